// SPDX-License-Identifier: Apache-2.0
// Vector functions shared by the kernels, once per instruction set (Highway's re-inclusion).
// Thread: pure functions.
#if defined(SPIN_BACKEND_CPU_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPIN_BACKEND_CPU_SIMD_MATH_INL_H_
#undef SPIN_BACKEND_CPU_SIMD_MATH_INL_H_
#else
#define SPIN_BACKEND_CPU_SIMD_MATH_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spin::backend::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Vectors of at most 16 floats: what a panel unit and a cache line hold.
using F32 = hn::CappedTag<float, 16>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using VF32 = hn::Vec<F32>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F32()));

// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln(2) / 2. exp(r) by its Taylor polynomial of
// degree 7: remainder below r^8 / 8! = 5e-9, less than a tenth of a unit in the last place.
// Returns exp(r) and n.
HWY_INLINE VF32 exp_parts(F32 d, VF32 x, hn::Vec<I32>& n) {
  n = hn::NearestInt(hn::Mul(x, hn::Set(d, 1.44269504f)));
  const VF32 nf = hn::ConvertTo(d, n);
  // ln 2 in two parts; the first has 9 zero bits at its end, so that n * part is exact.
  VF32 r = hn::NegMulAdd(nf, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(nf, hn::Set(d, -2.12194440e-4f), r);
  VF32 p = hn::MulAdd(hn::Set(d, 1.0f / 5040), r, hn::Set(d, 1.0f / 720));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  return hn::MulAdd(p, r, hn::Set(d, 1.0f));
}

// 2^n for n in [-126, 127].
HWY_INLINE VF32 power_of_two(F32 d, hn::Vec<I32> n) {
  return hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(n, hn::Set(I32(), 127))));
}

// exp over all floats: 0 and infinity at the ends, NaN stays NaN. Error: 2 units.
HWY_INLINE VF32 exp_any(F32 d, VF32 x) {
  // Max and Min return their second operand for NaN, so that the integer part is defined.
  const VF32 clamped = hn::Min(hn::Max(x, hn::Set(d, -104.0f)), hn::Set(d, 89.0f));
  const VF32 safe = hn::IfThenElse(hn::Eq(x, x), clamped, hn::Zero(d));
  hn::Vec<I32> n;
  const VF32 p = exp_parts(d, safe, n);
  const hn::Vec<I32> half = hn::ShiftRight<1>(n);
  const VF32 y = hn::Mul(hn::Mul(p, power_of_two(d, half)), power_of_two(d, hn::Sub(n, half)));
  return hn::IfThenElse(hn::Eq(x, x), y, x);
}

// 2^x for x <= 0. Below -126 the result is some number in [0, 2^-126]; NaN stays NaN.
// r = x - round(x) is exact and |r| <= 1/2, so that one Taylor polynomial of degree 7 in r ln 2
// does: its remainder is below (ln(2) / 2)^8 / 8! = 5e-9.
HWY_INLINE VF32 exp2_nonpositive(F32 d, VF32 x) {
#if HWY_TARGET == HWY_SCALAR
  if (!(hn::GetLane(x) == hn::GetLane(x))) return x;  // its conversion would be undefined
#endif
  // Max returns its second operand for NaN.
  const VF32 safe = hn::Max(hn::Set(d, -126.0f), x);
  const hn::Vec<I32> n = hn::NearestInt(safe);
  const VF32 r = hn::Sub(safe, hn::ConvertTo(d, n));
  VF32 p = hn::MulAdd(hn::Set(d, 1.52527338e-5f), r, hn::Set(d, 1.54035304e-4f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.33335581e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 9.61812911e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.55041087e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 2.40226507e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 6.93147181e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  // p in [0.7, 1.42]: adding n to its exponent multiplies by 2^n.
  return hn::BitCast(d, hn::Add(hn::BitCast(I32(), p), hn::ShiftLeft<23>(n)));
}

// The two halves of 2-byte pairs held in 32-bit lanes, as floats: bf16 is the upper half of a
// float.
HWY_INLINE VF32 even_bf16(F32 d, hn::Vec<U32> pairs) {
  return hn::BitCast(d, hn::ShiftLeft<16>(pairs));
}
HWY_INLINE VF32 odd_bf16(F32 d, hn::Vec<U32> pairs) {
  return hn::BitCast(d, hn::And(pairs, hn::Set(U32(), 0xFFFF0000u)));
}

}  // namespace HWY_NAMESPACE
}  // namespace spin::backend::cpu
HWY_AFTER_NAMESPACE();

#endif  // per target
