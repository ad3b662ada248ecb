// SPDX-License-Identifier: Apache-2.0
// Input of the benchmarks: the same pseudo-random floats in [-1, 1) on every run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace spin::bench {

inline std::vector<float> pattern(int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  uint32_t state = 1;
  for (float& value : out) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
  return out;
}

}  // namespace spin::bench
