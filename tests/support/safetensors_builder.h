// SPDX-License-Identifier: Apache-2.0
// Makes safetensors files in memory. Tests only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace spin::testing {

// A file with this header text and data; the length field is the header's own.
std::string safetensors_file(std::string_view header, std::string_view data);

// A well-formed file, tensor by tensor.
class SafetensorsBuilder {
 public:
  SafetensorsBuilder& add(std::string_view name,
                          std::string_view dtype,
                          const std::vector<uint64_t>& shape,
                          std::string_view data);
  SafetensorsBuilder& add_f32(std::string_view name,
                              const std::vector<uint64_t>& shape,
                              const std::vector<float>& values);
  std::string build() const;

 private:
  std::string entries_;
  std::string data_;
};

}  // namespace spin::testing
