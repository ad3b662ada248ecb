// SPDX-License-Identifier: Apache-2.0
// Counts of values in fixed buckets, in the shape that metrics are shown in.
// Thread: external synchronisation.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "spin/stats.h"

namespace spin::base {

class Histogram {
 public:
  // Requires: `bounds` ascends strictly.
  explicit Histogram(std::vector<double> bounds) {
    data_.counts.assign(bounds.size() + 1, 0);
    data_.bounds = std::move(bounds);
  }

  // A value that is no number, or negative through a clock's fault, counts as 0: metrics never
  // fail.
  void observe(double value) {
    if (!std::isfinite(value) || value < 0) value = 0;
    const auto bound = std::lower_bound(data_.bounds.begin(), data_.bounds.end(), value);
    ++data_.counts[static_cast<size_t>(bound - data_.bounds.begin())];
    data_.sum += value;
  }

  const HistogramSnapshot& snapshot() const { return data_; }

 private:
  HistogramSnapshot data_;
};

}  // namespace spin::base
