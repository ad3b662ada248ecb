// SPDX-License-Identifier: Apache-2.0
// RetroInfer, one layer at a time. The pipeline runs it in parity_test.cc.
#include "sparse/retroinfer.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/sparse/retroinfer_sequence.h"

namespace spin::sparse {
namespace {

using layout::DType;
using testing::Attended;
using testing::Content;
using testing::kinds_of_keys;
using testing::random_content;
using testing::random_query;
using testing::RetroSequence;
using testing::RetroShape;

constexpr double kRoundoff = 1.0 / (1 << 24);

// Attention in double over `tokens` of one query head: output and log-sum-exp.
struct Exact {
  std::vector<double> out;
  double log_sum_exp = -std::numeric_limits<double>::infinity();
};
Exact exact_attention(const RetroSequence& sequence,
                      const std::vector<float>& q,
                      uint32_t group,
                      uint32_t q_head,
                      const std::vector<uint64_t>& tokens) {
  const uint32_t dim = sequence.geometry().head_dim;
  const uint32_t head = q_head / group;
  std::vector<double> scores;
  double max = -std::numeric_limits<double>::infinity();
  for (const uint64_t t : tokens) {
    double score = 0;
    for (uint32_t d = 0; d < dim; ++d) {
      score += static_cast<double>(q[q_head * dim + d]) *
               static_cast<double>(sequence.content().keys[t][head * dim + d]);
    }
    scores.push_back(score * static_cast<double>(sequence.scale()));
    max = std::max(max, scores.back());
  }
  Exact exact;
  exact.out.assign(dim, 0.0);
  double total = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const double weight = std::exp(scores[i] - max);
    total += weight;
    for (uint32_t d = 0; d < dim; ++d) {
      exact.out[d] +=
          weight * static_cast<double>(sequence.content().values[tokens[i]][head * dim + d]);
    }
  }
  for (double& x : exact.out) x /= total;
  exact.log_sum_exp = max + std::log(total);
  return exact;
}

// What float arithmetic may change in an output: keys and queries are at most 2, values at most 1
// in magnitude. A score is a chain of `dim` products of size <= 4 * scale; relative to the weights'
// sum, rounding adds one unit for each of `context` terms.
double score_error(const RetroShape& shape) {
  const double dim = shape.head_dim;
  return (dim + 2) * kRoundoff * 4 * dim / std::sqrt(dim);
}
double output_error(const RetroShape& shape, uint64_t context) {
  return 2 * (std::expm1(2 * score_error(shape)) + static_cast<double>(context + 8) * kRoundoff);
}
// What storing centroids and value sums in the KV type adds: a centroid is off by eps * |c| + the
// mean's own error, a value sum by eps of itself, at most 1 per token.
double summary_error(const RetroShape& shape, uint64_t clustered) {
  const double eps = shape.dtype == DType::kF32 ? kRoundoff : 1.0 / 256;
  const double element = 2 * eps + 4 * static_cast<double>(clustered + 2) * kRoundoff;
  const double dim = shape.head_dim;
  return 2 * std::expm1(2 * dim / std::sqrt(dim) * element) + eps;
}

void expect_dense(const RetroSequence& sequence,
                  const RetroShape& shape,
                  const std::vector<float>& q,
                  const Attended& found,
                  double tolerance) {
  std::vector<uint64_t> all(sequence.tokens());
  std::iota(all.begin(), all.end(), uint64_t{0});
  for (uint32_t q_head = 0; q_head < shape.kv_heads * shape.group; ++q_head) {
    const Exact exact = exact_attention(sequence, q, shape.group, q_head, all);
    for (uint32_t d = 0; d < shape.head_dim; ++d) {
      const float value = found.out[q_head * shape.head_dim + d];
      ASSERT_NEAR(static_cast<double>(value), exact.out[d], tolerance)
          << "query head " << q_head << ", dimension " << d;
    }
  }
}

const RetroShape kShapes[] = {
    {1, 2, 2, 64, 8, DType::kF32},
    {1, 1, 4, 128, 16, DType::kBF16},
    {1, 2, 1, 64, 64, DType::kF32},
    {1, 1, 8, 64, 32, DType::kBF16},
};

TEST(RetroInfer, EveryTokenIsInExactlyOneZoneOrCluster) {
  for (const RetroShape& shape : kShapes) {
    for (const char* options : {":cluster=16,update=128", ":cluster=1,update=64,iterations=1"}) {
      for (const uint64_t tokens : {3ul, 8ul, 64ul, 255ul, 320ul, 777ul}) {
        SCOPED_TRACE(std::to_string(tokens) + " tokens, pages of " +
                     std::to_string(shape.page_tokens) + options);
        RetroSequence sequence(shape, options, tokens + 1);
        sequence.prompt(random_content(shape, tokens, 1));
        std::vector<uint64_t> expected(tokens);
        std::iota(expected.begin(), expected.end(), uint64_t{0});
        for (uint32_t head = 0; head < shape.kv_heads; ++head) {
          EXPECT_EQ(sequence.all_tokens(head), expected);
        }
        EXPECT_LE(sequence.tail_first_token(), tokens);
      }
    }
  }
}

TEST(RetroInfer, AllClustersRetrievedAreDenseAttention) {
  for (const RetroShape& shape : kShapes) {
    SCOPED_TRACE("pages of " + std::to_string(shape.page_tokens));
    RetroSequence sequence(shape, ":budget=100%,update=128", 701);
    sequence.prompt(random_content(shape, 700, 2));
    const std::vector<float> q = random_query(shape, 3);
    const Attended found = sequence.attend(q);
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      EXPECT_EQ(found.counted[head], 700u);
      EXPECT_EQ(found.overflows[head], 0u);
      std::vector<uint64_t> tokens = found.tokens[head];
      std::sort(tokens.begin(), tokens.end());
      EXPECT_EQ(tokens, sequence.all_tokens(head));
    }
    for (const float lse : found.part_log_sum_exp) {
      EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
    }
    expect_dense(sequence, shape, q, found, output_error(shape, 700));
  }
}

