// SPDX-License-Identifier: Apache-2.0
// Failures of other engines, as docs/failure_cases.md lists them, on the fake model. Only those
// that no test of a part of the engine would show.
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "engine/fake_engine.h"
#include "tests/engine/fake_support.h"
#include "tests/engine/recording_sink.h"

namespace spin::engine {
namespace {

using testing::ChoiceOutput;
using testing::expect_clean;
using testing::fake_engine;
using testing::free_request;
using testing::Outcome;
using testing::RecordingSink;
using testing::run_request;

using Setter = std::function<void(SamplingParams&)>;

// Every sampling parameter at a value that takes effect, most at an end of its range.
std::vector<Setter> setters() {
  return {
      [](SamplingParams&) {},
      [](SamplingParams& p) { p.top_k = 1; },
      [](SamplingParams& p) { p.top_k = 1'000'000; },
      [](SamplingParams& p) { p.top_p = 1e-9f; },
      [](SamplingParams& p) { p.min_p = 1; },
      [](SamplingParams& p) { p.repetition_penalty = 0.01f; },
      [](SamplingParams& p) { p.repetition_penalty = 100; },
      [](SamplingParams& p) { p.presence_penalty = 2; },
      [](SamplingParams& p) { p.presence_penalty = -2; },
      [](SamplingParams& p) { p.frequency_penalty = 2; },
      [](SamplingParams& p) { p.frequency_penalty = -2; },
      [](SamplingParams& p) { p.logprobs = 20; },
      [](SamplingParams& p) { p.prompt_logprobs = 20; },
      [](SamplingParams& p) {
        p.stop = {"e", "stop"};
      },
      [](SamplingParams& p) {
        p.stop_token_ids = {'a', kFakeVocabulary - 1};
      },
      [](SamplingParams& p) { p.min_tokens = 12; },
      [](SamplingParams& p) { p.ignore_eos = true; },
      [](SamplingParams& p) { p.skip_special_tokens = false; },
      [](SamplingParams& p) {
        p.logit_bias = {{kFakeEos, 100.0f}, {kFakeEmojiFront, -100.0f}};
      },
      [](SamplingParams& p) { p.n = 5; },
  };
}

// Two parameters at a time, greedy and drawn, streamed and not.
std::vector<GenerateRequest> cross_product() {
  std::vector<GenerateRequest> requests;
  const std::vector<Setter> all = setters();
  for (size_t a = 0; a < all.size(); ++a) {
    for (size_t b = a; b < all.size(); ++b) {
      for (const float temperature : {0.0f, 1.3f}) {
        GenerateRequest request = free_request(a * all.size() + b, 12);
        request.sampling.temperature = temperature;
        request.stream = (a + b) % 2 == 0;
        all[a](request.sampling);
        all[b](request.sampling);
        requests.push_back(std::move(request));
      }
    }
  }
  return requests;
}

// S48: one parameter in one mode of the engine must not end the others' requests, nor mean
// something else there.
TEST(EngineFailureCases, EverySamplingParameterWorksInEveryModeOfTheEngine) {
  const std::vector<GenerateRequest> requests = cross_product();
  std::vector<Outcome> reference;
  struct Mode {
    uint32_t seqs, tokens;
    bool chunked;
  };
  for (const Mode& mode : {Mode{64, 512, true}, Mode{3, 7, true}, Mode{16, 64, false}}) {
    EngineOptions options;
    options.max_num_seqs = mode.seqs;
    options.max_num_batched_tokens = mode.tokens;
    options.enable_chunked_prefill = mode.chunked;
    const auto engine = fake_engine({}, options);
    ASSERT_NE(engine, nullptr);
    std::vector<std::shared_ptr<RecordingSink>> sinks;
    for (const GenerateRequest& request : requests) {
      sinks.push_back(std::make_shared<RecordingSink>());
      ASSERT_TRUE(engine->submit(request, sinks.back()).ok());
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      const Outcome outcome = sinks[i]->wait();
      ASSERT_TRUE(outcome.result.status.ok()) << i << outcome.result.status.to_string();
      ASSERT_EQ(outcome.choices.size(), requests[i].sampling.n) << i;
      if (reference.size() == i) reference.push_back(outcome);
      for (const auto& [index, choice] : outcome.choices) {
        const ChoiceOutput& expected = reference[i].choices.at(index);
        EXPECT_EQ(choice.tokens, expected.tokens) << i;
        EXPECT_EQ(choice.text, expected.text) << i;
        EXPECT_EQ(choice.finish, expected.finish) << i;
        EXPECT_EQ(choice.logprobs.size(), expected.logprobs.size()) << i;
      }
    }
    expect_clean(*engine);
  }
}

// B084: a choice that ends must not end the others.
TEST(EngineFailureCases, EveryChoiceEndsAtItsOwnEnd) {
  FakeModelOptions model;
  model.end_percent = 12;
  const auto engine = fake_engine(model);
  std::set<size_t> lengths;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    GenerateRequest request = free_request(seed, 60);
    request.sampling.n = 6;
    const Outcome outcome = run_request(*engine, request);
    ASSERT_EQ(outcome.choices.size(), 6u);
    for (const auto& [index, choice] : outcome.choices) {
      EXPECT_EQ(choice.finishes, 1);
      lengths.insert(choice.tokens.size());
      ASSERT_FALSE(choice.tokens.empty());
      const TokenId last = choice.tokens.back();
      if (choice.finish == FinishReason::kStop) {
        EXPECT_TRUE(last == kFakeEos || last == kFakeTurnEnd) << last;
      } else {
        EXPECT_EQ(choice.finish, FinishReason::kLength);
        EXPECT_EQ(choice.tokens.size(), 60u);
      }
    }
  }
  EXPECT_GT(lengths.size(), 10u);  // they did end at different places
  expect_clean(*engine);
}

// B088, B092: exactly min_tokens tokens and then the end that the bias forces; the prompt does not
// count, however long.
TEST(EngineFailureCases, AForcedEndComesRightAfterMinTokens) {
  const auto engine = fake_engine();
  for (const auto& [prompt, least] :
       std::vector<std::pair<size_t, uint32_t>>{{3, 4}, {3, 0}, {1024, 1024}, {1500, 1}}) {
    GenerateRequest request;
    request.prompt.assign(prompt, 'x');
    request.sampling.min_tokens = least;
    request.sampling.logit_bias = {{kFakeEos, 100.0f}};
    for (const float temperature : {0.0f, 1.0f}) {
      request.sampling.temperature = temperature;
      const ChoiceOutput choice = run_request(*engine, request).choices.at(0);
      EXPECT_EQ(choice.completion_tokens, uint64_t{least} + 1);
      EXPECT_EQ(choice.tokens.back(), kFakeEos);
      EXPECT_EQ(choice.finish, FinishReason::kStop);
    }
  }
  expect_clean(*engine);
}

// B080: what the engine has kept of an equal prompt never changes the penalties.
TEST(EngineFailureCases, AnEqualSecondRequestHasTheSamePenalties) {
  const auto engine = fake_engine();
  GenerateRequest request = free_request(5, 60);
  request.prompt.assign(400, 'e');
  for (TokenId id = 0; id < 128; ++id) request.prompt.push_back(id);
  request.sampling.ignore_eos = true;
  const std::vector<TokenId> plain = run_request(*engine, request).choices.at(0).tokens;
  request.sampling.repetition_penalty = 1.5f;
  const std::vector<TokenId> first = run_request(*engine, request).choices.at(0).tokens;
  EXPECT_NE(first, plain);
  for (int again = 0; again < 3; ++again) {
    EXPECT_EQ(run_request(*engine, request).choices.at(0).tokens, first);
  }
  expect_clean(*engine);
}

}  // namespace
}  // namespace spin::engine
