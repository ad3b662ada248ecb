// SPDX-License-Identifier: Apache-2.0
// plan_leases: properties over random requests, and the cases that people look at.
#include "kv/lease_planner.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace spin::kv {
namespace {

using Random = std::mt19937_64;

uint64_t between(Random& random, uint64_t least, uint64_t most) {
  return least + random() % (most - least + 1);
}

GainCurve random_curve(Random& random) {
  GainCurve curve;
  curve.measured = random() % 4 != 0;
  auto misses = static_cast<float>(between(random, 0, 200));
  for (float& point : curve.misses) {
    point = misses;
    if (random() % 3 != 0) misses *= static_cast<float>(random() % 100) / 100.0f;  // or a plateau
  }
  return curve;
}

std::vector<LeaseRequest> random_requests(Random& random) {
  std::vector<LeaseRequest> requests(between(random, 1, 12));
  for (LeaseRequest& request : requests) {
    request.heads = between(random, 1, 64);
    request.mandatory = between(random, 1, 60);
    request.largest = between(random, 0, 1500);
    request.curve = random_curve(random);
  }
  return requests;
}

uint64_t mandatory_slots(const std::vector<LeaseRequest>& requests) {
  uint64_t slots = 0;
  for (const LeaseRequest& request : requests) slots += request.heads * request.mandatory;
  return slots;
}

uint64_t slots_of(const std::vector<LeaseRequest>& requests, const std::vector<uint64_t>& leases) {
  uint64_t slots = 0;
  for (size_t i = 0; i < requests.size(); ++i) slots += requests[i].heads * leases[i];
  return slots;
}

LeasePolicy random_policy(Random& random) {
  LeasePolicy policy;
  policy.granule = between(random, 1, 16);
  if (random() % 3 == 0) policy.fixed_ratio = static_cast<double>(random() % 90) / 10.0;
  return policy;
}

TEST(LeasePlanner, KeepsEveryBoundForRandomRequests) {
  Random random(1);
  for (int round = 0; round < 5000; ++round) {
    std::vector<LeaseRequest> requests = random_requests(random);
    for (LeaseRequest& request : requests) request.current = between(random, 0, 1600);
    const uint64_t fast = mandatory_slots(requests) + between(random, 0, 40000);
    const LeasePolicy policy = random_policy(random);
    const std::vector<uint64_t> leases = plan_leases(requests, fast, policy);
    ASSERT_EQ(leases.size(), requests.size());
    EXPECT_LE(slots_of(requests, leases), fast);
    for (size_t i = 0; i < leases.size(); ++i) {
      EXPECT_GE(leases[i], requests[i].mandatory);
      EXPECT_LE(leases[i], std::max(requests[i].largest, requests[i].mandatory));
    }
    EXPECT_EQ(leases, plan_leases(requests, fast, policy)) << "the plan is a function";
  }
}

TEST(LeasePlanner, MoreMemoryTakesNothingFromAnybody) {
  Random random(2);
  for (int round = 0; round < 2000; ++round) {
    const std::vector<LeaseRequest> requests = random_requests(random);
    const LeasePolicy policy = random_policy(random);
    const uint64_t fast = mandatory_slots(requests) + between(random, 0, 20000);
    const std::vector<uint64_t> less = plan_leases(requests, fast, policy);
    const std::vector<uint64_t> more =
        plan_leases(requests, fast + between(random, 1, 3000), policy);
    for (size_t i = 0; i < less.size(); ++i) EXPECT_LE(less[i], more[i]) << round;
  }
}

TEST(LeasePlanner, ANewcomerShrinksTheOthersToMandatoryBeforeItIsRefused) {
  Random random(3);
  for (int round = 0; round < 500; ++round) {
    std::vector<LeaseRequest> requests = random_requests(random);
    for (LeaseRequest& request : requests) {
      request.current = std::max(request.largest, request.mandatory);
    }
    const std::vector<uint64_t> leases =
        plan_leases(requests, mandatory_slots(requests), random_policy(random));
    for (size_t i = 0; i < leases.size(); ++i) EXPECT_EQ(leases[i], requests[i].mandatory);
  }
}

TEST(LeasePlanner, GivesSlotsWhereTheySaveMostFetches) {
  LeaseRequest steep{.heads = 8, .mandatory = 20, .largest = 1000, .curve = {}};
  LeaseRequest shallow = steep;
  steep.curve.measured = shallow.curve.measured = true;
  for (size_t i = 0; i < steep.curve.misses.size(); ++i) {
    const float left = 1.0f - static_cast<float>(i) / 16.0f;
    steep.curve.misses[i] = 20.0f * left;
    shallow.curve.misses[i] = 5.0f * left;
  }
  const LeaseRequest requests[] = {shallow, steep};
  const uint64_t fast = 8 * (20 + 20 + 100);
  const std::vector<uint64_t> leases = plan_leases(requests, fast, {});
  EXPECT_EQ(leases[0], 20u);
  EXPECT_EQ(leases[1], 120u);
}

TEST(LeasePlanner, CrossesAPlateauThatASteepPartFollows) {
  LeaseRequest late{.heads = 1, .mandatory = 16, .largest = 1000, .curve = {}};
  late.curve.measured = true;
  late.curve.misses.fill(10.0f);
  for (size_t i = 6; i < late.curve.misses.size(); ++i) late.curve.misses[i] = 0.0f;
  const LeaseRequest requests[] = {late};
  EXPECT_EQ(plan_leases(requests, 500, {})[0], 16u + 3 * 16) << "6 / 2 times mandatory, then none";
}

TEST(LeasePlanner, WithoutAMeasurementTheBufferIsFourTimesMandatory) {
  const LeaseRequest requests[] = {{.heads = 4, .mandatory = 24, .largest = 1000, .curve = {}},
                                   {.heads = 4, .mandatory = 24, .largest = 60, .curve = {}}};
  const std::vector<uint64_t> leases = plan_leases(requests, 100'000, {});
  EXPECT_EQ(leases[0], 24u * 5);
  EXPECT_EQ(leases[1], 60u) << "not beyond all of its pages";
}

TEST(LeasePlanner, AFixedRatioIsKeptAndSharedFairlyWhenSlotsAreShort) {
  const LeaseRequest requests[] = {{.heads = 2, .mandatory = 10, .largest = 1000, .curve = {}},
                                   {.heads = 2, .mandatory = 40, .largest = 1000, .curve = {}}};
  LeasePolicy policy;
  policy.granule = 1;
  policy.fixed_ratio = 2.0;
  EXPECT_EQ(plan_leases(requests, 10'000, policy), (std::vector<uint64_t>{30, 120}));
  const std::vector<uint64_t> half = plan_leases(requests, 2 * (50 + 50), policy);
  EXPECT_EQ(half[0] + half[1], 100u);
  EXPECT_NEAR(static_cast<double>(half[0] - 10) / 10, static_cast<double>(half[1] - 40) / 40, 0.1);
  policy.fixed_ratio = 0;
  EXPECT_EQ(plan_leases(requests, 10'000, policy), (std::vector<uint64_t>{10, 40}));
}

TEST(LeasePlanner, ChangesOfLessThanAStepAreNotMade) {
  LeaseRequest request{.heads = 4, .mandatory = 24, .largest = 1000, .curve = {}};
  for (uint64_t current = 120 - 7; current <= 120 + 7; ++current) {
    request.current = current;
    const LeaseRequest requests[] = {request};
    EXPECT_EQ(plan_leases(requests, 100'000, {})[0], current);
  }
  request.current = 120 - 8;
  const LeaseRequest requests[] = {request};
  EXPECT_EQ(plan_leases(requests, 100'000, {})[0], 120u);
}

TEST(LeasePlanner, WhatNobodyGainsFromStaysWhereItIs) {
  LeaseRequest rich{.heads = 4, .mandatory = 10, .largest = 1000, .current = 600, .curve = {}};
  rich.curve.measured = true;  // no misses at all: nothing to gain
  const LeaseRequest alone[] = {rich};
  EXPECT_EQ(plan_leases(alone, 4000, {})[0], 600u);
  const LeaseRequest both[] = {rich, {.heads = 4, .mandatory = 100, .largest = 900, .curve = {}}};
  const std::vector<uint64_t> leases = plan_leases(both, 4000, {});
  EXPECT_EQ(leases[1], 500u);
  EXPECT_EQ(leases[0], 500u) << "it gives what the other gains from";
}

}  // namespace
}  // namespace spin::kv
