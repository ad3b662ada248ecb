// SPDX-License-Identifier: Apache-2.0
// IEEE 754 binary16 as a storage type. Thread: pure functions.
#pragma once

#include <bit>
#include <cstdint>

namespace spin::base {

struct Fp16 {
  uint16_t bits = 0;

  friend bool operator==(Fp16, Fp16) = default;
};

// Exact; the payload of a NaN is kept.
inline float to_float(Fp16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1Fu;
  const uint32_t fraction = value.bits & 0x3FFu;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | (fraction << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

}  // namespace spin::base
