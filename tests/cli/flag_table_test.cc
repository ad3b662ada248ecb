// SPDX-License-Identifier: Apache-2.0
#include "cli/flag_table.h"

#include <gtest/gtest.h>

namespace spin::cli {
namespace {

TEST(FlagTable, WrapsAtSpacesWithinTheWidth) {
  EXPECT_EQ(wrap_text("aa bb cc", 0, 5), "aa bb\ncc\n");
  EXPECT_EQ(wrap_text("aa bb cc", 2, 5), "  aa\n  bb\n  cc\n");
  EXPECT_EQ(wrap_text("a  b ", 0, 10), "a b\n");
  EXPECT_EQ(wrap_text("", 4, 10), "");
}

TEST(FlagTable, WordsLongerThanALineAreNotCut) {
  EXPECT_EQ(wrap_text("a bbbbbbbb c", 0, 4), "a\nbbbbbbbb\nc\n");
}

TEST(FlagTable, VariablesAreCapitalsWithUnderscores) {
  EXPECT_EQ(environment_name("max-model-len"), "SPIN_MAX_MODEL_LEN");
  EXPECT_EQ(environment_name("model"), "SPIN_MODEL");
}

TEST(FlagTable, RemembersWhatWasGiven) {
  uint32_t a = 1;
  uint32_t b = 2;
  FlagTable table("test", "", "");
  table.add_count({"a", "N", "A"}, a, {0, 9});
  table.add_count({"b", "N", "B"}, b, {0, 9});
  const std::vector<std::string> args = {"--a", "3"};
  ASSERT_TRUE(table.parse(args, [](const char*) { return nullptr; }).ok());
  EXPECT_EQ(a, 3u);
  EXPECT_EQ(b, 2u);
}

TEST(FlagTable, HelpReadsTheDefaultFromTheTarget) {
  uint32_t a = 77;
  FlagTable table("test", "[OPTIONS]", "About.");
  table.group("Group");
  table.add_count({"a", "N", "Some text"}, a, {1, 99});
  EXPECT_EQ(table.help(),
            "Usage: spin test [OPTIONS]\n\nAbout.\n\nGroup:\n  --a N\n"
            "      Some text. Range: an integer from 1 to 99. Default: 77. [SPIN_A]\n"
            "  -h, --help\n      Prints this text.\n");
}

}  // namespace
}  // namespace spin::cli
