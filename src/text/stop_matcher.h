// SPDX-License-Identifier: Apache-2.0
// Finds stop strings in streamed text, across the borders of its pieces, and holds back only what
// may still become one.
//
// Thread: external synchronisation (one owner per sequence).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "spin/status.h"

namespace spin::text {

// Limits of one matcher; the HTTP layer's own are tighter.
inline constexpr size_t kMaxStopStrings = 64;
inline constexpr size_t kMaxStopBytes = 64u << 10;  // all strings together

// States: running -> stopped (a stop string was seen; everything later is ignored).
// The match that ends first in the text wins; of two that end at the same byte, the one that
// begins first. While running, exactly the longest suffix of the text that is a beginning of a
// stop string is held back. Memory: the stop strings and that suffix. Time: bytes x strings.
class StopMatcher {
 public:
  // `include_stop`: the stop string is part of the text (vLLM's include_stop_str_in_output).
  // Errors: kInvalidArgument for an empty or ill-formed string, or over a limit.
  static Result<StopMatcher> create(std::vector<std::string> stops, bool include_stop = false);

  // Returns the text that may be sent now. Pieces of whole characters give whole characters.
  std::string feed(std::string_view piece);

  // At the end of the sequence: releases what is held back, if no stop was seen.
  std::string flush();

  bool stopped() const { return matched_.has_value(); }
  // The stop string that ended the text, an index into create()'s argument.
  std::optional<size_t> matched_stop() const { return matched_; }
  size_t held_bytes() const { return held_.size(); }

 private:
  struct Pattern {
    std::string text;
    std::vector<uint32_t> border;  // [text.size()]: KMP failure function
    size_t matched = 0;            // bytes of `text` that the input's end matches
  };

  StopMatcher() = default;
  bool advance(char byte);

  std::vector<Pattern> patterns_;
  bool include_stop_ = false;
  std::string held_;
  std::optional<size_t> matched_;
};

}  // namespace spin::text
