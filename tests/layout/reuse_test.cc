// SPDX-License-Identifier: Apache-2.0
#include "layout/reuse.h"

#include <cstdint>
#include <numeric>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace spin::layout {
namespace {

struct Head {
  Head(uint32_t lease, uint32_t pinned)
      : pages(lease), stamps(lease), table(residency_table_size(lease)) {
    view.pages = pages.data();
    view.stamps = stamps.data();
    view.table = table.data();
    view.lease_pages = lease;
    view.pinned_entries = pinned;
    view.table_size = static_cast<uint32_t>(table.size());
    clear_residency(view, 0);
  }
  void hold(uint32_t entry, uint32_t page, uint8_t stamp) {
    set_entry(view, entry, page);
    stamps[entry] = stamp;
  }

  std::vector<uint32_t> pages;
  std::vector<uint8_t> stamps;
  std::vector<uint32_t> table;
  HeadPages view;
};

uint64_t sum(const uint64_t (&bins)[kReuseBins]) {
  return std::accumulate(bins, bins + kReuseBins, uint64_t{0});
}

TEST(Reuse, OneHeadInSixteenIsSampledAndNotAlwaysTheSameOfItsLayer) {
  for (const uint64_t heads : {1u, 2u, 16u, 17u, 60u, 320u, 640u}) {
    uint64_t sampled = 0;
    for (uint64_t head = 0; head < heads; ++head) {
      EXPECT_EQ(sampled_heads(head), sampled);
      sampled += is_sampled_head(head) ? 1 : 0;
    }
    EXPECT_EQ(sampled_heads(heads), sampled);
    EXPECT_GE(sampled, heads / kReuseSampling);
    EXPECT_LE(sampled, heads / kReuseSampling + 1);
  }
  std::set<uint64_t> of_eight;
  for (uint64_t head = 0; head < 320; ++head) {
    if (is_sampled_head(head)) of_eight.insert(head % 8);
  }
  EXPECT_EQ(of_eight.size(), 8u);
}

TEST(Reuse, EveryHeadHasItsTurnOnceInSixteenSteps) {
  for (const uint64_t head : {0u, 5u, 31u}) {
    int turns = 0;
    for (int epoch = 0; epoch < 256; ++epoch) {
      turns += is_turn(head, static_cast<uint8_t>(epoch)) ? 1 : 0;
    }
    EXPECT_EQ(turns, 16);
  }
}

TEST(Reuse, ABinIsTheSmallestSizeThatHoldsThePage) {
  for (const uint64_t mandatory : {1u, 7u, 33u}) {
    for (const uint64_t base : {1u, 5u}) {
      for (uint64_t distance = 1; distance < 400; ++distance) {
        uint32_t size = 0;
        while (size < kReuseSizes && base + size * mandatory / 2 < distance) ++size;
        EXPECT_EQ(reuse_bin(distance, base, mandatory), size) << distance;
      }
    }
  }
}

TEST(Reuse, ATurnCountsHitsByDistanceAndLeavesPinnedPagesOut) {
  // Mandatory 4 of which 2 are pinned: sizes hold 2, 4, 6, 8, ... cached pages.
  Head head(12, 2);
  head.hold(0, 100, 9);
  for (uint32_t i = 0; i < 8; ++i) head.hold(2 + i, i, static_cast<uint8_t>(9 - i / 2));
  const std::vector<uint32_t> wanted = {0, 1, 3, 6, 50, 100};
  ReuseCounters counters;
  count_turn(head.view, wanted.data(), 6, 10, 4, counters);
  EXPECT_EQ(counters.turns, 1u);
  EXPECT_EQ(counters.misses, 1u);
  EXPECT_EQ(counters.hits[0], 2u);  // both of the newest age: distances 1 and 2
  EXPECT_EQ(counters.hits[1], 1u);  // the second newest: 3 or 4
  EXPECT_EQ(counters.hits[3], 1u);  // the fourth: 7 or 8
  EXPECT_EQ(sum(counters.hits), 4u);
}

TEST(Reuse, GhostsAreInTheOrderInWhichTheyWereGivenUp) {
  Head head(6, 1);
  for (uint32_t i = 1; i < 6; ++i) head.hold(i, 10 + i, 0);
  std::vector<uint32_t> ghosts(4);
  clear_ghosts(ghosts.data(), 4);
  const std::vector<uint32_t> first = {1, 2};
  give_up(head.view, first.data(), 2, ghosts.data(), 4);
  EXPECT_EQ(ghosts, (std::vector<uint32_t>{11, 12, kNoPage, kNoPage}));
  const std::vector<uint32_t> second = {3};
  give_up(head.view, second.data(), 1, ghosts.data(), 4);
  EXPECT_EQ(ghosts, (std::vector<uint32_t>{13, 11, 12, kNoPage}));

  // 5 pages are resident; the ghost 11 is the second behind them. Page 99 never was there.
  const std::vector<uint32_t> wanted = {7, 11, 99};
  const std::vector<uint32_t> missing = {1, 2};
  ReuseProbe probe;
  probe.ghost_pages = 4;
  probe.mandatory = 2;  // one cached page at least, then one more for each size
  ReuseCounters counters;
  count_ghosts(head.view, wanted.data(), missing.data(), 2, probe, ghosts.data(), counters);
  EXPECT_EQ(counters.ghosts[6], 1u);
  EXPECT_EQ(counters.ghosts[kReuseSizes], 1u);

  // It is none any more; what does not fit is forgotten.
  const std::vector<uint32_t> third = {4, 5, 1};
  give_up(head.view, third.data(), 3, ghosts.data(), 4);
  EXPECT_EQ(ghosts, (std::vector<uint32_t>{14, 15, 11, 13}));
  const std::vector<uint32_t> many = {1, 2, 3, 4, 5};
  give_up(head.view, many.data(), 5, ghosts.data(), 4);
  EXPECT_EQ(ghosts, (std::vector<uint32_t>{11, 12, 13, 14}));
}

TEST(Reuse, EmptyEntriesGiveNothingUp) {
  Head head(4, 1);
  head.hold(2, 8, 0);
  std::vector<uint32_t> ghosts(2);
  clear_ghosts(ghosts.data(), 2);
  const std::vector<uint32_t> victims = {1, 2, 3};
  give_up(head.view, victims.data(), 3, ghosts.data(), 2);
  EXPECT_EQ(ghosts, (std::vector<uint32_t>{8, kNoPage}));
}

TEST(Reuse, WhatASmallerLeaseDropsIsRememberedYoungestFirst) {
  Head before(6, 1);
  before.hold(1, 21, 7);
  before.hold(2, 22, 9);
  before.hold(3, 23, 4);
  before.hold(4, 24, 8);
  Head after(3, 1);
  after.hold(1, 22, 9);
  std::vector<uint32_t> ghosts = {5, kRisenGhost, kNoPage, kNoPage};
  give_up_dropped(before.view, after.view, 10, ghosts.data(), 4);
  EXPECT_EQ(ghosts, (std::vector<uint32_t>{24, 21, 23, 5}));
}

}  // namespace
}  // namespace spin::layout
