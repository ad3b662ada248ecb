// SPDX-License-Identifier: Apache-2.0
// Integer arithmetic that says when it overflows. Every size that comes from a file or a request
// goes through these before it is used. Thread: pure functions.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>

namespace spin::base {

template <std::unsigned_integral T>
std::optional<T> checked_add(T a, T b) {
  T out = 0;
  if (__builtin_add_overflow(a, b, &out)) return std::nullopt;
  return out;
}

template <std::unsigned_integral T>
std::optional<T> checked_mul(T a, T b) {
  T out = 0;
  if (__builtin_mul_overflow(a, b, &out)) return std::nullopt;
  return out;
}

// Product of all factors; 1 for none.
inline std::optional<uint64_t> checked_product(std::span<const uint64_t> factors) {
  uint64_t product = 1;
  for (uint64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) return std::nullopt;
  }
  return product;
}

// Smallest multiple of `alignment` that is >= value. Requires: alignment is a power of two.
inline std::optional<uint64_t> checked_align_up(uint64_t value, uint64_t alignment) {
  auto sum = checked_add(value, alignment - 1);
  if (!sum) return std::nullopt;
  return *sum & ~(alignment - 1);
}

// `value` as To, or nothing if To cannot hold it.
template <std::integral To, std::integral From>
std::optional<To> checked_cast(From value) {
  To out = 0;
  if (__builtin_add_overflow(value, From{0}, &out)) return std::nullopt;
  return out;
}

// ceil(a / b). Requires: b > 0.
template <std::integral T>
constexpr T ceil_div(T a, T b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

}  // namespace spin::base
