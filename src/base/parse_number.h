// SPDX-License-Identifier: Apache-2.0
// The one checked number parser for outside text (flags, headers, environment). No strto*, stoi or
// atoi anywhere else. Thread: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace spin::base {

// Decimal digits only: no sign, space, prefix or suffix. Nothing on overflow or any other byte.
std::optional<uint64_t> parse_decimal(std::string_view text);

// 1 to 16 hexadecimal digits, nothing else.
std::optional<uint64_t> parse_hex(std::string_view text);

// A decimal number with an optional unit: k = 1000, K or Ki = 1024, m, M or Mi, g, G or Gi, t, T
// or Ti likewise (vLLM's convention: lower case is decimal, upper case binary). "4G" = 4 * 1024^3.
std::optional<uint64_t> parse_size(std::string_view text);

// A finite floating-point number in fixed or scientific notation, the whole text.
std::optional<double> parse_double(std::string_view text);

}  // namespace spin::base
