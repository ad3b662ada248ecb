// SPDX-License-Identifier: Apache-2.0
#include "text/pretokenizer.h"

#include <array>
#include <cstdint>
#include <utility>

#include <utf8proc.h>

namespace spin::text {
namespace {

enum class Class : uint8_t { kOther, kLetter, kNumber, kSpace };

// White_Space of Unicode; unchanged since 6.3.
bool is_wide_space(char32_t c) {
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

Class classify_wide(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return Class::kLetter;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return Class::kNumber;
    default:
      return is_wide_space(c) ? Class::kSpace : Class::kOther;
  }
}

constexpr std::array<Class, 128> make_ascii_classes() {
  std::array<Class, 128> classes = {};
  for (int c = 0; c < 128; ++c) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    const bool number = c >= '0' && c <= '9';
    const bool space = c == ' ' || (c >= 0x09 && c <= 0x0D);
    classes[static_cast<size_t>(c)] = letter   ? Class::kLetter
                                      : number ? Class::kNumber
                                      : space  ? Class::kSpace
                                               : Class::kOther;
  }
  return classes;
}

constexpr std::array<Class, 128> kAsciiClasses = make_ascii_classes();

struct Char {
  Class type = Class::kOther;
  uint8_t length = 0;  // 0: the end of the text
};

// A view of well-formed UTF-8, read one character at a time.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  Char at(size_t pos) const {
    if (pos >= text_.size()) return {};
    const auto byte = [&](size_t i) { return static_cast<uint8_t>(text_[pos + i]); };
    const char32_t lead = byte(0);
    if (lead < 0x80) return {kAsciiClasses[lead], 1};
    if (lead < 0xE0) {
      return {classify_wide(((lead & 0x1F) << 6) | (byte(1) & 0x3Fu)), 2};
    }
    if (lead < 0xF0) {
      return {classify_wide(((lead & 0x0F) << 12) | ((byte(1) & 0x3Fu) << 6) | (byte(2) & 0x3Fu)),
              3};
    }
    return {classify_wide(((lead & 0x07) << 18) | ((byte(1) & 0x3Fu) << 12) |
                          ((byte(2) & 0x3Fu) << 6) | (byte(3) & 0x3Fu)),
            4};
  }

  // The byte at `pos`, 0 past the end (a NUL in the text fits none of the callers' questions).
  char byte_at(size_t pos) const { return pos < text_.size() ? text_[pos] : '\0'; }
  bool is_newline(size_t pos) const { return byte_at(pos) == '\r' || byte_at(pos) == '\n'; }

  // First position >= pos whose character is not of class `type`.
  size_t skip(size_t pos, Class type) const {
    for (Char c = at(pos); c.length != 0 && c.type == type; c = at(pos)) pos += c.length;
    return pos;
  }

  // `'s|'t|'re|'ve|'m|'ll|'d` at 0; 0 if it does not match. With `fold` in any case, where U+017F
  // (long s) is an s: simple case folding, as the reference engine does.
  size_t contraction(bool fold) const {
    if (byte_at(0) != '\'') return 0;
    const auto letter = [&](size_t pos) {
      const char c = byte_at(pos);
      return fold && c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
    };
    const char first = letter(1);
    const char second = letter(2);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
    if ((first == 'r' || first == 'v') && second == 'e') return 3;
    if (first == 'l' && second == 'l') return 3;
    if (fold && byte_at(1) == '\xC5' && byte_at(2) == '\xBF') return 3;
    return 0;
  }

  // `\s+(?!\S)|\s+` at 0. Requires: white space stands there. A run before other text leaves its
  // last character to the next word, unless it is the only one.
  size_t spaces() const {
    size_t pos = 0;
    size_t last = 0;  // where the last character of the run begins
    for (Char c = at(0); c.length != 0 && c.type == Class::kSpace; c = at(pos)) {
      last = pos;
      pos += c.length;
    }
    return pos == text_.size() || last == 0 ? pos : last;
  }

 private:
  std::string_view text_;
};

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
size_t next_gpt2(std::string_view text) {
  const Scanner scan(text);
  if (const size_t length = scan.contraction(false); length != 0) return length;
  const size_t start = text[0] == ' ' ? 1 : 0;
  const Char c = scan.at(start);
  if (c.length != 0 && c.type != Class::kSpace) return scan.skip(start, c.type);
  return scan.spaces();
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,max_digits}|
// ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
size_t next_qwen2(std::string_view text, int max_digits) {
  const Scanner scan(text);
  if (const size_t length = scan.contraction(true); length != 0) return length;
  const Char first = scan.at(0);
  if (first.type == Class::kLetter) return scan.skip(0, Class::kLetter);
  if (first.type == Class::kNumber) {
    size_t pos = first.length;
    for (int digits = 1; digits < max_digits; ++digits) {
      const Char c = scan.at(pos);
      if (c.length == 0 || c.type != Class::kNumber) break;
      pos += c.length;
    }
    return pos;
  }
  const Char second = scan.at(first.length);
  if (second.length != 0 && second.type == Class::kLetter && !scan.is_newline(0)) {
    return scan.skip(first.length, Class::kLetter);
  }
  const bool space_then_other =
      text[0] == ' ' && second.length != 0 && second.type == Class::kOther;
  if (first.type == Class::kOther || space_then_other) {
    size_t pos = scan.skip(first.length, Class::kOther);
    while (scan.is_newline(pos)) ++pos;
    return pos;
  }
  // White space: up to the last line break of the run, if it has one.
  size_t after_newline = 0;
  size_t pos = 0;
  for (Char c = first; c.length != 0 && c.type == Class::kSpace; c = scan.at(pos)) {
    if (scan.is_newline(pos)) after_newline = pos + 1;
    pos += c.length;
  }
  return after_newline != 0 ? after_newline : scan.spaces();
}

// A digit alone; otherwise GPT-2's expression on the text before the next digit.
size_t next_smollm(std::string_view text) {
  const Scanner scan(text);
  const Char first = scan.at(0);
  if (first.type == Class::kNumber) return first.length;
  // GPT-2's word ends at or before the next digit, except that `\s+(?!\S)` must not see the digit
  // behind a run of spaces and ` ?\p{N}+` must not take the space before it.
  if (first.type == Class::kSpace) {
    const size_t end = scan.skip(0, Class::kSpace);
    if (scan.at(end).length != 0 && scan.at(end).type == Class::kNumber) return end;
  }
  return next_gpt2(text);
}

constexpr std::pair<std::string_view, PreTokenizer> kKnownRegexes[] = {
    {R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
     PreTokenizer::kGpt2},
    {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
     R"(\s*[\r\n]+|\s+(?!\S)|\s+)",
     PreTokenizer::kQwen2},
    {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
     R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     PreTokenizer::kLlama3},
};

}  // namespace

std::optional<PreTokenizer> pretokenizer_by_regex(std::string_view regex) {
  for (const auto& [known, kind] : kKnownRegexes) {
    if (known == regex) return kind;
  }
  return std::nullopt;
}

size_t next_word(PreTokenizer kind, std::string_view text) {
  switch (kind) {
    case PreTokenizer::kGpt2:
      return next_gpt2(text);
    case PreTokenizer::kSmolLm:
      return next_smollm(text);
    case PreTokenizer::kQwen2:
      return next_qwen2(text, 1);
    case PreTokenizer::kLlama3:
      return next_qwen2(text, 3);
  }
  return text.size();
}

}  // namespace spin::text
