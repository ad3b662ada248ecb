// SPDX-License-Identifier: Apache-2.0
// The algorithms that requests make: shared where their settings are, and bounded in number.
#include "engine/algorithm_set.h"

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "sparse/registry.h"

namespace spin::engine {
namespace {

class AlgorithmSets : public ::testing::Test {
 protected:
  AlgorithmSets() : device_(std::move(*backend::cpu::create_cpu_device({.threads = 1}))) {
    sparse::AlgorithmContext context;
    context.device = device_.get();
    context.shape.geometry = {2, 2, 64, 8, layout::DType::kBF16};
    context.shape.q_heads = 2;
    const std::vector<std::string> specs = {"quest"};
    set_ = std::move(*AlgorithmSet::create(specs, context));
  }
  Result<AlgorithmRef> with_budget(int budget) {
    return set_->resolve("quest:budget=" + std::to_string(budget));
  }

  std::unique_ptr<backend::Device> device_;
  std::unique_ptr<AlgorithmSet> set_;
};

TEST_F(AlgorithmSets, EqualSettingsShareAnInstance) {
  EXPECT_EQ(*set_->resolve("quest"), set_->default_algorithm());
  EXPECT_EQ(*with_budget(7), *with_budget(7));
  EXPECT_NE(*with_budget(7), *with_budget(8));
}

TEST_F(AlgorithmSets, RequestsHoldABoundedNumberOfThem) {
  std::vector<AlgorithmRef> held;
  Result<AlgorithmRef> made = with_budget(1);
  for (int budget = 2; made.ok() && budget < 2000; ++budget) {
    held.push_back(*made);
    made = with_budget(budget);
  }
  ASSERT_EQ(made.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(made.status().param(), "sparse");
  EXPECT_GE(held.size(), 16u);
  EXPECT_LE(held.size(), 64u);
  // The settings of the start, dense attention and what is there go on.
  EXPECT_TRUE(set_->resolve("quest").ok());
  EXPECT_TRUE(set_->resolve("dense").ok());
  held.erase(held.begin());
  EXPECT_TRUE(with_budget(3000).ok());
}

TEST_F(AlgorithmSets, SettingsThatNobodyUsesAnyMoreMakeRoom) {
  for (int budget = 1; budget < 500; ++budget) ASSERT_TRUE(with_budget(budget).ok()) << budget;
}

}  // namespace
}  // namespace spin::engine
