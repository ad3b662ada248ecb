// SPDX-License-Identifier: Apache-2.0
#include "engine/step_loop.h"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "base/check.h"

namespace spin::engine {
namespace {

bool is_finished(const Choice& choice) { return choice.phase.phase() == Phase::kFinished; }

Status out_of_memory() {
  return Status(StatusCode::kResourceExhausted, "out of memory while processing the request");
}

}  // namespace

StepLoop::StepLoop(StepLoopParts parts) : parts_(std::move(parts)) {}

Status StepLoop::run() {
  Status status;
  try {
    status = loop();
  } catch (const std::exception&) {  // std::bad_alloc of the bookkeeping itself
    status = Status(StatusCode::kInternal, "the step thread ran out of memory");
  }
  close_all();
  {
    base::MutexLock lock(parts_.shared->mutex);
    if (!status.ok()) parts_.shared->failed = true;
    parts_.shared->running_sequences = 0;
  }
  parts_.events->close();
  return status;
}

Status StepLoop::loop() {
  while (take_in()) {
    now_s_ = parts_.clock->now_s();
    apply_signals();
    flush_events();  // an end is not held back by the step that follows
    SPIN_RETURN_IF_ERROR(step());
    forget_released();
    publish_running();
    flush_events();
  }
  return ok_status();
}

// Waits for work if there is none. False when the engine stops.
bool StepLoop::take_in() {
  std::vector<Request*> arrived;
  EngineShared& shared = *parts_.shared;
  {
    base::MutexLock lock(shared.mutex);
    while (!shared.stopping && shared.inbox.empty() && !shared.signalled && open_.empty()) {
      shared.wake_step.wait(shared.mutex);
    }
    if (shared.stopping) return false;
    arrived.swap(shared.inbox);
    shared.signalled = false;
  }
  for (Request* request : arrived) accept(*request);
  return true;
}

void StepLoop::accept(Request& request) {
  open_.push_back(&request);
  for (uint32_t i = 0; i < request.choices.size(); ++i) {
    request.choices[i].phase.advance(Phase::kWaiting);
    waiting_.push_back({&request, i});
  }
  request.open_choices = static_cast<uint32_t>(request.choices.size());
}

void StepLoop::apply_signals() {
  for (Request* request : open_) {
    if (request->cancel_requested.load()) {
      request->failure = Status(StatusCode::kCancelled, "the request was cancelled");
      end_request(*request, FinishReason::kAborted);
      continue;
    }
    for (uint32_t i = 0; i < request->choices.size(); ++i) {
      if (request->stop_hit[i].load() && !is_finished(request->choices[i])) {
        release({request, i}, FinishReason::kStop);
      }
    }
  }
  forget_released();
}

void StepLoop::end_request(Request& request, FinishReason reason) {
  for (uint32_t i = 0; i < request.choices.size(); ++i) {
    if (!is_finished(request.choices[i])) release({&request, i}, reason);
  }
}

// The end of a choice. The news is put down before anything changes, because that may run out of
// memory and a choice without it would never end; it is handed over after the step, when the pages
// have been returned.
void StepLoop::release(Ref ref, FinishReason reason) {
  StepEvent event = make_event(EventKind::kReleased, ref);
  event.finish = reason;
  if (reason == FinishReason::kAborted || reason == FinishReason::kError) {
    event.status = ref.request->failure;
  }
  events_.push_back(std::move(event));
  Choice& choice = ref.get();
  choice.phase.advance(Phase::kFinished);
  if (choice.sequence) parts_.runner->close_sequence(*choice.sequence);
  choice.sequence.reset();
  --ref.request->open_choices;
}

// Drops what is finished from the lists, before its events are handed over and it may vanish.
void StepLoop::forget_released() {
  const auto finished = [](const Ref& ref) { return is_finished(ref.get()); };
  std::erase_if(running_, finished);
  std::erase_if(waiting_, finished);
  std::erase_if(open_, [](const Request* request) { return request->open_choices == 0; });
}

// What a waiting choice takes at least to run.
MemoryNeed StepLoop::least_need(Ref ref) const {
  if (ref.get().suspended) return parts_.runner->resume_need(*ref.get().sequence);
  return ref.request->need.memory;
}

StepPlan StepLoop::plan() const {
  std::vector<RunningSequence> running;
  running.reserve(running_.size());
  for (const Ref& ref : running_) {
    running.push_back({ref.request->spec.prompt.size(), ref.get().prefilled_tokens,
                       ref.params().prompt_logprobs.has_value(),
                       ref.request->need.exclusive_prefill});
    const Choice& choice = ref.get();
    if (choice.phase.phase() != Phase::kDecoding) continue;
    running.back().decoded_tokens = choice.output.size() - choice.resumed_at;
    running.back().pages_if_suspended = parts_.runner->suspend_pages(*choice.sequence);
  }
  std::vector<WaitingSequence> waiting;
  waiting.reserve(waiting_.size());
  for (const Ref& ref : waiting_) {
    if (ref.get().suspended) {
      waiting.push_back(
          {ref.request->spec.prompt.size(), least_need(ref), ref.get().passed, false, false, true});
      continue;
    }
    waiting.push_back({ref.request->spec.prompt.size(), least_need(ref), ref.get().passed,
                       ref.params().prompt_logprobs.has_value(),
                       ref.request->need.exclusive_prefill});
  }
  SchedulerState state;
  state.running = running;
  state.waiting = waiting;
  state.total = parts_.runner->total_memory();
  state.free = parts_.runner->free_memory();
  return plan_step(state, parts_.scheduler);
}

Status StepLoop::step() {
  if (running_.empty() && waiting_.empty()) return ok_status();
  const StepPlan plan = this->plan();
  SPIN_CHECK(!plan.empty());  // the scheduler's progress invariant
  const std::vector<Ref> waiting = waiting_;
  apply_rejects(plan, waiting);
  admit(plan, waiting);
  const StepBatch batch = make_batch(plan);
  if (batch.sequences.empty()) {
    suspend(plan);
    return ok_status();
  }
  publish_running();
  std::atomic<double>& progress = parts_.shared->last_progress_s;
  const base::Clock& clock = *parts_.clock;
  const auto output =
      parts_.runner->run(batch, [&progress, &clock] { progress.store(clock.now_s()); });
  if (!output.ok()) return output.status();
  now_s_ = clock.now_s();
  progress.store(now_s_);
  digest(plan, *output);
  suspend(plan);
  parts_.metrics->record_step(plan.tokens);
  return ok_status();
}

void StepLoop::apply_rejects(const StepPlan& plan, std::span<const Ref> waiting) {
  for (const uint32_t index : plan.reject) {
    fail(*waiting[index].request,
         Status(StatusCode::kResourceExhausted, "the request can never fit into the KV cache"));
  }
}

// Moves the admitted from waiting_ to the end of running_, in the plan's order (work items of the
// plan count on it).
void StepLoop::admit(const StepPlan& plan, std::span<const Ref> waiting) {
  if (plan.admit.empty()) return;
  std::vector<bool> admitted(waiting.size(), false);
  // What the plan gives to those behind: whoever is first must not take it for its buffer.
  uint64_t promised = 0;
  std::vector<uint64_t> pages;
  for (const uint32_t index : plan.admit) {
    pages.push_back(is_finished(waiting[index].get()) ? 0 : least_need(waiting[index]).pages);
    promised += pages.back();
  }
  for (size_t i = 0; i < plan.admit.size(); ++i) {
    const uint32_t index = plan.admit[i];
    admitted[index] = true;
    running_.push_back(waiting[index]);
    promised -= pages[i];
    if (is_finished(waiting[index].get())) continue;
    if (waiting[index].get().suspended) {
      resume(waiting[index], promised);
    } else {
      open(waiting[index], promised);
    }
  }
  for (uint32_t i = 0; i < plan.admit.back(); ++i) {
    if (!admitted[i]) ++waiting[i].get().passed;
  }
  size_t index = 0;
  std::erase_if(waiting_, [&](const Ref&) { return admitted[index++]; });
}

void StepLoop::open(Ref ref, uint64_t promised_pages) {
  Request& request = *ref.request;
  Choice& choice = ref.get();
  try {
    const auto sequence = parts_.runner->open_sequence(
        {request.spec.prompt, request.spec.prompt.size() + request.max_tokens, request.algorithm,
         ref.params().prompt_logprobs.has_value(), promised_pages});
    if (!sequence.ok()) {
      return fail(request, sequence.status());
    }
    choice.sequence = *sequence;
    choice.history = TokenHistory(request.spec.prompt, ref.params().repetition_penalty != 1.0f);
  } catch (const std::bad_alloc&) {
    return fail(request, out_of_memory());
  }
  choice.phase.advance(Phase::kPrefilling);
  if (!request.admitted.exchange(true)) events_.push_back(make_event(EventKind::kAdmitted, ref));
}

void StepLoop::resume(Ref ref, uint64_t promised_pages) {
  Choice& choice = ref.get();
  choice.suspended = false;
  choice.resumed_at = choice.output.size();
  const Status status = parts_.runner->resume_sequence(*choice.sequence, promised_pages);
  if (!status.ok()) fail(*ref.request, status);
}

void StepLoop::suspend(const StepPlan& plan) {
  if (plan.suspend.empty()) return;
  std::vector<bool> leaves(running_.size(), false);
  for (const uint32_t index : plan.suspend) {
    const Ref ref = running_[index];
    Choice& choice = ref.get();
    if (is_finished(choice)) continue;
    const Status status = parts_.runner->suspend_sequence(*choice.sequence);
    if (status.code() == StatusCode::kResourceExhausted) continue;  // it goes on as it was
    if (!status.ok()) {
      fail(*ref.request, status);
      continue;
    }
    waiting_.push_back(ref);
    choice.suspended = true;
    choice.passed = 0;
    leaves[index] = true;
    parts_.metrics->record_preemption();
  }
  size_t index = 0;
  std::erase_if(running_, [&](const Ref&) { return leaves[index++]; });
}

StepBatch StepLoop::make_batch(const StepPlan& plan) const {
  StepBatch batch;
  batch.sequences.reserve(plan.work.size());
  batch.requests_wait = !waiting_.empty();
  for (const PlannedWork& work : plan.work) {
    const Ref& ref = running_[work.sequence];
    const Choice& choice = ref.get();
    if (is_finished(choice)) continue;
    std::span<const TokenId> tokens;
    if (choice.phase.phase() == Phase::kPrefilling) {
      tokens = std::span(ref.request->spec.prompt).subspan(choice.prefilled_tokens, work.tokens);
    } else {
      tokens = std::span(choice.output).last(1);
    }
    batch.sequences.push_back({*choice.sequence, tokens, work.logit_rows});
  }
  return batch;
}

void StepLoop::digest(const StepPlan& plan, const StepOutput& output) {
  // Which work ran is decided before any of it is looked at: a fault below may end others.
  std::vector<const PlannedWork*> ran;
  ran.reserve(plan.work.size());
  for (const PlannedWork& work : plan.work) {
    if (!is_finished(running_[work.sequence].get())) ran.push_back(&work);
  }
  for (const SequenceFault& fault : output.faults) {
    fail(*running_[ran[fault.index]->sequence].request, fault.status);
  }
  uint64_t row = 0;
  for (const PlannedWork* work : ran) {
    const Ref ref = running_[work->sequence];
    if (!is_finished(ref.get())) {
      try {
        digest_one(ref, *work, output.logits, row);
      } catch (const std::bad_alloc&) {
        fail(*ref.request, out_of_memory());
      }
    }
    row += work->logit_rows;
  }
}

void StepLoop::digest_one(Ref ref,
                          const PlannedWork& work,
                          const LogitsView& logits,
                          uint64_t first_row) {
  Request& request = *ref.request;
  Choice& choice = ref.get();
  if (choice.phase.phase() == Phase::kPrefilling) {
    if (ref.params().prompt_logprobs) {
      const Status status = score_prompt(ref, work, logits, first_row);
      if (!status.ok()) return fail(request, status);
    }
    choice.prefilled_tokens += work.tokens;
    if (ref.choice == 0) {
      StepEvent event = make_event(EventKind::kPrefill, ref);
      event.done_tokens = choice.prefilled_tokens;
      events_.push_back(std::move(event));
    }
    if (choice.prefilled_tokens < request.spec.prompt.size()) return;
    if (ref.params().prompt_logprobs) {
      StepEvent event = make_event(EventKind::kPromptScores, ref);
      event.prompt_scores = std::move(choice.prompt_scores);
      choice.prompt_scores = {};
      events_.push_back(std::move(event));
    }
  }
  const Status status = sample(ref, logits.row(first_row + work.logit_rows - 1));
  if (!status.ok()) fail(request, status);
}

// The logits after prompt token i tell the probability of token i + 1.
Status StepLoop::score_prompt(Ref ref,
                              const PlannedWork& work,
                              const LogitsView& logits,
                              uint64_t row) {
  Choice& choice = ref.get();
  const auto& prompt = ref.request->spec.prompt;
  for (uint32_t i = 0; i < work.tokens; ++i) {
    const uint64_t next = choice.prefilled_tokens + i + 1;
    if (next >= prompt.size()) break;
    SPIN_ASSIGN_OR_RETURN(SampledToken scored,
                          sampler_.score(logits.row(row + i).first(parts_.sampled_vocab),
                                         prompt[next], *ref.params().prompt_logprobs));
    choice.prompt_scores.push_back(std::move(scored));
  }
  return ok_status();
}

Status StepLoop::sample(Ref ref, std::span<const float> logits) {
  Request& request = *ref.request;
  Choice& choice = ref.get();
  SampleInput input;
  input.logits = logits.first(parts_.sampled_vocab);
  input.params = &ref.params();
  input.history = &choice.history;
  input.end_ids = request.end_ids;
  input.seed = request.seed;
  input.choice = ref.choice;
  input.output_index = choice.output.size();
  SPIN_ASSIGN_OR_RETURN(SampledToken token, sampler_.sample(input));

  if (choice.phase.phase() == Phase::kPrefilling) choice.phase.advance(Phase::kDecoding);
  choice.output.push_back(token.id);
  choice.history.add_output(token.id);
  StepEvent event = make_event(EventKind::kToken, ref);
  const auto holds = [&](const std::vector<TokenId>& ids) {
    return std::find(ids.begin(), ids.end(), token.id) != ids.end();
  };
  if (holds(request.end_ids)) {
    event.finish = FinishReason::kStop;
    event.by_stop_token = ref.params().ignore_eos || !holds(parts_.model_end_ids);
  } else if (choice.output.size() >= request.max_tokens) {
    event.finish = FinishReason::kLength;
  }
  const std::optional<FinishReason> finish = event.finish;
  event.token = std::move(token);
  events_.push_back(std::move(event));
  if (finish) release(ref, *finish);
  return ok_status();
}

void StepLoop::fail(Request& request, Status status) {
  if (request.failure.ok()) request.failure = std::move(status);
  end_request(request, FinishReason::kError);
}

StepEvent StepLoop::make_event(EventKind kind, Ref ref) const {
  StepEvent event;
  event.kind = kind;
  event.request = ref.request;
  event.choice = ref.choice;
  event.time_s = now_s_;
  return event;
}

void StepLoop::flush_events() {
  if (events_.empty()) return;
  parts_.events->push(std::exchange(events_, {}));
}

void StepLoop::publish_running() {
  base::MutexLock lock(parts_.shared->mutex);
  parts_.shared->running_sequences = static_cast<uint32_t>(running_.size());
}

// The end of the loop: pages go back. The delivery thread ends the requests.
void StepLoop::close_all() {
  for (Request* request : open_) {
    for (Choice& choice : request->choices) {
      if (choice.sequence) parts_.runner->close_sequence(*choice.sequence);
      choice.sequence.reset();
    }
  }
}

}  // namespace spin::engine
