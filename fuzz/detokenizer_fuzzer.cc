// SPDX-License-Identifier: Apache-2.0
// The incremental detokenizer and the stop matcher against the plain definitions: any bytes, cut
// anywhere, give the text of one full decode, and stop where a search of the whole text stops.
//
// Input: one byte of flags, stop strings that end in 0xFF (up to three), then token bytes, where
// 0xFE ends a piece. The vocabulary has one token per byte.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/utf8.h"
#include "text/detokenizer.h"
#include "text/stop_matcher.h"
#include "text/tokenizer.h"
#include "text/tokenizer_parts.h"

namespace {

using spin::TokenId;
using spin::text::StopMatcher;
using spin::text::Tokenizer;

// Token i is byte i; token 256 is special.
const Tokenizer& byte_tokenizer() {
  static const std::unique_ptr<Tokenizer> tokenizer = [] {
    spin::text::TokenizerParts parts;
    for (TokenId id = 0; id < 256; ++id) {
      parts.tokens.push_back(std::string(1, static_cast<char>(id)));
      parts.byte_tokens[id] = id;
    }
    parts.tokens.push_back("<end>");
    parts.ordinary.assign(257, true);
    parts.special_ids = {256};
    return Tokenizer::create(std::move(parts)).value();
  }();
  return *tokenizer;
}

// Where the first match ends, and how long the longest match ending there is; npos if none.
std::pair<size_t, size_t> naive_stop(std::string_view text, const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t longest = 0;
    for (const std::string& stop : stops) {
      if (text.substr(0, end).ends_with(stop)) longest = std::max(longest, stop.size());
    }
    if (longest != 0) return {end, longest};
  }
  return {std::string_view::npos, 0};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0 || size > 4096) return 0;
  const bool include_stop = (data[0] & 1) != 0;
  size_t pos = 1;
  std::vector<std::string> stops;
  for (int i = 0; i < ((data[0] >> 1) & 3); ++i) {
    std::string stop;
    while (pos < size && data[pos] != 0xFF) stop.push_back(static_cast<char>(data[pos++]));
    pos += pos < size ? 1 : 0;
    stops.push_back(std::move(stop));
  }
  auto made = StopMatcher::create(stops, include_stop);
  if (!made.ok()) return 0;
  StopMatcher matcher = std::move(made).value();

  spin::text::IncrementalDetokenizer detokenizer(byte_tokenizer());
  std::vector<TokenId> all;
  std::string text, sent;
  const auto take = [&](std::string delta) {
    SPIN_CHECK(spin::base::is_valid_utf8(delta));
    text += delta;
    sent += matcher.feed(delta);
    SPIN_CHECK(spin::base::is_valid_utf8(sent));
    if (!matcher.stopped()) SPIN_CHECK(sent.size() + matcher.held_bytes() == text.size());
  };
  std::vector<TokenId> piece;
  for (; pos <= size; ++pos) {
    if (pos == size || data[pos] == 0xFE) {
      take(detokenizer.feed(piece));
      piece = {256};  // special tokens contribute nothing
      all.push_back(256);
    } else {
      piece.push_back(data[pos]);
      all.push_back(data[pos]);
    }
  }
  take(detokenizer.flush());
  sent += matcher.flush();

  SPIN_CHECK(text == spin::base::utf8_replace_invalid(byte_tokenizer().decode(all, true)));
  const auto [end, length] = naive_stop(text, stops);
  SPIN_CHECK(matcher.stopped() == (end != std::string_view::npos));
  if (matcher.stopped()) text.resize(include_stop ? end : end - length);
  SPIN_CHECK(sent == text);
  return 0;
}
