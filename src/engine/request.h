// SPDX-License-Identifier: Apache-2.0
// An accepted request inside the engine. Its fields have one owner each: immutable after submit,
// the step thread, or the delivery thread; the few atomics carry signals between them.
//
// Lifetime: owned by EngineShared::live. The step thread lets go of it when it has released the
// last choice and said so to the delivery thread, which ends and removes it after that. So a
// request that the step thread still knows always exists.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "engine/metrics.h"
#include "engine/model_runner.h"
#include "engine/request_state.h"
#include "engine/sampler.h"
#include "engine/step_batch.h"
#include "spin/request.h"
#include "text/detokenizer.h"
#include "text/stop_matcher.h"

namespace spin::engine {

// A choice as the step thread sees it.
struct Choice {
  PhaseTracker phase;
  std::optional<SequenceHandle> sequence;  // from admission to release
  uint64_t prefilled_tokens = 0;
  uint64_t resumed_at = 0;  // tokens of output when it was last resumed
  bool suspended = false;   // it holds a sequence and waits
  std::vector<TokenId> output;
  TokenHistory history;
  uint32_t passed = 0;                      // see WaitingSequence
  std::vector<SampledToken> prompt_scores;  // of prompt tokens 1.. so far, where asked for
};

// A choice as the delivery thread sees it.
struct ChoiceText {
  std::optional<text::IncrementalDetokenizer> detokenizer;
  std::optional<text::StopMatcher> matcher;  // none: no stop strings
  OutputDelta gathered;                      // without streaming: all that came so far
  uint64_t completion_tokens = 0;
  double last_token_s = -1;
  bool finished = false;  // its last delta was sent
};

struct Request {
  // Immutable after submit().
  uint64_t id = 0;
  GenerateRequest spec;
  std::shared_ptr<RequestSink> sink;
  uint64_t max_tokens = 0;
  std::shared_ptr<const sparse::SparseAlgorithm> algorithm;  // null: dense
  SequenceNeed need;                                         // of one choice
  uint64_t seed = 0;
  std::vector<TokenId> end_ids;  // all that end a choice: the model's (unless ignored), the user's

  // Step thread.
  std::vector<Choice> choices;
  uint32_t open_choices = 0;  // not yet released
  Status failure;             // why it is being ended

  // Delivery thread.
  std::vector<ChoiceText> texts;
  uint32_t released_choices = 0;
  Status final_status;
  std::optional<FinishReason> worst_reason;
  RequestTimes times;
  bool prompt_scores_sent = false;
  bool sink_broken = false;

  // Signals to the step thread, set under no lock; EngineShared::signalled tells that some are.
  std::atomic<bool> cancel_requested{false};
  std::unique_ptr<std::atomic<bool>[]> stop_hit;  // [n], a stop string was found

  std::atomic<bool> admitted{false};  // set by the step thread, read by stats()
};

// What the threads of an engine share.
struct EngineShared {
  base::Mutex mutex;
  base::CondVar wake_step;  // something for the step thread
  base::CondVar ended;      // a request has had its on_end()
  std::unordered_map<uint64_t, std::unique_ptr<Request>> live SPIN_GUARDED_BY(mutex);
  uint32_t ending SPIN_GUARDED_BY(mutex) = 0;          // removed from `live`, on_end() under way
  std::vector<Request*> inbox SPIN_GUARDED_BY(mutex);  // accepted, not yet seen by the step thread
  bool signalled SPIN_GUARDED_BY(mutex) = false;
  bool draining SPIN_GUARDED_BY(mutex) = false;
  bool stopping SPIN_GUARDED_BY(mutex) = false;
  bool failed SPIN_GUARDED_BY(mutex) = false;
  // Size of the running set, kept by the step thread.
  uint32_t running_sequences SPIN_GUARDED_BY(mutex) = 0;

  // When a step last ended or moved on, or work came to an idle engine.
  std::atomic<double> last_progress_s{0};
};

}  // namespace spin::engine