TEST(RetroInfer, EqualKeysInEachEstimatedClusterAreDenseAttention) {
  for (const RetroShape& shape : kShapes) {
    SCOPED_TRACE("pages of " + std::to_string(shape.page_tokens));
    // One cluster is retrieved, all others are estimated.
    RetroSequence sequence(shape, ":budget=1,estimate=1,update=128", 901);
    sequence.prompt(kinds_of_keys(shape, 900, 5, 4));
    const std::vector<float> q = random_query(shape, 5);
    const Attended found = sequence.attend(q);
    EXPECT_LT(found.counted[0], 900u);
    EXPECT_TRUE(std::isfinite(found.part_log_sum_exp[0]));
    expect_dense(sequence, shape, q, found, output_error(shape, 900) + summary_error(shape, 900));
  }
}

TEST(RetroInfer, EstimatedMassNeverExceedsTheExactOne) {
  for (const RetroShape& shape : kShapes) {
    if (shape.dtype != DType::kF32) continue;  // a rounded centroid may lie on either side
    RetroSequence sequence(shape, ":budget=64,estimate=1,update=128", 1001);
    sequence.prompt(random_content(shape, 1000, 6));
    for (uint32_t seed = 0; seed < 4; ++seed) {
      const std::vector<float> q = random_query(shape, 100 + seed);
      const Attended found = sequence.attend(q);
      for (uint32_t q_head = 0; q_head < shape.kv_heads * shape.group; ++q_head) {
        const uint32_t head = q_head / shape.group;
        std::vector<uint64_t> attended = found.tokens[head];
        std::sort(attended.begin(), attended.end());
        std::vector<uint64_t> rest;
        const std::vector<uint64_t> all = sequence.all_tokens(head);
        std::set_difference(all.begin(), all.end(), attended.begin(), attended.end(),
                            std::back_inserter(rest));
        ASSERT_FALSE(rest.empty());
        const Exact exact = exact_attention(sequence, q, shape.group, q_head, rest);
        const auto estimated = static_cast<double>(found.part_log_sum_exp[q_head]);
        EXPECT_LE(estimated, exact.log_sum_exp + summary_error(shape, 1000));
        // Not far below either: most of the mass of random keys is in the estimate.
        EXPECT_GT(estimated, exact.log_sum_exp - 3);
      }
    }
  }
}

