// SPDX-License-Identifier: Apache-2.0
// Outside text made fit for an error message or a log line. Thread: pure functions.
#pragma once

#include <string>
#include <string_view>

namespace spin::base {

// `text` as well-formed UTF-8 on one line: invalid bytes become U+FFFD, control characters '?', so
// that no escape sequence of a hostile file reaches a terminal.
std::string printable_text(std::string_view text);

// The same in single quotes, with "..." for what goes beyond 80 bytes.
std::string quote_text(std::string_view text);

}  // namespace spin::base
