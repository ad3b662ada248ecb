// SPDX-License-Identifier: Apache-2.0
// Makes GGUF files in memory, well formed or with any field wrong. Tests only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace spin::testing {

// Value types of the format.
enum GgufValueType : uint32_t {
  kGgufU8 = 0,
  kGgufI8 = 1,
  kGgufU16 = 2,
  kGgufI16 = 3,
  kGgufU32 = 4,
  kGgufI32 = 5,
  kGgufF32 = 6,
  kGgufBool = 7,
  kGgufString = 8,
  kGgufArray = 9,
  kGgufU64 = 10,
  kGgufI64 = 11,
  kGgufF64 = 12,
};

// Tensor types of the format that tests use.
enum GgmlTypeId : uint32_t {
  kGgmlF32 = 0,
  kGgmlF16 = 1,
  kGgmlQ4_0 = 2,
  kGgmlQ4_1 = 3,
  kGgmlQ5_0 = 6,
  kGgmlQ5_1 = 7,
  kGgmlQ8_0 = 8,
  kGgmlQ2_K = 10,
  kGgmlQ4_K = 12,
  kGgmlQ5_K = 13,
  kGgmlQ6_K = 14,
  kGgmlI8 = 24,
  kGgmlBF16 = 30,
};

// The little-endian bytes of a number.
template <typename T>
std::string le_bytes(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

// A u64 length and the text.
std::string gguf_string(std::string_view text);

struct GgufTensorRecord {
  std::string name;
  std::vector<uint64_t> dims;  // as the file lists them: fastest first
  uint32_t type = kGgmlF32;
  std::string data;                // the bytes put at the tensor's place
  std::optional<uint64_t> offset;  // in the data section; default: after the tensor before, aligned
  std::optional<uint32_t> n_dims;  // default: dims.size()
};

class GgufBuilder {
 public:
  // Header fields; the defaults are those of a good file.
  std::string magic = "GGUF";
  uint32_t version = 3;
  std::optional<uint64_t> tensor_count;
  std::optional<uint64_t> kv_count;
  // Used for padding only; add_u32("general.alignment", n) writes the key.
  uint64_t padding = 32;

  GgufBuilder& add_raw(std::string_view key, uint32_t type, std::string_view value_bytes);
  template <typename T>
  GgufBuilder& add_number(std::string_view key, uint32_t type, T value) {
    return add_raw(key, type, le_bytes(value));
  }
  GgufBuilder& add_u32(std::string_view key, uint32_t value);
  GgufBuilder& add_u64(std::string_view key, uint64_t value);
  GgufBuilder& add_i32(std::string_view key, int32_t value);
  GgufBuilder& add_f32(std::string_view key, float value);
  GgufBuilder& add_bool(std::string_view key, bool value);
  GgufBuilder& add_string(std::string_view key, std::string_view value);
  // An array with `count` written as its length, whatever `element_bytes` holds.
  GgufBuilder& add_array_raw(std::string_view key,
                             uint32_t element_type,
                             uint64_t count,
                             std::string_view element_bytes);
  GgufBuilder& add_strings(std::string_view key, const std::vector<std::string>& values);
  GgufBuilder& add_f32s(std::string_view key, const std::vector<float>& values);
  GgufBuilder& add_i32s(std::string_view key, const std::vector<int32_t>& values);

  GgufBuilder& add_tensor(GgufTensorRecord tensor);
  // [rows, columns] row-major f32 values.
  GgufBuilder& add_f32_tensor(std::string_view name,
                              std::vector<uint64_t> dims_fastest_first,
                              const std::vector<float>& values);

  // The file's bytes.
  std::string build() const;

 private:
  std::vector<std::string> entries_;  // key, type and value of each key as bytes
  std::vector<GgufTensorRecord> tensors_;
};

}  // namespace spin::testing
