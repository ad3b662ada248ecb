// SPDX-License-Identifier: Apache-2.0
#include "sparse/registry.h"

#include <memory>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"

namespace spin::sparse {
namespace {

class Registry : public ::testing::Test {
 protected:
  Registry() : device_(std::move(*backend::cpu::create_cpu_device({.threads = 1}))) {
    context_.device = device_.get();
    context_.shape.geometry = {4, 2, 64, 8, layout::DType::kBF16};
    context_.shape.q_heads = 4;
    context_.shape.scale = 0.125f;
  }

  Result<std::unique_ptr<SparseAlgorithm>> create(std::string_view text) {
    auto spec = parse_sparse_spec(text);
    if (!spec.ok()) return spec.status();
    return create_algorithm(*spec, context_);
  }

  std::unique_ptr<backend::Device> device_;
  AlgorithmContext context_;
};

TEST_F(Registry, NamesAreDistinctAndDescribed) {
  std::set<std::string_view> names;
  for (const RegisteredAlgorithm& algorithm : algorithms()) {
    EXPECT_TRUE(names.insert(algorithm.name).second) << algorithm.name;
    EXPECT_NE(algorithm.name, "dense");
    EXPECT_FALSE(algorithm.summary.empty()) << algorithm.name;
    EXPECT_NE(algorithm.create, nullptr) << algorithm.name;
  }
  for (const char* name : {"streaming", "quest", "shadowkv", "oracle"}) {
    EXPECT_EQ(names.count(name), 1u) << name;
  }
}

TEST_F(Registry, AnUnknownNameIsAnsweredWithTheKnownOnes) {
  const auto algorithm = create("quset");
  ASSERT_FALSE(algorithm.ok());
  EXPECT_EQ(algorithm.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(algorithm.status().message().find("dense, streaming, quest"), std::string::npos)
      << algorithm.status().message();
}

TEST_F(Registry, DescriptorsSayWhatWasResolved) {
  const auto quest = create("quest:budget=256,dense_layers=1");
  ASSERT_TRUE(quest.ok()) << quest.status().to_string();
  const Descriptor& d = (*quest)->descriptor();
  EXPECT_EQ(d.name, "quest");
  EXPECT_EQ(d.settings, "budget=256,block=16,sinks=4,local=64,dense_layers=1,aggregate=max");
  EXPECT_EQ(d.dense_layers, 1u);
  EXPECT_TRUE(d.prefix_stable);
  // Sinks of one partition, the window, the budget.
  EXPECT_EQ(d.minimum_tokens, 16u + 64 + 256);

  const auto shadow = create("shadowkv");
  ASSERT_TRUE(shadow.ok()) << shadow.status().to_string();
  EXPECT_EQ((*shadow)->descriptor().settings,
            "budget=1.56%,block=8,sinks=4,local=32,outliers=48,aggregate=max");
  EXPECT_FALSE((*shadow)->descriptor().prefix_stable);
  const auto landmarks = create("shadowkv:outliers=0");
  ASSERT_TRUE(landmarks.ok());
  EXPECT_TRUE((*landmarks)->descriptor().prefix_stable);
}

TEST_F(Registry, BadOptionsAndShapesAreRefused) {
  for (const char* text :
       {"quest:budget=0", "quest:block=0", "quest:dense_layers=5", "quest:aggregate=mean",
        "shadowkv:outliers=x", "oracle:bits=2", "streaming:block=8", "streaming:budget=200%"}) {
    const auto algorithm = create(text);
    ASSERT_FALSE(algorithm.ok()) << text;
    EXPECT_EQ(algorithm.status().code(), StatusCode::kInvalidArgument) << text;
  }
  context_.shape.geometry.head_dim = 20;
  for (const char* text : {"quest", "shadowkv", "oracle"}) {
    const auto algorithm = create(text);
    ASSERT_FALSE(algorithm.ok()) << text;
    EXPECT_EQ(algorithm.status().code(), StatusCode::kUnsupported) << text;
  }
}

}  // namespace
}  // namespace spin::sparse
