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

}  // namespace
}  // namespace spin::base
