// SPDX-License-Identifier: Apache-2.0
#include "layout/residency.h"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace spin::layout {
namespace {

#if defined(SPIN_SANITIZED) || !defined(NDEBUG)
constexpr int kScale = 10;
#else
constexpr int kScale = 1;
#endif

// A tiered head with arrays of its own.
struct Head {
  Head(uint32_t lease, uint32_t pinned, uint8_t epoch = 0)
      : slots(lease), pages(lease), stamps(lease), table(residency_table_size(lease)) {
    for (uint32_t i = 0; i < lease; ++i) slots[i] = i;
    view.slots = slots.data();
    view.pages = pages.data();
    view.stamps = stamps.data();
    view.table = table.data();
    view.lease_pages = lease;
    view.pinned_entries = pinned;
    view.table_size = static_cast<uint32_t>(table.size());
    clear_residency(view, epoch);
  }

  std::vector<uint32_t> slots;
  std::vector<uint32_t> pages;
  std::vector<uint8_t> stamps;
  std::vector<uint32_t> table;
  HeadPages view;
};

TEST(Residency, TablesAreLoadedToAHalfAtMostAndNeverFull) {
  for (uint64_t lease = 0; lease < 1000; ++lease) {
    const uint64_t size = residency_table_size(lease);
    EXPECT_GE(size, 2 * lease);
    EXPECT_GT(size, lease);
    EXPECT_LE(size, std::max<uint64_t>(2, 2 * lease)) << lease;
  }
}

// Ids from several ranges, close together and far apart, so that runs form and wrap.
uint32_t random_page(std::mt19937& random) {
  const uint32_t ranges[] = {0, 1000, 0x8000'0000u, 0xFFFF'FF00u};
  return ranges[random() % 4] + random() % 200;
}

TEST(Residency, TableAgreesWithAMapOverRandomOperations) {
  for (const uint32_t lease : {1u, 2u, 7u, 64u, 130u}) {
    Head head(lease, 0);
    std::map<uint32_t, uint32_t> expected;  // page -> entry
    std::vector<uint32_t> held(lease, kNoPage);
    std::mt19937 random(lease);
    const int operations = 200'000 / kScale;
    for (int i = 0; i < operations; ++i) {
      const uint32_t page = random_page(random);
      const auto found = expected.find(page);
      ASSERT_EQ(find_entry(head.view, page), found == expected.end() ? kNoEntry : found->second);
      const auto entry = static_cast<uint32_t>(random() % lease);
      if (random() % 3 == 0) {
        set_entry(head.view, entry, kNoPage);
        expected.erase(held[entry]);
        held[entry] = kNoPage;
      } else if (found == expected.end()) {
        set_entry(head.view, entry, page);
        expected.erase(held[entry]);
        expected[page] = entry;
        held[entry] = page;
      }
    }
    for (const auto& [page, entry] : expected) EXPECT_EQ(find_entry(head.view, page), entry);
    const auto used = std::count_if(head.table.begin(), head.table.end(),
                                    [](uint32_t value) { return value != 0; });
    EXPECT_EQ(static_cast<size_t>(used), expected.size());
    for (uint32_t entry = 0; entry < lease; ++entry) set_entry(head.view, entry, kNoPage);
    for (const uint32_t value : head.table) EXPECT_EQ(value, 0u);
  }
}

TEST(Residency, SettingAnEntryToWhatItHoldsChangesNothing) {
  Head head(4, 0);
  set_entry(head.view, 2, 77);
  const std::vector<uint32_t> table = head.table;
  set_entry(head.view, 2, 77);
  EXPECT_EQ(head.table, table);
  EXPECT_EQ(find_entry(head.view, 77), 2u);
}

// The rule written down once more, over exact ages: empty entries, then the oldest of 64 buckets,
// within a bucket by entry; nothing that was used in this step.
std::vector<uint32_t> reference_victims(const Head& head,
                                        const std::vector<int64_t>& last_use,
                                        int64_t step,
                                        uint32_t wanted) {
  std::vector<std::pair<int64_t, uint32_t>> order;  // -bucket, entry
  for (uint32_t i = head.view.pinned_entries; i < head.view.lease_pages; ++i) {
    const int64_t age =
        head.pages[i] == kNoPage ? 1 << 20 : std::min<int64_t>(step - last_use[i], 63);
    if (age > 0) order.emplace_back(-age, i);
  }
  std::sort(order.begin(), order.end());
  if (order.size() > wanted) order.resize(wanted);
  std::vector<uint32_t> victims;
  for (const auto& [bucket, entry] : order) victims.push_back(entry);
  std::sort(victims.begin(), victims.end());
  return victims;
}

// Steps of a cache whose entries are used, emptied and replaced at random; every choice is compared
// with the reference. Calls are `stride` epochs apart.
void run_against_reference(uint32_t lease, uint32_t pinned, int steps, int stride, uint32_t seed) {
  Head head(lease, pinned, static_cast<uint8_t>(stride));
  std::vector<int64_t> last_use(lease, 0);
  std::mt19937 random(seed);
  uint32_t next_page = 0;
  for (int s = 1; s <= steps; ++s) {
    const int64_t step = int64_t{s} * stride;
    const auto epoch = static_cast<uint8_t>(step);
    sweep_if_due(head.view, epoch);
    // A few hot entries, the rest seldom: ages from 1 to beyond 63.
    for (uint32_t i = 0; i < lease; ++i) {
      if (head.pages[i] == kNoPage || random() % (i % 8 == 0 ? 2 : 150) != 0) continue;
      head.stamps[i] = epoch;
      last_use[i] = step;
    }
    const uint32_t wanted = random() % (lease / 3 + 2);
    std::vector<uint32_t> victims(lease);
    victims.resize(choose_victims(head.view, epoch, wanted, victims.data()));
    ASSERT_EQ(victims, reference_victims(head, last_use, step, wanted))
        << "step " << step << ", wanted " << wanted;
    for (const uint32_t entry : victims) {
      const bool emptied = random() % 5 == 0;
      set_entry(head.view, entry, emptied ? kNoPage : next_page++);
      head.stamps[entry] = epoch;
      last_use[entry] = step;
    }
  }
}

TEST(Residency, VictimsAreThoseOfTheReferenceWhileEpochsWrap) {
  for (const uint32_t lease : {1u, 5u, 26u, 130u}) {
    for (const uint32_t pinned : {0u, lease / 4}) {
      run_against_reference(lease, pinned, 1100 / kScale + 300, 1, lease);
    }
  }
}

TEST(Residency, AgesSurviveGapsBetweenCallsUpToTheSweepsLimit) {
  for (const int stride : {2, 63, 64, 65, 100, 127, 128}) {
    run_against_reference(40, 3, 200, stride, 9);
  }
}

TEST(Residency, AgesSaturateSoThatAnUnusedPageStaysTheOldest) {
  Head head(3, 0);
  for (uint32_t i = 0; i < 3; ++i) set_entry(head.view, i, i);
  for (int step = 1; step <= 1000; ++step) {
    const auto epoch = static_cast<uint8_t>(step);
    sweep_if_due(head.view, epoch);
    head.stamps[0] = epoch;
    if (step % 70 == 0) head.stamps[2] = epoch;
    uint32_t victim = kNoEntry;
    ASSERT_EQ(choose_victims(head.view, epoch, 1, &victim), 1u);
    ASSERT_EQ(victim, 1u) << step;
    if (step > 63) {
      EXPECT_EQ(entry_bucket(head.view, 1, epoch), kAgeBuckets - 1);
    }
  }
}

TEST(Residency, PagesOfThisEpochAndPinnedEntriesAreNoVictims) {
  Head head(10, 4);
  for (uint32_t i = 0; i < 10; ++i) set_entry(head.view, i, i);
  for (const uint32_t used : {5u, 8u}) head.stamps[used] = 0;  // epoch 0
  std::vector<uint32_t> victims(10);
  EXPECT_EQ(choose_victims(head.view, 0, 10, victims.data()), 4u);
  victims.resize(4);
  EXPECT_EQ(victims, (std::vector<uint32_t>{4, 6, 7, 9}));
}

TEST(Residency, EmptyEntriesGoFirstAndCountAsTheOldestBucket) {
  Head head(6, 0);
  for (const uint32_t i : {0u, 2u, 3u, 5u}) set_entry(head.view, i, i);
  const AgeCounts ages = count_ages(head.view, 0);
  EXPECT_EQ(ages.counts[kEmptyBucket], 2u);
  EXPECT_EQ(ages.counts[1], 4u);
  std::vector<uint32_t> victims(3);
  EXPECT_EQ(choose_victims(head.view, 0, 3, victims.data()), 3u);
  EXPECT_EQ(victims, (std::vector<uint32_t>{0, 1, 4}));
  EXPECT_EQ(choose_victims(head.view, 0, 0, victims.data()), 0u);
}

TEST(Residency, TailPagesGoRoundTheirRing) {
  Head head(12, 10);
  const Tail tail{.first_page = 7, .first_entry = 4, .ring = 3, .tokens = 20};
  EXPECT_EQ(tail_entry(head.view, tail, 0), 5u);
  EXPECT_EQ(tail_entry(head.view, tail, 1), 6u);
  EXPECT_EQ(tail_entry(head.view, tail, 2), 4u);
  head.view.table = nullptr;
  EXPECT_EQ(tail_entry(head.view, tail, 2), 9u);
}

}  // namespace
}  // namespace spin::layout
