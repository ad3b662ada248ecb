// SPDX-License-Identifier: Apache-2.0
// The key/value section of a GGUF file: reading and typed look-up.
#include <algorithm>
#include <array>
#include <numeric>

#include <fmt/format.h>

#include "base/checked_math.h"
#include "base/quote.h"
#include "io/byte_reader.h"
#include "io/gguf.h"

namespace spin::io {
namespace {

using base::quote_text;

// Shortest possible entry: key length, empty key, type, one byte of value.
constexpr uint64_t kMinEntryBytes = 8 + 4 + 1;
constexpr uint64_t kStringLengthBytes = 8;

struct TypeRow {
  GgufType type;
  std::string_view name;
  uint32_t bytes;  // 0: not of fixed size
};
constexpr std::array<TypeRow, 13> kTypes = {{
    {GgufType::kU8, "u8", 1},
    {GgufType::kI8, "i8", 1},
    {GgufType::kU16, "u16", 2},
    {GgufType::kI16, "i16", 2},
    {GgufType::kU32, "u32", 4},
    {GgufType::kI32, "i32", 4},
    {GgufType::kF32, "f32", 4},
    {GgufType::kBool, "bool", 1},
    {GgufType::kString, "string", 0},
    {GgufType::kArray, "array", 0},
    {GgufType::kU64, "u64", 8},
    {GgufType::kI64, "i64", 8},
    {GgufType::kF64, "f64", 8},
}};

const TypeRow& row_of(GgufType type) { return kTypes[static_cast<size_t>(type)]; }

Status corrupt(std::string message) { return Status(StatusCode::kCorrupt, std::move(message)); }

Status wrong_type(std::string_view wanted, GgufType found) {
  return Status(StatusCode::kInvalidArgument,
                fmt::format("expected {}, found {}", wanted, row_of(found).name));
}

Result<GgufType> read_type(ByteReader& reader, std::string_view what) {
  const uint64_t offset = reader.position();
  SPIN_ASSIGN_OR_RETURN(const uint32_t id, reader.u32(what));
  if (id >= kTypes.size()) {
    return corrupt(fmt::format("{}: expected 0 to {} at offset {}, found {}", what,
                               kTypes.size() - 1, offset, id));
  }
  return static_cast<GgufType>(id);
}

// The decoders below take the bytes of one scalar. Their length was checked at open, and the reader
// checks it again.
Result<uint64_t> decode_uint(GgufType type, std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  int64_t value = 0;
  switch (type) {
    case GgufType::kU8: {
      SPIN_ASSIGN_OR_RETURN(const uint8_t number, reader.u8("value"));
      return uint64_t{number};
    }
    case GgufType::kU16: {
      SPIN_ASSIGN_OR_RETURN(const uint16_t number, reader.u16("value"));
      return uint64_t{number};
    }
    case GgufType::kU32: {
      SPIN_ASSIGN_OR_RETURN(const uint32_t number, reader.u32("value"));
      return uint64_t{number};
    }
    case GgufType::kU64:
      return reader.u64("value");
    case GgufType::kI8: {
      SPIN_ASSIGN_OR_RETURN(value, reader.i8("value"));
      break;
    }
    case GgufType::kI16: {
      SPIN_ASSIGN_OR_RETURN(value, reader.i16("value"));
      break;
    }
    case GgufType::kI32: {
      SPIN_ASSIGN_OR_RETURN(value, reader.i32("value"));
      break;
    }
    case GgufType::kI64: {
      SPIN_ASSIGN_OR_RETURN(value, reader.i64("value"));
      break;
    }
    default:
      return wrong_type("an integer", type);
  }
  if (value < 0) return corrupt(fmt::format("expected a number of 0 or more, found {}", value));
  return static_cast<uint64_t>(value);
}

Result<int64_t> decode_int(GgufType type, std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  switch (type) {
    case GgufType::kI8: {
      SPIN_ASSIGN_OR_RETURN(const int8_t number, reader.i8("value"));
      return int64_t{number};
    }
    case GgufType::kI16: {
      SPIN_ASSIGN_OR_RETURN(const int16_t number, reader.i16("value"));
      return int64_t{number};
    }
    case GgufType::kI32: {
      SPIN_ASSIGN_OR_RETURN(const int32_t number, reader.i32("value"));
      return int64_t{number};
    }
    case GgufType::kI64:
      return reader.i64("value");
    default:
      break;
  }
  SPIN_ASSIGN_OR_RETURN(const uint64_t number, decode_uint(type, bytes));
  const auto value = base::checked_cast<int64_t>(number);
  if (!value) return corrupt(fmt::format("expected a number below 2^63, found {}", number));
  return *value;
}

Result<double> decode_float(GgufType type, std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  if (type == GgufType::kF64) return reader.f64("value");
  if (type != GgufType::kF32) return wrong_type("a floating-point number", type);
  SPIN_ASSIGN_OR_RETURN(const float number, reader.f32("value"));
  return double{number};
}

Result<bool> decode_bool(GgufType type, std::span<const std::byte> bytes) {
  if (type != GgufType::kBool) return wrong_type("a bool", type);
  ByteReader reader(bytes);
  SPIN_ASSIGN_OR_RETURN(const uint8_t number, reader.u8("value"));
  if (number > 1) return corrupt(fmt::format("expected 0 or 1 for a bool, found {}", number));
  return number == 1;
}

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// `result` with the key and the place of its value in the message.
template <typename T>
Result<T> in_key(std::string_view key, uint64_t offset, Result<T> result) {
  if (result.ok()) return result;
  return result.status().with_context(fmt::format("key {} at offset {}", quote_text(key), offset));
}

}  // namespace

std::string_view gguf_type_name(GgufType type) {
  return static_cast<size_t>(type) < kTypes.size() ? row_of(type).name : "unknown";
}

Result<std::span<const std::byte>> GgufArray::scalar_at(uint64_t i) const {
  SPIN_RETURN_IF_ERROR(check_index(i));
  const uint64_t width = row_of(type_).bytes;
  ByteReader reader(bytes_);
  SPIN_RETURN_IF_ERROR(reader.skip(i * width, "array"));  // i < size_, and size_ * width fits
  return reader.bytes(width, "array element");
}

Status GgufArray::check_index(uint64_t i) const {
  if (i < size_) return ok_status();
  return Status(StatusCode::kInvalidArgument,
                fmt::format("array element: expected an index below {}, found {}", size_, i));
}

Result<std::string_view> GgufArray::string_at(uint64_t i) const {
  if (type_ != GgufType::kString) return wrong_type("an array of strings", type_);
  SPIN_RETURN_IF_ERROR(check_index(i));
  // The lengths are read again from the file; the reader keeps the walk inside it whatever they
  // say.
  ByteReader reader(bytes_);
  SPIN_RETURN_IF_ERROR(reader.skip(string_marks_[i / kStride], "array of strings"));
  for (uint64_t step = 0; step < i % kStride; ++step) {
    SPIN_ASSIGN_OR_RETURN(const auto skipped,
                          reader.string_u64(kMaxGgufArrayStringBytes, "array string"));
    static_cast<void>(skipped);
  }
  return reader.string_u64(kMaxGgufArrayStringBytes, "array string");
}

Result<uint64_t> GgufArray::uint_at(uint64_t i) const {
  SPIN_ASSIGN_OR_RETURN(const auto bytes, scalar_at(i));
  return decode_uint(type_, bytes);
}

Result<int64_t> GgufArray::int_at(uint64_t i) const {
  SPIN_ASSIGN_OR_RETURN(const auto bytes, scalar_at(i));
  return decode_int(type_, bytes);
}

Result<double> GgufArray::float_at(uint64_t i) const {
  SPIN_ASSIGN_OR_RETURN(const auto bytes, scalar_at(i));
  return decode_float(type_, bytes);
}

Result<bool> GgufArray::bool_at(uint64_t i) const {
  SPIN_ASSIGN_OR_RETURN(const auto bytes, scalar_at(i));
  return decode_bool(type_, bytes);
}

Status GgufMetadata::read_array(ByteReader& reader, GgufArray& array) {
  SPIN_ASSIGN_OR_RETURN(array.type_, read_type(reader, "array element type"));
  if (array.type_ == GgufType::kArray) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("array element type: expected a scalar or string at offset {}, found "
                              "array (nested arrays are not read)",
                              reader.position() - 4));
  }
  SPIN_ASSIGN_OR_RETURN(array.size_, reader.u64("array length"));
  const bool strings = array.type_ == GgufType::kString;
  const uint64_t width = strings ? kStringLengthBytes : row_of(array.type_).bytes;
  SPIN_RETURN_IF_ERROR(reader.need_elements(array.size_, width, "array length"));
  ByteReader start = reader;
  if (strings) {
    const uint64_t first = reader.position();
    for (uint64_t i = 0; i < array.size_; ++i) {
      if (i % GgufArray::kStride == 0) array.string_marks_.push_back(reader.position() - first);
      SPIN_ASSIGN_OR_RETURN(const auto text,
                            reader.string_u64(kMaxGgufArrayStringBytes, "array string"));
      static_cast<void>(text);
    }
  } else {
    SPIN_RETURN_IF_ERROR(reader.skip(array.size_ * width, "array"));
  }
  SPIN_ASSIGN_OR_RETURN(array.bytes_, start.bytes(reader.position() - start.position(), "array"));
  return ok_status();
}

