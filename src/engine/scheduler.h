// SPDX-License-Identifier: Apache-2.0
// What the next step does: a pure function from the queues to a plan. It owns nothing, reads no
// clock and mutates nothing, so that the simulator (tests/engine/simulator.h) can drive it through
// millions of steps.
//
// Policy. Every decoding sequence gets its token first. What is left of the token budget goes to
// prompts: the oldest gets at least half of it, the others follow shortest first, so that a short
// prompt passes a long one and the long one still moves. Waiting sequences are admitted in order of
// arrival, each with all the memory that it can ever need at least. One that does not fit at the
// moment may be passed by smaller ones in at most `max_passes` steps; then everybody behind it
// waits. Prompts that need the runner's staging buffer (exclusive_prefill) are processed one at a
// time: while one is, the next such prompt waits and all others pass it.
//
// When the first one that lacks fast pages would fit if running sequences were suspended, these
// are: those that have decoded longest since they were admitted or resumed, at least
// `min_decoded_tokens`. A suspended sequence waits again behind the others and resumes with the
// same KV; nothing is computed twice.
//
// Progress: with a non-empty queue the plan processes at least one token, or admits and processes,
// or rejects at least one sequence. Requires for that: max_num_batched_tokens >= max_num_seqs.
// Thread: pure function.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/memory_need.h"

namespace spin::engine {

struct SchedulerOptions {
  uint32_t max_num_seqs = 64;
  uint32_t max_num_batched_tokens = 512;
  // false: a prompt is processed in one step, or in chunks only if it wants all its logits.
  bool chunked_prefill = true;
  uint32_t max_logit_rows = 96;  // > max_num_seqs
  uint32_t max_passes = 64;
  uint32_t min_decoded_tokens = 256;  // before a sequence may be suspended for another
};

// A sequence that holds its memory, in order of admission.
struct RunningSequence {
  uint64_t prompt_tokens = 0;
  uint64_t prefilled_tokens = 0;  // < prompt_tokens: prefilling, else decoding
  // Logits of every prompt position are wanted (log-probabilities of the prompt).
  bool wants_prompt_logits = false;
  bool exclusive_prefill = false;
  uint64_t decoded_tokens = 0;      // since it was admitted or resumed
  uint64_t pages_if_suspended = 0;  // that others could then have; 0: it cannot be suspended
};

// A sequence that waits, in order of arrival.
struct WaitingSequence {
  uint64_t prompt_tokens = 0;
  MemoryNeed need;      // for the whole of prompt and output
  uint32_t passed = 0;  // how often a later one was admitted before it
  bool wants_prompt_logits = false;
  bool exclusive_prefill = false;
  bool is_suspended = false;  // it has decoded before: goes on with a token
};

struct SchedulerState {
  std::span<const RunningSequence> running;
  std::span<const WaitingSequence> waiting;
  MemoryNeed free;  // what new sequences can be given now
  MemoryNeed total;
};

// Work on one sequence. Index: below running.size() an index into `running`; from there on,
// running.size() + i is the i-th admitted sequence of this plan.
struct PlannedWork {
  uint32_t sequence = 0;
  uint32_t tokens = 0;
  // Trailing tokens whose logits are computed: 1 when a token is sampled after this step, `tokens`
  // when the prompt's log-probabilities are wanted, else 0.
  uint32_t logit_rows = 0;
};

struct StepPlan {
  std::vector<uint32_t> admit;    // indices into `waiting`, ascending
  std::vector<uint32_t> reject;   // indices into `waiting`: can never fit
  std::vector<uint32_t> suspend;  // indices into `running`, ascending; they have no work
  std::vector<PlannedWork> work;
  uint32_t tokens = 0;      // sum over work
  uint32_t logit_rows = 0;  // sum over work

  bool empty() const { return admit.empty() && reject.empty() && suspend.empty() && work.empty(); }
};

StepPlan plan_step(const SchedulerState& state, const SchedulerOptions& options);

}  // namespace spin::engine
