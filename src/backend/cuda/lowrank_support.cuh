// SPDX-License-Identifier: Apache-2.0
// What the kernels of low-rank keys (lowrank.cu, lowrank_factor.cu) share: rotations and what they
// require of factors.
#pragma once

#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include "backend/lowrank_items.h"
#include "base/check.h"
#include "layout/kv_geometry.h"

namespace spin::backend::cuda {

inline constexpr uint32_t kLargestRopeDim = 1024;

// RopeParams as a kernel argument.
struct RopeArgument {
  float inv_freq[kLargestRopeDim / 2];
  float factor;
};

inline RopeArgument rope_argument(const RopeParams& rope) {
  RopeArgument argument = {};
  std::copy(rope.inv_freq.begin(), rope.inv_freq.end(), argument.inv_freq);
  argument.factor = rope.attention_factor;
  return argument;
}

inline void check_factors(const KeyFactors& factors,
                          const layout::KvGeometry& geometry,
                          const RopeParams& rope) {
  SPIN_CHECK(geometry.head_dim > 0 && geometry.head_dim % 8 == 0);
  SPIN_CHECK(geometry.head_dim <= kLargestRopeDim);
  SPIN_CHECK(geometry.kv_heads > 0 && geometry.kv_heads <= 65535);
  SPIN_CHECK(rope.inv_freq.size() * 2 == geometry.head_dim);
  SPIN_CHECK(factors.rank > 0 && factors.rank <= 65535);
  SPIN_CHECK(factors.rank <= uint64_t{geometry.kv_heads} * geometry.head_dim);
  SPIN_CHECK(factors.token != nullptr && factors.head != nullptr);
}

struct Rotation {
  float cos;
  float sin;
};

// factor * (cos, sin) of position * inv_freq. The angle is formed and reduced in double: exact to
// 2^-27 for positions below 2^27. The polynomials are Taylor's for |r| <= pi / 4, with remainders
// below (pi / 4)^11 / 11! = 2e-9 and (pi / 4)^10 / 10! = 3e-8. Products and sums are fused by name,
// so that all kernels get the same bits.
__device__ __forceinline__ Rotation rotation_of(uint32_t position, float inv_freq, float factor) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  // pi / 2 in three parts.
  constexpr double kHalfPi1 = 0x1.921fbp0;
  constexpr double kHalfPi2 = 0x5.4442p-24;
  constexpr double kHalfPi3 = 0xd.18469898cc518p-44;
  const double angle = __dmul_rn(static_cast<double>(position), static_cast<double>(inv_freq));
  const double quadrant = rint(__dmul_rn(angle, kTwoOverPi));
  const double reduced =
      fma(-quadrant, kHalfPi3, fma(-quadrant, kHalfPi2, fma(-quadrant, kHalfPi1, angle)));
  const auto turn = static_cast<uint32_t>(static_cast<int64_t>(quadrant));
  const auto r = static_cast<float>(reduced);
  const float z = __fmul_rn(r, r);
  const float sin_tail =
      fmaf(fmaf(fmaf(1.0f / 362880, z, -1.0f / 5040), z, 1.0f / 120), z, -1.0f / 6);
  const float cos_tail =
      fmaf(fmaf(fmaf(-1.0f / 3628800, z, 1.0f / 40320), z, -1.0f / 720), z, 1.0f / 24);
  const float s = __fmul_rn(fmaf(__fmul_rn(r, z), sin_tail, r), factor);
  const float c = __fmul_rn(fmaf(z, fmaf(z, cos_tail, -0.5f), 1.0f), factor);
  const float swapped_sin = (turn & 1) != 0 ? c : s;
  const float swapped_cos = (turn & 1) != 0 ? s : c;
  return {((turn + 1) & 2) != 0 ? -swapped_cos : swapped_cos,
          (turn & 2) != 0 ? -swapped_sin : swapped_sin};
}

// The pair (x, y) of a head turned by it.
__device__ __forceinline__ float2 rotated(float x, float y, Rotation by) {
  return make_float2(fmaf(-y, by.sin, __fmul_rn(x, by.cos)), fmaf(x, by.sin, __fmul_rn(y, by.cos)));
}

}  // namespace spin::backend::cuda
