// SPDX-License-Identifier: Apache-2.0
// SequenceKv: reservation, steps, release, and the property test against a trivial model.
// RELIABILITY rows B008, B010, B011, B012.
#include "kv/sequence_kv.h"

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kv/memory_for_tests.h"

namespace spin::kv {
namespace {

using testing::HeapMemory;

constexpr uint32_t kLayers = 2;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kHeadDim = 8;

layout::KvGeometry geometry_of(uint32_t page_tokens) {
  return {.layers = kLayers, .kv_heads = kHeads, .head_dim = kHeadDim, .page_tokens = page_tokens};
}

std::unique_ptr<PagePool> make_pool(HeapMemory& memory, uint32_t page_tokens, uint64_t pages) {
  return std::move(*PagePool::create(memory, geometry_of(page_tokens), {.pages = pages}));
}

Status audit_one(const PagePool& pool, const SequenceKv& sequence) {
  const SequenceKv* live[] = {&sequence};
  return audit(pool, live);
}

TEST(SequenceKv, ReservesWholePagesForEveryLayerAndHead) {
  // B010: lengths around the page edge.
  for (uint32_t page_tokens : {1u, 2u, 8u, 16u, 64u}) {
    HeapMemory memory;
    auto pool = make_pool(memory, page_tokens, 64 * kLayers * kHeads);
    for (uint64_t pages = 1; pages <= 3; ++pages) {
      for (int64_t delta : {-1, 0, 1}) {
        const uint64_t tokens = pages * page_tokens + delta;
        if (tokens == 0) continue;
        auto sequence = SequenceKv::reserve(*pool, tokens);
        ASSERT_TRUE(sequence.ok());
        const uint64_t expected = (tokens + page_tokens - 1) / page_tokens;
        EXPECT_EQ(sequence->pages().size(), expected * kLayers * kHeads);
        EXPECT_EQ(sequence->capacity_tokens(), expected * page_tokens);
        EXPECT_TRUE(audit_one(*pool, *sequence).ok());
      }
    }
    EXPECT_EQ(pool->counts().in_use(), 0u);
  }
}

// A long reservation, of which only the first tokens are used, must not spread them over the pool.
TEST(SequenceKv, FirstTokensOfAllHeadsLieTogetherInAFreshPool) {
  HeapMemory memory;
  constexpr uint64_t kPages = 1000;
  auto pool = make_pool(memory, 8, kPages * kLayers * kHeads);
  auto sequence = SequenceKv::reserve(*pool, kPages * 8);
  ASSERT_TRUE(sequence.ok());
  for (uint64_t head = 0; head < kLayers * kHeads; ++head) {
    const std::span<const PageHandle> pages = sequence->pages().subspan(head * kPages, kPages);
    EXPECT_LT(pages[0].slot, 64 * kLayers * kHeads);
    EXPECT_LT(pages[31].slot, 64 * kLayers * kHeads);
    EXPECT_EQ(pages[31].slot, pages[0].slot + 31) << "a run reads like one stream";
  }
  EXPECT_TRUE(audit_one(*pool, *sequence).ok());
}

TEST(SequenceKv, OutOfPagesIsAValueWithNumbersAndChangesNothing) {
  HeapMemory memory;
  auto pool = make_pool(memory, 4, 10);
  const auto sequence = SequenceKv::reserve(*pool, 9);  // 3 pages * 2 layers * 2 heads
  ASSERT_FALSE(sequence.ok());
  EXPECT_EQ(sequence.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(sequence.status().message(), "9 tokens need 12 KV pages; 10 of 10 are free");
  EXPECT_EQ(pool->counts().free, 10u);
  EXPECT_FALSE(SequenceKv::reserve(*pool, UINT64_MAX).ok());
  EXPECT_TRUE(audit(*pool, {}).ok());
}

// B011: of two pools the second is full; the first gets its pages back.
TEST(SequenceKv, ReservationOverTwoPoolsIsAllOrNothing) {
  HeapMemory memory;
  auto roomy = make_pool(memory, 4, 100);
  auto full = make_pool(memory, 4, 3);
  const auto reserve_both = [&]() -> Result<std::vector<SequenceKv>> {
    std::vector<SequenceKv> both;
    for (PagePool* pool : {roomy.get(), full.get()}) {
      SPIN_ASSIGN_OR_RETURN(SequenceKv sequence, SequenceKv::reserve(*pool, 4));
      both.push_back(std::move(sequence));
    }
    return both;
  };
  EXPECT_FALSE(reserve_both().ok());
  EXPECT_TRUE(audit(*roomy, {}).ok());
  EXPECT_TRUE(audit(*full, {}).ok());
}

TEST(SequenceKv, OnlyCommittedTokensSealPages) {
  HeapMemory memory;
  auto pool = make_pool(memory, 4, 100);
  auto sequence = std::move(*SequenceKv::reserve(*pool, 10));
  sequence.begin_step(8);
  EXPECT_EQ(sequence.committed_tokens(), 0u);
  EXPECT_EQ(sequence.in_flight_tokens(), 8u);
  EXPECT_EQ(pool->counts().sealed, 0u);
  sequence.drop_step();
  EXPECT_EQ(sequence.in_flight_tokens(), 0u);
  EXPECT_EQ(pool->counts().sealed, 0u);
  sequence.begin_step(3);
  sequence.commit_step();
  EXPECT_EQ(sequence.committed_tokens(), 3u);
  EXPECT_EQ(pool->counts().sealed, 0u);
  sequence.begin_step(1);
  sequence.commit_step();
  EXPECT_EQ(pool->counts().sealed, uint64_t{kLayers} * kHeads);
  sequence.begin_step(6);
  sequence.commit_step();
  EXPECT_EQ(sequence.committed_tokens(), 10u);
  EXPECT_EQ(pool->counts().sealed, 2 * uint64_t{kLayers} * kHeads);
  EXPECT_TRUE(audit_one(*pool, sequence).ok());
}

TEST(SequenceKv, SliceShowsCommittedAndFlyingTokensAndItsLayersSlots) {
  HeapMemory memory;
  auto pool = make_pool(memory, 4, 100);
  auto sequence = std::move(*SequenceKv::reserve(*pool, 12));
  sequence.begin_step(5);
  sequence.commit_step();
  sequence.begin_step(2);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const layout::SequenceSlice slice = sequence.slice(layer, 17);
    EXPECT_EQ(slice.first_row, 17u);
    EXPECT_EQ(slice.query_tokens, 2u);
    EXPECT_EQ(slice.context_tokens, 7u);
    EXPECT_EQ(slice.slot_stride, 3u);
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint64_t page = 0; page < 3; ++page) {
        EXPECT_EQ(slice.slots[head * slice.slot_stride + page],
                  sequence.pages()[(layer * kHeads + head) * 3 + page].slot);
      }
    }
  }
}

