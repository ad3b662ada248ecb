// SPDX-License-Identifier: Apache-2.0
#include "backend/chunked_memory.h"

#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "backend/memory_decorators.h"

namespace spin::backend {
namespace {

constexpr size_t kChunk = 64 << 10;

class ChunkedMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = std::move(*cpu::create_cpu_device({.threads = 1}));
    upstream_.emplace(device_->memory(MemoryKind::kHost));
    memory_.emplace(*upstream_, kChunk);
  }

  void* take(size_t bytes, size_t alignment = 64) {
    auto pointer = memory_->allocate(bytes, alignment);
    EXPECT_TRUE(pointer.ok()) << pointer.status().to_string();
    return pointer.ok() ? *pointer : nullptr;
  }

  std::unique_ptr<Device> device_;
  std::optional<CountingMemoryResource> upstream_;
  std::optional<ChunkedMemoryResource> memory_;
};

TEST_F(ChunkedMemory, SmallBlocksShareAChunk) {
  std::vector<void*> blocks;
  for (int i = 0; i < 100; ++i) blocks.push_back(take(100));
  EXPECT_EQ(memory_->bytes_held(), kChunk);
  EXPECT_EQ(upstream_->bytes_in_use(), kChunk);
  EXPECT_EQ(memory_->bytes_in_use(), 100u * 100);
  for (void* block : blocks) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % ChunkedMemoryResource::kGranule, 0u);
    memory_->deallocate(block, 100, 64);
  }
  EXPECT_EQ(memory_->bytes_in_use(), 0u);
  EXPECT_EQ(memory_->bytes_held(), kChunk);  // one empty chunk stays
}

TEST_F(ChunkedMemory, FreedNeighboursJoin) {
  const size_t quarter = kChunk / 4;
  std::vector<void*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(take(quarter));
  for (const size_t i : {1u, 2u}) memory_->deallocate(blocks[i], quarter, 64);
  // Both together hold what neither does.
  void* const joined = take(2 * quarter);
  EXPECT_EQ(joined, blocks[1]);
  EXPECT_EQ(memory_->bytes_held(), kChunk);
  memory_->deallocate(joined, 2 * quarter, 64);
  for (const size_t i : {0u, 3u}) memory_->deallocate(blocks[i], quarter, 64);
  EXPECT_EQ(memory_->bytes_held(), kChunk);
}

TEST_F(ChunkedMemory, ASecondEmptyChunkGoesBack) {
  std::vector<void*> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(take(kChunk / 2));
  EXPECT_EQ(memory_->bytes_held(), 3 * kChunk);
  for (void* block : blocks) memory_->deallocate(block, kChunk / 2, 64);
  EXPECT_EQ(memory_->bytes_held(), kChunk);
  EXPECT_EQ(upstream_->bytes_in_use(), kChunk);
}

TEST_F(ChunkedMemory, LargeOrAlignedBlocksArePassedThrough) {
  void* const large = take(kChunk);
  void* const aligned = take(10, 4096);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(aligned) % 4096, 0u);
  EXPECT_EQ(memory_->bytes_held(), kChunk + 10);
  EXPECT_EQ(upstream_->bytes_in_use(), kChunk + 10);
  memory_->deallocate(large, kChunk, 64);
  memory_->deallocate(aligned, 10, 4096);
  EXPECT_EQ(upstream_->bytes_in_use(), 0u);
}

TEST_F(ChunkedMemory, RefusalsOfTheUpstreamArePassedOnAndChangeNothing) {
  LimitingMemoryResource limited(*upstream_, kChunk);
  ChunkedMemoryResource memory(limited, kChunk);
  auto first = memory.allocate(kChunk / 2, 64);
  auto second = memory.allocate(kChunk / 2, 64);
  ASSERT_TRUE(first.ok() && second.ok());
  for (const size_t bytes : {size_t{1}, kChunk, SIZE_MAX, SIZE_MAX - 100}) {
    EXPECT_EQ(memory.allocate(bytes, 64).status().code(), StatusCode::kResourceExhausted) << bytes;
  }
  EXPECT_EQ(memory.bytes_in_use(), kChunk);
  memory.deallocate(*first, kChunk / 2, 64);
  memory.deallocate(*second, kChunk / 2, 64);
}

// Blocks never overlap and keep what is in them, whatever is freed around them.
TEST_F(ChunkedMemory, RandomUseKeepsEveryBlock) {
  std::mt19937 random(5);
  std::map<unsigned char*, size_t> live;
  uint64_t bytes_live = 0;
  for (int i = 0; i < 20000; ++i) {
    if (live.empty() || random() % 100 < 55) {
      const size_t bytes = random() % 10 == 0 ? random() % kChunk : random() % 3000;
      auto* const block = static_cast<unsigned char*>(take(bytes));
      const auto after = live.lower_bound(block);
      ASSERT_TRUE(after == live.end() || block + bytes <= after->first);
      ASSERT_TRUE(after == live.begin() ||
                  std::prev(after)->first + std::prev(after)->second <= block);
      std::memset(block, static_cast<int>(bytes % 251), bytes);
      live[block] = bytes;
      bytes_live += bytes;
    } else {
      auto victim = live.begin();
      std::advance(victim, random() % std::min<size_t>(live.size(), 50));
      const auto [block, bytes] = *victim;
      for (size_t k = 0; k < bytes; ++k) ASSERT_EQ(block[k], bytes % 251);
      memory_->deallocate(block, bytes, 64);
      live.erase(victim);
      bytes_live -= bytes;
    }
    ASSERT_EQ(memory_->bytes_in_use(), bytes_live);
  }
  for (const auto& [block, bytes] : live) memory_->deallocate(block, bytes, 64);
  EXPECT_EQ(memory_->bytes_held(), kChunk);
}

TEST_F(ChunkedMemory, ThreadsMayShareIt) {
  std::vector<std::jthread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 2000; ++i) {
        const size_t bytes = 1 + random() % 5000;
        auto pointer = memory_->allocate(bytes, 64);
        ASSERT_TRUE(pointer.ok());
        std::memset(*pointer, 1, bytes);
        memory_->deallocate(*pointer, bytes, 64);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(memory_->bytes_in_use(), 0u);
}

}  // namespace
}  // namespace spin::backend