TEST(RetroInfer, EmptyClustersAreNeverSelectedAndTokensAreCountedExactly) {
  // All keys are equal: one cluster has every clustered token, more than bf16 counts one by one.
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const RetroShape shape{1, 1, 2, 64, 8, dtype};
    RetroSequence sequence(shape, ":budget=1%,update=128", 1500);
    sequence.prompt(kinds_of_keys(shape, 1205, 1, 7));
    const uint64_t clustered = sequence.tail_first_token() - 8;
    EXPECT_EQ(clustered, 1128u);
    const std::vector<float> q = random_query(shape, 8);
    const Attended found = sequence.attend(q);
    // It does not fit the page limit: estimated, and counted as such.
    EXPECT_EQ(found.selected[0], 0u);
    EXPECT_EQ(found.overflows[0], 1u);
    EXPECT_EQ(found.counted[0], 1205u - clustered);
    for (uint32_t q_head = 0; q_head < 2; ++q_head) {
      std::vector<uint64_t> one = {8};
      const Exact exact = exact_attention(sequence, q, shape.group, q_head, one);
      // A count of 1136, the next in bf16, would be off by 0.007. The centroid is the key itself.
      EXPECT_NEAR(static_cast<double>(found.part_log_sum_exp[q_head]),
                  exact.log_sum_exp + std::log(1128.0), 0.001);
    }
    expect_dense(sequence, shape, q, found, output_error(shape, 1205) + summary_error(shape, 1205));
    // Nothing but that cluster is there to select when everything is.
    RetroSequence whole(shape, ":budget=100%,update=128", 1500);
    whole.prompt(kinds_of_keys(shape, 1205, 1, 7));
    const Attended all = whole.attend(q);
    EXPECT_EQ(all.selected[0], 1u);
    EXPECT_EQ(all.counted[0], 1205u);
  }
}

TEST(RetroInfer, AClusterThatDoesNotFitIsEstimatedEvenWithoutAnEstimationZone) {
  const RetroShape shape{1, 1, 2, 64, 8, DType::kF32};
  RetroSequence sequence(shape, ":budget=16,estimate=0,update=128", 1500);
  sequence.prompt(kinds_of_keys(shape, 1205, 1, 9));
  const std::vector<float> q = random_query(shape, 10);
  const Attended found = sequence.attend(q);
  EXPECT_EQ(found.overflows[0], 1u);
  expect_dense(sequence, shape, q, found, output_error(shape, 1205) + summary_error(shape, 1205));
  // With keys that spread there is nothing to estimate.
  RetroSequence spread(shape, ":budget=16,estimate=0,update=128", 1500);
  spread.prompt(random_content(shape, 1205, 11));
  const Attended some = spread.attend(q);
  EXPECT_EQ(some.overflows[0], 0u);
  EXPECT_EQ(some.selected[0], 1u);
  EXPECT_EQ(some.part_log_sum_exp[0], -std::numeric_limits<float>::infinity());
}

TEST(RetroInfer, TheTailIsClusteredEveryUpdateTokensAndStaysExact) {
  const RetroShape shape{1, 2, 2, 64, 8, DType::kF32};
  // Starts below the minimum length: nothing is clustered yet.
  constexpr uint64_t kTokens = 520;
  RetroSequence sequence(shape, ":budget=100%,update=128", kTokens);
  const Content content = random_content(shape, kTokens, 12);
  Content prompt;
  prompt.keys.assign(content.keys.begin(), content.keys.begin() + 100);
  prompt.values.assign(content.values.begin(), content.values.begin() + 100);
  sequence.prompt(prompt);
  EXPECT_EQ(sequence.tail_first_token(), 8u);
  std::vector<uint64_t> updates;
  for (uint64_t t = 100; t < kTokens; ++t) {
    if (sequence.append(content.keys[t], content.values[t])) updates.push_back(t + 1);
    if (t % 60 != 0 && t + 1 != kTokens) continue;
    std::vector<uint64_t> expected(t + 1);
    std::iota(expected.begin(), expected.end(), uint64_t{0});
    EXPECT_EQ(sequence.all_tokens(0), expected);
    EXPECT_EQ(sequence.all_tokens(1), expected);
    const std::vector<float> q = random_query(shape, static_cast<uint32_t>(t));
    const Attended found = sequence.attend(q);
    EXPECT_EQ(found.counted[0], t + 1);
    expect_dense(sequence, shape, q, found, output_error(shape, t + 1));
  }
  // 8 sinks, 64 local, 128 to cluster.
  EXPECT_EQ(updates, (std::vector<uint64_t>{200, 328, 456}));
}

