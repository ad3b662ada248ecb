// SPDX-License-Identifier: Apache-2.0
#include "text/stop_matcher.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/utf8.h"

namespace spin::text {
namespace {

// border[i]: length of the longest proper prefix of text[0..i] that also ends it.
std::vector<uint32_t> borders_of(std::string_view text) {
  std::vector<uint32_t> border(text.size(), 0);
  uint32_t length = 0;
  for (size_t i = 1; i < text.size(); ++i) {
    while (length > 0 && text[i] != text[length]) length = border[length - 1];
    if (text[i] == text[length]) ++length;
    border[i] = length;
  }
  return border;
}

}  // namespace

Result<StopMatcher> StopMatcher::create(std::vector<std::string> stops, bool include_stop) {
  if (stops.size() > kMaxStopStrings) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("stop: expected at most {} strings, found {}", kMaxStopStrings, stops.size()),
        "stop");
  }
  StopMatcher matcher;
  matcher.include_stop_ = include_stop;
  size_t total_bytes = 0;
  for (std::string& stop : stops) {
    total_bytes += stop.size();
    if (stop.empty() || !base::is_valid_utf8(stop)) {
      return Status(StatusCode::kInvalidArgument,
                    "stop: expected non-empty strings of well-formed UTF-8", "stop");
    }
    if (total_bytes > kMaxStopBytes) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("stop: expected at most {} bytes in all", kMaxStopBytes), "stop");
    }
    std::vector<uint32_t> border = borders_of(stop);
    matcher.patterns_.push_back({std::move(stop), std::move(border), 0});
  }
  return matcher;
}

// Moves all patterns over one byte. Returns whether a stop string ends with it; `matched_` is then
// the longest one, i.e. the one that begins first.
bool StopMatcher::advance(char byte) {
  for (size_t i = 0; i < patterns_.size(); ++i) {
    Pattern& pattern = patterns_[i];
    size_t& length = pattern.matched;
    while (length > 0 && pattern.text[length] != byte) length = pattern.border[length - 1];
    if (pattern.text[length] == byte) ++length;
    if (length < pattern.text.size()) continue;
    if (!matched_ || patterns_[*matched_].text.size() < length) matched_ = i;
  }
  return matched_.has_value();
}

std::string StopMatcher::feed(std::string_view piece) {
  if (stopped()) return {};
  std::string text = std::exchange(held_, {});
  const size_t before = text.size();
  text += piece;
  for (size_t i = 0; i < piece.size(); ++i) {
    if (!advance(piece[i])) continue;
    const size_t end = before + i + 1;
    text.resize(include_stop_ ? end : end - patterns_[*matched_].text.size());
    return text;
  }
  size_t held = 0;
  for (const Pattern& pattern : patterns_) held = std::max(held, pattern.matched);
  held_ = text.substr(text.size() - held);
  text.resize(text.size() - held);
  return text;
}

std::string StopMatcher::flush() {
  for (Pattern& pattern : patterns_) pattern.matched = 0;
  return std::exchange(held_, {});
}

}  // namespace spin::text
