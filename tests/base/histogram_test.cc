// SPDX-License-Identifier: Apache-2.0
#include "base/histogram.h"

#include <limits>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/bounded_queue.h"
#include "base/clock.h"
#include "base/counter_rng.h"

namespace spin::base {
namespace {

TEST(Histogram, CountsIntoBucketsThatIncludeTheirUpperBound) {
  Histogram histogram({1, 10});
  for (const double value : {0.0, 1.0, 1.5, 10.0, 11.0}) histogram.observe(value);
  EXPECT_EQ(histogram.snapshot().counts, (std::vector<uint64_t>{2, 2, 1}));
  EXPECT_DOUBLE_EQ(histogram.snapshot().sum, 23.5);
}

TEST(Histogram, NeverFailsOnAbsurdValues) {
  Histogram histogram({1});
  for (const double value :
       {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    histogram.observe(value);
  }
  EXPECT_EQ(histogram.snapshot().counts[0], 3u);
  EXPECT_DOUBLE_EQ(histogram.snapshot().sum, 0.0);
}

// The known answers of the Random123 distribution.
TEST(CounterRng, GivesThePublishedVectorsOfPhilox) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, 0),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({~0u, ~0u, ~0u, ~0u}, ~uint64_t{0}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822u),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(CounterRng, UniformsAreInRangeAndDiffer) {
  std::set<double> seen;
  for (uint64_t position = 0; position < 1000; ++position) {
    const double value = counter_uniform(1, 0, position);
    EXPECT_GE(value, 0.0);
    EXPECT_LT(value, 1.0);
    seen.insert(value);
  }
  EXPECT_EQ(seen.size(), 1000u);
}

TEST(BoundedQueue, MakesTheProducerWaitAndKeepsTheOrder) {
  BoundedQueue<int> queue(2);
  std::thread producer([&queue] {
    for (int i = 0; i < 1000; ++i) EXPECT_TRUE(queue.push(i));
    queue.close();
    EXPECT_FALSE(queue.push(1000));
  });
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(queue.pop(), i);
  EXPECT_EQ(queue.pop(), std::nullopt);
  producer.join();
}

TEST(BoundedQueue, ClosingWakesAProducerThatWaits) {
  BoundedQueue<int> queue(1);
  EXPECT_TRUE(queue.push(1));
  std::thread producer([&queue] { EXPECT_FALSE(queue.push(2)); });
  queue.close();
  producer.join();
  EXPECT_EQ(queue.pop(), 1);
  EXPECT_EQ(queue.pop(), std::nullopt);
}

TEST(Clock, TheManualOneMovesOnlyWhenTold) {
  ManualClock clock;
  EXPECT_EQ(clock.now_s(), 0.0);
  clock.advance_s(1.5);
  EXPECT_DOUBLE_EQ(clock.now_s(), 1.5);
  const SteadyClock steady;
  const double before = steady.now_s();
  EXPECT_LE(before, steady.now_s());
}

}  // namespace
}  // namespace spin::base
