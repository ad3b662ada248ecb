// SPDX-License-Identifier: Apache-2.0
// bfloat16 as a storage type (g++ 12 has no __bf16). Thread: pure functions.
#pragma once

#include <bit>
#include <cstdint>

namespace spin::base {

struct Bf16 {
  uint16_t bits = 0;

  friend bool operator==(Bf16, Bf16) = default;
};

inline float to_float(Bf16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
inline Bf16 to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  const uint32_t rounding = 0x7FFFu + ((bits >> 16) & 1u);
  return {static_cast<uint16_t>((bits + rounding) >> 16)};
}

}  // namespace spin::base