TEST(RetroInfer, TokensOfAPromptAndThoseThatFollowAreSelectedAlike) {
  const RetroShape shape{1, 1, 2, 64, 8, DType::kF32};
  RetroSequence sequence(shape, ":budget=48,estimate=0,update=128,cluster=8", 1000);
  Content content = random_content(shape, 900, 13);
  // A direction that no other key has, once in the prompt and once behind it.
  const std::vector<float> rare(64, 2.0f);
  content.keys[300] = rare;
  content.keys[700] = rare;
  Content prompt;
  prompt.keys.assign(content.keys.begin(), content.keys.begin() + 600);
  prompt.values.assign(content.values.begin(), content.values.begin() + 600);
  sequence.prompt(prompt);
  int updates = 0;
  for (uint64_t t = 600; t < 900; ++t) {
    updates += sequence.append(content.keys[t], content.values[t]) ? 1 : 0;
  }
  EXPECT_EQ(updates, 2);
  EXPECT_GT(sequence.tail_first_token(), 701u);
  const Attended found = sequence.attend(std::vector<float>(128, 1.0f));
  for (const uint64_t t : {300u, 700u}) {
    EXPECT_EQ(std::count(found.tokens[0].begin(), found.tokens[0].end(), t), 1) << t;
  }
  EXPECT_LT(found.counted[0], 400u);
}

TEST(RetroInfer, LayersUpdateInDifferentSteps) {
  const RetroShape shape{5, 1, 1, 64, 8, DType::kF32};
  RetroSequence sequence(shape, ":update=128", 1000);
  std::map<uint32_t, uint32_t> updates;  // step -> layers
  std::vector<uint32_t> tails(5, 64);
  for (uint32_t step = 0; step < 500; ++step) {
    for (uint32_t layer = 0; layer < 5; ++layer) {
      const layout::Tail tail{.tokens = ++tails[layer]};
      const SealPlan plan = sequence.algorithm().plan_seal(SequenceIndex(), layer, tail);
      if (plan.repack_tokens == 0) continue;
      EXPECT_EQ(plan.repack_tokens, 128u);
      EXPECT_GE(tails[layer] - plan.repack_tokens, 64u);
      EXPECT_LE(tails[layer], sequence.algorithm().needs(1000).tail_pages * 8);
      tails[layer] -= plan.repack_tokens;
      ++updates[step];
    }
  }
  EXPECT_EQ(updates.size(), 15u);
  for (const auto& [step, layers] : updates) EXPECT_EQ(layers, 1u) << "step " << step;
}

TEST(RetroInfer, OutputsDoNotDependOnTheNumberOfThreads) {
  const RetroShape shape{1, 2, 2, 64, 8, DType::kBF16};
  std::vector<float> first;
  for (const uint32_t threads : {1u, 3u}) {
    RetroSequence sequence(shape, ":budget=64,update=128", 1300, threads);
    Content content = random_content(shape, 1300, 14);
    Content prompt;
    prompt.keys.assign(content.keys.begin(), content.keys.begin() + 1150);
    prompt.values.assign(content.values.begin(), content.values.begin() + 1150);
    sequence.prompt(prompt);
    bool updated = false;
    for (uint64_t t = 1150; t < 1300; ++t) {
      updated |= sequence.append(content.keys[t], content.values[t]);
    }
    EXPECT_TRUE(updated);
    const Attended found = sequence.attend(random_query(shape, 15));
    if (threads == 1) first = found.out;
    EXPECT_EQ(found.out, first);
  }
}

