// SPDX-License-Identifier: Apache-2.0
// Outside text made fit for an error message or a log line. Thread: pure function.
#pragma once

#include <string>
#include <string_view>

namespace spin::base {

// `text` in single quotes: invalid UTF-8 becomes U+FFFD, control characters '?', and what goes
// beyond 80 bytes "...". The result is well-formed UTF-8 on one line.
std::string quote_text(std::string_view text);

}  // namespace spin::base