TEST(SequenceKv, MovingKeepsPagesAndSlices) {
  HeapMemory memory;
  auto pool = make_pool(memory, 4, 100);
  auto first = std::move(*SequenceKv::reserve(*pool, 4));
  first.begin_step(3);
  const uint32_t* slots = first.slice(1, 0).slots;
  SequenceKv second = std::move(first);
  EXPECT_EQ(second.slice(1, 0).slots, slots);
  second.commit_step();
  auto third = std::move(*SequenceKv::reserve(*pool, 8));
  third = std::move(second);
  EXPECT_EQ(third.committed_tokens(), 3u);
  EXPECT_EQ(pool->counts().in_use(), uint64_t{kLayers} * kHeads);
  EXPECT_TRUE(audit_one(*pool, third).ok());
}

// B012: what is not given back is an error, with numbers.
TEST(SequenceKv, AuditFindsPagesThatNoLiveSequenceHolds) {
  HeapMemory memory;
  auto pool = make_pool(memory, 4, 100);
  auto kept = std::move(*SequenceKv::reserve(*pool, 4));
  auto forgotten = std::move(*SequenceKv::reserve(*pool, 4));
  const SequenceKv* live[] = {&kept};
  const Status leak = audit(*pool, live);
  EXPECT_EQ(leak.code(), StatusCode::kInternal);
  EXPECT_NE(leak.message().find("8 pages are in use, 1 sequences hold 4"), std::string::npos)
      << leak.message();
  const SequenceKv* twice[] = {&kept, &kept};
  EXPECT_NE(audit(*pool, twice).message().find("held twice"), std::string::npos);
}

