// SPDX-License-Identifier: Apache-2.0
#include "tests/support/gguf_builder.h"

#include <utility>

namespace spin::testing {

std::string gguf_string(std::string_view text) {
  return le_bytes<uint64_t>(text.size()) + std::string(text);
}

GgufBuilder& GgufBuilder::add_raw(std::string_view key,
                                  uint32_t type,
                                  std::string_view value_bytes) {
  entries_.push_back(gguf_string(key) + le_bytes(type) + std::string(value_bytes));
  return *this;
}

GgufBuilder& GgufBuilder::add_u32(std::string_view key, uint32_t value) {
  return add_number(key, kGgufU32, value);
}

GgufBuilder& GgufBuilder::add_u64(std::string_view key, uint64_t value) {
  return add_number(key, kGgufU64, value);
}

GgufBuilder& GgufBuilder::add_i32(std::string_view key, int32_t value) {
  return add_number(key, kGgufI32, value);
}

GgufBuilder& GgufBuilder::add_f32(std::string_view key, float value) {
  return add_number(key, kGgufF32, value);
}

GgufBuilder& GgufBuilder::add_bool(std::string_view key, bool value) {
  return add_number(key, kGgufBool, static_cast<uint8_t>(value ? 1 : 0));
}

GgufBuilder& GgufBuilder::add_string(std::string_view key, std::string_view value) {
  return add_raw(key, kGgufString, gguf_string(value));
}

GgufBuilder& GgufBuilder::add_array_raw(std::string_view key,
                                        uint32_t element_type,
                                        uint64_t count,
                                        std::string_view element_bytes) {
  return add_raw(key, kGgufArray,
                 le_bytes(element_type) + le_bytes(count) + std::string(element_bytes));
}

GgufBuilder& GgufBuilder::add_strings(std::string_view key,
                                      const std::vector<std::string>& values) {
  std::string bytes;
  for (const std::string& value : values) bytes += gguf_string(value);
  return add_array_raw(key, kGgufString, values.size(), bytes);
}

GgufBuilder& GgufBuilder::add_f32s(std::string_view key, const std::vector<float>& values) {
  std::string bytes;
  for (const float value : values) bytes += le_bytes(value);
  return add_array_raw(key, kGgufF32, values.size(), bytes);
}

GgufBuilder& GgufBuilder::add_i32s(std::string_view key, const std::vector<int32_t>& values) {
  std::string bytes;
  for (const int32_t value : values) bytes += le_bytes(value);
  return add_array_raw(key, kGgufI32, values.size(), bytes);
}

GgufBuilder& GgufBuilder::add_tensor(GgufTensorRecord tensor) {
  tensors_.push_back(std::move(tensor));
  return *this;
}

GgufBuilder& GgufBuilder::add_f32_tensor(std::string_view name,
                                         std::vector<uint64_t> dims_fastest_first,
                                         const std::vector<float>& values) {
  std::string bytes;
  for (const float value : values) bytes += le_bytes(value);
  GgufTensorRecord record;
  record.name = std::string(name);
  record.dims = std::move(dims_fastest_first);
  record.data = std::move(bytes);
  return add_tensor(std::move(record));
}

std::string GgufBuilder::build() const {
  std::string out = magic;
  out += le_bytes(version);
  out += le_bytes<uint64_t>(tensor_count.value_or(tensors_.size()));
  out += le_bytes<uint64_t>(kv_count.value_or(entries_.size()));
  for (const std::string& entry : entries_) out += entry;
  std::string data;
  const auto pad = [this](std::string& bytes) {
    if (padding > 0) bytes.resize((bytes.size() + padding - 1) / padding * padding, '\0');
  };
  for (const GgufTensorRecord& tensor : tensors_) {
    pad(data);
    out += gguf_string(tensor.name);
    out += le_bytes<uint32_t>(tensor.n_dims.value_or(static_cast<uint32_t>(tensor.dims.size())));
    for (const uint64_t dim : tensor.dims) out += le_bytes(dim);
    out += le_bytes(tensor.type);
    out += le_bytes<uint64_t>(tensor.offset.value_or(data.size()));
    data += tensor.data;
  }
  if (!data.empty()) pad(out);
  return out + data;
}

}  // namespace spin::testing
