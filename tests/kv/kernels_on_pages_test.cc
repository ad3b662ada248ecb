// SPDX-License-Identifier: Apache-2.0
// The CPU kernels on pages of a PagePool: far slots (RELIABILITY row B070) and poisoned pages.
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "backend/ops.h"
#include "kv/sequence_kv.h"
#include "tests/kv/memory_for_tests.h"

namespace spin::kv {
namespace {

using testing::HeapMemory;
using testing::SparseMemory;

constexpr uint32_t kQHeads = 4;

backend::TensorRef matrix(std::vector<float>& values, int64_t rows) {
  const int64_t cols = static_cast<int64_t>(values.size()) / rows;
  return {.data = values.data(),
          .dtype = layout::DType::kF32,
          .rows = rows,
          .cols = cols,
          .row_stride = cols};
}

std::vector<float> random_values(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

class KernelsOnPages : public ::testing::Test {
 protected:
  KernelsOnPages()
      : device_(std::move(*backend::cpu::create_cpu_device({.threads = 2}))),
        stream_(std::move(*device_->create_stream("test"))) {}

  // Attention outputs of layer 0 for `steps` of tokens of one sequence; the same numbers each time.
  std::vector<float> attend(const PagePool& pool,
                            SequenceKv& sequence,
                            const std::vector<uint64_t>& steps) {
    const layout::KvGeometry& geometry = pool.geometry();
    std::vector<float> outputs;
    uint32_t seed = 1;
    for (uint64_t tokens : steps) {
      const int64_t rows = static_cast<int64_t>(tokens);
      auto q = random_values(tokens * kQHeads * geometry.head_dim, seed++);
      auto k = random_values(tokens * geometry.kv_heads * geometry.head_dim, seed++);
      auto v = random_values(tokens * geometry.kv_heads * geometry.head_dim, seed++);
      std::vector<float> out(q.size());
      sequence.begin_step(tokens);
      const layout::SequenceSlice slices[] = {sequence.slice(0, 0)};
      device_->ops().enqueue_kv_append(matrix(k, rows), matrix(v, rows), slices, pool.ref(),
                                       *stream_);
      device_->ops().enqueue_paged_attention(matrix(q, rows), slices, pool.ref(), 0.1f,
                                             matrix(out, rows), *stream_);
      EXPECT_TRUE(stream_->wait_idle().ok());
      sequence.commit_step();
      outputs.insert(outputs.end(), out.begin(), out.end());
    }
    return outputs;
  }

  std::unique_ptr<backend::Device> device_;
  std::unique_ptr<backend::Stream> stream_;
};

TEST_F(KernelsOnPages, SlotsBeyond32BitOffsetsGiveTheSameBits) {
  for (layout::DType dtype : {layout::DType::kF32, layout::DType::kBF16}) {
    SparseMemory memory;
    const layout::KvGeometry geometry{
        .layers = 1, .kv_heads = 2, .head_dim = 128, .page_tokens = 64, .dtype = dtype};
    // The last slot begins past 2^32 bytes and past 2^31 elements.
    const uint64_t pages = (uint64_t{9} << 30) / geometry.page_bytes();
    auto pool = std::move(*PagePool::create(memory, geometry, {.pages = pages, .poison = false}));
    auto near = std::move(*SequenceKv::reserve(*pool, 150));
    const uint64_t rest = pool->counts().free - geometry.pages_for(150);
    std::vector<PageHandle> between(rest);
    ASSERT_TRUE(pool->allocate(between));
    auto far = std::move(*SequenceKv::reserve(*pool, 150));
    EXPECT_EQ(near.pages().front().slot, 0u);
    EXPECT_GE(far.pages().front().slot * geometry.page_bytes(), uint64_t{1} << 32);
    const std::vector<uint64_t> steps = {100, 1, 47, 1, 1};
    EXPECT_EQ(attend(*pool, near, steps), attend(*pool, far, steps));
  }
}

// Rows that no token has reached are NaN; one that gets into a sum makes the result NaN.
TEST_F(KernelsOnPages, RowsThatNobodyWroteNeverReachAResult) {
  for (uint32_t head_dim : {64u, 96u, 128u}) {
    for (layout::DType dtype : {layout::DType::kF32, layout::DType::kBF16}) {
      HeapMemory memory;
      const layout::KvGeometry geometry{
          .layers = 1, .kv_heads = 2, .head_dim = head_dim, .page_tokens = 8, .dtype = dtype};
      auto pool = std::move(*PagePool::create(memory, geometry, {.pages = 64, .poison = true}));
      const std::vector<uint64_t> steps = {1, 5, 1, 1, 1, 9, 17, 1, 1};
      std::vector<float> first;
      for (int life = 0; life < 3; ++life) {  // fresh pages, then pages of earlier lives
        auto sequence = std::move(*SequenceKv::reserve(*pool, 40));
        const std::vector<float> out = attend(*pool, sequence, steps);
        for (float value : out) ASSERT_TRUE(std::isfinite(value)) << head_dim;
        if (first.empty()) first = out;
        EXPECT_EQ(out, first) << "head size " << head_dim << ", life " << life;
      }
    }
  }
}

}  // namespace
}  // namespace spin::kv