Status GgufMetadata::read_value(ByteReader& reader, Value& value) {
  SPIN_ASSIGN_OR_RETURN(value.type, read_type(reader, "value type"));
  value.offset = reader.position();
  if (value.type == GgufType::kArray) return read_array(reader, value.array);
  if (value.type == GgufType::kString) {
    SPIN_ASSIGN_OR_RETURN(const auto text, reader.string_u64(reader.size(), "string value"));
    value.bytes = std::as_bytes(std::span(text));
    return ok_status();
  }
  SPIN_ASSIGN_OR_RETURN(value.bytes, reader.bytes(row_of(value.type).bytes, "value"));
  return ok_status();
}

Status GgufMetadata::read(ByteReader& reader, uint64_t count) {
  SPIN_RETURN_IF_ERROR(reader.need_elements(count, kMinEntryBytes, "number of keys"));
  if (count > kMaxGgufKeys) {
    return corrupt(fmt::format("number of keys: expected at most {} before offset {}, found {}",
                               kMaxGgufKeys, reader.position(), count));
  }
  for (uint64_t i = 0; i < count; ++i) {
    Value value;
    SPIN_ASSIGN_OR_RETURN(const auto key, reader.string_u64(kMaxGgufKeyBytes, "key"));
    value.key = std::string(key);
    const Status status = read_value(reader, value);
    if (!status.ok()) return status.with_context("key " + quote_text(key));
    values_.push_back(std::move(value));
  }
  // Sorted indices rather than a hash table: the keys come from the file, and a sort has no bad
  // case for them to aim at.
  by_key_.resize(values_.size());
  std::iota(by_key_.begin(), by_key_.end(), 0u);
  std::sort(by_key_.begin(), by_key_.end(), [this](uint32_t a, uint32_t b) {
    const int order = values_[a].key.compare(values_[b].key);
    return order < 0 || (order == 0 && a < b);
  });
  for (size_t i = 1; i < by_key_.size(); ++i) {
    const Value& one = values_[by_key_[i - 1]];
    const Value& other = values_[by_key_[i]];
    if (one.key == other.key) {
      return corrupt(
          fmt::format("key {}: expected it once, found values at offset {} and at "
                      "offset {}",
                      quote_text(one.key), one.offset, other.offset));
    }
  }
  return ok_status();
}

