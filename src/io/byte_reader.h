// SPDX-License-Identifier: Apache-2.0
// The one bounds-checked reader for bytes that nobody vouches for. Every read passes through
// need(); nothing is allocated, everything returned is a value or a view of the input.
//
// Thread: external synchronisation (it has a position). Lifetime: views point into the input.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "spin/status.h"

namespace spin::io {

// Little-endian reader. `what` names the field for the error message and is a literal.
// Errors: kCorrupt, "WHAT: expected N bytes at offset O, found M"; the position does not move.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  uint64_t position() const { return position_; }
  uint64_t size() const { return bytes_.size(); }
  uint64_t remaining() const { return bytes_.size() - position_; }

  // Errors: fewer than `count` bytes are left.
  Status need(uint64_t count, std::string_view what) const;

  // Errors: `count` elements of at least `min_element_bytes` each cannot be in what is left. To be
  // called before any loop or reservation that a count from the input governs.
  // Requires: min_element_bytes > 0.
  Status need_elements(uint64_t count, uint64_t min_element_bytes, std::string_view what) const;

  Result<uint8_t> u8(std::string_view what);
  Result<uint16_t> u16(std::string_view what);
  Result<uint32_t> u32(std::string_view what);
  Result<uint64_t> u64(std::string_view what);
  Result<int8_t> i8(std::string_view what);
  Result<int16_t> i16(std::string_view what);
  Result<int32_t> i32(std::string_view what);
  Result<int64_t> i64(std::string_view what);
  Result<float> f32(std::string_view what);
  Result<double> f64(std::string_view what);

  Result<std::span<const std::byte>> bytes(uint64_t count, std::string_view what);
  Status skip(uint64_t count, std::string_view what);

  // A u64 length and that many bytes. Errors: the length is over `max_length` or over what is left.
  Result<std::string_view> string_u64(uint64_t max_length, std::string_view what);

 private:
  template <typename T>
  Result<T> scalar(std::string_view what);

  std::span<const std::byte> bytes_;
  uint64_t position_ = 0;  // <= bytes_.size()
};

}  // namespace spin::io
