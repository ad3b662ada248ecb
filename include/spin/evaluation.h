// SPDX-License-Identifier: Apache-2.0
// How well sparse attention does beside dense attention, on prompts with known answers and on
// text. A prompt is prefilled once, densely; then every setting decodes the same tokens, given
// beforehand ("teacher-forced"), all settings as one batch. Prefill covers all tokens but the last
// one before the first that is judged.
//
// Thread: the functions block; one evaluation at a time needs the whole machine. Errors: those of
// the model and of files, kInvalidArgument with param() for options, kCancelled when `progress`
// says so.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "spin/options.h"
#include "spin/status.h"

namespace spin {

struct EvaluationOptions {
  std::string model;      // as EngineOptions
  std::string tokenizer;  // empty: from the model
  DTypeChoice dtype = DTypeChoice::kAuto;
  std::string device = "cpu";  // as EngineOptions
  uint32_t threads = 0;        // of the CPU; 0: all usable cores
  uint32_t page_tokens = 8;
  uint32_t max_num_batched_tokens = 512;
  // Settings that decode together, where memory holds so many. Fewer: less memory.
  uint32_t max_num_seqs = 64;
  // Settings to compare with dense attention, "NAME[:key=value,...]"; the same algorithm may come
  // several times.
  std::vector<std::string> sparse;
  // Slots in fast memory that a setting gets, as a share of the pages of a prompt and its answer;
  // never fewer than a step needs. The other pages lie on the host. 1: everything is resident.
  double fast_fraction = 0.1;
};

// Done work in [0, 1] with what is at work; returning false cancels.
using EvaluationProgress = std::function<bool(double fraction, std::string_view part)>;

// What a setting did, over all prompts that it served. Dense attention has none of it.
struct SettingUse {
  uint64_t prompts = 0;
  // Prompts too short for the algorithm: dense attention served them.
  uint64_t dense_prompts = 0;
  uint64_t steps = 0;
  uint64_t selections = 0;       // (step, layer, KV head) in which the algorithm selected
  uint64_t dense_lists = 0;      // (step, layer, KV head) that attended to everything
  uint64_t attended_tokens = 0;  // on the lists of both
  uint64_t hits = 0;             // wanted pages that were in fast memory
  uint64_t misses = 0;           // fetched from the host
  uint64_t evictions = 0;
  uint64_t fetched_bytes = 0;
  uint64_t index_bytes = 0;      // summaries in fast memory, of the largest prompt
  uint64_t mandatory_pages = 0;  // per KV head and layer, of the largest prompt
  uint64_t leased_pages = 0;     // the same
  double fast_share = 0;         // leased pages of all pages, mean over the prompts

  double attended_per_head() const;  // and step; 0 if there was none
  double hit_ratio() const;          // 1 if nothing was wanted
};

struct TaskCount {
  std::string task;
  uint64_t exact = 0;  // answers all of whose tokens were the likeliest
  uint64_t prompts = 0;
};

struct RulerSetting {
  std::string sparse;            // "dense", or NAME:settings with all options resolved
  std::vector<TaskCount> tasks;  // in the file's order
  uint64_t exact = 0;
  double token_accuracy = 0;  // mean over the prompts
  SettingUse use;
};

struct RulerReport {
  std::vector<RulerSetting> settings;  // dense first, then in the order given
  uint64_t prompts = 0;
  uint64_t prompt_tokens = 0;
  double prefill_s = 0;
  double decode_s = 0;
};

struct RulerQuestion {
  // One JSON object per line: "task", "prompt", "answer" and, as ids of this model's vocabulary,
  // "answer_ids" (without them the tokens of "answer" are taken).
  std::string data;
  uint64_t limit_per_task = 0;  // first prompts of each task; 0: all
};

Result<RulerReport> evaluate_ruler(const EvaluationOptions& options,
                                   const RulerQuestion& question,
                                   const EvaluationProgress& progress = nullptr);

struct TextSetting {
  std::string sparse;
  double perplexity = 0;  // over the decoded positions
  double divergence = 0;  // mean KL(dense || setting), nats
  double agreement = 0;   // share of positions with dense attention's likeliest token
  SettingUse use;
};

struct TextReport {
  std::vector<TextSetting> settings;  // dense first
  uint64_t windows = 0;
  uint64_t positions = 0;  // decoded, over all windows
  double prefill_s = 0;
  double decode_s = 0;
};

struct TextQuestion {
  std::string text;  // UTF-8 file
  // The text's tokens are cut into windows; of each the last `positions` tokens are predicted by
  // decoding. The first window begins the text.
  uint64_t window_tokens = 8192;
  uint64_t positions = 64;
  uint64_t windows = 1;  // at most
};

Result<TextReport> evaluate_text(const EvaluationOptions& options,
                                 const TextQuestion& question,
                                 const EvaluationProgress& progress = nullptr);

}  // namespace spin
