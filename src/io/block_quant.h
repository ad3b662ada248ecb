// SPDX-License-Identifier: Apache-2.0
// Element types of checkpoints: how many bytes a block has and how it becomes f32. The decoders are
// the plain definition of each format (they equal ggml's reference bit for bit); speed lives in the
// backends.
//
// Thread: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "io/tensor_source.h"
#include "spin/status.h"

namespace spin::io {

// A row of a block format is a whole number of blocks; plain types are blocks of one element.
struct BlockFormat {
  ElementType type;
  std::string_view name;    // "Q4_K"
  uint32_t block_elements;  // e.g. 256
  uint32_t block_bytes;     // e.g. 144
  // blocks [count, block_bytes] -> out [count, block_elements]. Requires: both are that long.
  void (*decode)(const std::byte* blocks, size_t count, float* out);
};

// Requires: type != kUnsupported.
const BlockFormat& block_format(ElementType type);

// "F32", "Q4_K", ...; "unsupported" for kUnsupported.
std::string_view element_type_name(ElementType type);

// Bytes of `elements` values that lie together; nothing on overflow or when they do not fill whole
// blocks. Requires: type != kUnsupported.
std::optional<uint64_t> encoded_size(ElementType type, uint64_t elements);

// Decodes `encoded` (whole blocks) to `out`.
// Errors: kInvalidArgument unless encoded.size() == encoded_size(type, out.size());
// kUnsupported for kUnsupported.
Status decode_f32(ElementType type, std::span<const std::byte> encoded, std::span<float> out);

}  // namespace spin::io
