// SPDX-License-Identifier: Apache-2.0
#include "io/byte_reader.h"

#include <bit>
#include <cstring>

#include <fmt/format.h>

namespace spin::io {

// The formats are little-endian and so is every machine Spin runs on; a big-endian port has to swap
// in scalar() and in the decoders of block_quant.cc.
static_assert(std::endian::native == std::endian::little);

Status ByteReader::need(uint64_t count, std::string_view what) const {
  if (count <= remaining()) return ok_status();
  return Status(StatusCode::kCorrupt, fmt::format("{}: expected {} bytes at offset {}, found {}",
                                                  what, count, position_, remaining()));
}

Status ByteReader::need_elements(uint64_t count,
                                 uint64_t min_element_bytes,
                                 std::string_view what) const {
  const uint64_t most = remaining() / min_element_bytes;
  if (count <= most) return ok_status();
  return Status(StatusCode::kCorrupt,
                fmt::format("{}: expected at most {} in the {} bytes left at offset {}, found {}",
                            what, most, remaining(), position_, count));
}

template <typename T>
Result<T> ByteReader::scalar(std::string_view what) {
  SPIN_RETURN_IF_ERROR(need(sizeof(T), what));
  T value;
  std::memcpy(&value, bytes_.data() + position_, sizeof(T));
  position_ += sizeof(T);
  return value;
}

Result<uint8_t> ByteReader::u8(std::string_view what) { return scalar<uint8_t>(what); }
Result<uint16_t> ByteReader::u16(std::string_view what) { return scalar<uint16_t>(what); }
Result<uint32_t> ByteReader::u32(std::string_view what) { return scalar<uint32_t>(what); }
Result<uint64_t> ByteReader::u64(std::string_view what) { return scalar<uint64_t>(what); }
Result<int8_t> ByteReader::i8(std::string_view what) { return scalar<int8_t>(what); }
Result<int16_t> ByteReader::i16(std::string_view what) { return scalar<int16_t>(what); }
Result<int32_t> ByteReader::i32(std::string_view what) { return scalar<int32_t>(what); }
Result<int64_t> ByteReader::i64(std::string_view what) { return scalar<int64_t>(what); }
Result<float> ByteReader::f32(std::string_view what) { return scalar<float>(what); }
Result<double> ByteReader::f64(std::string_view what) { return scalar<double>(what); }

Result<std::span<const std::byte>> ByteReader::bytes(uint64_t count, std::string_view what) {
  SPIN_RETURN_IF_ERROR(need(count, what));
  const auto out = bytes_.subspan(position_, count);
  position_ += count;
  return out;
}

Status ByteReader::skip(uint64_t count, std::string_view what) {
  SPIN_RETURN_IF_ERROR(need(count, what));
  position_ += count;
  return ok_status();
}

Result<std::string_view> ByteReader::string_u64(uint64_t max_length, std::string_view what) {
  const uint64_t start = position_;
  SPIN_ASSIGN_OR_RETURN(const uint64_t length, u64(what));
  if (length > max_length) {
    position_ = start;
    return Status(StatusCode::kCorrupt,
                  fmt::format("{}: expected a length of at most {} at offset {}, found {}", what,
                              max_length, start, length));
  }
  Status enough = need(length, what);
  if (!enough.ok()) {
    position_ = start;
    return enough;
  }
  const auto* text = reinterpret_cast<const char*>(bytes_.data() + position_);
  position_ += length;
  return std::string_view(text, length);
}

}  // namespace spin::io
