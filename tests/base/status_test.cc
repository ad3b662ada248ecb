// SPDX-License-Identifier: Apache-2.0
#include "spin/status.h"

#include <string>

#include <gtest/gtest.h>

#include "base/checked_math.h"
#include "base/parse_number.h"
#include "base/utf8.h"

namespace spin {
namespace {

Result<int> half_of_even(int value) {
  if (value % 2 != 0) return Status(StatusCode::kInvalidArgument, "expected an even number", "n");
  return value / 2;
}

Result<int> quarter(int value) {
  SPIN_ASSIGN_OR_RETURN(const int half, half_of_even(value));
  return half_of_even(half);
}

TEST(Status, ErrorsTravelThroughAssignOrReturn) {
  EXPECT_EQ(*quarter(8), 2);
  EXPECT_EQ(quarter(6).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(quarter(5).status().param(), "n");
}

TEST(Status, ContextIsPutInFront) {
  const Status status(StatusCode::kCorrupt, "truncated");
  EXPECT_EQ(status.with_context("model.gguf").to_string(), "corrupt: model.gguf: truncated");
  EXPECT_TRUE(ok_status().with_context("x").ok());
}

TEST(CheckedMath, OverflowIsNothing) {
  EXPECT_EQ(base::checked_mul<uint64_t>(uint64_t{1} << 32, uint64_t{1} << 32), std::nullopt);
  EXPECT_EQ(base::checked_add<uint64_t>(~uint64_t{0}, 1), std::nullopt);
  EXPECT_EQ(base::checked_align_up(~uint64_t{0} - 3, 32), std::nullopt);
  EXPECT_EQ(base::checked_align_up(33, 32), 64u);
  EXPECT_EQ(base::checked_cast<int32_t>(int64_t{1} << 31), std::nullopt);
  EXPECT_EQ(base::checked_cast<uint32_t>(int64_t{-1}), std::nullopt);
}

TEST(ParseNumber, TakesDigitsOnly) {
  EXPECT_EQ(base::parse_decimal("18446744073709551615"), ~uint64_t{0});
  for (const char* text : {"", "+1", "-1", " 1", "1 ", "0x1", "1.0", "18446744073709551616"}) {
    EXPECT_EQ(base::parse_decimal(text), std::nullopt) << text;
  }
  EXPECT_EQ(base::parse_hex("fF"), 255u);
  for (const char* text : {"", "-2", "0x10", "12345678901234567"}) {
    EXPECT_EQ(base::parse_hex(text), std::nullopt) << text;
  }
}

TEST(ParseNumber, SizesHaveDecimalAndBinaryUnits) {
  EXPECT_EQ(base::parse_size("1k"), 1000u);
  EXPECT_EQ(base::parse_size("1K"), 1024u);
  EXPECT_EQ(base::parse_size("2Gi"), uint64_t{2} << 30);
  EXPECT_EQ(base::parse_size("3m"), 3'000'000u);
  for (const char* text : {"", "K", "1Kb", "1.5G", "-1G", "99999999999999T"}) {
    EXPECT_EQ(base::parse_size(text), std::nullopt) << text;
  }
  EXPECT_EQ(base::parse_double("0.5"), 0.5);
  for (const char* text : {"nan", "inf", "1e999", "0.5x", ""}) {
    EXPECT_EQ(base::parse_double(text), std::nullopt) << text;
  }
}

TEST(Utf8, ReplacesMaximalInvalidParts) {
  const std::string replacement = "\xEF\xBF\xBD";
  EXPECT_EQ(base::utf8_replace_invalid("a\xC3(b"), "a" + replacement + "(b");
  EXPECT_EQ(base::utf8_replace_invalid("\xE2\x82"), replacement);
  EXPECT_EQ(base::utf8_replace_invalid("\xED\xA0\x80"), replacement + replacement + replacement);
  EXPECT_TRUE(base::is_valid_utf8("\xF0\x9F\x98\x80"));
  EXPECT_FALSE(base::is_valid_utf8("\xC0\xAF"));
}

TEST(Utf8, CompletePrefixHoldsBackOnlyUnfinishedSequences) {
  EXPECT_EQ(base::utf8_complete_prefix("ab\xF0\x9F\x98"), 2u);
  EXPECT_EQ(base::utf8_complete_prefix("ab\xF0\x9F\x98\x80"), 6u);
  EXPECT_EQ(base::utf8_complete_prefix("ab\xFF"), 3u);
  EXPECT_EQ(base::utf8_complete_prefix("\x80\x80\x80"), 3u);
}

}  // namespace
}  // namespace spin
