// SPDX-License-Identifier: Apache-2.0
// A sink that keeps everything it is told and lets a test wait for the end. Thread: thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/mutex.h"
#include "spin/engine.h"
#include "spin/request.h"

namespace spin::testing {

// All deltas of one choice put together.
struct ChoiceOutput {
  std::string text;
  std::vector<TokenId> tokens;
  std::vector<TokenLogprob> logprobs;
  std::optional<FinishReason> finish;
  std::optional<std::string> stop_string;
  std::optional<TokenId> stop_token;
  uint64_t completion_tokens = 0;
  int deltas = 0;
  int finishes = 0;
};

struct Outcome {
  std::map<uint32_t, ChoiceOutput> choices;
  std::vector<PromptLogprobs> prompt_logprobs;
  RequestResult result;
  int ends = 0;
  bool late_event = false;                              // something came after on_end
  std::vector<std::pair<uint64_t, uint64_t>> progress;  // done, total
  bool early_delta = false;  // a delta came before the prompt's log-probabilities
};

class RecordingSink final : public RequestSink {
 public:
  // Called inside on_delta, before the delta is recorded.
  std::function<void(const OutputDelta&)> on_delta_hook;

  void on_prefill_progress(uint64_t done_tokens, uint64_t total_tokens) override {
    base::MutexLock lock(mutex_);
    outcome_.progress.emplace_back(done_tokens, total_tokens);
  }
  void on_prompt_logprobs(PromptLogprobs logprobs) override {
    base::MutexLock lock(mutex_);
    outcome_.early_delta = !outcome_.choices.empty();
    outcome_.prompt_logprobs.push_back(std::move(logprobs));
  }
  void on_delta(OutputDelta delta) override {
    if (on_delta_hook) on_delta_hook(delta);
    base::MutexLock lock(mutex_);
    outcome_.late_event |= outcome_.ends > 0;
    ChoiceOutput& choice = outcome_.choices[delta.choice];
    choice.text += delta.text;
    choice.tokens.insert(choice.tokens.end(), delta.token_ids.begin(), delta.token_ids.end());
    for (TokenLogprob& logprob : delta.logprobs) choice.logprobs.push_back(std::move(logprob));
    if (delta.finish_reason) ++choice.finishes;
    choice.finish = delta.finish_reason;
    choice.stop_string = delta.stop_string;
    choice.stop_token = delta.stop_token;
    choice.completion_tokens = delta.completion_tokens;
    ++choice.deltas;
    changed_.notify_all();
  }
  void on_end(const RequestResult& result) override {
    base::MutexLock lock(mutex_);
    outcome_.result = result;
    ++outcome_.ends;
    changed_.notify_all();
  }

  // Blocks until on_end(); fails the test after a long while.
  Outcome wait() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    base::MutexLock lock(mutex_);
    while (outcome_.ends == 0) {
      if (!changed_.wait_until(mutex_, deadline)) {
        ADD_FAILURE() << "the request did not end";
        break;
      }
    }
    return outcome_;
  }
  void wait_for_delta() {
    base::MutexLock lock(mutex_);
    while (outcome_.choices.empty() && outcome_.ends == 0) changed_.wait(mutex_);
  }
  Outcome now() {
    base::MutexLock lock(mutex_);
    return outcome_;
  }

 private:
  base::Mutex mutex_;
  base::CondVar changed_;
  Outcome outcome_ SPIN_GUARDED_BY(mutex_);
};

// Submits and waits for the end.
inline Outcome run_request(Engine& engine, GenerateRequest request) {
  auto sink = std::make_shared<RecordingSink>();
  const auto id = engine.submit(std::move(request), sink);
  EXPECT_TRUE(id.ok()) << id.status().to_string();
  if (!id.ok()) return {};
  return sink->wait();
}

}  // namespace spin::testing