// Settings that differ in what they select alone: the copy is the index that would have been made.
TEST(RetroInfer, APromptsIndexIsCopiedBetweenSettingsThatSelectDifferently) {
  RetroShape shape;
  shape.layers = 3;
  const std::string zones = ",cluster=8,update=32";
  const Content content = random_content(shape, 500, 71);
  for (const uint32_t layer : {0u, 2u}) {
    for (const char* options :
         {":budget=64,estimate=0.5", ":budget=100%", ":budget=8,estimate=0"}) {
      RetroSequence first(shape, ":budget=16" + zones, 700);
      RetroSequence built(shape, options + zones, 700);
      RetroSequence copied(shape, options + zones, 700);
      first.prompt(content, layer);
      built.prompt(content, layer);
      ASSERT_TRUE(copied.copy_prompt(first, layer)) << options;
      EXPECT_EQ(copied.pages(), built.pages());
      // The copy goes on by itself, through updates too.
      const Content more = random_content(shape, 90, 72);
      int updates = 0;
      for (size_t i = 0; i < more.keys.size(); ++i) {
        first.append(more.values[i], more.keys[i], layer);
        const bool updated = built.append(more.keys[i], more.values[i], layer);
        EXPECT_EQ(copied.append(more.keys[i], more.values[i], layer), updated);
        updates += updated ? 1 : 0;
        const std::vector<float> q = random_query(shape, static_cast<uint32_t>(i));
        const Attended expected = built.attend(q, layer);
        const Attended found = copied.attend(q, layer);
        ASSERT_EQ(found.tokens, expected.tokens) << options << " token " << i;
        ASSERT_EQ(found.out, expected.out) << options << " token " << i;
        ASSERT_EQ(found.overflows, expected.overflows);
      }
      EXPECT_GE(updates, 2);
    }
  }
}

TEST(RetroInfer, AnIndexOfOtherClustersIsNotCopied) {
  const RetroShape shape;
  RetroSequence first(shape, ":budget=16,cluster=8,update=32", 700);
  first.prompt(random_content(shape, 500, 71));
  for (const char* options :
       {":cluster=16,update=32", ":cluster=8,update=64", ":cluster=8,update=32,iterations=3"}) {
    RetroSequence other(shape, options, 700);
    EXPECT_FALSE(other.copy_prompt(first)) << options;
  }
  RetroSequence same(shape, ":cluster=8,update=32,estimate=0", 700);
  EXPECT_TRUE(same.copy_prompt(first));
}

TEST(RetroInfer, ZeroKeysGiveNumbers) {
  const RetroShape shape{1, 1, 2, 64, 8, DType::kF32};
  RetroSequence sequence(shape, ":budget=32,update=128", 600);
  Content content = random_content(shape, 600, 16);
  for (std::vector<float>& key : content.keys) std::fill(key.begin(), key.end(), 0.0f);
  sequence.prompt(content);
  const std::vector<float> q = random_query(shape, 17);
  expect_dense(sequence, shape, q, sequence.attend(q),
               output_error(shape, 600) + summary_error(shape, 600));
}

TEST(RetroInfer, IndexBytesAreWhatAnIndexTakes) {
  for (const RetroShape& shape : kShapes) {
    for (const char* options : {"", ":budget=100%,cluster=4", ":estimate=1,update=4096"}) {
      for (const uint64_t tokens : {1ul, 1095ul, 1096ul, 5000ul, 40000ul}) {
        RetroSequence sequence(shape, options, 1);
        const auto device = std::move(*backend::cpu::create_cpu_device({.threads = 1}));
        backend::MemoryResource& memory = device->memory(backend::MemoryKind::kFast);
        const uint64_t before = memory.bytes_in_use();
        const auto index = sequence.algorithm().create_index(tokens, memory);
        ASSERT_TRUE(index.ok()) << index.status().to_string();
        EXPECT_EQ(memory.bytes_in_use() - before, sequence.algorithm().needs(tokens).index_bytes);
      }
    }
  }
}

TEST(RetroInfer, SummariesTakeAboutTheSixteenthPart) {
  // docs/algorithms/retroinfer.md: centroid and value sum of 16 tokens are 2 of their 32 rows.
  const RetroShape shape{40, 8, 5, 128, 8, DType::kBF16};
  RetroSequence sequence(shape, "", 1);
  const layout::KvGeometry g = sequence.geometry();
  constexpr uint64_t kTokens = 131072;
  const auto share = static_cast<double>(sequence.algorithm().needs(kTokens).index_bytes) /
                     static_cast<double>(g.token_bytes() * kTokens);
  EXPECT_GT(share, 1.0 / 16);
  EXPECT_LT(share, 1.1 / 16);
}

