// SPDX-License-Identifier: Apache-2.0
// GGUF v2 and v3 files (little-endian). Metadata values are typed views of the file: a vocabulary
// of 150,000 strings is checked once at open and copied by nobody. A file without tensors (only a
// vocabulary) is fine.
//
// Refused: nested arrays, duplicate keys or tensor names, other than 1..4 dimensions, zero-size
// tensors, an alignment that is not a power of two in [1, 64 KiB] stored as u32, tensors that are
// misaligned, overlap or leave the file, rows that are not whole blocks, split files.
//
// Thread: immutable after opening. Lifetime: views live as long as the GgufFile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/mapped_file.h"
#include "io/tensor_source.h"
#include "spin/status.h"

namespace spin::io {

class ByteReader;

// Limits on single fields; everything else is bounded by the bytes present.
constexpr uint64_t kMaxGgufKeyBytes = 65535;
constexpr uint64_t kMaxGgufArrayStringBytes = 64 * 1024;  // a token or merge of a tokenizer
constexpr uint64_t kMaxGgufTensorNameBytes = 64;
constexpr uint64_t kMaxGgufAlignment = 64 * 1024;
// Real files have some 50 keys and a few thousand tensors. Tables this long keep the memory for
// them below a few hundred MB whatever the size of the file.
constexpr uint64_t kMaxGgufKeys = 1 << 16;
constexpr uint64_t kMaxGgufTensors = 1 << 20;

enum class GgufType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

// "u32", "string", ...
std::string_view gguf_type_name(GgufType type);

// One array value. Accessors check the index and the element type.
// Errors of all: kInvalidArgument (index, type), kCorrupt (a value outside the result's range).
class GgufArray {
 public:
  GgufType element_type() const { return type_; }
  uint64_t size() const { return size_; }

  // O(kStride); walk with a loop over i.
  Result<std::string_view> string_at(uint64_t i) const;
  Result<uint64_t> uint_at(uint64_t i) const;  // any integer type, >= 0
  Result<int64_t> int_at(uint64_t i) const;    // any integer type
  Result<double> float_at(uint64_t i) const;   // f32 or f64
  Result<bool> bool_at(uint64_t i) const;

 private:
  friend class GgufMetadata;
  // Strings have no fixed size: the place of every kStride-th one is kept.
  static constexpr uint64_t kStride = 16;

  Status check_index(uint64_t i) const;
  Result<std::span<const std::byte>> scalar_at(uint64_t i) const;

  GgufType type_ = GgufType::kU8;
  uint64_t size_ = 0;
  std::span<const std::byte> bytes_;    // the elements as stored
  std::vector<uint64_t> string_marks_;  // offset in bytes_ of string i * kStride
};

// Typed look-up. Errors of all: kNotFound (no such key), kInvalidArgument (another type; the
// message says which), kCorrupt (a value outside the result's range). The *_or forms return
// `fallback` when the key is absent and still refuse a wrong type.
class GgufMetadata {
 public:
  bool contains(std::string_view key) const { return find(key) != nullptr; }
  // In file order. Lifetime: that of the object.
  std::vector<std::string_view> keys() const;
  Result<GgufType> type_of(std::string_view key) const;

  Result<std::string_view> get_string(std::string_view key) const;
  Result<uint64_t> get_uint(std::string_view key) const;  // any integer type, >= 0
  Result<int64_t> get_int(std::string_view key) const;    // any integer type
  Result<double> get_float(std::string_view key) const;   // f32 or f64
  Result<bool> get_bool(std::string_view key) const;
  // Never null in a Result that is ok.
  Result<const GgufArray*> get_array(std::string_view key) const;

  Result<std::string_view> get_string_or(std::string_view key, std::string_view fallback) const;
  Result<uint64_t> get_uint_or(std::string_view key, uint64_t fallback) const;
  Result<double> get_float_or(std::string_view key, double fallback) const;
  Result<bool> get_bool_or(std::string_view key, bool fallback) const;

 private:
  friend class GgufFile;
  struct Value {
    std::string key;
    GgufType type = GgufType::kU8;
    uint64_t offset = 0;               // of the value in the file
    std::span<const std::byte> bytes;  // scalar: its bytes; string: its text
    GgufArray array;
  };

  const Value* find(std::string_view key) const;
  Result<const Value*> require(std::string_view key) const;
  Status read(ByteReader& reader, uint64_t count);
  static Status read_value(ByteReader& reader, Value& value);
  static Status read_array(ByteReader& reader, GgufArray& array);

  std::vector<Value> values_;
  std::vector<uint32_t> by_key_;  // indices of values_, sorted by key
};

class GgufFile : public TensorSource {
 public:
  // Errors: those of MappedFile::open and of parse.
  static Result<std::unique_ptr<GgufFile>> open(const std::string& path);
  // Errors: kCorrupt or kUnsupported, with what was expected, what was found and at which offset.
  static Result<std::unique_ptr<GgufFile>> parse(MappedFile file);

  uint32_t version() const { return version_; }
  uint64_t alignment() const { return alignment_; }
  const GgufMetadata& metadata() const { return metadata_; }
  const MappedFile& file() const { return file_; }

  Result<std::span<const std::byte>> bytes(const TensorInfo& info) const override;
  void drop(const TensorInfo& info) const override;
  const GgufMetadata* gguf_metadata() const override { return &metadata_; }

 private:
  explicit GgufFile(MappedFile file) : file_(std::move(file)) {}
  Status read();
  Status read_header(ByteReader& reader, uint64_t& tensor_count, uint64_t& value_count);
  Status read_alignment();
  Status refuse_splits() const;
  Status read_tensor(ByteReader& reader, TensorInfo& info) const;
  // Makes offsets absolute; checks them against the file and each other.
  Status place_tensors(uint64_t header_end, std::vector<TensorInfo>& tensors) const;

  MappedFile file_;
  GgufMetadata metadata_;
  uint32_t version_ = 0;
  uint64_t alignment_ = 32;
};

}  // namespace spin::io
