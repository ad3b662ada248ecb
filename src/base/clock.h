// SPDX-License-Identifier: Apache-2.0
// Time as an injected dependency, so that stalls, drains and latencies are tested without sleeping.
// Thread: all classes are thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace spin::base {

class Clock {
 public:
  virtual ~Clock() = default;
  // Seconds since an arbitrary fixed point; never goes back.
  virtual double now_s() const = 0;
};

// The machine's monotonic clock.
class SteadyClock final : public Clock {
 public:
  double now_s() const override {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

// Stands still until it is told to move. For tests and simulators.
class ManualClock final : public Clock {
 public:
  double now_s() const override { return static_cast<double>(now_us_.load()) * 1e-6; }
  void advance_s(double seconds) { now_us_.fetch_add(static_cast<int64_t>(seconds * 1e6)); }

 private:
  std::atomic<int64_t> now_us_{0};
};

}  // namespace spin::base
