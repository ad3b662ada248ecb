// SPDX-License-Identifier: Apache-2.0
// An engine that says what the test wants: every byte is a token, the output is a function of the
// prompt, and the prompt's first word chooses a fault. For what the fake engine does too well:
// errors, stalls, floods.
//
// Prompts: "refuse" submit() fails with kInvalidArgument; "full" with kResourceExhausted; "fault"
// ends with kInternal before the first token; "exhaust" runs out of memory in tokenize(); "break"
// after three tokens; anything else generates.
//
// Thread: as Engine.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "spin/engine.h"

namespace spin::server {

struct ScriptedOptions {
  std::chrono::microseconds step_delay{0};
  uint64_t max_model_len = 4096;
  uint32_t max_queued = 100000;
  uint64_t flood_bytes = 0;  // text of each token, if not 0
};

class ScriptedEngine final : public Engine {
 public:
  static constexpr TokenId kEos = 256;
  static constexpr uint64_t kVocabulary = 300;

  explicit ScriptedEngine(ScriptedOptions options = {});
  ~ScriptedEngine() override;

  const ModelInfo& model_info() const override { return info_; }
  const SamplingParams& default_sampling() const override { return defaults_; }
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

  // The output text of one choice, as the engine will generate it.
  static std::string expected_text(std::string_view prompt, uint32_t choice, uint64_t tokens);

  // While set, no step is made.
  void hang(bool on) { hanging_ = on; }
  // Seconds that one tokenize() takes from now on.
  void slow_tokenizer(double seconds) { tokenize_s_ = seconds; }
  void set_health(HealthState state) { health_ = state; }
  // Of the last accepted request.
  SamplingParams last_sampling() const;
  std::optional<std::string> last_sparse() const;
  uint64_t active() const;

 private:
  struct Running {
    RequestId id;
    GenerateRequest request;
    std::string text;  // of the prompt
    std::shared_ptr<RequestSink> sink;
    uint64_t made = 0;
    bool begun = false;
    bool cancelled = false;
    std::vector<OutputDelta> whole;  // without streaming
  };

  void run();
  // True when the request has ended.
  bool step(Running& running);
  OutputDelta make_delta(const Running& running, uint32_t choice) const;

  const ScriptedOptions options_;
  ModelInfo info_;
  SamplingParams defaults_;
  std::atomic<bool> hanging_{false};
  std::atomic<double> tokenize_s_{0};
  std::atomic<HealthState> health_{HealthState::kReady};

  mutable base::Mutex mutex_;
  base::CondVar wake_;
  std::vector<std::shared_ptr<Running>> running_ SPIN_GUARDED_BY(mutex_);
  uint64_t next_id_ SPIN_GUARDED_BY(mutex_) = 1;
  EngineStats stats_ SPIN_GUARDED_BY(mutex_);
  SamplingParams last_sampling_ SPIN_GUARDED_BY(mutex_);
  std::optional<std::string> last_sparse_ SPIN_GUARDED_BY(mutex_);
  bool draining_ SPIN_GUARDED_BY(mutex_) = false;
  bool stopping_ SPIN_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace spin::server
