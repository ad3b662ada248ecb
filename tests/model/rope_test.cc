// SPDX-License-Identifier: Apache-2.0
// RoPE tables against published numbers and against the formulas' own limits.
#include "model/rope.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace spin::model {
namespace {

std::vector<float> plain(double theta, uint32_t head_dim) {
  return make_rope_table({.theta = theta}, head_dim, {}).inv_freq;
}

TEST(Rope, PlainFrequenciesAreAGeometricSeries) {
  const std::vector<float> f = plain(10000.0, 64);
  ASSERT_EQ(f.size(), 32u);
  EXPECT_FLOAT_EQ(f[0], 1.0f);
  EXPECT_FLOAT_EQ(f[16], 0.01f);
  EXPECT_FLOAT_EQ(f[8], 0.1f);
}

TEST(Rope, LinearDividesEveryFrequency) {
  const std::vector<float> f = plain(10000.0, 64);
  const RopeTable table = make_rope_table({.scaling = RopeScaling::kLinear, .factor = 4.0}, 64, {});
  for (size_t i = 0; i < f.size(); ++i) EXPECT_FLOAT_EQ(table.inv_freq[i], f[i] / 4.0f);
  EXPECT_EQ(table.attention_factor, 1.0f);
}

// Llama 3.1: wavelengths below 2,048 stay, those above 8,192 are divided by 8.
TEST(Rope, Llama3KeepsShortAndDividesLongWavelengths) {
  const RopeConfig config{.theta = 500000.0,
                          .scaling = RopeScaling::kLlama3,
                          .factor = 8.0,
                          .original_positions = 8192};
  const std::vector<float> f = plain(500000.0, 128);
  const std::vector<float> scaled = make_rope_table(config, 128, {}).inv_freq;
  int kept = 0;
  int divided = 0;
  int between = 0;
  for (size_t i = 0; i < f.size(); ++i) {
    const double wavelength = 2.0 * M_PI / f[i];
    if (wavelength < 2048.0) {
      EXPECT_EQ(scaled[i], f[i]);
      ++kept;
    } else if (wavelength > 8192.0) {
      EXPECT_FLOAT_EQ(scaled[i], f[i] / 8.0f);
      ++divided;
    } else {
      const double s = (8192.0 / wavelength - 1.0) / 3.0;
      EXPECT_NEAR(scaled[i], f[i] * ((1.0 - s) / 8.0 + s), 1e-6 * f[i]);
      ++between;
    }
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(divided, 0);
  EXPECT_GT(between, 0);
}

// Qwen3 at 128K: factor 4 over 32,768 gives 0.1 ln 4 + 1 = 1.1386 on cos and sin.
TEST(Rope, YarnOfQwen3HasItsPublishedAttentionFactor) {
  const RopeConfig config{
      .theta = 1e6, .scaling = RopeScaling::kYarn, .factor = 4.0, .original_positions = 32768};
  const RopeTable table = make_rope_table(config, 128, {});
  EXPECT_NEAR(table.attention_factor, 1.1386, 5e-5);
  const std::vector<float> f = plain(1e6, 128);
  // d(32) = 23.6 and d(1) = 39.7: the ramp runs from dimension 23 to 40.
  EXPECT_EQ(table.inv_freq[0], f[0]);
  EXPECT_EQ(table.inv_freq[23], f[23]);
  EXPECT_LT(table.inv_freq[24], f[24]);
  EXPECT_NEAR(table.inv_freq[24], f[24] * (16.0 / 17 + 1.0 / 17 / 4), 1e-6 * f[24]);
  EXPECT_GT(table.inv_freq[39], f[39] / 4);
  EXPECT_FLOAT_EQ(table.inv_freq[40], f[40] / 4);
  EXPECT_FLOAT_EQ(table.inv_freq[63], f[63] / 4);
}

TEST(Rope, YarnWithoutTruncationUsesTheExactEndsOfTheRamp) {
  RopeConfig config{.theta = 1e6,
                    .scaling = RopeScaling::kYarn,
                    .factor = 4.0,
                    .original_positions = 32768,
                    .truncate = false};
  const auto end = [](double rotations) {
    return 128 * std::log(32768 / (rotations * 2 * M_PI)) / (2 * std::log(1e6));
  };
  const std::vector<float> f = plain(1e6, 128);
  const std::vector<float> scaled = make_rope_table(config, 128, {}).inv_freq;
  const double keep = 1.0 - (30 - end(32)) / (end(1) - end(32));
  EXPECT_NEAR(scaled[30], f[30] * (keep + (1 - keep) / 4), 1e-6 * f[30]);
}

TEST(Rope, YarnTakesItsAttentionFactorFromWhatIsGiven) {
  RopeConfig config{.scaling = RopeScaling::kYarn, .factor = 40.0, .original_positions = 4096};
  const auto factor = [&] { return make_rope_table(config, 64, {}).attention_factor; };
  EXPECT_FLOAT_EQ(factor(), static_cast<float>(0.1 * std::log(40.0) + 1.0));
  config.mscale = 0.707;
  EXPECT_FLOAT_EQ(factor(), static_cast<float>(0.1 * std::log(40.0) + 1.0))
      << "mscale alone does nothing";
  config.mscale_all_dim = 1.0;
  EXPECT_FLOAT_EQ(
      factor(), static_cast<float>((0.0707 * std::log(40.0) + 1.0) / (0.1 * std::log(40.0) + 1.0)));
  config.attention_factor = 1.5;
  EXPECT_FLOAT_EQ(factor(), 1.5f);
  config = {.scaling = RopeScaling::kYarn, .factor = 1.0, .original_positions = 4096};
  EXPECT_FLOAT_EQ(factor(), 1.0f);
}

TEST(Rope, YarnRampOfNoWidthDividesByNothing) {
  // Both ends fall on dimension 0.
  const RopeConfig config{.scaling = RopeScaling::kYarn,
                          .factor = 2.0,
                          .original_positions = 1,
                          .beta_fast = 2.0,
                          .beta_slow = 1.0};
  ASSERT_TRUE(check_rope(config).ok());
  for (float f : make_rope_table(config, 8, {}).inv_freq) EXPECT_TRUE(std::isfinite(f));
}

TEST(Rope, DivisorsOfAGgufFileDivideTheFrequencies) {
  const std::vector<float> divisors = {1.0f, 2.0f, 8.0f, 8.0f};
  const std::vector<float> f = plain(500000.0, 8);
  const std::vector<float> scaled = make_rope_table({.theta = 500000.0}, 8, divisors).inv_freq;
  for (size_t i = 0; i < 4; ++i) EXPECT_FLOAT_EQ(scaled[i], f[i] / divisors[i]);
}

TEST(Rope, RefusesParametersThatAreNotNumbersOrOutOfRange) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  for (double bad : {nan, infinity, -infinity, 0.0, -1.0, 1e300}) {
    EXPECT_FALSE(check_rope({.theta = bad}).ok()) << bad;
    EXPECT_FALSE(check_rope({.scaling = RopeScaling::kLinear, .factor = bad}).ok()) << bad;
    EXPECT_FALSE(check_rope({.scaling = RopeScaling::kYarn,
                             .factor = 4,
                             .original_positions = 32,
                             .beta_fast = bad})
                     .ok())
        << bad;
    EXPECT_FALSE(check_rope({.scaling = RopeScaling::kYarn,
                             .factor = 4,
                             .original_positions = 32,
                             .attention_factor = bad})
                     .ok())
        << bad;
  }
  EXPECT_FALSE(check_rope({.scaling = RopeScaling::kYarn, .factor = 4}).ok())
      << "original_positions is missing";
  EXPECT_FALSE(check_rope({.scaling = RopeScaling::kLlama3,
                           .factor = 8,
                           .original_positions = 8192,
                           .low_freq_factor = 4,
                           .high_freq_factor = 4})
                   .ok());
}

}  // namespace
}  // namespace spin::model
