// SPDX-License-Identifier: Apache-2.0
// The one place that knows what well-formed UTF-8 is (RFC 3629: no overlong forms, no surrogates,
// nothing above U+10FFFF). Thread: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace spin::base {

// What stands at the front of a byte string.
struct Utf8Step {
  enum class Kind : uint8_t {
    kValid,       // `length` bytes form `code_point`
    kIncomplete,  // the bytes so far can still become one; more are needed
    kInvalid,     // `length` bytes (>= 1) can never be part of a well-formed sequence; the maximal
                  // subpart of Unicode 3.9, i.e. one U+FFFD stands for them
  };
  Kind kind = Kind::kInvalid;
  size_t length = 0;
  char32_t code_point = 0;
};

// Requires: !bytes.empty().
Utf8Step utf8_step(std::string_view bytes);

bool is_valid_utf8(std::string_view bytes);

// Length of the longest prefix that does not end inside a possibly complete sequence.
size_t utf8_complete_prefix(std::string_view bytes);

// Every invalid part replaced by U+FFFD, as Python's errors="replace" does.
std::string utf8_replace_invalid(std::string_view bytes);

// Appends `code_point`. Requires: a Unicode scalar value.
void append_utf8(char32_t code_point, std::string& out);

}  // namespace spin::base
