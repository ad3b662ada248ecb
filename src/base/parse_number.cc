// SPDX-License-Identifier: Apache-2.0
#include "base/parse_number.h"

#include <charconv>
#include <cmath>
#include <system_error>

#include "base/checked_math.h"

namespace spin::base {
namespace {

std::optional<uint64_t> parse_digits(std::string_view text, int radix) {
  uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value, radix);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

std::optional<uint64_t> unit_factor(std::string_view unit) {
  if (unit.empty()) return 1;
  const bool binary = unit.size() == 2 && unit[1] == 'i';
  if (unit.size() > 1 && !binary) return std::nullopt;
  const char letter = unit[0];
  const bool upper = letter >= 'A' && letter <= 'Z';
  const uint64_t base = upper || binary ? 1024 : 1000;
  uint64_t factor = 1;
  for (const char step : {'k', 'm', 'g', 't'}) {
    factor *= base;
    if (letter == step || letter == step - 'a' + 'A') return factor;
  }
  return std::nullopt;
}

}  // namespace

std::optional<uint64_t> parse_decimal(std::string_view text) { return parse_digits(text, 10); }

std::optional<uint64_t> parse_hex(std::string_view text) {
  if (text.empty() || text.size() > 16) return std::nullopt;
  return parse_digits(text, 16);
}

std::optional<uint64_t> parse_size(std::string_view text) {
  const size_t digits = text.find_first_not_of("0123456789");
  const auto value = parse_decimal(text.substr(0, digits));
  const auto factor =
      unit_factor(digits == std::string_view::npos ? std::string_view() : text.substr(digits));
  if (!value || !factor) return std::nullopt;
  return checked_mul(*value, *factor);
}

std::optional<double> parse_double(std::string_view text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || !std::isfinite(value)) return std::nullopt;
  return value;
}

}  // namespace spin::base
