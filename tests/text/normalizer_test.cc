// SPDX-License-Identifier: Apache-2.0
#include "text/normalizer.h"

#include <string>

#include <gtest/gtest.h>

#include "tests/support/cpu_time.h"

namespace spin::text {
namespace {

std::string nfc(std::string_view text) {
  std::string out;
  append_nfc(text, out);
  return out;
}

TEST(Normalizer, ComposesAndOrdersMarks) {
  EXPECT_EQ(nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(nfc("\u00e9"), "\u00e9");
  EXPECT_EQ(nfc("abc e\u0301 xyz"), "abc \u00e9 xyz");
  EXPECT_EQ(nfc("s\u0307\u0323"), "\u1e69");        // marks in the wrong order
  EXPECT_EQ(nfc("a\u0315\u0300"), "\u00e0\u0315");  // and not blocked
  EXPECT_EQ(nfc("\u212b"), "\u00c5");               // a singleton
  EXPECT_EQ(nfc("\u0958"), "\u0915\u093c");         // excluded from composition
  EXPECT_EQ(nfc("\u1100\u1161\u11a8"), "\uac01");
  EXPECT_EQ(nfc("\uac00\u11a8"), "\uac01");
  EXPECT_EQ(nfc(""), "");
  EXPECT_EQ(nfc("\u4f60\u597d, plain"), "\u4f60\u597d, plain");
}

TEST(Normalizer, KeepsHangulTBaseBehindASyllable) {
  EXPECT_EQ(nfc("\uac00\u11a7"), "\uac00\u11a7");
  EXPECT_EQ(nfc("\u1100\u1161\u11a7\u11a7x"), "\uac00\u11a7\u11a7x");
  EXPECT_EQ(nfc("\u11a7\u0323\u0307"), "\u11a7\u0323\u0307");
}

TEST(Normalizer, PlainTextIsFixed) {
  EXPECT_TRUE(is_plain_nfc("plain ASCII"));
  EXPECT_TRUE(is_plain_nfc("\u4f60\u597d\U0001f600"));
  EXPECT_FALSE(is_plain_nfc("e\u0301"));
  EXPECT_FALSE(is_plain_nfc("\u212b"));
}

// The classic way to sort marks is quadratic: 2 * 10^5 of them would take minutes.
TEST(Normalizer, SortsLongRunsOfMarksInTime) {
  std::string text = "a";
  for (int i = 0; i < 100000; ++i) text += "\u0301\u0323";
  const double begin = testing::cpu_seconds();
  const std::string out = nfc(text);
  const double seconds = testing::cpu_seconds() - begin;
  EXPECT_TRUE(out.starts_with("\u1ea1"));
  EXPECT_LT(seconds, 10.0);
}

}  // namespace
}  // namespace spin::text
