// SPDX-License-Identifier: Apache-2.0
#include "engine/scheduler.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "engine/request_state.h"
#include "tests/engine/simulator.h"

namespace spin::engine {
namespace {

using testing::kNever;
using testing::SimOutcome;
using testing::SimRequest;
using testing::Simulator;

#ifdef SPIN_SANITIZED
constexpr bool kReduced = true;
#else
constexpr bool kReduced = false;
#endif

SchedulerOptions options(uint32_t seqs, uint32_t tokens) {
  SchedulerOptions made;
  made.max_num_seqs = seqs;
  made.max_num_batched_tokens = tokens;
  made.max_logit_rows = seqs + 32;
  return made;
}

SimRequest request(double arrival_s, uint64_t prompt, uint64_t output) {
  return {arrival_s, prompt, output, output, false, kNever};
}

void expect_all_end(const std::vector<SimOutcome>& outcomes) {
  for (size_t i = 0; i < outcomes.size(); ++i) {
    const SimOutcome& outcome = outcomes[i];
    EXPECT_EQ(outcome.finished + outcome.rejected + outcome.aborted, 1) << "request " << i;
  }
}

TEST(RequestState, OnlyTheDocumentedEdgesAreLegal) {
  const Phase all[] = {Phase::kSubmitted, Phase::kWaiting, Phase::kPrefilling, Phase::kDecoding,
                       Phase::kFinished};
  int legal = 0;
  for (const Phase from : all) {
    for (const Phase to : all) legal += is_legal_transition(from, to) ? 1 : 0;
  }
  EXPECT_EQ(legal, 7);  // three forward edges, and four to finished
  EXPECT_FALSE(is_legal_transition(Phase::kFinished, Phase::kFinished));
  EXPECT_FALSE(is_legal_transition(Phase::kWaiting, Phase::kDecoding));
  EXPECT_TRUE(is_legal_transition(Phase::kDecoding, Phase::kFinished));
  EXPECT_DEATH(
      {
        PhaseTracker tracker;
        tracker.advance(Phase::kDecoding);
      },
      "check failed");
}

TEST(Scheduler, AnIdleStateHasAnEmptyPlan) { EXPECT_TRUE(plan_step({}, options(4, 16)).empty()); }

TEST(Scheduler, DecodesComeFirstAndThePromptGetsTheRest) {
  const std::vector<RunningSequence> running = {{5, 5}, {100, 20}, {7, 7}};
  SchedulerState state;
  state.running = running;
  state.total.pages = state.free.pages = 100;
  const StepPlan plan = plan_step(state, options(8, 16));
  ASSERT_EQ(plan.work.size(), 3u);
  EXPECT_EQ(plan.work[0].sequence, 0u);
  EXPECT_EQ(plan.work[1].sequence, 2u);
  EXPECT_EQ(plan.work[2].sequence, 1u);
  EXPECT_EQ(plan.work[2].tokens, 14u);
  EXPECT_EQ(plan.work[2].logit_rows, 0u);
  EXPECT_EQ(plan.tokens, 16u);
}

TEST(Scheduler, AShortPromptPassesALongOneThatStillMoves) {
  const std::vector<RunningSequence> running = {{100'000, 512}, {40, 0}, {30, 0}};
  SchedulerState state;
  state.running = running;
  state.total.pages = 100;
  const StepPlan plan = plan_step(state, options(8, 512));
  ASSERT_EQ(plan.work.size(), 3u);
  EXPECT_EQ(plan.work[0].tokens, 442u);  // its half and what the others left
  EXPECT_EQ(plan.work[1].tokens, 40u);
  EXPECT_EQ(plan.work[2].tokens, 30u);
  EXPECT_EQ(plan.work[2].logit_rows, 1u);
}

TEST(Scheduler, PromptLogitsAreCutToTheRowsThatThereAre) {
  const std::vector<RunningSequence> running = {{500, 0, true}, {500, 0, true}, {3, 3}};
  SchedulerState state;
  state.running = running;
  state.total.pages = 100;
  const StepPlan plan = plan_step(state, options(4, 512));  // 36 rows
  ASSERT_EQ(plan.work.size(), 3u);
  EXPECT_EQ(plan.work[1].tokens, 34u);
  EXPECT_EQ(plan.work[2].tokens, 1u);
  EXPECT_EQ(plan.logit_rows, 36u);
}

TEST(Scheduler, ASmallRequestPassesOneThatDoesNotFitButNotForEver) {
  std::vector<WaitingSequence> waiting = {{10, {90}, 0}, {10, {10}, 0}};
  SchedulerState state;
  state.waiting = waiting;
  state.free.pages = 20;
  state.total.pages = 100;
  EXPECT_EQ(plan_step(state, options(4, 512)).admit, std::vector<uint32_t>{1});
  waiting[0].passed = SchedulerOptions{}.max_passes;
  EXPECT_TRUE(plan_step(state, options(4, 512)).admit.empty());
}

TEST(Scheduler, WhatCanNeverFitIsRejectedAndTheQueueGoesOn) {
  const std::vector<WaitingSequence> waiting = {{10, {101}, 0}, {10, {10}, 0}};
  SchedulerState state;
  state.waiting = waiting;
  state.free.pages = state.total.pages = 100;
  const StepPlan plan = plan_step(state, options(4, 512));
  EXPECT_EQ(plan.reject, std::vector<uint32_t>{0});
  EXPECT_EQ(plan.admit, std::vector<uint32_t>{1});
}

TEST(Scheduler, EveryKindOfMemoryIsCounted) {
  // Total: 100 pages, 50 extents, 1000 bytes; each lacks another kind, now or for ever.
  const std::vector<WaitingSequence> waiting = {
      {10, {10, 51, 0}, 0},   {10, {10, 0, 1001}, 0}, {10, {10, 41, 0}, 0},   {10, {10, 0, 901}, 0},
      {10, {10, 30, 500}, 0}, {10, {10, 30, 0}, 0},   {10, {10, 10, 400}, 0},
  };
  SchedulerState state;
  state.waiting = waiting;
  state.total = {100, 50, 1000};
  state.free = {90, 40, 900};
  const StepPlan plan = plan_step(state, options(8, 512));
  EXPECT_EQ(plan.reject, (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(plan.admit, (std::vector<uint32_t>{4, 6}));  // 2 and 3 lack room now, 5 after 4
}

TEST(Scheduler, OnePromptAtATimeHasTheStagingBufferAndShortOnesPass) {
  const WaitingSequence staged = {100, {1}, SchedulerOptions{}.max_passes, false, true};
  const WaitingSequence plain = {10, {1}, 0, false, false};
  const std::vector<WaitingSequence> waiting = {staged, staged, plain};
  std::vector<RunningSequence> running;
  SchedulerState state;
  state.waiting = waiting;
  state.free.pages = state.total.pages = 100;
  EXPECT_EQ(plan_step(state, options(8, 512)).admit, (std::vector<uint32_t>{0, 2}));
  running = {{100, 50, false, true}};
  state.running = running;
  EXPECT_EQ(plan_step(state, options(8, 512)).admit, (std::vector<uint32_t>{2}));
  running = {{100, 100, false, true}};  // it decodes: the buffer is free
  state.running = running;
  EXPECT_EQ(plan_step(state, options(8, 512)).admit, (std::vector<uint32_t>{0, 2}));
}

TEST(Scheduler, StagedPromptsFollowEachOtherAndNobodyWaitsForThem) {
  std::vector<SimRequest> trace;
  for (int i = 0; i < 10; ++i) {
    trace.push_back(request(0, 20'000, 50));
    trace.back().exclusive_prefill = true;
  }
  for (int i = 0; i < 200; ++i) trace.push_back(request(0.02 * (i + 1), 100, 20));
  Simulator simulator(options(32, 512), 100'000, 8);
  const auto outcomes = simulator.run(trace);
  const double step_s = simulator.step_cost_s + 512 * simulator.token_cost_s;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    EXPECT_TRUE(outcomes[i].finished);
    if (i >= 10) {
      EXPECT_LE(outcomes[i].first_token_s - trace[i].arrival_s, 4 * step_s);
    }
    if (i > 0 && i < 10) {
      EXPECT_GT(outcomes[i].admitted_step, outcomes[i - 1].admitted_step);
    }
  }
}

TEST(Scheduler, TheLongestRunningAreSuspendedForOneThatWouldFitThen) {
  // Decoding: {.., decoded, pages if suspended}.
  const std::vector<RunningSequence> running = {{5, 5, false, false, 300, 10},
                                                {5, 5, false, false, 900, 10},
                                                {5, 5, false, false, 255, 10},  // not long enough
                                                {5, 5, false, false, 999, 0},   // cannot be
                                                {5, 4, false, true, 0, 10}};    // its prompt runs
  SchedulerState state;
  state.running = running;
  state.total = {100, 10, 0};
  state.free = {4, 10, 0};
  const auto suspended = [&](const WaitingSequence& waiting) {
    state.waiting = {&waiting, 1};
    const StepPlan plan = plan_step(state, options(8, 64));
    EXPECT_EQ(plan.work.size(), running.size() - plan.suspend.size() + plan.admit.size());
    for (const PlannedWork& work : plan.work) {
      EXPECT_EQ(std::count(plan.suspend.begin(), plan.suspend.end(), work.sequence), 0);
    }
    return plan.suspend;
  };
  EXPECT_EQ(suspended({10, {4}}), (std::vector<uint32_t>{}));       // it fits
  EXPECT_EQ(suspended({10, {14}}), (std::vector<uint32_t>{1}));     // the longest first
  EXPECT_EQ(suspended({10, {15}}), (std::vector<uint32_t>{0, 1}));  // as many as it takes
  EXPECT_EQ(suspended({10, {25}}), (std::vector<uint32_t>{}));      // not for nothing
  EXPECT_EQ(suspended({10, {14, 11}}), (std::vector<uint32_t>{}));  // it can never fit
  state.free.host_extents = 0;
  EXPECT_EQ(suspended({10, {14, 1}}), (std::vector<uint32_t>{}));  // pages are not what it lacks
}

TEST(Scheduler, WhoeverWaitsForWhatASuspendedSequenceHoldsLetsItPass) {
  // It needs extents of the host, has waited long enough, and nobody runs.
  const WaitingSequence first = {10, {10, 5}, SchedulerOptions{}.max_passes};
  const WaitingSequence newcomer = {10, {10}, 0};
  WaitingSequence holder = {500, {10}, 0};
  holder.is_suspended = true;
  const std::vector<WaitingSequence> waiting = {first, newcomer, holder};
  SchedulerState state;
  state.waiting = waiting;
  state.total = {100, 8, 0};
  state.free = {100, 4, 0};
  EXPECT_EQ(plan_step(state, options(8, 64)).admit, (std::vector<uint32_t>{2}));
}

TEST(Scheduler, ASuspendedSequenceResumesInItsTurnWithAToken) {
  WaitingSequence resumes = {500, {10}, 0};
  resumes.is_suspended = true;
  const std::vector<WaitingSequence> waiting = {{10, {10}, 0}, resumes};
  SchedulerState state;
  state.waiting = waiting;
  state.total.pages = 100;
  state.free.pages = 20;
  const StepPlan plan = plan_step(state, options(8, 64));
  EXPECT_EQ(plan.admit, (std::vector<uint32_t>{0, 1}));
  ASSERT_EQ(plan.work.size(), 2u);
  EXPECT_EQ(plan.work[0].sequence, 1u);
  EXPECT_EQ(plan.work[0].tokens, 1u);
  EXPECT_EQ(plan.work[0].logit_rows, 1u);
  EXPECT_EQ(plan.work[1].tokens, 10u);
  state.free.pages = 10;
  EXPECT_EQ(plan_step(state, options(8, 64)).admit, (std::vector<uint32_t>{0}));
}

TEST(Scheduler, WithoutChunksAPromptOverTheStepIsRejectedAndOthersRun) {
  SchedulerOptions whole = options(4, 64);
  whole.chunked_prefill = false;
  Simulator simulator(whole, 1000, 8);
  const auto outcomes = simulator.run({request(0, 65, 4), request(0, 64, 4), request(0, 10, 4)});
  EXPECT_TRUE(outcomes[0].rejected);
  EXPECT_TRUE(outcomes[1].finished);
  EXPECT_TRUE(outcomes[2].finished);
}

// Two are admitted that do not fit the same step; the second has to wait, uncut.
TEST(Scheduler, WithoutChunksAnAdmittedPromptThatWaitsIsNotCutLater) {
  SchedulerOptions whole = options(4, 64);
  whole.chunked_prefill = false;
  Simulator simulator(whole, 1000, 8);  // checks every plan
  const auto outcomes = simulator.run({request(0, 40, 20), request(0, 40, 20), request(0, 40, 20)});
  expect_all_end(outcomes);
}

TEST(Scheduler, WithoutChunksDecodesDoNotKeepAFullSizedPromptOut) {
  SchedulerOptions whole = options(4, 64);
  whole.chunked_prefill = false;
  std::vector<SimRequest> trace;
  for (int i = 0; i < 200; ++i) trace.push_back(request(0.004 * i, 8, 40));
  trace.insert(trace.begin() + 20, request(0.004 * 19, 64, 4));
  Simulator simulator(whole, 1000, 8);
  const auto outcomes = simulator.run(trace);
  expect_all_end(outcomes);
  // Admitted in its turn, prefilled in the same step.
  EXPECT_LE(outcomes[20].admitted_step, outcomes[21].admitted_step);
}

TEST(Scheduler, AFullPoolLetsEverybodyFinish) {
  // Each takes a third of the pool, as prompts that cannot all be there together.
  std::vector<SimRequest> trace;
  for (int i = 0; i < 60; ++i) trace.push_back(request(0, 2000, 300));
  Simulator simulator(options(16, 512), 900, 8);
  const auto outcomes = simulator.run(trace);
  for (const SimOutcome& outcome : outcomes) EXPECT_TRUE(outcome.finished);
}

TEST(Scheduler, APromptThatBarelyFitsKeepsItsPagesWhileOthersDecode) {
  std::vector<SimRequest> trace;
  for (int i = 0; i < 7; ++i) trace.push_back(request(0, 8, 400));
  trace.push_back(request(0.01, 8 * 600 - 20, 20));
  Simulator simulator(options(8, 64), 600 + 7 * 51, 8);
  const auto outcomes = simulator.run(trace);
  for (const SimOutcome& outcome : outcomes) EXPECT_TRUE(outcome.finished);
  EXPECT_LE(outcomes[7].admitted_step, 20u);
}

TEST(Scheduler, ALargeRequestIsNotStarvedByASteadyStreamOfSmallOnes) {
  std::vector<SimRequest> trace;
  for (int i = 0; i < 20'000; ++i) trace.push_back(request(0.002 * i, 20, 30));
  trace.insert(trace.begin() + 1000, request(0.002 * 999, 7000, 400));
  SchedulerOptions small = options(64, 512);
  Simulator simulator(small, 1000, 8);  // the large one needs 925 of them
  const auto outcomes = simulator.run(trace);
  for (const SimOutcome& outcome : outcomes) EXPECT_TRUE(outcome.finished);
  // max_passes admissions of others, then the running ones end (30 steps), then it is in.
  EXPECT_LE(outcomes[1000].admitted_step - outcomes[1000].arrival_step, 20u * small.max_passes);
}

TEST(Scheduler, KvExhaustionWithManyRequestsFinishesThemAll) {
  const size_t count = kReduced ? 2'000 : 19'800;
  std::mt19937_64 random(21);
  std::vector<SimRequest> trace;
  for (size_t i = 0; i < count; ++i) {
    trace.push_back(
        request(0.001 * static_cast<double>(i), 1 + random() % 400, 1 + random() % 100));
  }
  Simulator simulator(options(64, 512), 200, 8);  // three to four requests' worth
  simulator.max_waiting = 100;
  const auto outcomes = simulator.run(trace);
  for (const SimOutcome& outcome : outcomes) EXPECT_TRUE(outcome.finished);
}

TEST(Scheduler, RunningRequestsGetATokenInEveryStep) {
  std::mt19937_64 random(5);
  std::vector<SimRequest> trace;
  for (int i = 0; i < 500; ++i) {
    trace.push_back(request(0.01 * i, 1 + random() % 3000, 1 + random() % 200));
  }
  Simulator simulator(options(16, 256), 4000, 8);
  for (const SimOutcome& outcome : simulator.run(trace)) {
    EXPECT_TRUE(outcome.finished);
    EXPECT_LE(outcome.longest_decode_gap_steps, 1u);
  }
}

TEST(Scheduler, AShortRequestIsSoonServedBesideAVeryLongPrompt) {
  std::vector<SimRequest> trace = {request(0, 200'000, 4)};
  for (int i = 0; i < 100; ++i) trace.push_back(request(0.05 * (i + 1), 100, 4));
  Simulator simulator(options(16, 512), 100'000, 8);
  const auto outcomes = simulator.run(trace);
  const double step_s = simulator.step_cost_s + 512 * simulator.token_cost_s;
  for (size_t i = 1; i < outcomes.size(); ++i) {
    EXPECT_LE(outcomes[i].first_token_s - trace[i].arrival_s, 3 * step_s);
  }
  EXPECT_TRUE(outcomes[0].finished);
}

TEST(Scheduler, RandomTracesKeepEveryPromise) {
  const int traces = kReduced ? 20 : 300;
  uint64_t suspensions = 0;
  for (int seed = 0; seed < traces; ++seed) {
    std::mt19937_64 random(static_cast<uint64_t>(seed));
    SchedulerOptions mixed = options(1 + static_cast<uint32_t>(random() % 20), 0);
    mixed.max_num_batched_tokens = mixed.max_num_seqs + static_cast<uint32_t>(random() % 100);
    mixed.chunked_prefill = seed % 4 != 0;
    mixed.max_passes = static_cast<uint32_t>(random() % 8);
    mixed.min_decoded_tokens = 1 + static_cast<uint32_t>(random() % 20);
    const uint64_t page_tokens = std::vector<uint64_t>{1, 2, 16, 64}[random() % 4];
    const uint64_t pages = 20 + random() % 200;
    std::vector<SimRequest> trace;
    double arrival = 0;
    for (int i = 0; i < 150; ++i) {
      arrival += static_cast<double>(random() % 5) * 0.002;
      SimRequest one = request(arrival, 1 + random() % 120, 1 + random() % 60);
      one.reserved_output = one.output_tokens + random() % 10;
      one.wants_prompt_logits = random() % 5 == 0;
      one.exclusive_prefill = !one.wants_prompt_logits && random() % 3 == 0;
      one.host_extents = random() % 4;
      if (random() % 6 == 0) one.abort_after_steps = random() % 40;
      if (random() % 40 == 0) one.prompt_tokens = pages * page_tokens + 1;  // never fits
      trace.push_back(one);
    }
    Simulator simulator(mixed, pages, page_tokens);
    simulator.total_extents = 3 + random() % 8;
    simulator.may_suspend = seed % 2 == 0;
    expect_all_end(simulator.run(trace));
    if (::testing::Test::HasFailure()) FAIL() << "seed " << seed;
    suspensions += simulator.suspensions();
  }
  EXPECT_GT(suspensions, 0u);
}

// A day of traffic (5 requests a second for 86,400 s, one in ten of them) at the lengths of long
// context, scaled down by 64 in tokens.
TEST(Scheduler, CompressedSoakEndsEveryRequestAndKeepsItsPace) {
  const size_t count = kReduced ? 4'000 : 43'000;
  std::mt19937_64 random(43);
  std::vector<SimRequest> trace;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t kind = random() % 100;
    uint64_t prompt = 1 + random() % 32;                // short
    if (kind >= 40) prompt = 16 + random() % 112;       // 1 to 8 k
    if (kind >= 80) prompt = 128 + random() % 896;      // 8 to 64 k
    if (kind >= 95) prompt = 1024 + random() % 15'360;  // 64 k to 1 M
    SimRequest one = request(2.0 * static_cast<double>(i), prompt, 1 + random() % 60);
    one.wants_prompt_logits = kind < 80 && random() % 5 == 0;
    if (random() % 100 < 15) one.abort_after_steps = random() % 80;
    if (random() % 100 < 2) one.prompt_tokens = 100'000;  // never fits
    trace.push_back(one);
  }
  Simulator simulator(options(64, 512), 3000, 8);
  simulator.step_cost_s = 0.05;
  simulator.token_cost_s = 0.002;
  const auto outcomes = simulator.run(trace);
  expect_all_end(outcomes);
  size_t rejected = 0;
  for (const SimOutcome& outcome : outcomes) {
    rejected += outcome.rejected ? 1 : 0;
    EXPECT_LE(outcome.longest_decode_gap_steps, 1u);
  }
  EXPECT_GT(rejected, count / 100);
  EXPECT_LT(rejected, count / 30);
}

}  // namespace
}  // namespace spin::engine
