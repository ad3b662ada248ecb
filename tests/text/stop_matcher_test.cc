// SPDX-License-Identifier: Apache-2.0
#include "text/stop_matcher.h"

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/utf8.h"
#include "tests/support/cpu_time.h"
#include "tests/text/random_text.h"

namespace spin::text {
namespace {

using testing::SplitMix64;

StopMatcher make(std::vector<std::string> stops, bool include_stop = false) {
  auto matcher = StopMatcher::create(std::move(stops), include_stop);
  EXPECT_TRUE(matcher.ok()) << matcher.status().to_string();
  return std::move(matcher).value();
}

// B098: nothing of a beginning stop string is sent.
TEST(StopMatcher, HoldsBackTheBeginningOfAStop) {
  StopMatcher matcher = make({"DEFGHIJ"});
  EXPECT_EQ(matcher.feed("ABCDEF"), "ABC");
  EXPECT_EQ(matcher.feed("G"), "");
  EXPECT_EQ(matcher.feed("HI"), "");
  EXPECT_EQ(matcher.held_bytes(), 6u);
  EXPECT_EQ(matcher.feed("Jxyz"), "");
  EXPECT_TRUE(matcher.stopped());
  EXPECT_EQ(matcher.feed("more"), "");
  EXPECT_EQ(matcher.flush(), "");
}

// B100 and B101: only what is ambiguous is held, and it comes back in full.
TEST(StopMatcher, ReleasesWhatTurnsOutHarmless) {
  StopMatcher matcher = make({"\nUser:"});
  EXPECT_EQ(matcher.feed("hi\nUser"), "hi");
  EXPECT_EQ(matcher.feed("s and\n"), "\nUsers and");
  EXPECT_EQ(matcher.flush(), "\n");
  StopMatcher overlapping = make({"aab"});
  EXPECT_EQ(overlapping.feed("aaa"), "a");
  EXPECT_EQ(overlapping.feed("b"), "");
  EXPECT_TRUE(overlapping.stopped());
}

TEST(StopMatcher, TheMatchThatEndsFirstWins) {
  StopMatcher first = make({"abcdef", "cd"});
  EXPECT_EQ(first.feed("xabcdef"), "xab");
  EXPECT_EQ(first.matched_stop(), 1u);
  // Of two that end together the one that begins first wins.
  StopMatcher together = make({"cd", "bcd"});
  EXPECT_EQ(together.feed("abcd"), "a");
  EXPECT_EQ(together.matched_stop(), 1u);
}

TEST(StopMatcher, MayIncludeTheStop) {
  StopMatcher matcher = make({"</s>"}, true);
  EXPECT_EQ(matcher.feed("ok</"), "ok");
  EXPECT_EQ(matcher.feed("s>rest"), "</s>");
  EXPECT_TRUE(matcher.stopped());
}

TEST(StopMatcher, WithoutStopsPassesEverythingOn) {
  StopMatcher matcher = make({});
  EXPECT_EQ(matcher.feed("anything"), "anything");
  EXPECT_EQ(matcher.flush(), "");
  EXPECT_FALSE(matcher.stopped());
}

TEST(StopMatcher, RefusesWhatIsNoStop) {
  EXPECT_EQ(StopMatcher::create({""}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(StopMatcher::create({"ok", "\x80"}).status().param(), "stop");
  EXPECT_FALSE(StopMatcher::create(std::vector<std::string>(kMaxStopStrings + 1, "x")).ok());
  EXPECT_FALSE(StopMatcher::create({std::string(kMaxStopBytes + 1, 'x')}).ok());
}

// What the whole text gives, by trying every place.
struct Naive {
  std::string text;
  bool stopped = false;
};

Naive search(const std::string& text, const std::vector<std::string>& stops, bool include_stop) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t longest = 0;
    for (const std::string& stop : stops) {
      if (std::string_view(text).substr(0, end).ends_with(stop))
        longest = std::max(longest, stop.size());
    }
    if (longest != 0) return {text.substr(0, include_stop ? end : end - longest), true};
  }
  return {text, false};
}

// The longest suffix of `text` that begins a stop string.
size_t ambiguous(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t length = text.size(); length > 0; --length) {
    for (const std::string& stop : stops) {
      if (length < stop.size() && stop.starts_with(text.substr(text.size() - length)))
        return length;
    }
  }
  return 0;
}

TEST(StopMatcher, EqualsASearchOfTheWholeText) {
  SplitMix64 rng(31);
  const auto word = [&rng](size_t most) {
    std::string text;
    const size_t length = 1 + rng.below(most);
    for (size_t i = 0; i < length; ++i) text += "aab\u00e9"[rng.below(3)];
    return rng.below(6) == 0 ? text + "\u00e9" : text;
  };
  for (int run = 0; run < 20000; ++run) {
    std::vector<std::string> stops(rng.below(4));
    for (std::string& stop : stops) stop = word(5);
    const bool include_stop = rng.below(2) == 0;
    StopMatcher matcher = make(stops, include_stop);
    std::string fed, sent;
    for (int piece = 0; piece < 6 && !matcher.stopped(); ++piece) {
      const std::string text = word(6);
      fed += text;
      sent += matcher.feed(text);
      ASSERT_TRUE(base::is_valid_utf8(sent));
      if (!matcher.stopped()) {
        ASSERT_EQ(matcher.held_bytes(), ambiguous(fed, stops));
        ASSERT_EQ(sent.size() + matcher.held_bytes(), fed.size());
      }
    }
    sent += matcher.flush();
    const Naive expected = search(fed, stops, include_stop);
    ASSERT_EQ(sent, expected.text);
    ASSERT_EQ(matcher.stopped(), expected.stopped);
  }
}

TEST(StopMatcher, TakesLinearTimeOnRepetitiveText) {
  StopMatcher matcher = make({std::string(30000, 'a') + "b"});
  const double begin = testing::cpu_seconds();
  size_t sent = 0;
  for (int i = 0; i < 100; ++i) sent += matcher.feed(std::string(10000, 'a')).size();
  const double seconds = testing::cpu_seconds() - begin;
  EXPECT_EQ(sent, 1000000u - 30000u);
  EXPECT_EQ(matcher.held_bytes(), 30000u);
  EXPECT_LT(seconds, 5.0);  // the naive search needs 3 * 10^10 comparisons
}

}  // namespace
}  // namespace spin::text
