// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "tests/backend/cpu_backends.h"
#include "tests/backend/sparse_ops_conformance.h"

namespace spin::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu,
                         SparseOpsConformance,
                         ::testing::ValuesIn(cpu_backends()),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(Cpu, ScoreConformance, ::testing::ValuesIn(cpu_backends()), backend_name);
// No kernels of an instruction set's own.
INSTANTIATE_TEST_SUITE_P(Cpu,
                         RankConformance,
                         ::testing::ValuesIn(cpu_thread_counts()),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(Cpu,
                         ListConformance,
                         ::testing::ValuesIn(cpu_thread_counts()),
                         backend_name);

// Means, scores and estimates of one made-up head of 3,000 tokens.
std::vector<float> select_with(uint32_t threads) {
  const auto device = backend::cpu::create_cpu_device({.threads = threads});
  EXPECT_TRUE(device.ok()) << device.status().to_string();
  const auto stream = (*device)->create_stream("select");
  EXPECT_TRUE(stream.ok()) << stream.status().to_string();
  constexpr uint32_t kHeads = 2, kDim = 64, kTokens = 3000, kCount = kTokens / 2;
  Matrix pool = random_matrix(1, int64_t{kHeads} * kTokens * kDim * 2, 1);
  std::vector<uint32_t> slots(kHeads * kTokens);
  for (uint32_t i = 0; i < slots.size(); ++i) slots[i] = i;
  const layout::KvGeometry geometry{1, kHeads, kDim, 1, layout::DType::kF32};
  std::vector<float> means(kHeads * kCount * kDim);
  const backend::HeadVectors vectors{means.data(), layout::DType::kF32, kDim, kCount * kDim};
  backend::PoolKeysItem pool_item;
  pool_item.tokens = {reinterpret_cast<const std::byte*>(pool.values.data()), geometry,
                      slots.data(), kTokens, kTokens};
  pool_item.partition_tokens = 2;
  pool_item.count = kCount;
  pool_item.mean = vectors;
  Matrix q = random_matrix(1, kHeads * 3 * kDim, 2);
  const backend::TensorRef q_ref{q.values.data(), layout::DType::kF32, 1, q.cols, q.cols};
  std::vector<float> scores(kHeads * kCount);
  backend::ScoreMeansItem score_item;
  score_item.count = kCount;
  score_item.scores = scores.data();
  score_item.score_stride = kCount;
  score_item.keys = vectors;
  std::vector<uint32_t> ids(kHeads * 700), counts(kHeads), sizes(kHeads * kCount, 2);
  backend::RankItem rank;
  rank.scores = scores.data();
  rank.score_stride = kCount;
  rank.count = kCount;
  rank.most = 700;
  rank.ranked = true;
  rank.ids = ids.data();
  rank.counts = counts.data();
  rank.id_stride = 700;
  std::vector<float> part(kHeads * 3 * kDim), lse(kHeads * 3);
  backend::EstimateItem estimate;
  estimate.keys = vectors;
  estimate.value_sums = vectors;
  estimate.sizes = sizes.data();
  estimate.size_stride = kCount;
  estimate.ids = ids.data();
  estimate.counts = counts.data();
  estimate.id_stride = 700;
  estimate.part = part.data();
  estimate.log_sum_exp = lse.data();
  backend::SparseOps& ops = (*device)->sparse_ops();
  ops.enqueue_pool_keys({&pool_item, 1}, **stream);
  ops.enqueue_score_means(q_ref, {&score_item, 1}, geometry, 0.4f,
                          backend::Aggregation::kSoftmaxSum, **stream);
  ops.enqueue_rank({&rank, 1}, kHeads, **stream);
  ops.enqueue_estimate(q_ref, {&estimate, 1}, geometry, 0.4f, **stream);
  EXPECT_TRUE((*stream)->wait_idle().ok());
  std::vector<float> all = means;
  for (const auto* more : {&scores, &part, &lse}) all.insert(all.end(), more->begin(), more->end());
  for (const uint32_t id : ids) all.push_back(static_cast<float>(id));
  return all;
}

TEST(CpuSparseOps, ResultsDoNotDependOnTheNumberOfThreads) {
  const std::vector<float> one = select_with(1);
  EXPECT_EQ(select_with(2), one);
  EXPECT_EQ(select_with(5), one);
}

}  // namespace
}  // namespace spin::testing
