// SPDX-License-Identifier: Apache-2.0
// Drives the scheduler through a trace on a virtual clock: no model, no threads, millions of steps.
// Every step checks the plan against the scheduler's promises. Thread: external synchronisation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "engine/scheduler.h"

namespace spin::testing {

inline constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

struct SimRequest {
  double arrival_s = 0;
  uint64_t prompt_tokens = 1;
  uint64_t output_tokens = 1;    // what it will say
  uint64_t reserved_output = 1;  // its max_tokens
  bool wants_prompt_logits = false;
  uint64_t abort_after_steps = kNever;  // since arrival
  bool exclusive_prefill = false;
  uint64_t host_extents = 0;
};

struct SimOutcome {
  bool finished = false;
  bool rejected = false;
  bool aborted = false;
  double first_token_s = -1;
  double end_s = -1;
  uint64_t admitted_step = kNever;
  uint64_t arrival_step = 0;
  uint64_t longest_decode_gap_steps = 0;
};

class Simulator {
 public:
  Simulator(engine::SchedulerOptions options, uint64_t total_pages, uint64_t page_tokens)
      : options_(options), total_pages_(total_pages), page_tokens_(page_tokens) {}

  // A step costs this much time.
  double step_cost_s = 0.001;
  double token_cost_s = 0.00001;
  // Requests beyond this queue length arrive later (a client that backs off).
  uint64_t max_waiting = kNever;
  uint64_t total_extents = 0;
  bool may_suspend = false;

  // Runs until nothing is left. Requires: `trace` is ordered by arrival.
  std::vector<SimOutcome> run(const std::vector<SimRequest>& trace) {
    trace_ = &trace;
    outcomes_.assign(trace.size(), {});
    size_t next = 0;
    while (next < trace.size() || !running_.empty() || !waiting_.empty()) {
      while (next < trace.size() && trace[next].arrival_s <= now_s_ &&
             waiting_.size() < max_waiting) {
        outcomes_[next].arrival_step = steps_;
        waiting_.push_back({next++, 0, {}});
      }
      abort_some();
      if (running_.empty() && waiting_.empty()) {
        if (next >= trace.size()) break;
        now_s_ = std::max(now_s_, trace[next].arrival_s);
        continue;
      }
      step();
      if (::testing::Test::HasFatalFailure()) return outcomes_;
    }
    EXPECT_EQ(free_pages(), total_pages_);
    EXPECT_EQ(free_extents(), total_extents);
    return outcomes_;
  }

  uint64_t steps() const { return steps_; }
  uint64_t suspensions() const { return suspensions_; }
  double now_s() const { return now_s_; }

 private:
  struct Running {
    size_t request = 0;
    uint64_t pages = 0;
    uint64_t prefilled = 0;
    uint64_t said = 0;
    uint64_t last_step = 0;
    uint64_t decoded = 0;  // since it was admitted or resumed
  };
  struct Waiting {
    size_t request = 0;
    uint32_t passed = 0;
    std::optional<Running> suspended;
  };

  uint64_t pages_of(const SimRequest& request) const {
    return (request.prompt_tokens + request.reserved_output + page_tokens_ - 1) / page_tokens_;
  }
  uint64_t free_pages() const {
    uint64_t used = 0;
    for (const Running& running : running_) used += running.pages;
    EXPECT_LE(used, total_pages_);
    return total_pages_ - used;
  }

  uint64_t free_extents() const {
    uint64_t used = 0;
    for (const Running& running : running_) used += (*trace_)[running.request].host_extents;
    for (const Waiting& waiting : waiting_) {
      if (waiting.suspended) used += (*trace_)[waiting.request].host_extents;
    }
    EXPECT_LE(used, total_extents);
    return total_extents - used;
  }

  void abort_some() {
    const auto gone = [this](size_t request) {
      SimOutcome& outcome = outcomes_[request];
      const uint64_t limit = (*trace_)[request].abort_after_steps;
      if (limit == kNever || steps_ - outcome.arrival_step < limit) return false;
      outcome.aborted = true;
      outcome.end_s = now_s_;
      return true;
    };
    std::erase_if(running_, [&](const Running& running) { return gone(running.request); });
    std::erase_if(waiting_, [&](const Waiting& waiting) { return gone(waiting.request); });
  }

