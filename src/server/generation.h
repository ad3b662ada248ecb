// SPDX-License-Identifier: Apache-2.0
// One completion or chat request on its way: parsed and submitted on a worker thread, then fed by
// the engine's delivery thread through the mailbox of its I/O thread, where everything else runs.
//
// States:  preparing -> running -> done
// done is reached by the last on_end(), by an error, by the client leaving, or by a client that
// reads too slowly. Whatever the way, every engine request that was submitted is either ended or
// cancelled.
//
// A slow reader: while more than max_unsent_bytes wait in the connection, deltas are merged per
// choice instead of written (nothing is dropped); more than max_held_bytes of merged deltas, or
// no progress for write_stall_timeout, ends the request.
//
// Thread: prepare() on a worker; the sink's members on the delivery thread; the rest on the I/O
// thread of the exchange.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "server/api_error.h"
#include "server/exchange.h"
#include "server/limits.h"
#include "server/openai_request.h"
#include "server/openai_response.h"
#include "spin/engine.h"

namespace spin::server {

// Thread: atomics.
struct GenerationCounters {
  std::atomic<uint64_t> client_left{0};   // before the response was complete
  std::atomic<uint64_t> slow_readers{0};  // cancelled for it
};

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  // Lifetime: `engine` and `counters` outlive the I/O threads and the workers.
  Generation(Engine& engine,
             std::shared_ptr<Exchange> exchange,
             const ServerLimits& limits,
             GenerationCounters& counters,
             std::string label);

  // I/O thread; before prepare() is queued.
  void attach();

  // Worker thread: validates `body`, makes tokens of it, submits. Errors are answered from here.
  void prepare(Api api, const std::string& body, std::string id_suffix);

 private:
  friend class GenerationSink;

  // What is known of one choice of one prompt.
  struct Choice {
    bool started = false;  // a chunk was written
    OutputDelta held;      // merged deltas that were not written yet
    bool has_held = false;
    size_t held_bytes = 0;
    uint64_t text_offset = 0;
    // Collected for a response that is not streamed.
    OutputDelta all;
  };

  // Worker thread.
  std::optional<ApiError> parse_and_submit(Api api, const std::string& body);
  std::optional<ApiError> make_tokens();
  std::optional<ApiError> check_lengths() const;
  std::optional<ApiError> submit_all();
  bool keep_or_cancel(RequestId id);
  bool left();  // nobody waits for the answer any more

  // I/O thread.
  void on_prompt_logprobs(size_t prompt, PromptLogprobs logprobs);
  void on_delta(size_t prompt, OutputDelta delta);
  void on_end(size_t prompt, RequestResult result);
  void on_lost();
  void on_drained();
  void hold(Choice& choice, OutputDelta delta);
  void write_held(uint32_t index);
  void write_chunk(uint32_t index, const OutputDelta& delta);
  void collect(Choice& choice, OutputDelta delta);
  ChoiceView view(uint32_t index, const OutputDelta& delta) const;
  std::string_view echo_text(uint32_t index) const;
  void complete();
  void fail(const ApiError& error);
  void cancel_all();

  Engine& engine_;
  const std::shared_ptr<Exchange> exchange_;
  const ServerLimits limits_;
  GenerationCounters& counters_;
  const std::string label_;

  // Written by the worker before the first submit(), read only afterwards.
  ApiRequest request_;
  ResponseIdentity identity_;

  // I/O thread.
  std::vector<Choice> choices_;                  // [prompts * n]
  std::vector<PromptLogprobs> prompt_logprobs_;  // [prompts]
  std::vector<std::string> echo_texts_;          // [prompts], written by the worker
  std::vector<uint64_t> prompt_tokens_;          // [prompts], written by the worker
  size_t ends_left_ = 0;
  Usage usage_;
  uint64_t collected_bytes_ = 0;
  size_t held_bytes_ = 0;
  bool stream_begun_ = false;
  bool done_ = false;

  base::Mutex mutex_;
  std::vector<RequestId> ids_ SPIN_GUARDED_BY(mutex_);
  bool cancelled_ SPIN_GUARDED_BY(mutex_) = false;
};

}  // namespace spin::server
