// SPDX-License-Identifier: Apache-2.0
// From what kernels counted of pages used again (layout/reuse.h) to the fetches that a sequence
// would have with smaller and larger leases. Thread: engine thread.
#pragma once

#include <cstdint>
#include <span>

#include "kv/lease_planner.h"
#include "layout/reuse.h"

namespace spin::kv {

// Misses per head and step at each size. Up to the lease that was counted under, they are the
// misses there and the hits of greater distance; beyond it, the sampled heads say which share of
// the misses is left. Decreasing; not measured when there was no turn. Thread: pure function.
GainCurve gain_curve(const layout::ReuseCounters& sums);

// Counts in windows, each of half the weight of the next.
class GainMeter {
 public:
  // A window ends when it has both.
  static constexpr uint32_t kWindowSteps = 64;
  static constexpr uint32_t kWindowTurns = 64;
  // After the start and after restart() the cache fills; these steps are not counted.
  static constexpr uint32_t kWarmSteps = 32;

  // A step's work has run: `counters` hold what was counted since the window began. They are
  // cleared when it ends.
  void add_step(std::span<layout::ReuseCounters> counters);
  // What the caches held is gone, or a step did not count: the window begins again.
  void restart(std::span<layout::ReuseCounters> counters);
  const GainCurve& curve() const { return curve_; }

 private:
  bool warm_ = false;
  uint32_t steps_ = 0;
  layout::ReuseCounters sums_;
  GainCurve curve_;
};

}  // namespace spin::kv
