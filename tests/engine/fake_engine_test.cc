// SPDX-License-Identifier: Apache-2.0
// Requests from submit() to their end on the fake model.
#include "engine/fake_engine.h"

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/utf8.h"
#include "engine/admission.h"
#include "engine/engine_impl.h"
#include "tests/engine/fake_support.h"
#include "tests/engine/recording_sink.h"

namespace spin::engine {
namespace {

using testing::ChoiceOutput;
using testing::expect_clean;
using testing::fake_engine;
using testing::free_request;
using testing::kReducedCounts;
using testing::Outcome;
using testing::RecordingSink;
using testing::run_request;
using testing::say;

TEST(FakeEngine, SaysWhatItIsToldAndStopsAtTheEndToken) {
  const auto engine = fake_engine();
  const Outcome outcome = run_request(*engine, say("Hello \xF0\x9F\x98\x80!"));
  const ChoiceOutput& choice = outcome.choices.at(0);
  EXPECT_EQ(choice.text, "Hello \xF0\x9F\x98\x80!");
  EXPECT_EQ(choice.finish, FinishReason::kStop);
  EXPECT_EQ(choice.stop_string, std::nullopt);
  EXPECT_EQ(choice.stop_token, std::nullopt);
  EXPECT_EQ(choice.completion_tokens, 12u);  // 11 bytes and the end token
  EXPECT_EQ(choice.tokens.size(), 12u);
  EXPECT_EQ(outcome.result.usage.completion_tokens, 12u);
  EXPECT_EQ(outcome.result.usage.prompt_tokens, 13u);
  EXPECT_TRUE(outcome.result.status.ok());
  EXPECT_EQ(outcome.ends, 1);
  expect_clean(*engine);
}

void expect_same(const Outcome& a, const Outcome& b, uint64_t seed) {
  ASSERT_EQ(a.choices.size(), b.choices.size()) << seed;
  for (const auto& [index, left] : a.choices) {
    const ChoiceOutput& right = b.choices.at(index);
    EXPECT_EQ(left.text, right.text) << seed;
    EXPECT_EQ(left.tokens, right.tokens) << seed;
    EXPECT_EQ(left.finish, right.finish) << seed;
    EXPECT_EQ(left.stop_string, right.stop_string) << seed;
    EXPECT_EQ(left.stop_token, right.stop_token) << seed;
    EXPECT_EQ(left.completion_tokens, right.completion_tokens) << seed;
    EXPECT_EQ(left.finishes, 1) << seed;
    EXPECT_EQ(right.finishes, 1) << seed;
    ASSERT_EQ(left.logprobs.size(), right.logprobs.size()) << seed;
    for (size_t i = 0; i < left.logprobs.size(); ++i) {
      EXPECT_EQ(left.logprobs[i].id, right.logprobs[i].id);
      EXPECT_EQ(left.logprobs[i].logprob, right.logprobs[i].logprob);
      EXPECT_EQ(left.logprobs[i].bytes, right.logprobs[i].bytes);
      ASSERT_EQ(left.logprobs[i].top.size(), right.logprobs[i].top.size());
      for (size_t j = 0; j < left.logprobs[i].top.size(); ++j) {
        EXPECT_EQ(left.logprobs[i].top[j].id, right.logprobs[i].top[j].id);
        EXPECT_EQ(left.logprobs[i].top[j].logprob, right.logprobs[i].top[j].logprob);
      }
    }
  }
  EXPECT_EQ(a.result.usage.completion_tokens, b.result.usage.completion_tokens) << seed;
  EXPECT_EQ(a.result.usage.prompt_tokens, b.result.usage.prompt_tokens) << seed;
}

GenerateRequest varied_request(uint64_t seed) {
  GenerateRequest request = free_request(seed, 8 + seed % 33);
  SamplingParams& sampling = request.sampling;
  if (seed % 2 == 0) sampling.stop = {"stop", "et", "\nUser", "\xF0\x9F\x98\x80", "\xEF\xBF\xBD"};
  if (seed % 3 == 0) sampling.logprobs = seed % 5;
  if (seed % 5 == 0) sampling.n = 1 + seed % 3;
  if (seed % 7 == 0) sampling.min_tokens = 4;
  if (seed % 11 == 0) sampling.stop_token_ids = {'e', 'a'};
  if (seed % 13 == 0) sampling.include_stop_str_in_output = true;
  if (seed % 17 == 0) sampling.skip_special_tokens = false;
  if (seed % 19 == 0) sampling.repetition_penalty = 1.2f;
  if (seed % 4 == 0) sampling.top_p = 0.9f;
  if (seed % 6 == 0) sampling.top_k = 20;
  return request;
}

// The text that a naive reader makes of all tokens.
std::string naive_text(const GenerateRequest& request,
                       const ChoiceOutput& choice,
                       const Engine& engine) {
  std::vector<TokenId> ids = choice.tokens;
  const SamplingParams& sampling = request.sampling;
  const bool ended_by_id = choice.finish == FinishReason::kStop && !choice.stop_string;
  if (ended_by_id && !sampling.include_stop_str_in_output) ids.pop_back();
  std::string text = *engine.detokenize(ids, sampling.skip_special_tokens);
  if (choice.stop_string) {
    // The first stop to end after the text of min_tokens tokens.
    size_t end = std::string::npos;
    size_t begin = 0;
    for (const std::string& stop : sampling.stop) {
      const size_t at = text.find(stop);
      if (at == std::string::npos || at + stop.size() > end) continue;
      if (at + stop.size() == end && at > begin) continue;
      begin = at;
      end = at + stop.size();
    }
    text.resize(sampling.include_stop_str_in_output ? end : begin);
  }
  return text;
}

TEST(FakeEngine, StreamedOutputEqualsUnstreamedOutput) {
  constexpr uint64_t kOutputs = kReducedCounts ? 600 : 10'000;
  const auto engine = fake_engine();
  constexpr uint64_t kWave = 100;
  int stops = 0;
  int streamed_stops_in_text = 0;
  for (uint64_t first = 0; first < kOutputs; first += kWave) {
    std::vector<std::shared_ptr<RecordingSink>> streamed;
    std::vector<std::shared_ptr<RecordingSink>> whole;
    for (uint64_t seed = first; seed < first + kWave; ++seed) {
      for (const bool stream : {true, false}) {
        GenerateRequest request = varied_request(seed);
        request.stream = stream;
        auto sink = std::make_shared<RecordingSink>();
        (stream ? streamed : whole).push_back(sink);
        ASSERT_TRUE(engine->submit(std::move(request), std::move(sink)).ok());
      }
    }
    for (uint64_t i = 0; i < kWave; ++i) {
      const uint64_t seed = first + i;
      const Outcome a = streamed[i]->wait();
      const Outcome b = whole[i]->wait();
      expect_same(a, b, seed);
      const GenerateRequest request = varied_request(seed);
      for (const auto& [index, choice] : a.choices) {
        EXPECT_TRUE(base::is_valid_utf8(choice.text));
        if (request.sampling.min_tokens == 0) {
          EXPECT_EQ(choice.text, naive_text(request, choice, *engine)) << seed;
        }
        if (!choice.stop_string) continue;
        ++stops;
        if (!request.sampling.include_stop_str_in_output && request.sampling.min_tokens == 0 &&
            choice.text.find(*choice.stop_string) != std::string::npos) {
          ++streamed_stops_in_text;
        }
      }
      for (const auto& [index, choice] : b.choices) EXPECT_EQ(choice.deltas, 1);
      if (::testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(stops, static_cast<int>(kOutputs / 10));
  EXPECT_EQ(streamed_stops_in_text, 0);
  expect_clean(*engine);
}
}  // namespace
}  // namespace spin::engine
