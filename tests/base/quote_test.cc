// SPDX-License-Identifier: Apache-2.0
#include "base/quote.h"

#include <string>

#include <gtest/gtest.h>

#include "base/utf8.h"

namespace spin::base {
namespace {

TEST(QuoteText, KeepsPlainTextAndMakesTheRestHarmless) {
  EXPECT_EQ(quote_text("blk.0.attn_q.weight"), "'blk.0.attn_q.weight'");
  EXPECT_EQ(quote_text(""), "''");
  EXPECT_EQ(quote_text("a\nb\x1b[0m\x7f"), "'a?b?[0m?'");
  EXPECT_EQ(quote_text(std::string("a\0b", 3)), "'a?b'");
  EXPECT_EQ(quote_text("\xFF"), "'\xEF\xBF\xBD'");
}

TEST(PrintableText, IsOneLineOfAnyLength) {
  EXPECT_EQ(printable_text("\x1b]0;owned\a\xC3\xA9\xFF"), "?]0;owned?\xC3\xA9\xEF\xBF\xBD");
  const std::string text(1000, 'x');
  EXPECT_EQ(printable_text(text), text);
}

TEST(QuoteText, CutsLongTextBetweenCharacters) {
  const std::string text(79, 'x');
  EXPECT_EQ(quote_text(text + "y"), "'" + text + "y'");
  const std::string cut = quote_text(text + "\xC3\xA9");  // the last character would be torn
  EXPECT_EQ(cut, "'" + text + "...'");
  EXPECT_TRUE(is_valid_utf8(quote_text(std::string(200, '\xF0'))));
}

}  // namespace
}  // namespace spin::base
