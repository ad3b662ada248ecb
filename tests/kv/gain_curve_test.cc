// SPDX-License-Identifier: Apache-2.0
// Measured curves beside exact LRU caches of every size that see the same requests.
#include "kv/gain_curve.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "layout/residency.h"

namespace spin::kv {
namespace {

using layout::HeadPages;
using layout::kNoEntry;
using layout::kReuseSizes;
using layout::ReuseCounters;

#if defined(SPIN_SANITIZED) || !defined(NDEBUG)
constexpr uint32_t kSteps = 320;
#else
constexpr uint32_t kSteps = 640;
#endif
constexpr uint32_t kWarm = 64;
constexpr uint32_t kHeads = 16;
constexpr uint32_t kWanted = 16;
constexpr uint32_t kPinned = 4;
constexpr uint32_t kMandatory = kWanted + kPinned;
constexpr uint32_t kGhosts = layout::kGhostRatio * kMandatory;

using Steps = std::vector<std::vector<uint32_t>>;  // ascending pages of each step

uint64_t cache_pages(uint32_t size) { return kWanted + size * kMandatory / 2; }

// Steps of `draw`, each page once.
Steps make_steps(uint32_t seed, const std::function<uint32_t(std::mt19937&, uint32_t step)>& draw) {
  std::mt19937 random(seed);
  Steps steps;
  for (uint32_t step = 0; step < kSteps; ++step) {
    std::set<uint32_t> pages;
    while (pages.size() < kWanted) pages.insert(draw(random, step));
    steps.emplace_back(pages.begin(), pages.end());
  }
  return steps;
}

// Popularity falls with rank; ranks wander through the pages.
Steps zipf(uint32_t seed, double exponent, double pages_per_step) {
  constexpr uint32_t kPages = 800;
  std::vector<double> weights;
  for (uint32_t i = 0; i < kPages; ++i) weights.push_back(std::pow(i + 1.0, -exponent));
  std::discrete_distribution<uint32_t> rank(weights.begin(), weights.end());
  return make_steps(seed, [=](std::mt19937& random, uint32_t step) mutable {
    return (rank(random) * 389 + static_cast<uint32_t>(step * pages_per_step)) % kPages;
  });
}

// Goes round `pages` pages, some of them again and again.
Steps scan(uint32_t seed, uint32_t pages) {
  uint32_t next = seed;
  return make_steps(seed, [=](std::mt19937& random, uint32_t) mutable {
    return random() % 4 == 0 ? random() % 8 : 8 + next++ % pages;
  });
}

// A set that stays, and now and then another page.
Steps stationary(uint32_t seed, uint32_t pages) {
  return make_steps(seed, [=](std::mt19937& random, uint32_t) {
    return random() % 16 == 0 ? 1000 + random() % 1000 : random() % pages;
  });
}

// The cache of one head and what a Retrieve does with it.
class MeasuredHead {
 public:
  MeasuredHead(uint64_t number, uint64_t cached)
      : number_(number),
        pages_(kPinned + cached),
        stamps_(pages_.size()),
        table_(layout::residency_table_size(pages_.size())),
        ghosts_(kGhosts) {
    head_.pages = pages_.data();
    head_.stamps = stamps_.data();
    head_.table = table_.data();
    head_.lease_pages = static_cast<uint32_t>(pages_.size());
    head_.pinned_entries = kPinned;
    head_.table_size = static_cast<uint32_t>(table_.size());
    layout::clear_residency(head_, 0);
    layout::clear_ghosts(ghosts_.data(), kGhosts);
    probe_.ghost_pages = kGhosts;
    probe_.mandatory = kMandatory;
  }

  uint32_t step(const std::vector<uint32_t>& wanted, ReuseCounters& counters) {
    ++epoch_;
    layout::sweep_if_due(head_, epoch_);
    const auto count = static_cast<uint32_t>(wanted.size());
    if (layout::is_turn(number_, epoch_)) {
      layout::count_turn(head_, wanted.data(), count, epoch_, kMandatory, counters);
    }
    uint32_t missing[kWanted];
    uint32_t victims[kWanted];
    uint32_t misses = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t entry = layout::find_entry(head_, wanted[i]);
      if (entry == kNoEntry) {
        missing[misses++] = i;
      } else {
        head_.stamps[entry] = epoch_;
      }
    }
    EXPECT_EQ(layout::choose_victims(head_, epoch_, misses, victims), misses);
    if (misses > 0 && layout::is_sampled_head(number_)) {
      layout::count_ghosts(head_, wanted.data(), missing, misses, probe_, ghosts_.data(), counters);
      layout::give_up(head_, victims, misses, ghosts_.data(), kGhosts);
    }
    for (uint32_t m = 0; m < misses; ++m) {
      layout::set_entry(head_, victims[m], wanted[missing[m]]);
      head_.stamps[victims[m]] = epoch_;
    }
    return misses;
  }

