// SPDX-License-Identifier: Apache-2.0
// Bucketed LRU beside exact LRU and FIFO on selections that were made up to be like recorded ones.
#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "bench/locality_replay.h"

namespace spin::bench {
namespace {

TEST(Locality, BucketedLruIsWithinOnePointOfExactLru) {
  std::vector<HeadSteps> heads;
  heads.push_back(zipf_steps({}));
  heads.push_back(zipf_steps({.per_step = 8, .steps = 1200, .drift = 0, .seed = 2}));
  heads.push_back(zipf_steps({.pages = 500, .exponent = 1.2, .drift = 0.1, .seed = 3}));
  bool beats_fifo = false;
  for (const HeadSteps& head : heads) {
    double smaller_buffer = 0;
    for (const double ratio : {0.0, 0.5, 1.0, 2.0, 4.0, 8.0}) {
      const double bucketed = replay_all({head}, CachePolicy::kBucketedLru, ratio).ratio();
      const double exact = replay_all({head}, CachePolicy::kExactLru, ratio).ratio();
      const double fifo = replay_all({head}, CachePolicy::kFifo, ratio).ratio();
      EXPECT_NEAR(bucketed, exact, 0.01) << ratio;
      EXPECT_GE(bucketed, smaller_buffer) << ratio;
      smaller_buffer = bucketed;
      beats_fifo |= bucketed > fifo + 0.01;
    }
    EXPECT_GT(smaller_buffer, 0.1);  // the traces have locality
  }
  EXPECT_TRUE(beats_fifo);
}

TEST(Locality, ABufferForAllPagesMissesEachOnce) {
  const HeadSteps steps = {{1, 2}, {2, 3}, {1, 3}, {4, 7}, {1, 2}};
  for (const auto& [policy, name] : kCachePolicies) {
    const HitCounts counts = replay(steps, policy, 5);
    EXPECT_EQ(counts.misses, 5u) << name;
    EXPECT_EQ(counts.hits, 5u) << name;
  }
}

TEST(Locality, PoliciesDifferWhereTheyShould) {
  // With three pages: page 1 is used all the time, so LRU keeps it and FIFO, in its order, does
  // not.
  const HeadSteps steps = {{1}, {1, 2}, {1, 3}, {1, 4}, {1, 5}};
  EXPECT_EQ(replay(steps, CachePolicy::kExactLru, 3).misses, 5u);
  EXPECT_EQ(replay(steps, CachePolicy::kBucketedLru, 3).misses, 5u);
  const HeadSteps alternating = {{1}, {2}, {1}, {3}, {1}, {2}};
  EXPECT_EQ(replay(alternating, CachePolicy::kExactLru, 2).misses, 4u);
  EXPECT_EQ(replay(alternating, CachePolicy::kBucketedLru, 2).misses, 4u);
  EXPECT_EQ(replay(alternating, CachePolicy::kFifo, 2).misses, 5u);
}

TEST(Locality, ATraceIsTakenApartByHeadsInOrderOfSteps) {
  sparse::SelectionTrace trace;
  trace.header = {1, 2, 8, ""};
  trace.records = {
      {1, 1, 0, 0, {2, 5}}, {1, 0, 0, 0, {2, 4}}, {1, 0, 0, 1, {6}}, {2, 0, 0, 0, {7}}};
  const std::vector<HeadSteps> heads = heads_of(trace);
  ASSERT_EQ(heads.size(), 3u);
  EXPECT_EQ(heads[0], (HeadSteps{{4}, {5}}));  // page 2 is always there
  EXPECT_EQ(heads[1], (HeadSteps{{6}}));
  EXPECT_EQ(heads[2], (HeadSteps{{7}}));
}

}  // namespace
}  // namespace spin::bench
