// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "backend/cpu/orthonormal.h"
#include "backend/sparse_ops.h"
#include "tests/backend/cpu_backends.h"
#include "tests/backend/lowrank_conformance.h"

namespace spin::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu,
                         LowRankConformance,
                         ::testing::ValuesIn(cpu_backends()),
                         backend_name);

TEST(CpuOrthonormal, DependentAndZeroColumnsGiveAnOrthonormalBasisAllTheSame) {
  constexpr int64_t kRows = 40;
  constexpr int64_t kCols = 17;
  std::vector<double> y;
  for (int64_t c = 0; c < kCols; ++c) {
    const Matrix column = random_matrix(1, kRows, static_cast<uint64_t>(c % 5));
    for (int64_t r = 0; r < kRows; ++r) y.push_back(c == 3 ? 0.0 : column.at(0, r) * 1e3);
  }
  const std::vector<double> before = y;
  std::vector<double> scratch((kRows + 1) * kCols);
  backend::cpu::orthonormalize(kRows, kCols, y, scratch);
  const auto dot = [&](const std::vector<double>& a, int64_t i, int64_t j) {
    double sum = 0;
    for (int64_t r = 0; r < kRows; ++r) {
      sum += a[static_cast<size_t>(i * kRows + r)] * y[static_cast<size_t>(j * kRows + r)];
    }
    return sum;
  };
  for (int64_t i = 0; i < kCols; ++i) {
    double squares = 0, norm = 0;
    for (int64_t r = 0; r < kRows; ++r) {
      norm += std::pow(before[static_cast<size_t>(i * kRows + r)], 2);
    }
    for (int64_t j = 0; j < kCols; ++j) {
      EXPECT_NEAR(dot(y, i, j), i == j ? 1.0 : 0.0, 1e-13) << i << " " << j;
      squares += std::pow(dot(before, i, j), 2);
    }
    // The basis holds the columns.
    EXPECT_NEAR(squares, norm, 1e-12 * norm) << i;
  }
}

TEST(CpuLowRank, FactorsDoNotDependOnTheNumberOfThreads) {
  const layout::KvGeometry geometry{
      .layers = 1, .kv_heads = 3, .head_dim = 64, .page_tokens = 8, .dtype = layout::DType::kF32};
  constexpr uint32_t kRank = 37;
  constexpr uint64_t kTokens = 1003;
  const uint64_t pages = geometry.pages_per_head(kTokens);
  std::vector<uint32_t> slots(pages * geometry.kv_heads);
  std::iota(slots.begin(), slots.end(), 0u);
  Matrix pool = random_matrix(static_cast<int64_t>(slots.size()), 2 * 8 * 64, 5);
  const std::vector<float> inv_freq(32, 0.01f);
  std::vector<float> first;
  for (const uint32_t threads : {1u, 2u, 5u}) {
    const auto device = backend::cpu::create_cpu_device({.threads = threads});
    ASSERT_TRUE(device.ok()) << device.status().to_string();
    const auto stream = (*device)->create_stream("factors");
    ASSERT_TRUE(stream.ok()) << stream.status().to_string();
    std::vector<float> factors((kTokens + 3 * 64) * kRank);
    backend::FactorKeysItem item;
    item.tokens = {reinterpret_cast<const std::byte*>(pool.values.data()), geometry, slots.data(),
                   pages, kTokens};
    item.factors = {factors.data(), factors.data() + kTokens * kRank, layout::DType::kF32, kRank};
    (*device)->sparse_ops().enqueue_factor_keys(item, {inv_freq, 1.0f}, **stream);
    ASSERT_TRUE((*stream)->wait_idle().ok());
    if (threads == 1) first = factors;
    EXPECT_EQ(factors, first) << threads << " threads";
  }
}

}  // namespace
}  // namespace spin::testing