  void step() {
    std::vector<engine::RunningSequence> running;
    for (const Running& sequence : running_) {
      const SimRequest& request = (*trace_)[sequence.request];
      running.push_back({request.prompt_tokens, sequence.prefilled, request.wants_prompt_logits,
                         request.exclusive_prefill, sequence.decoded,
                         may_suspend ? sequence.pages : 0});
    }
    std::vector<engine::WaitingSequence> waiting;
    for (const Waiting& sequence : waiting_) {
      const SimRequest& request = (*trace_)[sequence.request];
      waiting.push_back({request.prompt_tokens,
                         {pages_of(request), sequence.suspended ? 0 : request.host_extents, 0},
                         sequence.passed,
                         request.wants_prompt_logits && !sequence.suspended,
                         request.exclusive_prefill && !sequence.suspended,
                         sequence.suspended.has_value()});
    }
    engine::SchedulerState state;
    state.running = running;
    state.waiting = waiting;
    state.free = {free_pages(), free_extents(), 0};
    state.total = {total_pages_, total_extents, 0};
    const engine::StepPlan plan = engine::plan_step(state, options_);
    check(plan, state);
    if (::testing::Test::HasFatalFailure()) return;
    apply_queue(plan);
    apply_work(plan);
    ++steps_;
  }

  void check(const engine::StepPlan& plan, const engine::SchedulerState& state) const {
    ASSERT_FALSE(plan.empty()) << "no progress at step " << steps_;
    ASSERT_TRUE(!plan.work.empty() || !plan.reject.empty() || !plan.suspend.empty());
    for (const uint32_t index : plan.suspend) {
      ASSERT_GE(state.running[index].decoded_tokens, options_.min_decoded_tokens);
      ASSERT_GT(state.running[index].pages_if_suspended, 0u);
    }
    ASSERT_LE(plan.tokens, options_.max_num_batched_tokens);
    ASSERT_LE(plan.logit_rows, options_.max_logit_rows);
    ASSERT_LE(state.running.size() + plan.admit.size(), options_.max_num_seqs);
    engine::MemoryNeed free = state.free;
    for (const uint32_t index : plan.admit) {
      ASSERT_TRUE(state.waiting[index].need.fits(free));
      free -= state.waiting[index].need;
    }
    ASSERT_LE(staged_prompts(plan, state), 1u);
    std::vector<bool> seen(state.running.size() + plan.admit.size(), false);
    uint64_t decodes = 0;
    for (const engine::PlannedWork& work : plan.work) {
      ASSERT_LT(work.sequence, seen.size());
      ASSERT_FALSE(seen[work.sequence]) << "planned twice";
      seen[work.sequence] = true;
      ASSERT_GT(work.tokens, 0u);
      ASSERT_LE(work.logit_rows, work.tokens);
      if (work.sequence < state.running.size()) {
        const engine::RunningSequence& sequence = state.running[work.sequence];
        if (sequence.prefilled_tokens >= sequence.prompt_tokens) ++decodes;
      }
      check_whole(work, plan, state);
    }
    if (!options_.chunked_prefill) return;
    for (size_t i = 0; i < state.running.size(); ++i) {
      const engine::RunningSequence& sequence = state.running[i];
      const bool decoding = sequence.prefilled_tokens >= sequence.prompt_tokens;
      const bool leaves = std::count(plan.suspend.begin(), plan.suspend.end(), i) > 0;
      ASSERT_FALSE(leaves && seen[i]);
      if (decoding && !leaves) {
        ASSERT_TRUE(seen[i]) << "a decode was left out";
      }
    }
    ASSERT_TRUE(oldest_prefill_moves(state, seen)) << "the oldest prompt stands still";
  }

  static uint64_t staged_prompts(const engine::StepPlan& plan,
                                 const engine::SchedulerState& state) {
    uint64_t count = 0;
    for (const engine::RunningSequence& sequence : state.running) {
      if (sequence.exclusive_prefill && sequence.prefilled_tokens < sequence.prompt_tokens) ++count;
    }
    for (const uint32_t index : plan.admit) {
      count += state.waiting[index].exclusive_prefill ? 1 : 0;
    }
    return count;
  }

