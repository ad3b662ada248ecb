// SPDX-License-Identifier: Apache-2.0
#include "text/normalizer.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include <utf8proc.h>

#include "base/check.h"
#include "base/utf8.h"

namespace spin::text {
namespace {

using CodePoint = utf8proc_int32_t;

bool is_ascii(char byte) { return static_cast<uint8_t>(byte) < 0x80; }

// Neither decomposes nor takes part in a composition: it is itself under NFC, and nothing around
// it can change that.
bool is_plain(CodePoint c) {
  if ((c >= 0x1100 && c <= 0x11FF) || (c >= 0xA960 && c <= 0xA97F) ||
      (c >= 0xD7B0 && c <= 0xD7FF)) {
    return false;  // conjoining Hangul, composed by arithmetic
  }
  const utf8proc_property_t* property = utf8proc_get_property(c);
  return property->combining_class == 0 && property->decomp_seqindex == UINT16_MAX &&
         property->comb_index == UINT16_MAX;
}

// Decomposes, orders and composes one stretch.
void append_composed_part(std::string_view text, std::string& out) {
  std::vector<CodePoint> points;
  points.reserve(text.size());
  constexpr int kMaxDecomposition = 8;  // the longest canonical one has 4
  while (!text.empty()) {
    const base::Utf8Step step = base::utf8_step(text);
    CodePoint buffer[kMaxDecomposition];
    int last_boundclass = 0;
    const utf8proc_ssize_t count =
        utf8proc_decompose_char(static_cast<CodePoint>(step.code_point), buffer, kMaxDecomposition,
                                UTF8PROC_DECOMPOSE, &last_boundclass);
    SPIN_CHECK(count >= 0 && count <= kMaxDecomposition);
    points.insert(points.end(), buffer, buffer + count);
    text.remove_prefix(step.length);
  }
  const auto order = [](CodePoint c) { return utf8proc_get_property(c)->combining_class; };
  for (auto begin = points.begin(); begin != points.end();) {
    if (order(*begin) == 0) {
      ++begin;
      continue;
    }
    const auto end = std::find_if(begin, points.end(), [&](CodePoint c) { return order(c) == 0; });
    std::stable_sort(begin, end, [&](CodePoint a, CodePoint b) { return order(a) < order(b); });
    begin = end;
  }
  const utf8proc_ssize_t count =
      utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(points.size()),
                               static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  SPIN_CHECK(count >= 0);
  for (utf8proc_ssize_t i = 0; i < count; ++i) {
    base::append_utf8(static_cast<char32_t>(points[static_cast<size_t>(i)]), out);
  }
}

// utf8proc 2.8 takes U+11A7 for a trailing consonant and drops it behind a Hangul syllable. It is a
// starter that composes with nothing, so the text may be cut in front of it.
void append_composed(std::string_view text, std::string& out) {
  constexpr std::string_view kHangulTBase = "\xE1\x86\xA7";
  while (true) {
    const size_t cut = text.find(kHangulTBase, 1);
    append_composed_part(text.substr(0, cut), out);
    if (cut == std::string_view::npos) return;
    text.remove_prefix(cut);
  }
}

}  // namespace

bool is_plain_nfc(std::string_view text) {
  while (!text.empty()) {
    if (is_ascii(text[0])) {
      text.remove_prefix(1);
      continue;
    }
    const base::Utf8Step step = base::utf8_step(text);
    if (!is_plain(static_cast<CodePoint>(step.code_point))) return false;
    text.remove_prefix(step.length);
  }
  return true;
}

void append_nfc(std::string_view text, std::string& out) {
  // An ASCII character composes with marks behind it and with nothing before it, so the text falls
  // apart in front of every ASCII character; plain stretches are copied.
  size_t pos = 0;
  while (pos < text.size()) {
    size_t end = pos + 1;
    if (is_ascii(text[pos])) {
      while (end < text.size() && is_ascii(text[end])) ++end;
      if (end == text.size()) {
        out.append(text.substr(pos));
        return;
      }
      out.append(text.substr(pos, end - 1 - pos));
      pos = end - 1;  // the last ASCII character, with what follows it
    }
    while (end < text.size() && !is_ascii(text[end])) ++end;
    const std::string_view stretch = text.substr(pos, end - pos);
    if (is_plain_nfc(stretch)) {
      out.append(stretch);
    } else {
      append_composed(stretch, out);
    }
    pos = end;
  }
}

}  // namespace spin::text
