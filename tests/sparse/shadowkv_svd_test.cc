// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "base/counter_rng.h"
#include "sparse/range_algorithm.h"
#include "sparse/registry.h"
#include "tests/sparse/parity_rig.h"

namespace spin::testing {
namespace {

using sparse::SparseAlgorithm;
using sparse::SparseSequence;
using ::testing::HasSubstr;

class ShadowKvSvd : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = backend::cpu::create_cpu_device({.threads = 2});
    ASSERT_TRUE(device.ok());
    device_ = std::move(*device);
  }

  struct Run {
    Outputs outputs;
    sparse::SparseCounters counters;
  };
  // `lease`: pages per head; 0: the mandatory ones.
  Run run(const std::string& spec, uint64_t prompt, uint64_t tokens, uint64_t lease) {
    const Conversation conversation(shape_, tokens, 5);
    ParityRig rig(*device_, shape_, {.fast_pages = 1024, .host_bytes = 8 << 20});
    const auto algorithm = rig.algorithm(spec);
    Run result;
    if (algorithm == nullptr) return result;
    const kv::SequenceShape needs = sparse::sequence_shape(*algorithm, rig.model(), tokens);
    auto sequence = rig.open(algorithm, tokens, lease == 0 ? needs.mandatory_pages(0) : lease);
    EXPECT_TRUE(sequence.ok()) << sequence.status().to_string();
    if (!sequence.ok()) return result;
    rig.prompt(**sequence, conversation, prompt);
    for (uint64_t token = prompt; token < tokens; ++token) {
      std::vector<float> out;
      ParityRig::Row row{sequence->get(), &conversation, &out, ok_status()};
      rig.step({&row, 1});
      EXPECT_TRUE(row.status.ok()) << row.status.to_string();
      result.outputs.push_back(std::move(out));
    }
    result.counters = (*sequence)->counters();
    return result;
  }

  Result<std::unique_ptr<SparseAlgorithm>> make(const std::string& text) {
    inv_freq_.resize(shape_.head_dim / 2);
    for (size_t i = 0; i < inv_freq_.size(); ++i) {
      inv_freq_[i] =
          std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(shape_.head_dim));
    }
    sparse::AlgorithmContext context;
    context.device = device_.get();
    context.shape.geometry = shape_.geometry();
    context.shape.q_heads = shape_.q_heads();
    context.shape.scale = 0.125f;
    context.shape.rope = {inv_freq_, 1.0f};
    const auto spec = sparse::parse_sparse_spec(text);
    EXPECT_TRUE(spec.ok());
    return sparse::create_algorithm(*spec, context);
  }

  ParityShape shape_{.layers = 1, .kv_heads = 2, .group = 2, .head_dim = 64, .page_tokens = 8};
  std::unique_ptr<backend::Device> device_;
  std::vector<float> inv_freq_;
};

TEST_F(ShadowKvSvd, OnlyValuesOfPromptPagesAreFetched) {
  // Nothing leaves the tail in these steps.
  const Run found = run("shadowkv-svd:budget=32,outliers=2,rank=24", 512, 518, 0);
  EXPECT_EQ(found.counters.sealed_pages, 0u);
  EXPECT_GT(found.counters.retrieve.misses, 10u);
  EXPECT_EQ(found.counters.retrieve.bytes,
            found.counters.retrieve.misses * shape_.geometry().plane_bytes());
}

TEST_F(ShadowKvSvd, PagesOfGeneratedTokensAreFetchedWholeAndChangeNoBit) {
  for (const layout::DType dtype : {layout::DType::kF32, layout::DType::kBF16}) {
    shape_.dtype = dtype;
    const std::string spec = "shadowkv-svd:budget=64,outliers=2,rank=24,local=8";
    const Run resident = run(spec, 160, 480, 64);
    const Run tiered = run(spec, 160, 480, 0);
    EXPECT_EQ(resident.counters.retrieve.misses, 0u);
    EXPECT_GT(tiered.counters.sealed_pages, 50u);
    const uint64_t plane = shape_.geometry().plane_bytes();
    const auto& retrieve = tiered.counters.retrieve;
    EXPECT_GT(retrieve.bytes, retrieve.misses * plane);
    EXPECT_LT(retrieve.bytes, retrieve.misses * 2 * plane);
    EXPECT_EQ(resident.outputs, tiered.outputs);
    EXPECT_EQ(resident.counters.attended_tokens, tiered.counters.attended_tokens);
  }
}

