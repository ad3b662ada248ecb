// SPDX-License-Identifier: Apache-2.0
// What encoding and scoring of sketches (backend/sketch_ops.h) share. Thread: pure functions.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "backend/sketch_ops.h"
#include "base/check.h"
#include "layout/kv_geometry.h"

namespace spin::backend::cpu {

// y = H y: one normalised Walsh-Hadamard matrix per power of two in `size`, the largest first.
inline void rotate(float* y, int64_t size) {
  while (size > 0) {
    const auto block = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(size)));
    for (int64_t half = 1; half < block; half *= 2) {
      for (int64_t i = 0; i < block; i += 2 * half) {
        for (int64_t j = i; j < i + half; ++j) {
          const float low = y[j];
          const float high = y[j + half];
          y[j] = low + high;
          y[j + half] = low - high;
        }
      }
    }
    const float norm = 1.0f / std::sqrt(static_cast<float>(block));
    for (int64_t i = 0; i < block; ++i) y[i] *= norm;
    y += block;
    size -= block;
  }
}

// Offset of a token of a head: the first mean or the second one.
inline const float* mean_of(const SketchArray& array,
                            const layout::KvGeometry& geometry,
                            uint32_t head,
                            bool second) {
  return array.means + ((second ? uint64_t{geometry.kv_heads} : 0) + head) * geometry.head_dim;
}

inline void check_sketches(const SketchArray& array, uint64_t tokens) {
  SPIN_CHECK(array.bits == 1 || array.bits == 2 || array.bits == 4);
  SPIN_CHECK(array.capacity % kSketchBlockTokens == 0 && tokens <= array.capacity);
  SPIN_CHECK(array.split % kSketchBlockTokens == 0);
}

}  // namespace spin::backend::cpu
