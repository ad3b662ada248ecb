// SPDX-License-Identifier: Apache-2.0
// What a checkpoint is to the rest of Spin: named tensors with a type, a shape and bytes, whatever
// file format they come from.
//
// Thread: immutable after opening; const members may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spin/status.h"

namespace spin::io {

class GgufMetadata;

enum class ElementType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kUnsupported,  // listed, with its size checked, but not decoded; see TensorInfo::type_name
};

struct TensorInfo {
  std::string name;
  ElementType type = ElementType::kUnsupported;
  std::string type_name;        // as the file calls it: "BF16", "Q4_K", "I64"
  std::vector<uint64_t> shape;  // row-major, slowest dimension first; empty: a scalar
  uint64_t elements = 1;        // product of shape; 0 only in safetensors
  uint64_t size_bytes = 0;      // in the file
  uint64_t offset = 0;          // absolute, in its file
  uint32_t shard = 0;           // which file of a sharded checkpoint

  // A row is the last dimension; a scalar is one row of one element.
  uint64_t row_elements() const { return shape.empty() ? 1 : shape.back(); }
  uint64_t rows() const { return row_elements() == 0 ? 0 : elements / row_elements(); }
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;
  TensorSource(const TensorSource&) = delete;
  TensorSource& operator=(const TensorSource&) = delete;

  // In the order of the file(s). Lifetime: that of the source.
  std::span<const TensorInfo> tensors() const { return tensors_; }
  // Null when there is no such tensor.
  const TensorInfo* find(std::string_view name) const;

  // The tensor's bytes as stored. Requires: `info` is one of tensors().
  // Errors: kCorrupt when the file has become too short. Lifetime: that of the source.
  virtual Result<std::span<const std::byte>> bytes(const TensorInfo& info) const = 0;

  // Decodes rows [first_row, first_row + rows) to `out` [rows, row_elements] f32.
  // Requires: `info` is one of tensors().
  // Errors: kInvalidArgument (range, size of out), kUnsupported (type), those of bytes().
  Status read_rows_f32(const TensorInfo& info,
                       uint64_t first_row,
                       uint64_t rows,
                       std::span<float> out) const;

  // Says that the tensor's mapped pages are not needed soon (after packing them elsewhere).
  virtual void drop(const TensorInfo& info) const = 0;

  // The key/value section of a GGUF file; null for safetensors.
  virtual const GgufMetadata* gguf_metadata() const { return nullptr; }

 protected:
  TensorSource() = default;
  // Errors: kCorrupt when two tensors share a name. To be called once, before publication.
  Status set_tensors(std::vector<TensorInfo> tensors);

 private:
  std::vector<TensorInfo> tensors_;
  std::vector<uint32_t> by_name_;  // indices of tensors_, sorted by name
};

}  // namespace spin::io