TEST(SequenceKvDeathTest, StepsOutOfOrderOrOverCapacityStop) {
  HeapMemory memory;
  auto pool = make_pool(memory, 4, 100);
  auto sequence = std::move(*SequenceKv::reserve(*pool, 4));
  EXPECT_DEATH(sequence.commit_step(), "in_flight_tokens_");
  EXPECT_DEATH(sequence.begin_step(5), "capacity_tokens");
  sequence.begin_step(1);
  EXPECT_DEATH(sequence.begin_step(1), "in_flight_tokens_");
  EXPECT_DEATH((void)sequence.slice(kLayers, 0), "layer");
}

// ---- property test -------------------------------------------------------------------------

// What the test believes about one sequence.
struct Expected {
  uint64_t id = 0;
  uint64_t pages_per_head = 0;
  uint64_t committed = 0;
  uint64_t in_flight = 0;
};

struct Live {
  SequenceKv kv;
  Expected expected;
};

class RandomWalk {
 public:
  RandomWalk(uint32_t page_tokens, uint64_t seed)
      : page_tokens_(page_tokens), pool_(make_pool(memory_, page_tokens, kPages)), random_(seed) {}

  void run(int operations) {
    for (int i = 0; i < operations && !::testing::Test::HasFailure(); ++i) {
      step();
      check_counts();
    }
    EXPECT_GT(refusals_, 0) << "the walk never met a full pool";
    EXPECT_GT(admissions_, 100);
    live_.clear();
    EXPECT_EQ(pool_->counts().free, kPages);
    EXPECT_TRUE(audit(*pool_, {}).ok());
  }

 private:
  static constexpr uint64_t kPages = 96;

  uint64_t below(uint64_t bound) { return random_() % bound; }

  void step() {
    const uint64_t choice = below(10);
    if (live_.empty() || choice == 0) return admit();
    Live& chosen = live_[below(live_.size())];
    if (choice == 1) {
      std::swap(chosen, live_.back());  // moves both
      live_.pop_back();
      return;
    }
    if (chosen.expected.in_flight == 0) return begin(chosen);
    choice < 8 ? commit(chosen) : drop(chosen);
  }

  // A length within one token of a page edge, or one token.
  uint64_t length_near_edge() {
    const uint64_t tokens = below(6) * page_tokens_ + below(3);
    return tokens <= 1 ? 1 : tokens - 1;
  }

  void admit() {
    const uint64_t tokens = length_near_edge();
    const uint64_t per_head = (tokens + page_tokens_ - 1) / page_tokens_;
    const bool fits = per_head * kLayers * kHeads <= kPages - pages_in_use();
    auto kv = SequenceKv::reserve(*pool_, tokens);
    ASSERT_EQ(kv.ok(), fits);
    ++(fits ? admissions_ : refusals_);
    if (fits) live_.push_back({std::move(*kv), {.id = ++last_id_, .pages_per_head = per_head}});
  }

  void begin(Live& chosen) {
    const uint64_t room = chosen.expected.pages_per_head * page_tokens_ - chosen.expected.committed;
    if (room == 0) return verify_content(chosen);
    const uint64_t tokens = std::min(room, length_near_edge());
    chosen.kv.begin_step(tokens);
    chosen.expected.in_flight = tokens;
    write_content(chosen);
  }