// A sequence of `prompt` tokens that grows to `most`, as counts.
void expect_bounds(const ClusterPlan& plan, uint32_t page_tokens, uint64_t prompt, uint64_t most) {
  uint64_t tail_first = plan.prompt_tail_first(prompt);
  uint64_t clusters = plan.prompt_clusters(prompt);
  uint64_t pages = plan.most_pages(plan.prompt_clustered(prompt), clusters);
  EXPECT_EQ(clusters % plan.prompt_segments(prompt), 0u);
  const uint64_t tail_ids = (most - tail_first) / page_tokens + 1;
  for (uint64_t context = prompt; context <= most; ++context) {
    if (context - tail_first >= plan.update_at(0)) {
      tail_first += plan.update_tokens();
      clusters += plan.update_clusters();
      pages += plan.most_pages(plan.update_tokens(), plan.update_clusters());
    }
    ASSERT_LE(std::min<uint64_t>(plan.retrieved_clusters(context), clusters),
              plan.most_retrieved_clusters(most));
    ASSERT_LE(std::min<uint64_t>(plan.retrieved_pages(context), pages),
              plan.most_retrieved_pages(most));
  }
  EXPECT_LE(clusters, plan.most_clusters(most));
  EXPECT_LE(pages, plan.most_cluster_pages(most));
  EXPECT_LE(plan.sink_pages() + pages + tail_ids, plan.most_page_ids(most));
}

TEST(ClusterPlan, BoundsHoldForEverySplitOfASequenceIntoPromptAndOutput) {
  const ClusterPlan::Settings settings[] = {
      {1, 8, 16, 1024, 0.232, {0, 0.018}},
      {36, 64, 16, 1024, 0.232, {512, 0}},
      {4, 8, 1, 64, 1.0, {0, 1.0}},
      {3, 16, 100, 100, 0.5, {3000, 0}},
  };
  for (const ClusterPlan::Settings& setting : settings) {
    const ClusterPlan plan(setting);
    for (const uint64_t most : {100ul, 1096ul, 1300ul, 9000ul, 20000ul}) {
      for (uint64_t prompt = 1; prompt <= most; prompt += 1 + prompt / 2) {
        SCOPED_TRACE(std::to_string(prompt) + " of " + std::to_string(most));
        expect_bounds(plan, setting.page_tokens, prompt, most);
      }
    }
  }
}

TEST(ClusterPlan, CountsAreThoseOfThePaper) {
  const ClusterPlan plan({1, 8, 16, 1024, 0.232, {0, 0.018}});
  EXPECT_EQ(plan.minimum_tokens(), 1096u);
  EXPECT_EQ(plan.update_clusters(), 64u);
  // 120K tokens: 15 segments, about tokens / 16 clusters, in units of lcm(8, 15).
  EXPECT_EQ(plan.prompt_segments(122880), 15u);
  EXPECT_EQ(plan.prompt_clusters(122880), 7680u);
  EXPECT_EQ(plan.retrieved_clusters(122880), 138u);  // 0.018 of 7680
  EXPECT_EQ(plan.estimated_clusters(7680), 1782u);
}

TEST(RetroInfer, OptionsOutOfRangeAreRefused) {
  const auto device = std::move(*backend::cpu::create_cpu_device({.threads = 1}));
  AlgorithmContext context;
  context.device = device.get();
  context.shape.geometry = {1, 1, 64, 8, DType::kF32};
  context.shape.q_heads = 1;
  for (const char* options :
       {"budget=0", "budget=101%", "estimate=1.5", "estimate=-1", "cluster=0", "cluster=2000",
        "cluster=100,update=64", "update=0", "iterations=101", "sinks=4"}) {
    const auto created =
        create_algorithm(*parse_sparse_spec(std::string("retroinfer:") + options), context);
    ASSERT_FALSE(created.ok()) << options;
    EXPECT_EQ(created.status().code(), StatusCode::kInvalidArgument) << options;
  }
  const auto created = create_algorithm(*parse_sparse_spec("retroinfer"), context);
  ASSERT_TRUE(created.ok());
  EXPECT_EQ((*created)->descriptor().settings,
            "budget=1.8%,estimate=0.232,cluster=16,update=1024,iterations=9");
  EXPECT_FALSE(
      (*created)->create_index(uint64_t{1} << 40, device->memory(backend::MemoryKind::kFast)).ok());
}

}  // namespace
}  // namespace spin::sparse
