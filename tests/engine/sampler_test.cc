// SPDX-License-Identifier: Apache-2.0
#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace spin::engine {
namespace {

#ifdef SPIN_SANITIZED
constexpr int kDraws = 4'000;
#else
constexpr int kDraws = 40'000;
#endif

struct Fixture {
  std::vector<float> logits;
  SamplingParams params;
  TokenHistory history;
  std::vector<TokenId> end_ids;
  Sampler sampler;

  Result<SampledToken> sample(uint64_t output_index = 0, uint64_t seed = 1, uint32_t choice = 0) {
    SampleInput input;
    input.logits = logits;
    input.params = &params;
    input.history = &history;
    input.end_ids = end_ids;
    input.seed = seed;
    input.choice = choice;
    input.output_index = output_index;
    return sampler.sample(input);
  }
  TokenId pick(uint64_t output_index = 0, uint64_t seed = 1) {
    const auto token = sample(output_index, seed);
    EXPECT_TRUE(token.ok()) << token.status().to_string();
    return token.ok() ? token->id : UINT32_MAX;
  }
  std::map<TokenId, int> draw(int count = kDraws) {
    std::map<TokenId, int> counts;
    for (int i = 0; i < count; ++i) ++counts[pick(static_cast<uint64_t>(i), 99)];
    return counts;
  }
};

std::vector<double> softmax(const std::vector<float>& logits, double temperature) {
  double largest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> p;
  double sum = 0;
  for (const float x : logits) {
    p.push_back(std::exp((static_cast<double>(x) - largest) / temperature));
    sum += p.back();
  }
  for (double& x : p) x /= sum;
  return p;
}

// Whether counts follow p; the 1 in 10^4 quantile of chi-square by Wilson and Hilferty.
void expect_distribution(const std::map<TokenId, int>& counts, const std::vector<double>& p) {
  double total = 0;
  for (const auto& [id, count] : counts) total += count;
  double chi = 0;
  double degrees = -1;
  for (size_t id = 0; id < p.size(); ++id) {
    const auto found = counts.find(static_cast<TokenId>(id));
    const double seen = found == counts.end() ? 0 : found->second;
    if (p[id] == 0) {
      EXPECT_EQ(seen, 0) << "token " << id << " must not come";
      continue;
    }
    ASSERT_GT(p[id] * total, 5) << "too rare for this test";
    chi += (seen - p[id] * total) * (seen - p[id] * total) / (p[id] * total);
    degrees += 1;
  }
  if (degrees < 1) return;
  const double h = 2.0 / (9 * degrees);
  EXPECT_LT(chi, degrees * std::pow(1 - h + 3.719 * std::sqrt(h), 3));
}

std::vector<double> renormalised(std::vector<double> p, const std::set<size_t>& keep) {
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    if (!keep.count(i)) p[i] = 0;
    sum += p[i];
  }
  for (double& x : p) x /= sum;
  return p;
}

const std::vector<float> kRow = {0.5f, 2.0f, 1.0f, -0.5f, 1.5f, 0.0f};

TEST(Sampler, GreedyTakesTheLargestAndTheLowestIdOfEquals) {
  Fixture f;
  f.logits = {1, 3, 2, 3, 3};
  for (const float temperature : {0.0f, 1e-6f, 9e-6f}) {
    f.params.temperature = temperature;
    EXPECT_EQ(f.pick(), 1u);
  }
  f.params.temperature = 1;
  f.params.top_k = 1;  // the same token as temperature 0
  for (uint64_t seed = 0; seed < 50; ++seed) EXPECT_EQ(f.pick(0, seed), 1u);
}

TEST(Sampler, TinyTemperaturesNeitherOverflowNorDivideByZero) {
  Fixture f;
  f.logits = kRow;
  for (const float temperature : {1e-5f, 1e-4f, 1e-3f}) {
    f.params.temperature = temperature;
    for (uint64_t seed = 0; seed < 50; ++seed) EXPECT_EQ(f.pick(0, seed), 1u);
  }
}

