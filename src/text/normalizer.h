// SPDX-License-Identifier: Apache-2.0
// Unicode normalization form C in linear time. Thread: pure function.
#pragma once

#include <string>
#include <string_view>

namespace spin::text {

// Appends NFC(text) to `out`. Requires: well-formed UTF-8.
// Runs of combining marks are sorted in O(k log k): utf8proc_NFC() itself is quadratic in k, which
// a request could use against the server.
void append_nfc(std::string_view text, std::string& out);

// Whether `text` is certainly unchanged by NFC; false may also mean "not known".
bool is_plain_nfc(std::string_view text);

}  // namespace spin::text