  // Without chunks a prompt is processed in one step.
  void check_whole(const engine::PlannedWork& work,
                   const engine::StepPlan& plan,
                   const engine::SchedulerState& state) const {
    if (options_.chunked_prefill) return;
    const bool is_running = work.sequence < state.running.size();
    if (is_running) {
      const engine::RunningSequence& sequence = state.running[work.sequence];
      if (sequence.wants_prompt_logits) return;
      if (sequence.prefilled_tokens >= sequence.prompt_tokens) return;
      ASSERT_EQ(work.tokens, sequence.prompt_tokens) << "a prompt was cut";
    } else {
      const size_t index = plan.admit[work.sequence - state.running.size()];
      if (state.waiting[index].wants_prompt_logits || state.waiting[index].is_suspended) return;
      ASSERT_EQ(work.tokens, state.waiting[index].prompt_tokens) << "a prompt was cut";
    }
  }

  static bool oldest_prefill_moves(const engine::SchedulerState& state,
                                   const std::vector<bool>& seen) {
    for (size_t i = 0; i < state.running.size(); ++i) {
      const engine::RunningSequence& sequence = state.running[i];
      if (sequence.prefilled_tokens < sequence.prompt_tokens) return seen[i];
    }
    return true;
  }

  void apply_queue(const engine::StepPlan& plan) {
    std::vector<bool> leaves(waiting_.size(), false);
    for (const uint32_t index : plan.admit) {
      const size_t request = waiting_[index].request;
      if (waiting_[index].suspended) {
        running_.push_back(*waiting_[index].suspended);
        running_.back().decoded = 0;
      } else {
        running_.push_back({request, pages_of((*trace_)[request]), 0, 0, steps_});
        outcomes_[request].admitted_step = steps_;
      }
      leaves[index] = true;
    }
    if (!plan.admit.empty()) {
      for (uint32_t i = 0; i < plan.admit.back(); ++i) {
        if (!leaves[i]) ++waiting_[i].passed;
      }
    }
    for (const uint32_t index : plan.reject) {
      outcomes_[waiting_[index].request].rejected = true;
      leaves[index] = true;
    }
    size_t i = 0;
    std::erase_if(waiting_, [&](const Waiting&) { return leaves[i++]; });
  }

  void apply_work(const engine::StepPlan& plan) {
    now_s_ += step_cost_s + token_cost_s * plan.tokens;
    for (const engine::PlannedWork& work : plan.work) {
      Running& sequence = running_[work.sequence];
      const SimRequest& request = (*trace_)[sequence.request];
      SimOutcome& outcome = outcomes_[sequence.request];
      if (sequence.prefilled < request.prompt_tokens) {
        sequence.prefilled += work.tokens;
        ASSERT_LE(sequence.prefilled, request.prompt_tokens);
        const bool samples = sequence.prefilled == request.prompt_tokens;
        const uint32_t rows = request.wants_prompt_logits ? work.tokens : (samples ? 1 : 0);
        ASSERT_EQ(work.logit_rows, rows);
        if (!samples) continue;
        outcome.first_token_s = now_s_;
      } else {
        ASSERT_EQ(work.tokens, 1u);
        ASSERT_EQ(work.logit_rows, 1u);
        outcome.longest_decode_gap_steps =
            std::max(outcome.longest_decode_gap_steps, steps_ - sequence.last_step);
      }
      sequence.last_step = steps_;
      ++sequence.said;
      ++sequence.decoded;
    }
    for (const uint32_t index : plan.suspend) {
      waiting_.push_back({running_[index].request, 0, running_[index]});
      running_[index].request = kSuspended;
      ++suspensions_;
    }
    std::erase_if(running_, [](const Running& sequence) { return sequence.request == kSuspended; });
    std::erase_if(running_, [this](const Running& sequence) {
      if (sequence.said < (*trace_)[sequence.request].output_tokens) return false;
      outcomes_[sequence.request].finished = true;
      outcomes_[sequence.request].end_s = now_s_;
      return true;
    });
  }

  engine::SchedulerOptions options_;
  uint64_t total_pages_;
  uint64_t page_tokens_;
  const std::vector<SimRequest>* trace_ = nullptr;
  std::vector<SimOutcome> outcomes_;
  std::vector<Running> running_;
  std::vector<Waiting> waiting_;
  static constexpr size_t kSuspended = std::numeric_limits<size_t>::max();

  uint64_t steps_ = 0;
  uint64_t suspensions_ = 0;
  double now_s_ = 0;
};

}  // namespace spin::testing
