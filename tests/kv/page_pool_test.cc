// SPDX-License-Identifier: Apache-2.0
// PagePool: the page equation, all-or-nothing allocation, handles that know when they are stale.
// RELIABILITY rows B008 (double release), B011 (all or nothing), B070 (64-bit offsets).
#include "kv/page_pool.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/bf16.h"
#include "tests/kv/memory_for_tests.h"

namespace spin::kv {
namespace {

using testing::HeapMemory;
using testing::SparseMemory;

layout::KvGeometry small_geometry(layout::DType dtype = layout::DType::kF32) {
  return {.layers = 2, .kv_heads = 2, .head_dim = 8, .page_tokens = 4, .dtype = dtype};
}

std::unique_ptr<PagePool> make_pool(HeapMemory& memory, uint64_t pages, bool poison = true) {
  auto pool = PagePool::create(memory, small_geometry(), {.pages = pages, .poison = poison});
  EXPECT_TRUE(pool.ok()) << pool.status().to_string();
  return std::move(*pool);
}

TEST(PagePool, StartsWithEveryPageFree) {
  HeapMemory memory;
  auto pool = make_pool(memory, 5);
  EXPECT_EQ(pool->counts(), (PageCounts{.free = 5, .filling = 0, .sealed = 0, .total = 5}));
  EXPECT_EQ(pool->size_bytes(), 5 * small_geometry().page_bytes());
  EXPECT_EQ(memory.bytes_in_use(), pool->size_bytes());
  EXPECT_TRUE(pool->audit().ok());
  pool.reset();
  EXPECT_EQ(memory.bytes_in_use(), 0u);
}

TEST(PagePool, PageGoesFromFreeToFillingToSealedToFree) {
  HeapMemory memory;
  auto pool = make_pool(memory, 3);
  PageHandle page[1];
  ASSERT_TRUE(pool->allocate(page));
  EXPECT_EQ(pool->state(page[0].slot), PageState::kFilling);
  pool->seal(page[0]);
  EXPECT_EQ(pool->state(page[0].slot), PageState::kSealed);
  EXPECT_EQ(pool->counts(), (PageCounts{.free = 2, .filling = 0, .sealed = 1, .total = 3}));
  pool->release(page);
  EXPECT_EQ(pool->state(page[0].slot), PageState::kFree);
  EXPECT_EQ(pool->counts(), (PageCounts{.free = 3, .filling = 0, .sealed = 0, .total = 3}));
  EXPECT_TRUE(pool->audit().ok());
}

TEST(PagePool, AllocatesAllOrNothing) {
  HeapMemory memory;
  auto pool = make_pool(memory, 4);
  std::vector<PageHandle> three(3);
  std::vector<PageHandle> two(2, PageHandle{77, 77});
  ASSERT_TRUE(pool->allocate(three));
  EXPECT_FALSE(pool->allocate(two));
  EXPECT_EQ(two[0], (PageHandle{77, 77})) << "a refused allocation writes nothing";
  EXPECT_EQ(pool->counts().free, 1u);
  EXPECT_TRUE(pool->audit().ok());
  EXPECT_TRUE(pool->allocate(std::span(two).first(1)));
  EXPECT_TRUE(pool->allocate({})) << "no pages are always there";
}

TEST(PagePool, HandleOfAnEarlierLifeIsNotCurrent) {
  HeapMemory memory;
  auto pool = make_pool(memory, 1);
  PageHandle first[1];
  PageHandle second[1];
  ASSERT_TRUE(pool->allocate(first));
  EXPECT_TRUE(pool->is_current(first[0]));
  pool->release(first);
  EXPECT_FALSE(pool->is_current(first[0]));
  ASSERT_TRUE(pool->allocate(second));
  EXPECT_EQ(first[0].slot, second[0].slot);
  EXPECT_FALSE(pool->is_current(first[0]));
  EXPECT_TRUE(pool->is_current(second[0]));
  EXPECT_FALSE(pool->is_current({.slot = 1, .generation = 0})) << "no such slot";
}

TEST(PagePoolDeathTest, ReleasingTwiceStopsBeforeTheCountsGoWrong) {
  HeapMemory memory;
  auto pool = make_pool(memory, 2);
  PageHandle page[1];
  ASSERT_TRUE(pool->allocate(page));
  pool->release(page);
  EXPECT_DEATH(pool->release(page), "is_current");
  ASSERT_TRUE(pool->allocate(page));
  pool->seal(page[0]);
  EXPECT_DEATH(pool->seal(page[0]), "kFilling");
}

TEST(PagePool, RefusesSizesThatCannotBe) {
  SparseMemory memory;
  const uint64_t too_many = std::numeric_limits<uint32_t>::max();
  for (uint64_t pages : {uint64_t{0}, too_many, std::numeric_limits<uint64_t>::max()}) {
    EXPECT_EQ(PagePool::create(memory, small_geometry(), {.pages = pages}).status().code(),
              StatusCode::kInvalidArgument)
        << pages;
  }
  layout::KvGeometry huge = small_geometry();
  huge.head_dim = 1u << 31;
  huge.page_tokens = 1u << 20;
  EXPECT_EQ(PagePool::create(memory, huge, {.pages = too_many - 1}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(PagePool, PassesOnThatThereIsNoMemory) {
  HeapMemory memory;
  memory.refuse = true;
  const auto pool = PagePool::create(memory, small_geometry(), {.pages = 3});
  EXPECT_EQ(pool.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(pool.status().message().find("3 pages"), std::string::npos);
}

// Every element of a page as float.
std::vector<float> page_values(const PagePool& pool, uint32_t slot) {
  const layout::KvGeometry& geometry = pool.geometry();
  const size_t count = geometry.page_bytes() / layout::dtype_bytes(geometry.dtype);
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    if (geometry.dtype == layout::DType::kF32) {
      std::memcpy(&values[i], pool.page_address(slot) + 4 * i, 4);
    } else {
      base::Bf16 value;
      std::memcpy(&value.bits, pool.page_address(slot) + 2 * i, 2);
      values[i] = base::to_float(value);
    }
  }
  return values;
}

TEST(PagePool, PoisonedPagesHoldOnlyNans) {
  for (layout::DType dtype : {layout::DType::kF32, layout::DType::kBF16}) {
    HeapMemory memory;
    auto pool =
        std::move(*PagePool::create(memory, small_geometry(dtype), {.pages = 2, .poison = true}));
    PageHandle page[1];
    ASSERT_TRUE(pool->allocate(page));
    for (float value : page_values(*pool, page[0].slot)) EXPECT_TRUE(std::isnan(value));
    std::memset(pool->page_address(page[0].slot), 0, pool->geometry().page_bytes());
    pool->release(page);
    for (float value : page_values(*pool, page[0].slot)) EXPECT_TRUE(std::isnan(value));
  }
}

TEST(PagePool, WithoutPoisonNothingTouchesThePages) {
  SparseMemory memory;
  auto pool =
      std::move(*PagePool::create(memory, small_geometry(), {.pages = 100'000, .poison = false}));
  std::vector<PageHandle> pages(100'000);
  ASSERT_TRUE(pool->allocate(pages));
  pool->release(pages);
  std::vector<unsigned char> resident(pool->size_bytes() / sysconf(_SC_PAGESIZE));
  ASSERT_EQ(mincore(pool->ref().base, pool->size_bytes(), resident.data()), 0);
  EXPECT_EQ(std::count_if(resident.begin(), resident.end(), [](auto r) { return r & 1; }), 0);
}

// B070: the byte offset of a slot passes 2^31 and 2^32, its element offset passes 2^31.
TEST(PagePool, OffsetsOfLateSlotsNeedMoreThan32Bits) {
  SparseMemory memory;
  const layout::KvGeometry geometry{.layers = 1, .kv_heads = 1, .head_dim = 128, .page_tokens = 64};
  const uint64_t pages = (uint64_t{9} << 30) / geometry.page_bytes();
  auto pool = std::move(*PagePool::create(memory, geometry, {.pages = pages, .poison = false}));
  std::vector<PageHandle> all(pages);
  ASSERT_TRUE(pool->allocate(all));
  const uint64_t page_bytes = geometry.page_bytes();
  std::vector<uint32_t> slots;
  for (uint64_t edge : {uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{1} << 33}) {
    for (uint64_t slot : {edge / page_bytes - 1, edge / page_bytes, edge / page_bytes + 1}) {
      slots.push_back(static_cast<uint32_t>(slot));
    }
  }
  slots.push_back(0);
  for (uint32_t slot : slots) {
    EXPECT_EQ(pool->page_address(slot) - static_cast<std::byte*>(pool->ref().base),
              static_cast<ptrdiff_t>(slot * page_bytes));
    std::memcpy(pool->page_address(slot), &slot, sizeof(slot));
  }
  for (uint32_t slot : slots) {
    uint32_t stamp = 0;
    std::memcpy(&stamp, pool->page_address(slot), sizeof(stamp));
    EXPECT_EQ(stamp, slot) << "two slots share an address";
  }
}

}  // namespace
}  // namespace spin::kv
