// SPDX-License-Identifier: Apache-2.0
// What a caller asks for and what it gets back. Plain data; defaults are vLLM's.
// Thread: plain data, external synchronisation.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spin/status.h"
#include "spin/token.h"

namespace spin {

// How tokens are chosen. Every field has its range; Engine::submit checks all of them and names the
// field at fault in Status::param().
struct SamplingParams {
  float temperature = 1.0f;         // [0, 2]; below 1e-5 the most likely token is taken
  int64_t top_k = 0;                // 0 or -1: all; otherwise >= 1
  float top_p = 1.0f;               // (0, 1]
  float min_p = 0.0f;               // [0, 1]; relative to the most likely token
  float repetition_penalty = 1.0f;  // [0.01, 100]; over prompt and output; > 1 discourages
  float presence_penalty = 0.0f;    // [-2, 2]; over the output only
  float frequency_penalty = 0.0f;   // [-2, 2]; over the output only
  std::optional<uint64_t> seed;     // the same seed gives the same tokens
  uint32_t n = 1;                   // [1, 128] independent choices
  // Number of alternatives to report beside each chosen token, [0, 20]; none: no logprobs at all.
  std::optional<uint32_t> logprobs;
  // As above for the prompt's tokens, [0, 20] (completions with echo and logprobs).
  std::optional<uint32_t> prompt_logprobs;
  std::vector<std::string> stop;        // at most 16 strings, each 1 to 1,024 bytes
  std::vector<TokenId> stop_token_ids;  // at most 64
  bool include_stop_str_in_output = false;
  uint32_t min_tokens = 0;  // no end token and no stop before; <= max_tokens
  // Output limit, >= 1; none: up to the model's length.
  std::optional<uint64_t> max_tokens;
  bool ignore_eos = false;          // the model's own end tokens do not end the request
  bool skip_special_tokens = true;  // special tokens yield no text
  // Added to the logit of a token, [-100, 100]; at most 1,024 entries; ids < vocabulary size.
  std::vector<std::pair<TokenId, float>> logit_bias;
};

struct GenerateRequest {
  // The caller's name for the request, echoed in logs only; need not be unique.
  std::string label;
  // 1 to (max_model_len - 1) ids, each below the vocabulary size.
  std::vector<TokenId> prompt;
  SamplingParams sampling;
  // Sparse attention of this request, "NAME[:key=value,...]": "dense", or an algorithm that the
  // engine was started with (EngineOptions::sparse), whose options are the start's unless they are
  // named here; none: the engine's default.
  std::optional<std::string> sparse;
  // Deliver deltas as they come (true), or only one delta per choice at its end (false). The
  // concatenated content is the same.
  bool stream = true;
};

enum class FinishReason : uint8_t { kStop, kLength, kAborted, kError };

// "stop", "length", "abort", "error".
std::string_view finish_reason_name(FinishReason reason);

struct Alternative {
  TokenId id = 0;
  float logprob = 0.0f;
  std::string bytes;  // the token's raw bytes, possibly a part of a character
};

struct TokenLogprob {
  TokenId id = 0;
  float logprob = 0.0f;  // of the chosen token, log-softmax of the raw logits
  std::string bytes;
  // The most likely tokens, best first; as many as asked for. (The chosen one is not added.)
  std::vector<Alternative> top;
};

// News of one choice. Text is valid UTF-8; a delta never ends inside a character or inside a
// possible stop string.
struct OutputDelta {
  uint32_t choice = 0;  // 0 .. n - 1
  std::string text;
  std::vector<TokenId> token_ids;
  std::vector<TokenLogprob> logprobs;         // one per token id where asked for
  std::optional<FinishReason> finish_reason;  // set exactly once per choice, on its last delta
  // What ended it when finish_reason is kStop: a stop string or a token id of the request
  // (neither when the model's own end token did).
  std::optional<std::string> stop_string;
  std::optional<TokenId> stop_token;
  uint64_t completion_tokens = 0;  // of this choice so far, the ending token included
};

// Log-probabilities of the prompt, delivered once before the first delta where asked for. Entry i
// belongs to prompt token i; the first token has no probability (logprob NaN, top empty).
struct PromptLogprobs {
  std::vector<TokenLogprob> tokens;
};

struct Usage {
  uint64_t prompt_tokens = 0;
  uint64_t completion_tokens = 0;  // over all choices
};

// When things happened, in seconds since the request was submitted.
struct RequestTiming {
  double queued = 0;       // admitted to the running set
  double first_token = 0;  // first token sampled
  double finished = 0;
};

// The one terminal event of every accepted request.
struct RequestResult {
  Status status;  // ok also for kLength; kCancelled after cancel(); kInternal after a fault
  Usage usage;
  RequestTiming timing;
};

// Receives a request's events. Thread: called on the engine's delivery thread, never concurrently
// for one request; the first calls may come before submit() has returned the request's id. Must not
// block; must not call back into the engine except cancel().
// Lifetime: the engine holds the sink until after on_end().
class RequestSink {
 public:
  virtual ~RequestSink() = default;
  // Prompt tokens processed so far; may be called any number of times, also never.
  virtual void on_prefill_progress(uint64_t /*done_tokens*/, uint64_t /*total_tokens*/) {}
  virtual void on_prompt_logprobs(PromptLogprobs /*logprobs*/) {}
  virtual void on_delta(OutputDelta delta) = 0;
  // Exactly once, last.
  virtual void on_end(const RequestResult& result) = 0;
};

// Names an accepted request within its engine; never reused.
struct RequestId {
  uint64_t value = 0;
  friend bool operator==(const RequestId&, const RequestId&) = default;
};

}  // namespace spin