TEST(Sampler, DrawsFollowTheSoftmaxOfEachTemperature) {
  for (const float temperature : {0.7f, 1.0f, 2.0f}) {
    Fixture f;
    f.logits = kRow;
    f.params.temperature = temperature;
    expect_distribution(f.draw(), softmax(kRow, temperature));
  }
}

TEST(Sampler, TopKTopPAndMinPKeepWhatTheyPromise) {
  const auto p = softmax(kRow, 1);  // order of ids: 1 4 2 0 5 3
  Fixture f;
  f.logits = kRow;
  f.params.top_k = 3;
  expect_distribution(f.draw(), renormalised(p, {1, 4, 2}));
  f.params.top_k = -1;
  f.params.top_p = static_cast<float>(p[1] + p[4] + 0.01);  // needs the third
  expect_distribution(f.draw(), renormalised(p, {1, 4, 2}));
  f.params.top_p = 1e-6f;
  expect_distribution(f.draw(200), renormalised(p, {1}));
  f.params.top_p = 1;
  f.params.min_p = 0.3f;  // e^-1 = 0.37 passes, e^-1.5 = 0.22 does not
  expect_distribution(f.draw(), renormalised(p, {1, 4, 2}));
  f.params.min_p = 1;
  expect_distribution(f.draw(200), renormalised(p, {1}));
  // top_p counts on what top_k left.
  f.params.min_p = 0;
  f.params.top_k = 2;
  f.params.top_p = static_cast<float>(p[1] / (p[1] + p[4]) + 0.01);
  expect_distribution(f.draw(), renormalised(p, {1, 4}));
}

TEST(Sampler, TopPOnALargeRowEqualsASortedReference) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal(0, 2);
  for (int round = 0; round < 20; round += kDraws < 10'000 ? 5 : 1) {
    Fixture f;
    f.logits.resize(3000);
    for (float& x : f.logits) x = std::round(normal(random) * 8) / 8;  // with many ties
    f.params.top_p = 0.05f + 0.045f * static_cast<float>(round);
    if (round % 3 == 0) f.params.top_k = 100;
    std::vector<TokenId> order(f.logits.size());
    for (TokenId i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](TokenId a, TokenId b) { return f.logits[a] > f.logits[b]; });
    if (f.params.top_k > 0) order.resize(100);
    double sum = 0;
    for (const TokenId id : order) sum += std::exp(static_cast<double>(f.logits[id]));
    std::set<TokenId> allowed;
    double running = 0;
    for (const TokenId id : order) {
      allowed.insert(id);
      running += std::exp(static_cast<double>(f.logits[id]));
      if (running >= f.params.top_p * sum * (1 + 1e-6)) break;
    }
    for (uint64_t i = 0; i < 100; ++i) EXPECT_TRUE(allowed.count(f.pick(i)));
  }
}

TEST(Sampler, PenaltiesChangeTheChoiceAsDocumented) {
  Fixture f;
  f.params.temperature = 0;
  f.logits = {2.0f, 1.9f, -1.0f};
  const std::vector<TokenId> prompt = {0};
  // Presence and frequency do not look at the prompt.
  f.history = TokenHistory(prompt, true);
  f.params.presence_penalty = 2;
  f.params.frequency_penalty = 2;
  EXPECT_EQ(f.pick(), 0u);
  f.history.add_output(0);
  EXPECT_EQ(f.pick(), 1u);
  // Frequency grows with the count, presence does not.
  f.params = {};
  f.params.temperature = 0;
  f.history = {};
  f.history.add_output(0);
  f.params.frequency_penalty = 0.06f;
  EXPECT_EQ(f.pick(), 0u);
  f.history.add_output(0);
  EXPECT_EQ(f.pick(), 1u);
  f.params.frequency_penalty = 0;
  f.params.presence_penalty = 0.06f;
  EXPECT_EQ(f.pick(), 0u);
  // Repetition looks at the prompt too, divides positive and multiplies negative values, and
  // counts a token once.
  f.params = {};
  f.params.temperature = 0;
  f.params.repetition_penalty = 1.15f;
  f.history = TokenHistory(prompt, true);
  EXPECT_EQ(f.pick(), 1u);
  f.logits = {-1.0f, -1.1f};
  EXPECT_EQ(f.pick(), 1u);
  f.logits = {2.0f, 1.6f};
  f.history.add_output(0);
  EXPECT_EQ(f.pick(), 0u);  // 2 / 1.15 = 1.74, not 2 / 1.15^2 = 1.51
}

