// SPDX-License-Identifier: Apache-2.0
// What goes wrong around a request: cancellation, overload, faults of the model, a step that hangs,
// sinks that throw, drain and stop.
#include <atomic>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/clock.h"
#include "tests/engine/fake_support.h"
#include "tests/engine/recording_sink.h"

namespace spin::engine {
namespace {

using std::chrono::seconds;
using testing::endless_request;
using testing::expect_clean;
using testing::fake_engine;
using testing::free_request;
using testing::kReducedCounts;
using testing::Outcome;
using testing::RecordingSink;
using testing::run_request;
using testing::say;

// Lets steps pass only while it is open.
class Gate {
 public:
  // The number of steps begun so far: the step with that number will be caught.
  uint64_t close() {
    base::MutexLock lock(mutex_);
    open_ = false;
    return steps_;
  }
  void open() {
    base::MutexLock lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  // For FakeModelOptions::before_step.
  Status pass(uint64_t step) {
    base::MutexLock lock(mutex_);
    steps_ = step + 1;
    changed_.notify_all();
    while (!open_) changed_.wait(mutex_);
    return ok_status();
  }
  // Blocks until step `step` has begun.
  void wait_for_step(uint64_t step) {
    base::MutexLock lock(mutex_);
    while (steps_ <= step) changed_.wait(mutex_);
  }
  uint64_t steps_begun() {
    base::MutexLock lock(mutex_);
    return steps_;
  }

 private:
  base::Mutex mutex_;
  base::CondVar changed_;
  bool open_ SPIN_GUARDED_BY(mutex_) = true;
  uint64_t steps_ SPIN_GUARDED_BY(mutex_) = 0;
};

FakeModelOptions gated(Gate& gate) {
  FakeModelOptions model;
  model.before_step = [&gate](uint64_t step) { return gate.pass(step); };
  return model;
}

struct Submitted {
  RequestId id;
  std::shared_ptr<RecordingSink> sink;
};

Submitted submit(Engine& engine, GenerateRequest request) {
  Submitted made;
  made.sink = std::make_shared<RecordingSink>();
  const auto id = engine.submit(std::move(request), made.sink);
  EXPECT_TRUE(id.ok()) << id.status().to_string();
  if (id.ok()) made.id = *id;
  return made;
}

TEST(EngineCancel, TakesEffectWithinTwoSteps) {
  Gate gate;
  const auto engine = fake_engine(gated(gate));
  const Submitted running = submit(*engine, endless_request());
  running.sink->wait_for_delta();
  const uint64_t step = gate.close();
  gate.wait_for_step(step);
  engine->cancel(running.id);
  gate.open();
  const Outcome outcome = running.sink->wait();
  EXPECT_EQ(gate.steps_begun(), step + 1);  // not even one more for this request
  EXPECT_EQ(outcome.result.status.code(), StatusCode::kCancelled);
  EXPECT_EQ(outcome.choices.at(0).finish, FinishReason::kAborted);
  EXPECT_EQ(outcome.choices.at(0).finishes, 1);
  expect_clean(*engine);
  EXPECT_EQ(engine->stats().requests_finished[2], 1u);
}

TEST(EngineCancel, AlsoEndsWhatWaitsAndIgnoresUnknownIds) {
  Gate gate;
  EngineOptions options;
  options.max_num_seqs = 1;
  const auto engine = fake_engine(gated(gate), options);
  const Submitted first = submit(*engine, endless_request());
  const Submitted second = submit(*engine, endless_request(2));
  first.sink->wait_for_delta();
  engine->cancel(second.id);
  engine->cancel({12345});
  EXPECT_EQ(second.sink->wait().result.status.code(), StatusCode::kCancelled);
  EXPECT_EQ(second.sink->now().choices.at(0).tokens.size(), 0u);
  EXPECT_EQ(second.sink->now().result.timing.first_token, 0.0);
  engine->cancel(first.id);
  engine->cancel(first.id);
  first.sink->wait();
  engine->cancel(first.id);
  expect_clean(*engine);
}

TEST(EngineCancel, AStormAtRandomTimesLeaksNothing) {
  FakeModelOptions model;
  model.kv_capacity_tokens = 3000;  // not all fit: aborts hit waiting, prefilling and decoding ones
  EngineOptions options;
  options.max_num_seqs = 16;
  options.max_num_batched_tokens = 64;
  const auto engine = fake_engine(model, options);
  const int rounds = kReducedCounts ? 3 : 20;
  std::mt19937_64 random(20);
  for (int round = 0; round < rounds; ++round) {
    std::vector<Submitted> requests;
    std::vector<std::thread> threads;
    for (int i = 0; i < 100; ++i) {
      GenerateRequest request = free_request(random(), 1 + random() % 200);
      request.prompt.resize(1 + random() % 300, 'x');
      request.sampling.n = 1 + static_cast<uint32_t>(random() % 3);
      request.sampling.stop = {"e", "ta"};
      request.sampling.min_tokens =
          static_cast<uint32_t>(std::min<uint64_t>(*request.sampling.max_tokens, random() % 20));
      request.stream = random() % 2 == 0;
      requests.push_back(submit(*engine, std::move(request)));
    }
    for (uint64_t part = 0; part < 2; ++part) {
      threads.emplace_back([&requests, &engine, part, round] {
        std::mt19937_64 own(part + 2 * static_cast<uint64_t>(round));
        for (size_t i = part; i < requests.size(); i += 2) {
          if (own() % 10 < 7) {
            if (own() % 4 == 0) std::this_thread::yield();
            engine->cancel(requests[i].id);
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Submitted& request : requests) {
      const Outcome outcome = request.sink->wait();
      EXPECT_EQ(outcome.ends, 1);
      EXPECT_FALSE(outcome.late_event);
      for (const auto& [index, choice] : outcome.choices) EXPECT_EQ(choice.finishes, 1);
    }
    expect_clean(*engine);
  }
}

TEST(EngineCancel, FromInsideTheSinkWorks) {
  const auto engine = fake_engine();
  auto sink = std::make_shared<RecordingSink>();
  std::atomic<uint64_t> id{0};
  sink->on_delta_hook = [&](const OutputDelta&) {
    while (id.load() == 0) std::this_thread::yield();
    engine->cancel({id.load()});
  };
  const auto submitted = engine->submit(endless_request(), sink);
  ASSERT_TRUE(submitted.ok());
  id.store(submitted->value);
  EXPECT_EQ(sink->wait().result.status.code(), StatusCode::kCancelled);
  expect_clean(*engine);
}

TEST(EngineQueue, IsBoundedAndSaysSo) {
  Gate gate;
  gate.close();
  EngineOptions options;
  options.max_num_seqs = 2;
  options.max_queued_requests = 3;
  const auto engine = fake_engine(gated(gate), options);
  std::vector<Submitted> accepted;
  for (int i = 0; i < 5; ++i) accepted.push_back(submit(*engine, say("ok")));
  auto sink = std::make_shared<RecordingSink>();
  const auto refused = engine->submit(say("no"), sink);
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(refused.status().message().find("limit 3"), std::string::npos);
  gate.open();
  for (const Submitted& request : accepted)
    EXPECT_EQ(request.sink->wait().choices.at(0).text, "ok");
  EXPECT_EQ(sink->now().ends, 0);
  expect_clean(*engine);
  EXPECT_EQ(engine->stats().requests_refused, 1u);
  EXPECT_EQ(run_request(*engine, say("again")).choices.at(0).text, "again");
}

TEST(EngineQueue, TwoHundredRequestsAtOnceAreEachAsAlone) {
  const auto engine = fake_engine();
  const uint64_t count = kReducedCounts ? 60 : 200;
  std::vector<Submitted> together;
  for (uint64_t i = 0; i < count; ++i) together.push_back(submit(*engine, free_request(i)));
  std::vector<Outcome> outcomes;
  for (const Submitted& request : together) outcomes.push_back(request.sink->wait());
  for (uint64_t i = 0; i < count; ++i) {
    const Outcome solo = run_request(*engine, free_request(i));
    EXPECT_EQ(outcomes[i].choices.at(0).tokens, solo.choices.at(0).tokens) << i;
    EXPECT_EQ(outcomes[i].choices.at(0).text, solo.choices.at(0).text) << i;
  }
  expect_clean(*engine);
}

// The fake model reads everything back from the pages, so this holds only if every page is right.
TEST(EngineQueue, OutputsDoNotDependOnChunksPagesOrPressure) {
  std::vector<std::vector<TokenId>> reference;
  for (const auto& [seqs, tokens, pages, capacity] :
       std::vector<std::tuple<uint32_t, uint32_t, uint32_t, uint64_t>>{
           {64, 512, 8, 0}, {1, 16, 16, 400}, {3, 7, 64, 2000}, {16, 33, 32, 1200}}) {
    FakeModelOptions model;
    model.max_model_len = 400;
    model.kv_capacity_tokens = capacity;
    EngineOptions options;
    options.max_num_seqs = seqs;
    options.max_num_batched_tokens = tokens;
    options.page_tokens = pages;
    const auto engine = fake_engine(model, options);
    std::vector<Submitted> requests;
    for (uint64_t i = 0; i < 40; ++i) {
      GenerateRequest request = free_request(i, 50);
      request.prompt.resize(1 + i * 6, static_cast<TokenId>(i));
      request.sampling.ignore_eos = true;
      requests.push_back(submit(*engine, std::move(request)));
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      const auto got = requests[i].sink->wait().choices.at(0).tokens;
      EXPECT_EQ(got.size(), 50u);
      if (reference.size() == i) reference.push_back(got);
      EXPECT_EQ(got, reference[i]) << i << " with chunks of " << tokens;
    }
    expect_clean(*engine);
  }
}

TEST(EngineFault, ARowThatIsNotANumberEndsItsRequestAlone) {
  const auto engine = fake_engine();
  for (const float temperature : {0.0f, 1.0f}) {
    const std::vector<TokenId> script = {'o', 'k', kFakeNan, 'x'};
    GenerateRequest poisoned;
    poisoned.prompt = fake_say_prompt(script);
    poisoned.sampling.temperature = temperature;
    poisoned.sampling.top_p = 0.001f;
    std::vector<Submitted> good;
    for (int i = 0; i < 8; ++i) good.push_back(submit(*engine, say("a good answer")));
    const Submitted bad = submit(*engine, poisoned);
    for (int i = 0; i < 8; ++i) good.push_back(submit(*engine, say("a good answer")));
    const Outcome outcome = bad.sink->wait();
    EXPECT_EQ(outcome.result.status.code(), StatusCode::kInternal);
    EXPECT_EQ(outcome.choices.at(0).text, "ok");
    EXPECT_EQ(outcome.choices.at(0).finish, FinishReason::kError);
    EXPECT_EQ(outcome.result.usage.completion_tokens, 2u);
    for (const Submitted& request : good) {
      EXPECT_EQ(request.sink->wait().choices.at(0).text, "a good answer");
    }
  }
  expect_clean(*engine);
  EXPECT_EQ(engine->health(seconds(1)).state, HealthState::kReady);
}

TEST(EngineFault, OneBrokenChoiceEndsTheWholeRequestOnce) {
  const auto engine = fake_engine();
  const std::vector<TokenId> script = {'o', kFakeNan};
  GenerateRequest request;
  request.prompt = fake_say_prompt(script);
  request.sampling.n = 5;
  const Outcome outcome = run_request(*engine, request);
  EXPECT_EQ(outcome.ends, 1);
  EXPECT_EQ(outcome.choices.size(), 5u);
  for (const auto& [index, choice] : outcome.choices) {
    EXPECT_EQ(choice.finish, FinishReason::kError);
    EXPECT_EQ(choice.finishes, 1);
  }
  expect_clean(*engine);
}

TEST(EngineFault, AFailingStepFailsTheEngineAndAnswersEverybody) {
  FakeModelOptions model;
  model.before_step = [](uint64_t step) {
    return step < 5 ? ok_status() : Status(StatusCode::kIoError, "the device is gone");
  };
  EngineOptions options;
  options.max_num_seqs = 2;
  const auto engine = fake_engine(model, options);
  std::vector<Submitted> requests;
  for (int i = 0; i < 6; ++i) {
    auto sink = std::make_shared<RecordingSink>();
    if (engine->submit(endless_request(), sink).ok()) requests.push_back({{}, sink});
  }
  ASSERT_FALSE(requests.empty());
  for (const Submitted& request : requests) {
    const Outcome outcome = request.sink->wait();
    EXPECT_EQ(outcome.result.status.code(), StatusCode::kInternal);
    EXPECT_EQ(outcome.choices.at(0).finish, FinishReason::kError);
    EXPECT_EQ(outcome.ends, 1);
  }
  expect_clean(*engine);
  EXPECT_EQ(engine->health(seconds(1)).state, HealthState::kFailed);
  const auto refused = engine->submit(say("x"), std::make_shared<RecordingSink>());
  EXPECT_EQ(refused.status().code(), StatusCode::kUnavailable);
  engine->stop();
}

TEST(EngineFault, MemoryThatRunsOutInAStepFailsTheEngineCleanly) {
  FakeModelOptions model;
  model.before_step = [](uint64_t step) -> Status {
    if (step == 3) throw std::bad_alloc();
    return ok_status();
  };
  const auto engine = fake_engine(model);
  const Outcome outcome = run_request(*engine, endless_request());
  EXPECT_EQ(outcome.result.status.code(), StatusCode::kInternal);
  expect_clean(*engine);
  EXPECT_EQ(engine->health(seconds(1)).state, HealthState::kFailed);
}

TEST(EngineFault, ASinkThatThrowsLosesItsRequestOnly) {
  const auto engine = fake_engine();
  auto broken = std::make_shared<RecordingSink>();
  int deltas = 0;
  broken->on_delta_hook = [&deltas](const OutputDelta&) {
    if (++deltas == 3) throw std::bad_alloc();
  };
  ASSERT_TRUE(engine->submit(endless_request(), broken).ok());
  EXPECT_EQ(run_request(*engine, say("fine")).choices.at(0).text, "fine");
  EXPECT_EQ(broken->wait().result.status.code(), StatusCode::kInternal);
  EXPECT_EQ(broken->now().ends, 1);
  expect_clean(*engine);
  EXPECT_EQ(deltas, 3);
  EXPECT_EQ(engine->stats().requests_finished[3], 1u);
}

TEST(EngineHealth, AHangingStepIsStalledAndRecovers) {
  base::ManualClock clock;
  Gate gate;
  const auto engine = fake_engine(gated(gate), {}, &clock);
  const Submitted request = submit(*engine, endless_request());
  request.sink->wait_for_delta();
  const uint64_t step = gate.close();
  EXPECT_EQ(engine->health(seconds(30)).state, HealthState::kReady);
  gate.wait_for_step(step);  // now one hangs
  clock.advance_s(31);
  const Health stalled = engine->health(seconds(30));
  EXPECT_EQ(stalled.state, HealthState::kStalled);
  EXPECT_GE(stalled.seconds_since_progress, 30.9);
  gate.open();
  gate.wait_for_step(step + 2);
  EXPECT_EQ(engine->health(seconds(30)).state, HealthState::kReady);
  engine->cancel(request.id);
  request.sink->wait();
  clock.advance_s(3600);
  EXPECT_TRUE(engine->wait_drained(seconds(100)));
  EXPECT_EQ(engine->health(seconds(30)).state, HealthState::kReady);  // idle is healthy
}

TEST(EngineHealth, ASinkThatDoesNotReturnIsNotTakenForHealth) {
  base::ManualClock clock;
  FakeModelOptions model;
  model.max_model_len = 256;  // more steps than the queue of events holds
  const auto engine = fake_engine(model, {}, &clock);
  auto sink = std::make_shared<RecordingSink>();
  std::atomic<bool> blocked{true};
  std::atomic<bool> inside{false};
  sink->on_delta_hook = [&](const OutputDelta&) {
    inside.store(true);
    while (blocked.load()) std::this_thread::yield();
  };
  ASSERT_TRUE(engine->submit(endless_request(), sink).ok());
  while (!inside.load()) std::this_thread::yield();
  // The queue of events fills up, then the model waits: the queue is bounded.
  uint64_t steps = 0;
  for (int calm = 0; calm < 50; ++calm) {
    const uint64_t now = engine->stats().steps;
    if (now != steps) calm = 0;
    steps = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_LE(steps, 80u);
  clock.advance_s(10);
  EXPECT_EQ(engine->health(seconds(5)).state, HealthState::kStalled);
  blocked.store(false);
  EXPECT_EQ(sink->wait().choices.at(0).finish, FinishReason::kLength);
}

TEST(EngineDrain, RefusesNewRequestsAndFinishesTheOldOnes) {
  Gate gate;
  gate.close();
  const auto engine = fake_engine(gated(gate));
  const Submitted request = submit(*engine, say("the end of the stream"));
  engine->begin_drain();
  EXPECT_EQ(engine->health(seconds(30)).state, HealthState::kDraining);
  const auto refused = engine->submit(say("x"), std::make_shared<RecordingSink>());
  EXPECT_EQ(refused.status().code(), StatusCode::kUnavailable);
  EXPECT_FALSE(engine->wait_drained(std::chrono::milliseconds(5)));
  gate.open();
  EXPECT_TRUE(engine->wait_drained(seconds(100)));
  EXPECT_EQ(request.sink->now().ends, 1);
  EXPECT_EQ(request.sink->wait().choices.at(0).text, "the end of the stream");
}

TEST(EngineStop, EndsEveryRequestExactlyOnceAndIsIdempotent) {
  for (int round = 0; round < (kReducedCounts ? 5 : 40); ++round) {
    EngineOptions options;
    options.max_num_seqs = 4;
    const auto engine = fake_engine({}, options);
    std::vector<Submitted> requests;
    for (uint64_t i = 0; i < 20; ++i) {
      GenerateRequest request = endless_request(i);
      request.sampling.n = 1 + i % 2;
      requests.push_back(submit(*engine, std::move(request)));
    }
    if (round % 2 == 0) requests[0].sink->wait_for_delta();
    std::thread other([&engine] { engine->stop(); });
    engine->stop();
    other.join();
    for (const Submitted& request : requests) {
      const Outcome outcome = request.sink->now();
      EXPECT_EQ(outcome.ends, 1);
      EXPECT_EQ(outcome.result.status.code(), StatusCode::kCancelled);
      for (const auto& [index, choice] : outcome.choices) EXPECT_EQ(choice.finishes, 1);
    }
    expect_clean(*engine);
    EXPECT_EQ(engine->health(seconds(1)).state, HealthState::kStopped);
    const auto refused = engine->submit(say("x"), std::make_shared<RecordingSink>());
    EXPECT_EQ(refused.status().code(), StatusCode::kUnavailable);
  }
}

TEST(EngineStop, TheDestructorStops) {
  auto sink = std::make_shared<RecordingSink>();
  {
    const auto engine = fake_engine();
    ASSERT_TRUE(engine->submit(endless_request(), sink).ok());
  }
  EXPECT_EQ(sink->now().ends, 1);
  EXPECT_EQ(sink.use_count(), 1);
}

}  // namespace
}  // namespace spin::engine