TEST_F(ShadowKvSvd, ThePromptsPagesTakeTheirRebuiltKeysButForZonesAndTail) {
  const auto algorithm = make("shadowkv-svd:budget=32,outliers=3,rank=8");
  ASSERT_TRUE(algorithm.ok()) << algorithm.status().to_string();
  const layout::KvGeometry g = shape_.geometry();
  constexpr uint64_t kTokens = 300;
  const uint64_t pages = g.pages_per_head(kTokens);
  std::vector<uint32_t> slots(pages * g.kv_heads);
  std::iota(slots.rbegin(), slots.rend(), 0u);
  std::vector<float> pool(slots.size() * g.page_bytes() / sizeof(float));
  for (size_t i = 0; i < pool.size(); ++i) {
    pool[i] = static_cast<float>(base::counter_uniform(3, 0, i) * 2 - 1);
  }
  const std::vector<float> before = pool;
  const layout::PagedTokens prompt{reinterpret_cast<const std::byte*>(pool.data()), g, slots.data(),
                                   pages, kTokens};
  auto index = (*algorithm)->create_index(512, device_->memory(backend::MemoryKind::kFast));
  ASSERT_TRUE(index.ok());
  EXPECT_EQ((*algorithm)->keyless_end(**index), 0u);
  const auto stream = device_->create_stream("svd");
  ASSERT_TRUE(stream.ok());
  const sparse::PromptPartition result =
      (*algorithm)->enqueue_finish_prompt(**index, 0, prompt, **stream);
  ASSERT_TRUE((*stream)->wait_idle().ok());
  const uint64_t tail_page = (*algorithm)->prompt_tail_first(kTokens) / g.page_tokens;
  EXPECT_EQ((*algorithm)->keyless_end(**index), tail_page);
  const uint64_t plane = g.plane_bytes() / sizeof(float);
  for (uint32_t head = 0; head < g.kv_heads; ++head) {
    ASSERT_EQ(result.pinned.counts[head], 3u);
    const uint32_t* pinned = result.pinned.pages + head * result.pinned.stride;
    for (uint32_t page = 0; page < pages; ++page) {
      const uint64_t at = uint64_t{slots[head * pages + page]} * 2 * plane;
      const bool same_keys = std::equal(pool.begin() + static_cast<ptrdiff_t>(at),
                                        pool.begin() + static_cast<ptrdiff_t>(at + plane),
                                        before.begin() + static_cast<ptrdiff_t>(at));
      const bool kept =
          page == 0 || page >= tail_page || std::find(pinned, pinned + 3, page) != pinned + 3;
      EXPECT_EQ(same_keys, kept) << "head " << head << " page " << page;
      EXPECT_TRUE(std::equal(pool.begin() + static_cast<ptrdiff_t>(at + plane),
                             pool.begin() + static_cast<ptrdiff_t>(at + 2 * plane),
                             before.begin() + static_cast<ptrdiff_t>(at + plane)));
    }
  }
}

TEST_F(ShadowKvSvd, TheRankIsAtMostTheWidthOfATokensKeys) {
  const auto full = make("shadowkv-svd:rank=4096");
  ASSERT_TRUE(full.ok());
  EXPECT_THAT((*full)->descriptor().settings, HasSubstr("rank=128"));
  EXPECT_EQ((*full)->descriptor().planes, layout::Planes::kValuesOnly);
  EXPECT_FALSE((*full)->descriptor().prefix_stable);
  for (const std::string bad : {"0", "4097", "-1", "x"}) {
    const auto refused = make("shadowkv-svd:rank=" + bad);
    ASSERT_FALSE(refused.ok());
    EXPECT_THAT(refused.status().message(), HasSubstr("rank"));
  }
  // Factors of 1,024 tokens and of two heads, beside what shadowkv keeps.
  const auto plain = make("shadowkv");
  const auto svd = make("shadowkv-svd:rank=24");
  ASSERT_TRUE(plain.ok() && svd.ok());
  EXPECT_EQ((*svd)->needs(1024).index_bytes - (*plain)->needs(1024).index_bytes,
            1024u * 24 * 4 + 2u * 24 * 64 * 4);
}

TEST_F(ShadowKvSvd, AModelWithoutRotationOfWholeHeadsIsRefused) {
  sparse::AlgorithmContext context;
  context.device = device_.get();
  context.shape.geometry = shape_.geometry();
  context.shape.q_heads = shape_.q_heads();
  const auto spec = sparse::parse_sparse_spec("shadowkv-svd");
  ASSERT_TRUE(spec.ok());
  EXPECT_EQ(sparse::create_algorithm(*spec, context).status().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace spin::testing