TEST(Sampler, MinTokensMasksAllEndIdsWhateverTheBias) {
  Fixture f;
  f.logits = {0, 1, 5, 6};
  f.end_ids = {2, 3};
  f.params.temperature = 0;
  f.params.min_tokens = 4;
  f.params.logit_bias = {{3, 100.0f}};
  for (uint64_t index = 0; index < 4; ++index) EXPECT_EQ(f.pick(index), 1u) << index;
  EXPECT_EQ(f.pick(4), 3u);
  f.end_ids = {0, 1, 2, 3};
  EXPECT_EQ(f.sample(0).status().code(), StatusCode::kInternal);
}

TEST(Sampler, LogitBiasForcesAndForbids) {
  Fixture f;
  f.logits = kRow;
  f.params.logit_bias = {{3, 100.0f}};
  expect_distribution(f.draw(500), renormalised(softmax(kRow, 1), {3}));
  f.params.logit_bias = {{1, -100.0f}, {77, 5.0f}};  // an id outside does nothing
  expect_distribution(f.draw(), renormalised(softmax(kRow, 1), {0, 2, 3, 4, 5}));
}

TEST(Sampler, LogprobsAreOfTheRawRow) {
  Fixture f;
  f.logits = kRow;
  f.params.temperature = 0.5f;
  f.params.logit_bias = {{3, 100.0f}};
  f.params.logprobs = 3;
  const auto token = f.sample();
  ASSERT_TRUE(token.ok());
  EXPECT_EQ(token->id, 3u);
  const auto p = softmax(kRow, 1);
  EXPECT_NEAR(token->logprob, std::log(p[3]), 1e-6);
  ASSERT_EQ(token->top.size(), 3u);
  const TokenId best[] = {1, 4, 2};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(token->top[i].id, best[i]);
    EXPECT_NEAR(token->top[i].logprob, std::log(p[best[i]]), 1e-6);
  }
  f.params.logprobs = 0;
  EXPECT_TRUE(f.sample()->top.empty());
  f.params.logprobs = 20;  // more than there are
  EXPECT_EQ(f.sample()->top.size(), kRow.size());
  f.logits = {1, 2, 2, 2};
  f.params.logprobs = 2;
  const auto ties = f.sample();
  EXPECT_EQ(ties->top[0].id, 1u);
  EXPECT_EQ(ties->top[1].id, 2u);
}

