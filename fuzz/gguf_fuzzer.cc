// SPDX-License-Identifier: Apache-2.0
// Bytes -> GGUF parser -> every key, array element and tensor read through every accessor.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"
#include "io/gguf.h"
#include "io/mapped_file.h"

namespace {

using spin::io::GgufArray;
using spin::io::GgufFile;
using spin::io::GgufMetadata;
using spin::io::GgufType;
using spin::io::TensorInfo;

// Decoding a huge row would only measure memset.
constexpr uint64_t kMaxRowElements = 1 << 16;

void read_array(const GgufArray& array) {
  for (uint64_t i = 0; i < array.size(); ++i) {
    const bool text = array.string_at(i).ok();
    SPIN_CHECK(text == (array.element_type() == GgufType::kString));
    static_cast<void>(array.uint_at(i).ok());
    static_cast<void>(array.int_at(i).ok());
    static_cast<void>(array.float_at(i).ok());
    static_cast<void>(array.bool_at(i).ok());
  }
  SPIN_CHECK(!array.string_at(array.size()).ok());
  SPIN_CHECK(!array.uint_at(array.size()).ok());
}

void read_metadata(const GgufMetadata& metadata) {
  for (const auto key : metadata.keys()) {
    SPIN_CHECK(metadata.contains(key));
    SPIN_CHECK(metadata.get_string(key).ok() == (*metadata.type_of(key) == GgufType::kString));
    static_cast<void>(metadata.get_uint(key).ok());
    static_cast<void>(metadata.get_int(key).ok());
    static_cast<void>(metadata.get_float(key).ok());
    static_cast<void>(metadata.get_bool(key).ok());
    const auto array = metadata.get_array(key);
    if (array.ok()) read_array(**array);
  }
}

void read_tensor(const GgufFile& file, const TensorInfo& info) {
  const auto bytes = file.bytes(info);
  SPIN_CHECK(bytes.ok() && bytes->size() == info.size_bytes);
  SPIN_CHECK(file.find(info.name) == &info);
  if (info.row_elements() > kMaxRowElements) return;
  std::vector<float> row(info.row_elements());
  for (const uint64_t first : {uint64_t{0}, info.rows() - 1}) {
    const bool read = file.read_rows_f32(info, first, 1, row).ok();
    SPIN_CHECK(read == (info.type != spin::io::ElementType::kUnsupported));
  }
  file.drop(info);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto file = GgufFile::parse(spin::io::MappedFile::borrow(bytes, "fuzz"));
  if (!file.ok()) return 0;
  read_metadata((*file)->metadata());
  for (const TensorInfo& info : (*file)->tensors()) read_tensor(**file, info);
  return 0;
}
