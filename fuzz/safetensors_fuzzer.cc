// SPDX-License-Identifier: Apache-2.0
// Bytes -> safetensors parser -> every tensor listed, read and dropped.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"
#include "io/mapped_file.h"
#include "io/safetensors.h"

namespace {

// Decoding a huge row would only measure memset.
constexpr uint64_t kMaxRowElements = 1 << 16;

void read_tensor(const spin::io::TensorSource& source, const spin::io::TensorInfo& info) {
  const auto bytes = source.bytes(info);
  SPIN_CHECK(bytes.ok() && bytes->size() == info.size_bytes);
  SPIN_CHECK(source.find(info.name) == &info);
  if (info.row_elements() > kMaxRowElements || info.rows() == 0) return;
  std::vector<float> row(info.row_elements());
  for (const uint64_t first : {uint64_t{0}, info.rows() - 1}) {
    const bool read = source.read_rows_f32(info, first, 1, row).ok();
    SPIN_CHECK(read == (info.type != spin::io::ElementType::kUnsupported));
  }
  source.drop(info);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto file = spin::io::SafetensorsFile::parse(spin::io::MappedFile::borrow(bytes, "fuzz"));
  if (!file.ok()) return 0;
  for (const auto& info : (*file)->tensors()) read_tensor(**file, info);
  return 0;
}