TEST(Sampler, LogprobsOfALargeRowEqualDoubleArithmetic) {
  std::mt19937_64 random(8);
  std::normal_distribution<float> normal(0, 6);
  Sampler sampler;
  for (const size_t size : {1u, 15u, 1023u, 1025u, 50'000u}) {
    std::vector<float> row(size);
    for (float& x : row) x = normal(random);
    row[0] = -300;  // its weight is below the smallest float
    const auto p = softmax(row, 1);
    const auto scored = sampler.score(row, static_cast<TokenId>(size - 1), 5);
    ASSERT_TRUE(scored.ok());
    // Every weight is right within 2^-22, so is their sum; one rounding of a value below 64.
    EXPECT_NEAR(scored->logprob, std::log(p[size - 1]), 0x1p-22 + 0x1p-18);
  }
}

TEST(Sampler, ARowThatIsNotFiniteIsAnErrorAndNeverAToken) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (size_t place = 0; place < 40; ++place) {
      Fixture f;
      f.logits.assign(40, 1.0f);
      f.logits[place] = bad;
      for (const float temperature : {0.0f, 1.0f}) {
        f.params.temperature = temperature;
        EXPECT_EQ(f.sample().status().code(), StatusCode::kInternal);
      }
      EXPECT_EQ(f.sampler.score(f.logits, 0, 2).status().code(), StatusCode::kInternal);
    }
  }
  Fixture empty;
  EXPECT_EQ(empty.sample().status().code(), StatusCode::kInternal);
  EXPECT_EQ(empty.sampler.score(kRow, 6, 2).status().code(), StatusCode::kInvalidArgument);
}

TEST(Sampler, SurvivesEveryFloatInEveryParameter) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values = {0.0f,  -0.0f, 1e-38f, -1e-38f, 1e-45f, 1e38f, -1e38f,
                                     3e38f, 1.0f,  -1.0f,  0.01f,   100.0f, inf,   -inf,
                                     nan,   0.5f,  2.0f,   1e-5f,   9.9e-6f};
  std::mt19937_64 random(38);
  const auto any = [&] { return values[random() % values.size()]; };
  const int rounds = kDraws;
  for (int round = 0; round < rounds; ++round) {
    Fixture f;
    f.logits.resize(1 + random() % 40);
    for (float& x : f.logits) {
      do {
        x = random() % 4 == 0 ? any() : static_cast<float>(random() % 100) - 50;
      } while (!std::isfinite(x));
    }
    const std::vector<TokenId> prompt = {0, static_cast<TokenId>(random() % 50)};
    f.history = TokenHistory(prompt, true);
    f.history.add_output(static_cast<TokenId>(random() % 50));
    f.params.temperature = any();
    f.params.top_p = any();
    f.params.min_p = any();
    f.params.repetition_penalty = any();
    f.params.presence_penalty = any();
    f.params.frequency_penalty = any();
    f.params.top_k = static_cast<int64_t>(random() % 7) - 2;
    f.params.logit_bias = {{static_cast<TokenId>(random() % 50), any()}};
    if (random() % 3 == 0) f.params.logprobs = 2;
    const auto token = f.sample(random() % 10, random());
    ASSERT_TRUE(token.ok()) << token.status().to_string();
    ASSERT_LT(token->id, f.logits.size());
  }
}

TEST(Sampler, ADrawDependsOnSeedChoiceAndPositionOnly) {
  Fixture a;
  Fixture b;
  a.logits = b.logits = std::vector<float>(500, 0.0f);
  for (int i = 0; i < 7; ++i) b.pick(static_cast<uint64_t>(i), 5);  // b has drawn before
  int different_choice = 0;
  int different_seed = 0;
  for (uint64_t position = 0; position < 200; ++position) {
    const TokenId id = a.sample(position, 7, 0)->id;
    EXPECT_EQ(id, b.sample(position, 7, 0)->id);
    different_choice += id != b.sample(position, 7, 1)->id;
    different_seed += id != b.sample(position, 8, 0)->id;
  }
  EXPECT_GT(different_choice, 180);
  EXPECT_GT(different_seed, 180);
}

TEST(Sampler, ArgmaxAndFiniteCheckAgreeWithPlainLoops) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<float> row(1 + random() % 100);
    for (float& x : row) x = static_cast<float>(static_cast<int64_t>(random() % 20)) - 30;
    EXPECT_EQ(argmax(row),
              static_cast<uint32_t>(std::max_element(row.begin(), row.end()) - row.begin()));
    EXPECT_TRUE(all_finite(row));
    row[random() % row.size()] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_FALSE(all_finite(row));
  }
}

}  // namespace
}  // namespace spin::engine