 private:
  uint64_t number_;
  std::vector<uint32_t> pages_;
  std::vector<uint8_t> stamps_;
  std::vector<uint32_t> table_;
  std::vector<uint32_t> ghosts_;
  HeadPages head_;
  layout::ReuseProbe probe_;
  uint8_t epoch_ = 0;
};

// Misses per step of an exact LRU cache, after it has warmed up.
double exact_misses(const Steps& steps, uint64_t cached) {
  std::vector<uint32_t> recent;  // newest first
  uint64_t misses = 0;
  for (uint32_t step = 0; step < steps.size(); ++step) {
    std::vector<uint32_t> next = steps[step];
    for (const uint32_t page : recent) {
      if (!std::binary_search(steps[step].begin(), steps[step].end(), page)) next.push_back(page);
    }
    const size_t distinct = next.size();
    if (step >= kWarm) misses += kWanted - (kWanted + recent.size() - distinct);
    next.resize(std::min<size_t>(distinct, cached));
    recent = std::move(next);
  }
  return static_cast<double>(misses) / (kSteps - kWarm);
}

using Heads = std::vector<Steps>;

Heads heads_of(const std::function<Steps(uint32_t seed)>& make) {
  Heads heads;
  for (uint32_t head = 0; head < kHeads; ++head) heads.push_back(make(head + 1));
  return heads;
}

double exact_misses(const Heads& heads, uint64_t cached) {
  double sum = 0;
  for (const Steps& steps : heads) sum += exact_misses(steps, cached);
  return sum / kHeads;
}

// As counted from step kWarm on.
GainCurve measure(const Heads& heads, uint64_t cached) {
  ReuseCounters sums;
  for (uint32_t h = 0; h < kHeads; ++h) {
    MeasuredHead head(h, cached);
    ReuseCounters unused;
    for (uint32_t step = 0; step < kSteps; ++step) {
      head.step(heads[h][step], step < kWarm ? unused : sums);
    }
  }
  return gain_curve(sums);
}

// Up to the current size the error is that of pages of one age, which have no order among
// themselves, and of counting one step in 16: some 30 turns of each head, 9,000 requests, one half
// of a point. Beyond it one head speaks for 16, and the list knows the order of leaving only.
//
// `unordered`: a cache may be that much smaller or larger. Pages used in the same step have no
// order in bucketed LRU, so where all requests are for pages of one age the curve is a cliff, and
// exact LRU falls off it at another place within those pages.
void expect_near(const Heads& heads, const char* name, uint64_t unordered = 0) {
  std::vector<double> most;
  std::vector<double> least;
  for (uint32_t i = 0; i < kReuseSizes; ++i) {
    most.push_back(exact_misses(heads, std::max<uint64_t>(cache_pages(i) - unordered, kWanted)));
    least.push_back(unordered == 0 ? most[i] : exact_misses(heads, cache_pages(i) + unordered));
  }
  for (const uint32_t size : {0u, 2u, 8u, 14u}) {
    const GainCurve curve = measure(heads, cache_pages(size));
    ASSERT_TRUE(curve.measured);
    for (uint32_t i = 0; i < kReuseSizes; ++i) {
      const double tolerance = (i <= size ? 0.03 : 0.05) * kWanted;
      EXPECT_LE(curve.misses[i], most[i] + tolerance) << name << ": " << i << " from " << size;
      EXPECT_GE(curve.misses[i], least[i] - tolerance) << name << ": " << i << " from " << size;
      if (i > 0) {
        EXPECT_LE(curve.misses[i], curve.misses[i - 1]);
      }
    }
  }
}

TEST(GainCurve, IsThatOfExactLruForPopularityThatWanders) {
  expect_near(heads_of([](uint32_t seed) { return zipf(seed, 0.9, 0.5); }), "slow");
  expect_near(heads_of([](uint32_t seed) { return zipf(seed, 1.3, 4.0); }), "fast");
}

TEST(GainCurve, IsThatOfExactLruForScans) {
  expect_near(heads_of([](uint32_t seed) { return scan(seed, 100); }), "scan", kWanted);
}

TEST(GainCurve, IsThatOfExactLruForSetsThatStay) {
  expect_near(heads_of([](uint32_t seed) { return stationary(seed, 60); }), "stationary");
}

TEST(GainCurve, IsThatOfExactLruForHeadsThatDiffer) {
  // Up to the size that they have every head is measured. Beyond, the sampled one may be like none.
  Heads heads;
  for (uint32_t h = 0; h < kHeads; ++h) {
    heads.push_back(h % 2 == 0 ? zipf(h, 1.3, 0) : scan(h, 100));
  }
  const GainCurve curve = measure(heads, cache_pages(12));
  for (uint32_t i = 0; i <= 12; ++i) {
    EXPECT_NEAR(curve.misses[i] / kWanted, exact_misses(heads, cache_pages(i)) / kWanted, 0.03);
  }
}

TEST(GainCurve, LeasesByGainMissLessThanEqualOnes) {
  const Heads local = heads_of([](uint32_t seed) { return stationary(seed, 24); });
  const Heads wide = heads_of([](uint32_t seed) { return zipf(seed, 0.8, 0.5); });
  const uint64_t equal = kMandatory * 3;
  const uint64_t cached = equal - kPinned;
  std::vector<LeaseRequest> requests(2);
  for (LeaseRequest& request : requests) {
    request.heads = kHeads;
    request.mandatory = kMandatory;
    request.largest = 2000;
    request.current = equal;
  }
  requests[0].curve = measure(local, cached);
  requests[1].curve = measure(wide, cached);
  const std::vector<uint64_t> leases = plan_leases(requests, 2 * equal * kHeads, LeasePolicy{});
  EXPECT_LT(leases[0] + 8, leases[1]);
  const double by_gain =
      exact_misses(local, leases[0] - kPinned) + exact_misses(wide, leases[1] - kPinned);
  EXPECT_LT(by_gain, exact_misses(local, cached) + exact_misses(wide, cached) - 0.2);
}

TEST(GainCurve, NothingIsExpectedOfSizesThatNoGhostTellsOf) {
  ReuseCounters sums;
  EXPECT_FALSE(gain_curve(sums).measured);
  sums.turns = 4;
  sums.misses = 8;
  sums.hits[2] = 4;
  const GainCurve curve = gain_curve(sums);
  EXPECT_TRUE(curve.measured);
  EXPECT_FLOAT_EQ(curve.misses[0], 3);
  EXPECT_FLOAT_EQ(curve.misses[1], 3);
  EXPECT_FLOAT_EQ(curve.misses[2], 2);
  EXPECT_FLOAT_EQ(curve.misses[16], 2);
}

// ---- The meter.

// Counters after a step that added one turn with `misses` for each of 2 heads.
void count(std::vector<ReuseCounters>& counters, uint64_t misses) {
  for (ReuseCounters& one : counters) {
    ++one.turns;
    one.misses += misses;
  }
}

TEST(GainMeter, MeasuresAfterItHasWarmedUpAndFollowsChanges) {
  std::vector<ReuseCounters> counters(2);
  GainMeter meter;
  const auto run = [&](uint32_t steps, uint64_t misses) {
    for (uint32_t i = 0; i < steps; ++i) {
      count(counters, misses);
      meter.add_step(counters);
    }
  };
  run(GainMeter::kWarmSteps, 100);
  run(GainMeter::kWindowSteps - 1, 4);
  EXPECT_FALSE(meter.curve().measured);
  run(1, 4);
  EXPECT_TRUE(meter.curve().measured);
  EXPECT_FLOAT_EQ(meter.curve().misses[0], 4);  // what came while it was warming up is left out
  for (int window = 0; window < 5; ++window) run(GainMeter::kWindowSteps, 1);
  EXPECT_NEAR(meter.curve().misses[0], 1, 0.1);

  // What a cache that begins empty misses says nothing; the old curve holds until there is a new.
  const float before = meter.curve().misses[0];
  run(GainMeter::kWindowSteps / 2, 50);
  meter.restart(counters);
  run(GainMeter::kWarmSteps, 50);
  EXPECT_FLOAT_EQ(meter.curve().misses[0], before);
  run(GainMeter::kWindowSteps, 1);
  EXPECT_NEAR(meter.curve().misses[0], 1, 0.1);
}

TEST(GainMeter, AFewHeadsNeedMoreSteps) {
  std::vector<ReuseCounters> counters(1);
  GainMeter meter;
  for (uint32_t step = 0; step < GainMeter::kWarmSteps; ++step) meter.add_step(counters);
  uint32_t steps = 0;
  while (!meter.curve().measured && steps < 10000) {
    if (++steps % 16 == 0) count(counters, 1);
    meter.add_step(counters);
  }
  EXPECT_EQ(steps, 16 * GainMeter::kWindowTurns);
}

}  // namespace
}  // namespace spin::kv
