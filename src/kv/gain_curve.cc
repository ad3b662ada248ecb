// SPDX-License-Identifier: Apache-2.0
#include "kv/gain_curve.h"

#include <algorithm>

namespace spin::kv {
namespace {

using layout::kReuseBins;
using layout::kReuseSizes;
using layout::ReuseCounters;

static_assert(std::tuple_size_v<decltype(GainCurve::misses)> == kReuseSizes);

ReuseCounters sum_of(std::span<const ReuseCounters> counters) {
  ReuseCounters sum;
  for (const ReuseCounters& one : counters) {
    sum.turns += one.turns;
    sum.misses += one.misses;
    for (uint32_t i = 0; i < kReuseBins; ++i) {
      sum.hits[i] += one.hits[i];
      sum.ghosts[i] += one.ghosts[i];
    }
  }
  return sum;
}

void halve(ReuseCounters& sums) {
  sums.turns /= 2;
  sums.misses /= 2;
  for (uint32_t i = 0; i < kReuseBins; ++i) {
    sums.hits[i] /= 2;
    sums.ghosts[i] /= 2;
  }
}

}  // namespace

GainCurve gain_curve(const ReuseCounters& sums) {
  GainCurve curve;
  if (sums.turns == 0) return curve;
  curve.measured = true;
  double ghosts = 0;
  for (const uint64_t count : sums.ghosts) ghosts += static_cast<double>(count);
  const auto turns = static_cast<double>(sums.turns);
  const double misses = static_cast<double>(sums.misses) / turns;
  double farther_hits = 0;
  double farther_ghosts = 0;
  for (uint32_t size = kReuseSizes; size-- > 0;) {
    farther_hits += static_cast<double>(sums.hits[size + 1]);
    farther_ghosts += static_cast<double>(sums.ghosts[size + 1]);
    // Without a ghost nothing is known about larger sizes, and nothing is expected of them.
    const double left = ghosts > 0 ? farther_ghosts / ghosts : 1.0;
    curve.misses[size] = static_cast<float>(farther_hits / turns + misses * left);
  }
  return curve;
}

void GainMeter::add_step(std::span<ReuseCounters> counters) {
  ++steps_;
  if (!warm_) {
    if (steps_ < kWarmSteps) return;
    std::fill(counters.begin(), counters.end(), ReuseCounters());
    warm_ = true;
    steps_ = 0;
    return;
  }
  if (steps_ < kWindowSteps) return;
  const ReuseCounters window = sum_of(counters);
  if (window.turns < kWindowTurns) return;
  halve(sums_);
  const ReuseCounters both[] = {sums_, window};
  sums_ = sum_of(both);
  curve_ = gain_curve(sums_);
  std::fill(counters.begin(), counters.end(), ReuseCounters());
  steps_ = 0;
}

void GainMeter::restart(std::span<ReuseCounters> counters) {
  std::fill(counters.begin(), counters.end(), ReuseCounters());
  warm_ = false;
  steps_ = 0;
}

}  // namespace spin::kv
