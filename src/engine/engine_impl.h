// SPDX-License-Identifier: Apache-2.0
// The engine behind include/spin/engine.h: it checks and queues requests, and owns the two threads.
//
//   callers --submit/cancel--> EngineShared --> step thread --events--> delivery thread --> sinks
//                                   ^                                        |
//                                   +-------- stop strings, broken sinks ----+
//
// The queue of events is bounded: when sinks are slower than the model, the model waits.
// Thread: as Engine.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backend/device.h"
#include "backend/side_weights.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "engine/admission.h"
#include "engine/algorithm_set.h"
#include "engine/delivery.h"
#include "engine/metrics.h"
#include "engine/model_runner.h"
#include "engine/request.h"
#include "engine/scheduler.h"
#include "engine/step_event.h"
#include "engine/step_loop.h"
#include "spin/engine.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace spin::engine {

// All that an engine is made of, whatever the model.
struct EngineParts {
  EngineOptions options;  // max_model_len is resolved: not 0
  ModelInfo info;
  SamplingParams defaults;
  std::unique_ptr<const text::Tokenizer> tokenizer;
  std::optional<text::ChatFormat> chat_format;
  Status chat_error;  // why there is none
  std::vector<TokenId> end_ids;
  // Output limit of requests that name none (generation_config.json's max_new_tokens); 0: none.
  uint64_t default_max_tokens = 0;
  std::unique_ptr<backend::Device> device;  // what the runner stands on; null for the fake model
  std::unique_ptr<backend::SideWeightSource> side_weights;  // of algorithms; may be null
  std::unique_ptr<ModelRunner> runner;
  std::unique_ptr<AlgorithmSet> algorithms;  // null: dense attention only
  uint32_t min_decoded_tokens = SchedulerOptions{}.min_decoded_tokens;
  std::unique_ptr<base::Clock> own_clock;
  const base::Clock* clock = nullptr;  // own_clock or a test's
};

// Checks of EngineOptions that need no model. Errors: kInvalidArgument with param().
Status check_engine_options(const EngineOptions& options);

// Rows of logits that a step may have: one for each sequence and some for prompt log-probabilities.
uint32_t logit_rows_for(const EngineOptions& options);

// Errors: kResourceExhausted if the threads cannot be started.
Result<std::unique_ptr<Engine>> start_engine(EngineParts parts);

class EngineImpl final : public Engine {
 public:
  explicit EngineImpl(EngineParts parts);
  ~EngineImpl() override;
  EngineImpl(const EngineImpl&) = delete;
  EngineImpl& operator=(const EngineImpl&) = delete;

  Status start();

  const ModelInfo& model_info() const override { return parts_.info; }
  const SamplingParams& default_sampling() const override { return parts_.defaults; }
  Result<std::vector<TokenId>> tokenize(std::string_view text, bool add_special) const override;
  Result<std::string> detokenize(std::span<const TokenId> ids, bool skip_special) const override;
  std::string token_bytes(TokenId id) const override;
  Result<std::vector<TokenId>> encode_chat(std::span<const ChatMessage> messages,
                                           const ChatOptions& options) const override;
  Result<RequestId> submit(GenerateRequest request, std::shared_ptr<RequestSink> sink) override;
  void cancel(RequestId id) override;
  EngineStats stats() const override;
  Health health(std::chrono::duration<double> stall_limit) const override;
  void begin_drain() override;
  bool wait_drained(std::chrono::duration<double> limit) override;
  void stop() override;

  // Recounts the pages. Requires: no request is live and no step runs (after wait_drained), or
  // after stop(). For tests.
  Status audit() const { return parts_.runner->audit(); }

 private:
  // Errors: kInvalidArgument with param() "sparse".
  Result<AlgorithmRef> resolve_sparse(const std::optional<std::string>& spec) const;
  Result<std::unique_ptr<Request>> make_request(GenerateRequest spec,
                                                std::shared_ptr<RequestSink> sink) const;
  Status check_open() const SPIN_REQUIRES(shared_.mutex);
  Status check_queue() const SPIN_REQUIRES(shared_.mutex);
  Result<RequestId> enqueue(std::unique_ptr<Request> request);
  uint64_t waiting_requests() const SPIN_REQUIRES(shared_.mutex);

  EngineParts parts_;
  RequestLimits limits_;
  uint64_t entropy_ = 0;
  Metrics metrics_;
  EventQueue events_;
  mutable EngineShared shared_;
  std::atomic<uint64_t> next_id_{1};
  std::unique_ptr<StepLoop> step_loop_;
  std::unique_ptr<Delivery> delivery_;
  base::Mutex stop_mutex_;  // one stop() at a time
  std::thread step_thread_;
  std::thread delivery_thread_;
};

}  // namespace spin::engine
