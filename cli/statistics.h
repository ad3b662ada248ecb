// SPDX-License-Identifier: Apache-2.0
// What `spin generate` reports at its end: speed, time to first token and memory.
// Thread: plain data and pure functions; MemorySampler runs a thread of its own.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "spin/request.h"
#include "spin/stats.h"

namespace spin::cli {

struct Statistics {
  std::string model;
  std::string device;
  std::string dtype;
  uint32_t threads = 0;
  uint64_t prompt_tokens = 0;
  uint64_t completion_tokens = 0;
  std::string finish_reason;  // "stop", "length", "abort" or "error"
  double load_s = 0;
  double ttft_s = 0;   // from submission to the first token; 0: there was none
  double total_s = 0;  // from submission to the end
  double prefill_tokens_per_s = 0;
  double decode_tokens_per_s = 0;  // without the first token; 0 for fewer than two tokens
  uint64_t peak_anonymous_bytes = 0;
  uint64_t peak_resident_bytes = 0;
  uint64_t weight_bytes = 0;
  uint64_t kv_used_bytes = 0;      // of this request
  uint64_t kv_reserved_bytes = 0;  // of the whole cache
  // Of all requests so far, where the engine was started with sparse attention.
  std::vector<std::string> attention;  // the algorithms, the default first
  std::vector<TierStats> tiers;
  SparseStats sparse;
};

// Fills everything but load_s, the peaks, the tiers and what was counted of sparse attention.
Statistics make_statistics(const ModelInfo& info, const RequestResult& result, FinishReason reason);

// Several aligned lines.
std::string statistics_text(const Statistics& statistics);
// One line without line breaks: "12 tokens, 35.2 tokens/s, first token after 0.42 s".
std::string statistics_line(const Statistics& statistics);
// One JSON object on one line, with a newline.
std::string statistics_json(const Statistics& statistics);

// What an engine with sparse attention resolved its memory to, one line each, with line ends; ""
// without.
std::string sparse_text(const ModelInfo& info);

// "1.5 GiB", "512.0 MiB", "17 B".
std::string bytes_text(uint64_t bytes);

struct ProcessMemory {
  uint64_t anonymous_bytes = 0;      // RssAnon now
  uint64_t peak_resident_bytes = 0;  // VmHWM, mapped files included
};

// From the text of /proc/self/status; 0 for lines that are missing.
ProcessMemory parse_process_status(std::string_view text);

// The peak of anonymous memory, which the kernel does not keep: samples it every 20 ms.
class MemorySampler {
 public:
  MemorySampler();
  ~MemorySampler();
  MemorySampler(const MemorySampler&) = delete;
  MemorySampler& operator=(const MemorySampler&) = delete;

  struct Peak {
    uint64_t anonymous_bytes = 0;
    uint64_t resident_bytes = 0;
  };
  // Takes one more sample first. Thread: any.
  Peak peak();

 private:
  void run();
  void sample() SPIN_REQUIRES(mutex_);

  base::Mutex mutex_;
  base::CondVar wake_;
  bool stop_ SPIN_GUARDED_BY(mutex_) = false;
  Peak peak_ SPIN_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace spin::cli
