// SPDX-License-Identifier: Apache-2.0
// The step thread: takes in requests and signals at the boundary between two steps, asks the
// scheduler for a plan, runs it, samples, and reports to the delivery thread.
//
// Aborts, stop strings and faults take effect only between steps, so a sequence is never taken away
// from under a running one: the step in flight ends, the next one does not hold it. When a step
// fails, or memory for the bookkeeping runs out, the loop ends, and the engine has failed; what
// goes wrong in one request ends that request alone. Thread: run() on the step thread; the
// constructor anywhere before.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/clock.h"
#include "engine/metrics.h"
#include "engine/model_runner.h"
#include "engine/request.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/step_event.h"

namespace spin::engine {

struct StepLoopParts {
  ModelRunner* runner = nullptr;
  EngineShared* shared = nullptr;
  EventQueue* events = nullptr;
  Metrics* metrics = nullptr;
  const base::Clock* clock = nullptr;
  SchedulerOptions scheduler;
  std::vector<TokenId> model_end_ids;
  uint64_t sampled_vocab = 0;  // ids that may be chosen
};

class StepLoop {
 public:
  explicit StepLoop(StepLoopParts parts);

  // Until the engine stops or a step fails. Ensures: all sequences are closed and the event queue
  // is closed afterwards. Errors: why the engine failed.
  Status run();

 private:
  struct Ref {
    Request* request = nullptr;
    uint32_t choice = 0;
    Choice& get() const { return request->choices[choice]; }
    const SamplingParams& params() const { return request->spec.sampling; }
  };

  Status loop();
  bool take_in();
  void accept(Request& request);
  void apply_signals();
  void end_request(Request& request, FinishReason reason);
  void release(Ref ref, FinishReason reason);
  void forget_released();

  MemoryNeed least_need(Ref ref) const;
  StepPlan plan() const;
  Status step();
  void apply_rejects(const StepPlan& plan, std::span<const Ref> waiting);
  void admit(const StepPlan& plan, std::span<const Ref> waiting);
  void open(Ref ref, uint64_t promised_pages);
  void resume(Ref ref, uint64_t promised_pages);
  // Those of the plan go back to the end of the queue.
  void suspend(const StepPlan& plan);
  StepBatch make_batch(const StepPlan& plan) const;
  void digest(const StepPlan& plan, const StepOutput& output);
  void digest_one(Ref ref, const PlannedWork& work, const LogitsView& logits, uint64_t first_row);
  Status score_prompt(Ref ref, const PlannedWork& work, const LogitsView& logits, uint64_t row);
  Status sample(Ref ref, std::span<const float> logits);
  void fail(Request& request, Status status);
  StepEvent make_event(EventKind kind, Ref ref) const;
  void flush_events();
  void close_all();
  void publish_running();

  StepLoopParts parts_;
  Sampler sampler_;
  std::vector<Request*> open_;  // all requests with a choice that is not released
  std::vector<Ref> running_;    // in order of admission
  std::vector<Ref> waiting_;    // in order of arrival
  StepEvents events_;
  double now_s_ = 0;  // of the events of the step at hand
};

}  // namespace spin::engine
