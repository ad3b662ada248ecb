// SPDX-License-Identifier: Apache-2.0
// JSON text by appending; responses and stream events are written without a tree in between.
// Nothing here can fail: invalid UTF-8 becomes U+FFFD, a number that JSON has no word for null.
// Thread: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace spin::server {

// With the quotes. Escapes `"`, `\`, control characters and U+2028/U+2029 (line ends for some
// readers), so the result is always one line.
void append_json_string(std::string& out, std::string_view text);

// Shortest form that reads back as the same double; null if not finite.
void append_json_number(std::string& out, double value);

inline void append_json_integer(std::string& out, uint64_t value) { out += std::to_string(value); }

}  // namespace spin::server
