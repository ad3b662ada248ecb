// SPDX-License-Identifier: Apache-2.0
// Normalisation, rotation and activation of single rows, for every Highway target.
#include <cmath>
#include <cstdint>

#include "backend/cpu/highway_targets.h"
#include "backend/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/elementwise_kernels.cc"
#include "hwy/foreach_target.h"  // must come before highway.h and -inl.h files
//
#include "backend/cpu/simd_math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spin::backend::cpu {
namespace HWY_NAMESPACE {

void rms_norm(const float* in, const float* weight, int64_t n, float epsilon, float* to) {
  const F32 d;
  VF32 sum0 = hn::Zero(d);
  VF32 sum1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const VF32 a = hn::LoadU(d, in + i);
    const VF32 b = hn::LoadU(d, in + i + kLanes);
    sum0 = hn::MulAdd(a, a, sum0);
    sum1 = hn::MulAdd(b, b, sum1);
  }
  float squares = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
  for (; i < n; ++i) squares += in[i] * in[i];
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon);
  const VF32 factors = hn::Set(d, factor);
  for (i = 0; i + kLanes <= n; i += kLanes) {
    const VF32 scaled = hn::Mul(hn::LoadU(d, in + i), factors);
    hn::StoreU(hn::Mul(scaled, hn::LoadU(d, weight + i)), d, to + i);
  }
  for (; i < n; ++i) to[i] = in[i] * factor * weight[i];
}

// sin and cos of a reduced angle |r| <= pi / 4, by their Taylor polynomials: remainders below
// (pi / 4)^11 / 11! = 2e-9 and (pi / 4)^10 / 10! = 3e-8.
HWY_INLINE float sin_reduced(float r) {
  const float z = r * r;
  const float p = ((1.0f / 362880 * z - 1.0f / 5040) * z + 1.0f / 120) * z - 1.0f / 6;
  return r + r * z * p;
}
HWY_INLINE float cos_reduced(float r) {
  const float z = r * r;
  const float p = ((-1.0f / 3628800 * z + 1.0f / 40320) * z - 1.0f / 720) * z + 1.0f / 24;
  return 1.0f + z * (z * p - 0.5f);
}

// The angle is formed and reduced in double: exact to 2^-27 for positions below 2^27.
void rope_table(
    uint32_t position, const float* inv_freq, int64_t half, float factor, float* cos, float* sin) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  // pi / 2 in three parts; the first two end in so many zero bits that their products with 32-bit
  // quadrants are exact.
  constexpr double kHalfPi1 = 0x1.921fbp0;
  constexpr double kHalfPi2 = 0x5.4442p-24;
  constexpr double kHalfPi3 = 0xd.18469898cc517p-44;
  constexpr double kRounder = 0x1.8p52;  // adding and subtracting it rounds to an integer
  for (int64_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * static_cast<double>(inv_freq[i]);
    const double quadrant = (angle * kTwoOverPi + kRounder) - kRounder;
    const double reduced =
        ((angle - quadrant * kHalfPi1) - quadrant * kHalfPi2) - quadrant * kHalfPi3;
    const auto turn = static_cast<uint64_t>(static_cast<int64_t>(quadrant));
    const float r = static_cast<float>(reduced);
    const float s = sin_reduced(r) * factor;
    const float c = cos_reduced(r) * factor;
    const float swapped_sin = (turn & 1) != 0 ? c : s;
    const float swapped_cos = (turn & 1) != 0 ? s : c;
    sin[i] = (turn & 2) != 0 ? -swapped_sin : swapped_sin;
    cos[i] = ((turn + 1) & 2) != 0 ? -swapped_cos : swapped_cos;
  }
}

void rope_head(float* head, const float* cos, const float* sin, int64_t half) {
  const F32 d;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const VF32 a = hn::LoadU(d, head + i);
    const VF32 b = hn::LoadU(d, head + half + i);
    const VF32 c = hn::LoadU(d, cos + i);
    const VF32 s = hn::LoadU(d, sin + i);
    hn::StoreU(hn::NegMulAdd(b, s, hn::Mul(a, c)), d, head + i);
    hn::StoreU(hn::MulAdd(a, s, hn::Mul(b, c)), d, head + half + i);
  }
  for (; i < half; ++i) {
    const float a = head[i];
    const float b = head[half + i];
    head[i] = a * cos[i] - b * sin[i];
    head[half + i] = b * cos[i] + a * sin[i];
  }
}

HWY_INLINE VF32 silu_product(F32 d, VF32 gate, VF32 up) {
  const VF32 one = hn::Set(d, 1.0f);
  return hn::Mul(hn::Div(gate, hn::Add(one, exp_any(d, hn::Neg(gate)))), up);
}

void silu_mul(const float* gate, const float* up, int64_t n, float* to) {
  const F32 d;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(silu_product(d, hn::LoadU(d, gate + i), hn::LoadU(d, up + i)), d, to + i);
  }
  if (i == n) return;
  HWY_ALIGN float gates[kLanes] = {};
  HWY_ALIGN float ups[kLanes] = {};
  for (int64_t j = i; j < n; ++j) {
    gates[j - i] = gate[j];
    ups[j - i] = up[j];
  }
  hn::Store(silu_product(d, hn::Load(d, gates), hn::Load(d, ups)), d, gates);
  for (int64_t j = i; j < n; ++j) to[j] = gates[j - i];
}

void fill_elementwise(KernelSet& set) {
  set.rms_norm = rms_norm;
  set.rope_table = rope_table;
  set.rope_head = rope_head;
  set.silu_mul = silu_mul;
}

}  // namespace HWY_NAMESPACE
}  // namespace spin::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spin::backend::cpu {

void fill_elementwise_kernels(int64_t target, KernelSet& set) {
  SPIN_CALL_FOR_TARGET(target, fill_elementwise, set);
}

}  // namespace spin::backend::cpu
#endif  // HWY_ONCE
