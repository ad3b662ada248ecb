// SPDX-License-Identifier: Apache-2.0
#include "server/json_writer.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/utf8.h"

namespace spin::server {
namespace {

std::string json_of(std::string_view text) {
  std::string out;
  append_json_string(out, text);
  return out;
}

TEST(JsonWriter, EveryByteStringBecomesOneLineOfJsonThatReadsBack) {
  uint64_t state = 7;
  auto next = [&state] {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return state >> 33;
  };
  for (int round = 0; round < 3000; ++round) {
    std::string text;
    for (uint64_t i = next() % 24; i > 0; --i) {
      switch (next() % 4) {
        case 0:
          text += static_cast<char>(next() % 256);
          break;
        case 1:
          text += static_cast<char>(next() % 0x30);
          break;
        case 2:
          text += "\xF0\x9F\x98\x80";
          break;
        default:
          text += static_cast<char>(0x80 + next() % 0x80);
          break;
      }
    }
    const std::string json = json_of(text);
    EXPECT_EQ(json.find('\n'), std::string::npos);
    EXPECT_EQ(json.find('\r'), std::string::npos);
    EXPECT_TRUE(base::is_valid_utf8(json));
    const auto read = nlohmann::json::parse(json, nullptr, false);
    ASSERT_TRUE(read.is_string()) << json;
    EXPECT_EQ(read.get<std::string>(), base::utf8_replace_invalid(text));
  }
}

TEST(JsonWriter, EscapesWhatReadersStumbleOver) {
  EXPECT_EQ(json_of("a\"\\\n\r\t\b\f\x01\x7F"), "\"a\\\"\\\\\\n\\r\\t\\b\\f\\u0001\\u007f\"");
  EXPECT_EQ(json_of("\xE2\x80\xA8\xE2\x80\xA9"), "\"\\u2028\\u2029\"");
  EXPECT_EQ(json_of("\xF0\x9F"), "\"\xEF\xBF\xBD\"");
  EXPECT_EQ(json_of(std::string_view("\0", 1)), "\"\\u0000\"");
}

TEST(JsonWriter, NumbersReadBackAndOthersAreNull) {
  for (const double value : {0.0, -0.5, 1e-300, 123456789.125, -9999.0, 0.1}) {
    std::string out;
    append_json_number(out, value);
    EXPECT_EQ(nlohmann::json::parse(out).get<double>(), value);
  }
  for (const double value : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    std::string out;
    append_json_number(out, value);
    EXPECT_EQ(out, "null");
  }
}

}  // namespace
}  // namespace spin::server
