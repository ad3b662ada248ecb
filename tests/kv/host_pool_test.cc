// SPDX-License-Identifier: Apache-2.0
// HostPool: reservations, extents, tags of a former life.
#include "kv/host_pool.h"

#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kv/memory_for_tests.h"

namespace spin::kv {
namespace {

using testing::HeapMemory;
using testing::SparseMemory;

layout::KvGeometry geometry() {
  return {.layers = 2, .kv_heads = 2, .head_dim = 8, .page_tokens = 4};
}

uint64_t extent_bytes(uint32_t pages) {
  return layout::HostExtentLayout{pages, geometry().page_bytes()}.bytes();
}

std::unique_ptr<HostPool> make_pool(backend::MemoryResource& memory, uint64_t extents) {
  return std::move(
      *HostPool::create(memory, geometry(), 4, extents * extent_bytes(4) + 5, /*poison=*/true));
}

TEST(HostPool, HoldsAsManyWholeExtentsAsFit) {
  HeapMemory memory;
  auto pool = make_pool(memory, 7);
  EXPECT_EQ(pool->counts().total, 7u);
  EXPECT_EQ(pool->counts().free, 7u);
  EXPECT_EQ(pool->size_bytes(), 7 * extent_bytes(4));
  EXPECT_EQ(pool->layout().pages, 4u);
  EXPECT_TRUE(pool->audit().ok());
}

TEST(HostPool, RefusesSizesThatCannotBe) {
  HeapMemory memory;
  const uint64_t huge = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(HostPool::create(memory, geometry(), 4, extent_bytes(4) - 1).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(HostPool::create(memory, geometry(), 0, 1000).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(HostPool::create(memory, geometry(), 1, huge).status().code(),
            StatusCode::kInvalidArgument)
      << "more extents than a number of 32 bits names";
  layout::KvGeometry wide = geometry();
  wide.head_dim = 1u << 30;
  wide.page_tokens = 1u << 30;
  EXPECT_EQ(HostPool::create(memory, wide, 1u << 31, huge).status().code(),
            StatusCode::kInvalidArgument);
  memory.refuse = true;
  EXPECT_EQ(HostPool::create(memory, geometry(), 4, 4096).status().code(),
            StatusCode::kResourceExhausted);
}

TEST(HostPool, AReservationIsAllOrNothingAndCannotFailLater) {
  HeapMemory memory;
  auto pool = make_pool(memory, 5);
  ASSERT_TRUE(pool->reserve(3));
  EXPECT_FALSE(pool->reserve(3));
  EXPECT_EQ(pool->counts().free, 2u);
  EXPECT_EQ(pool->counts().reserved, 3u);
  std::set<uint64_t> extents;
  for (int i = 0; i < 3; ++i) extents.insert(pool->take());
  EXPECT_EQ(extents.size(), 3u);
  for (uint64_t extent : extents) EXPECT_TRUE(pool->is_in_use(extent));
  EXPECT_EQ(pool->counts().in_use, 3u);
  ASSERT_TRUE(pool->reserve(2));
  pool->unreserve(1);
  EXPECT_EQ(pool->counts().free, 1u);
  for (uint64_t extent : extents) pool->release(extent);
  EXPECT_EQ(pool->counts().free, 4u);
  EXPECT_TRUE(pool->audit().ok());
}

// A tag that a former owner left behind names nobody's page.
TEST(HostPool, AnExtentComesWithClearedTags) {
  HeapMemory memory;
  auto pool = make_pool(memory, 1);
  ASSERT_TRUE(pool->reserve(1));
  const uint64_t first = pool->take();
  for (uint32_t page = 0; page < 4; ++page) *pool->layout().tag(first, page) = {9, page, 4};
  pool->release(first);
  ASSERT_TRUE(pool->reserve(1));
  const uint64_t second = pool->take();
  EXPECT_EQ(first, second);
  for (uint32_t page = 0; page < 4; ++page) {
    EXPECT_EQ(pool->layout().tag(second, page)->page, layout::kNoPage);
    EXPECT_EQ(pool->layout().tag(second, page)->owner, 0u);
  }
}

TEST(HostPoolDeathTest, WrongReleasesStopBeforeTheCountsGoWrong) {
  HeapMemory memory;
  auto pool = make_pool(memory, 2);
  EXPECT_DEATH((void)pool->take(), "reserved > 0");
  EXPECT_DEATH(pool->unreserve(1), "reserved");
  ASSERT_TRUE(pool->reserve(1));
  const uint64_t extent = pool->take();
  EXPECT_DEATH(pool->release(extent + 1), "bytes");
  pool->release(extent);
  EXPECT_DEATH(pool->release(extent), "in_use_");
}

TEST(HostPool, ExtentsBeyondFourGibibytesDoNotOverlap) {
  SparseMemory memory;
  const layout::KvGeometry wide{.layers = 1, .kv_heads = 1, .head_dim = 128, .page_tokens = 64};
  auto pool = std::move(*HostPool::create(memory, wide, 32, uint64_t{9} << 30, false));
  ASSERT_TRUE(pool->reserve(pool->counts().total));
  std::vector<uint64_t> extents;
  while (pool->counts().reserved > 0) extents.push_back(pool->take());
  for (size_t i = 0; i < extents.size(); ++i) pool->layout().tag(extents[i], 31)->owner = i + 1;
  for (size_t i = 0; i < extents.size(); ++i) {
    EXPECT_EQ(pool->layout().tag(extents[i], 31)->owner, i + 1);
    EXPECT_EQ(pool->layout().tag(extents[i], 0)->owner, 0u);
  }
}

TEST(HostPool, RandomOperationsKeepTheCounts) {
  HeapMemory memory;
  auto pool = make_pool(memory, 16);
  std::mt19937_64 random(1);
  std::vector<uint64_t> held;
  uint64_t reserved = 0;
  for (int i = 0; i < 20'000; ++i) {
    const uint64_t n = random() % 6;
    switch (random() % 4) {
      case 0:
        if (pool->reserve(n)) reserved += n;
        break;
      case 1:
        if (n <= reserved) {
          pool->unreserve(n);
          reserved -= n;
        }
        break;
      case 2:
        if (reserved > 0) {
          held.push_back(pool->take());
          --reserved;
        }
        break;
      default:
        if (!held.empty()) {
          std::swap(held[random() % held.size()], held.back());
          pool->release(held.back());
          held.pop_back();
        }
    }
    ASSERT_EQ(pool->counts().in_use, held.size());
    ASSERT_EQ(pool->counts().reserved, reserved);
    ASSERT_TRUE(pool->audit().ok());
    ASSERT_EQ(std::set<uint64_t>(held.begin(), held.end()).size(), held.size());
  }
}

}  // namespace
}  // namespace spin::kv
