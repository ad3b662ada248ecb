// SPDX-License-Identifier: Apache-2.0
#include "tests/support/safetensors_builder.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tests/support/gguf_builder.h"

namespace spin::testing {

std::string safetensors_file(std::string_view header, std::string_view data) {
  return gguf_string(header) + std::string(data);
}

SafetensorsBuilder& SafetensorsBuilder::add(std::string_view name,
                                            std::string_view dtype,
                                            const std::vector<uint64_t>& shape,
                                            std::string_view data) {
  if (!entries_.empty()) entries_ += ",";
  entries_ += fmt::format(R"("{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", name,
                          dtype, fmt::join(shape, ","), data_.size(), data_.size() + data.size());
  data_ += data;
  return *this;
}

SafetensorsBuilder& SafetensorsBuilder::add_f32(std::string_view name,
                                                const std::vector<uint64_t>& shape,
                                                const std::vector<float>& values) {
  std::string bytes;
  for (const float value : values) bytes += le_bytes(value);
  return add(name, "F32", shape, bytes);
}

std::string SafetensorsBuilder::build() const {
  return safetensors_file("{" + entries_ + "}", data_);
}

}  // namespace spin::testing
