// SPDX-License-Identifier: Apache-2.0
#include "base/fp16.h"

#include <cmath>

#include <gtest/gtest.h>

namespace spin::base {
namespace {

// The definition of IEEE 754, for all 65,536 numbers.
TEST(Fp16, EqualsTheDefinitionForEveryNumber) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = to_float(Fp16{static_cast<uint16_t>(bits)});
    const int exponent = (bits >> 10) & 31;
    const double fraction = bits & 1023;
    const double sign = (bits & 0x8000) != 0 ? -1 : 1;
    if (exponent == 31 && fraction != 0) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      continue;
    }
    const double expected = exponent == 31  ? HUGE_VAL
                            : exponent == 0 ? std::ldexp(fraction, -24)
                                            : std::ldexp(1024 + fraction, exponent - 25);
    ASSERT_EQ(static_cast<double>(value), sign * expected) << bits;
    ASSERT_EQ(std::signbit(value), sign < 0) << bits;
  }
}

TEST(Fp16, RoundsToTheNearestNumberTiesToEven) {
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const Fp16 here{static_cast<uint16_t>(bits)};
    const Fp16 next{static_cast<uint16_t>(bits + 1)};
    const float low = to_float(here);
    // Past the largest number the next one would be 65536.
    const float high = bits + 1 == 0x7C00 ? 65536.0f : to_float(next);
    const float middle = low + (high - low) / 2;  // exact
    ASSERT_EQ(to_fp16(low), here);
    ASSERT_EQ(to_fp16(std::nextafter(middle, 0.0f)), here) << bits;
    ASSERT_EQ(to_fp16(std::nextafter(middle, 1e9f)), next) << bits;
    ASSERT_EQ(to_fp16(middle), bits % 2 == 0 ? here : next) << bits;
    ASSERT_EQ(to_fp16(-low).bits, bits | 0x8000u);
  }
  EXPECT_EQ(to_fp16(HUGE_VALF).bits, 0x7C00);
  EXPECT_EQ(to_fp16(1e30f).bits, 0x7C00);
  EXPECT_TRUE(std::isnan(to_float(to_fp16(std::nanf("")))));
}

}  // namespace
}  // namespace spin::base
