// SPDX-License-Identifier: Apache-2.0
#include "io/json.h"

#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/io/io_test_support.h"

namespace spin::io {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string repeat(std::string_view text, size_t count) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out += text;
  return out;
}

TEST(Json, BuildsTheSameTreeAsTheLibrary) {
  for (
      const std::string text : {
          R"({"a":[1,-2,3.5,true,false,null,"x"],"b":{"c":{}, "d":[]},"e":"\u00e9\ud83d\ude00\n"})",
          R"([[],[[]],{"a":[{"b":1},{"b":2}]}])",
          R"("text")",
          "  -0.0e-3  ",
          "18446744073709551615",
          "-9223372036854775808",
          "18446744073709551616",
          R"({"":""})",
          "\"caf\xC3\xA9\"",
      }) {
    const auto parsed = parse_json(text);
    ASSERT_TRUE(parsed.ok()) << text << ": " << parsed.status().to_string();
    EXPECT_EQ(*parsed, nlohmann::json::parse(text)) << text;
    EXPECT_EQ(parsed->dump(), nlohmann::json::parse(text).dump()) << text;
  }
}

TEST(Json, RefusesWhatIsNotStrictJson) {
  const std::vector<std::string> bad = {
      "",
      " ",
      "{",
      "[",
      "\"",
      "[1,]",
      "{\"a\":1,}",
      "{\"a\"}",
      "{a:1}",
      "{'a':1}",
      "[1 2]",
      "tru",
      "nul",
      "NaN",
      "Infinity",
      "-Infinity",
      "[nan]",
      "+1",
      "01",
      "1.",
      ".5",
      "1e",
      "0x10",
      "--1",
      "1e999",
      "-1e999",
      "[1e400]",
      "1 2",
      "{} x",
      "[]]",
      "// c\n1",
      "/* c */ 1",
      "\xEF\xBB\xBF{}",            // byte order mark
      std::string("{}\0", 3),      // NUL after the value
      std::string("[1,\0 2]", 7),  // NUL inside
      "\"\xFF\"",
      "\"\xC0\x80\"",
      "\"\xED\xA0\x80\"",
      "\"\xF5\x80\x80\x80\"",
      "\"\xE2\x82\"",
      R"("\ud800")",
      R"("\ud800x")",
      R"("\ud800\ud800")",
      R"("\udc00")",
      R"("\udc00\ud800")",
      R"("\x41")",
      R"("\u12g4")",
      "\"a\nb\"",
      "\"\x01\"",
      R"({"a":1,"a":1})",
      R"({"a":{"b":1,"c":2,"b":3}})",
      R"({"\u0061":1,"a":2})",
  };
  for (const std::string& text : bad) {
    const auto parsed = parse_json(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(parsed.status().code(), StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(parsed.status().message(), HasSubstr("expected")) << text;
    EXPECT_THAT(parsed.status().message(), HasSubstr("found")) << text;
  }
}

TEST(Json, SaysWhereAndDoesNotRepeatTheText) {
  EXPECT_EQ(parse_json(R"({"prompt": "secret", oops})").status().message(),
            "JSON: expected well-formed text, found 'o' at byte 21");
  EXPECT_EQ(parse_json("[1,2").status().message(),
            "JSON: expected more, found the end of the text at byte 4");
  const auto twice = parse_json(R"({"secret":1,"secret":2})");
  ASSERT_FALSE(twice.ok());
  EXPECT_THAT(twice.status().message(), Not(HasSubstr("secret")));
}

TEST(Json, LimitsDepthExactly) {
  JsonLimits limits;
  limits.max_depth = 64;
  const auto nested = [](size_t depth) { return repeat("[", depth) + repeat("]", depth); };
  EXPECT_TRUE(parse_json(nested(64), limits).ok());
  EXPECT_EQ(parse_json(nested(65), limits).status().code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(parse_json(repeat("{\"a\":", 64) + "1" + repeat("}", 64), limits).ok());
  EXPECT_FALSE(parse_json(repeat("{\"a\":", 65) + "1" + repeat("}", 65), limits).ok());
  // Ten million brackets must neither overflow a stack nor be read to the end.
  EXPECT_FALSE(parse_json(repeat("[", 10'000'000), limits).ok());
}

TEST(Json, LimitsBytesValuesAndMemoryExactly) {
  JsonLimits limits;
  limits.max_bytes = 5;
  EXPECT_TRUE(parse_json("[1,2]", limits).ok());
  EXPECT_EQ(parse_json("[1,22]", limits).status().code(), StatusCode::kResourceExhausted);
  limits = {};
  limits.max_values = 4;  // the array and three numbers; or the object, a key and a value
  EXPECT_TRUE(parse_json("[1,2,3]", limits).ok());
  EXPECT_EQ(parse_json("[1,2,3,4]", limits).status().code(), StatusCode::kResourceExhausted);
  EXPECT_FALSE(parse_json(R"({"a":1,"b":2})", limits).ok());
  limits = {};
  limits.max_memory_bytes = 1000;
  EXPECT_TRUE(parse_json("\"" + std::string(800, 'x') + "\"", limits).ok());
  EXPECT_FALSE(parse_json("\"" + std::string(1000, 'x') + "\"", limits).ok());
}

// The texts that make the most tree per byte; the estimate must hold for each.
TEST(Json, StopsBeforeASmallTextBecomesAHugeTree) {
  JsonLimits limits;
  limits.max_memory_bytes = 16u << 20;
  for (const std::string_view element : {R"({"":{}},)", "[],", "0,", R"("0123456789abcdef",)",
                                         R"({"0123456789abcdef":0},)", R"("",)"}) {
    std::string text = "[";
    while (text.size() < (16u << 20)) text += element;
    text += "0]";
    testing::AllocationWatch watch;
    const auto parsed = parse_json(text, limits);
    ASSERT_FALSE(parsed.ok()) << element;
    EXPECT_EQ(parsed.status().code(), StatusCode::kResourceExhausted);
    // A growing array briefly exists twice.
    EXPECT_LE(watch.peak(), limits.max_memory_bytes * 3 / 2) << element;
  }
}

TEST(Json, ParsesAMillionTokenIdsQuickly) {
  std::string text = R"({"model":"m","prompt":[)";
  for (int i = 0; i < 1'000'000; ++i) text += std::to_string(100'000 + i % 50'000) + ",";
  text += "7]}";
  const double start = testing::cpu_seconds();
  const auto parsed = parse_json(text);
  const double spent = testing::cpu_seconds() - start;
  ASSERT_TRUE(parsed.ok()) << parsed.status().to_string();
  EXPECT_EQ((*parsed)["prompt"].size(), 1'000'001u);
  EXPECT_EQ((*parsed)["prompt"][1'000'000], 7);
#ifndef SPIN_SANITIZED
  EXPECT_LT(spent, 0.2);  // seconds; 0.04 to 0.08 measured
#else
  static_cast<void>(spent);
#endif
}

}  // namespace
}  // namespace spin::io