  void commit(Live& chosen) {
    chosen.kv.commit_step();
    chosen.expected.committed += chosen.expected.in_flight;
    chosen.expected.in_flight = 0;
    verify_content(chosen);
  }

  void drop(Live& chosen) {
    chosen.kv.drop_step();
    chosen.expected.in_flight = 0;
    verify_content(chosen);
  }

  static uint64_t stamp(const Expected& owner, uint64_t token, uint32_t layer, uint32_t head) {
    return ((owner.id * 1000 + token) * kLayers + layer) * kHeads + head;
  }

  std::byte* row(const layout::SequenceSlice& slice, uint32_t head, uint64_t token) {
    const uint32_t slot = slice.slots[head * slice.slot_stride + token / page_tokens_];
    return pool_->page_address(slot) + token % page_tokens_ * pool_->geometry().row_bytes();
  }

  // As a kernel would: through the slice, the tokens in flight only.
  void write_content(Live& chosen) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const layout::SequenceSlice slice = chosen.kv.slice(layer, 0);
      ASSERT_EQ(slice.context_tokens, chosen.expected.committed + chosen.expected.in_flight);
      for (uint32_t head = 0; head < kHeads; ++head) {
        for (uint64_t t = chosen.expected.committed; t < slice.context_tokens; ++t) {
          const uint64_t value = stamp(chosen.expected, t, layer, head);
          std::memcpy(row(slice, head, t), &value, sizeof(value));
        }
      }
    }
  }

  // Every committed token still holds what its own sequence wrote.
  void verify_content(Live& chosen) {
    const uint64_t stride = chosen.expected.pages_per_head;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (uint32_t head = 0; head < kHeads; ++head) {
        for (uint64_t t = 0; t < chosen.expected.committed; ++t) {
          const PageHandle page =
              chosen.kv.pages()[(layer * kHeads + head) * stride + t / page_tokens_];
          uint64_t value = 0;
          std::memcpy(
              &value,
              pool_->page_address(page.slot) + t % page_tokens_ * pool_->geometry().row_bytes(),
              sizeof(value));
          ASSERT_EQ(value, stamp(chosen.expected, t, layer, head));
        }
      }
    }
  }

  uint64_t pages_in_use() const {
    uint64_t pages = 0;
    for (const Live& one : live_) pages += one.expected.pages_per_head * kLayers * kHeads;
    return pages;
  }

  void check_counts() {
    uint64_t sealed = 0;
    std::vector<const SequenceKv*> sequences;
    for (const Live& one : live_) {
      sealed += one.expected.committed / page_tokens_ * kLayers * kHeads;
      sequences.push_back(&one.kv);
      ASSERT_EQ(one.kv.committed_tokens(), one.expected.committed);
      ASSERT_EQ(one.kv.in_flight_tokens(), one.expected.in_flight);
    }
    const PageCounts& counts = pool_->counts();
    ASSERT_EQ(counts.in_use(), pages_in_use());
    ASSERT_EQ(counts.sealed, sealed);
    ASSERT_EQ(counts.free + counts.filling + counts.sealed, kPages);
    const Status status = audit(*pool_, sequences);
    ASSERT_TRUE(status.ok()) << status.to_string();
  }

  uint64_t page_tokens_;
  HeapMemory memory_;
  std::unique_ptr<PagePool> pool_;
  std::mt19937_64 random_;
  std::vector<Live> live_;
  uint64_t last_id_ = 0;
  int admissions_ = 0;
  int refusals_ = 0;
};

// B008, B010, B012: 10^5 operations over five page sizes, audited after each.
TEST(SequenceKv, RandomOperationsKeepThePageEquation) {
#ifdef SPIN_SANITIZED
  constexpr int kOperations = 3'000;
#else
  constexpr int kOperations = 20'000;
#endif
  for (uint32_t page_tokens : {1u, 2u, 8u, 16u, 64u}) {
    SCOPED_TRACE(page_tokens);
    RandomWalk(page_tokens, 1000 + page_tokens).run(kOperations);
  }
}

}  // namespace
}  // namespace spin::kv