const GgufMetadata::Value* GgufMetadata::find(std::string_view key) const {
  const auto place =
      std::lower_bound(by_key_.begin(), by_key_.end(), key,
                       [this](uint32_t i, std::string_view k) { return values_[i].key < k; });
  if (place == by_key_.end() || values_[*place].key != key) return nullptr;
  return &values_[*place];
}

Result<const GgufMetadata::Value*> GgufMetadata::require(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) {
    return Status(StatusCode::kNotFound,
                  fmt::format("expected a key {}, found none", quote_text(key)));
  }
  return value;
}

std::vector<std::string_view> GgufMetadata::keys() const {
  std::vector<std::string_view> out;
  out.reserve(values_.size());
  for (const Value& value : values_) out.push_back(value.key);
  return out;
}

Result<GgufType> GgufMetadata::type_of(std::string_view key) const {
  SPIN_ASSIGN_OR_RETURN(const Value* value, require(key));
  return value->type;
}

Result<std::string_view> GgufMetadata::get_string(std::string_view key) const {
  SPIN_ASSIGN_OR_RETURN(const Value* value, require(key));
  if (value->type == GgufType::kString) return as_text(value->bytes);
  return in_key<std::string_view>(key, value->offset, wrong_type("a string", value->type));
}

Result<uint64_t> GgufMetadata::get_uint(std::string_view key) const {
  SPIN_ASSIGN_OR_RETURN(const Value* value, require(key));
  return in_key(key, value->offset, decode_uint(value->type, value->bytes));
}

Result<int64_t> GgufMetadata::get_int(std::string_view key) const {
  SPIN_ASSIGN_OR_RETURN(const Value* value, require(key));
  return in_key(key, value->offset, decode_int(value->type, value->bytes));
}

Result<double> GgufMetadata::get_float(std::string_view key) const {
  SPIN_ASSIGN_OR_RETURN(const Value* value, require(key));
  return in_key(key, value->offset, decode_float(value->type, value->bytes));
}

Result<bool> GgufMetadata::get_bool(std::string_view key) const {
  SPIN_ASSIGN_OR_RETURN(const Value* value, require(key));
  return in_key(key, value->offset, decode_bool(value->type, value->bytes));
}

Result<const GgufArray*> GgufMetadata::get_array(std::string_view key) const {
  SPIN_ASSIGN_OR_RETURN(const Value* value, require(key));
  if (value->type == GgufType::kArray) return &value->array;
  return in_key<const GgufArray*>(key, value->offset, wrong_type("an array", value->type));
}

Result<std::string_view> GgufMetadata::get_string_or(std::string_view key,
                                                     std::string_view fallback) const {
  return contains(key) ? get_string(key) : Result<std::string_view>(fallback);
}

Result<uint64_t> GgufMetadata::get_uint_or(std::string_view key, uint64_t fallback) const {
  return contains(key) ? get_uint(key) : Result<uint64_t>(fallback);
}

Result<double> GgufMetadata::get_float_or(std::string_view key, double fallback) const {
  return contains(key) ? get_float(key) : Result<double>(fallback);
}

Result<bool> GgufMetadata::get_bool_or(std::string_view key, bool fallback) const {
  return contains(key) ? get_bool(key) : Result<bool>(fallback);
}

}  // namespace spin::io
