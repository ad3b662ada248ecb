// SPDX-License-Identifier: Apache-2.0
// The header and tensor table of a GGUF file.
#include "io/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/checked_math.h"
#include "base/quote.h"
#include "io/byte_reader.h"

namespace spin::io {
namespace {

using base::quote_text;

constexpr std::string_view kAlignmentKey = "general.alignment";
constexpr std::string_view kSplitCountKey = "split.count";
// Shortest possible entry: name length, empty name, number of dimensions, one dimension, type,
// offset.
constexpr uint64_t kMinTensorEntryBytes = 8 + 4 + 8 + 4 + 8;
constexpr uint32_t kMaxDimensions = 4;

// Every type of the format by its number there. Types that Spin does not decode are listed so that
// the places of their tensors can be checked too (9, Q8_1, and 15, Q8_K, are never stored).
struct GgmlType {
  uint32_t id;
  std::string_view name;
  uint32_t block_elements;
  uint32_t block_bytes;
  ElementType type;
};
constexpr std::array<GgmlType, 32> kGgmlTypes = {{
    {0, "F32", 1, 4, ElementType::kF32},
    {1, "F16", 1, 2, ElementType::kF16},
    {2, "Q4_0", 32, 18, ElementType::kQ4_0},
    {3, "Q4_1", 32, 20, ElementType::kQ4_1},
    {6, "Q5_0", 32, 22, ElementType::kQ5_0},
    {7, "Q5_1", 32, 24, ElementType::kQ5_1},
    {8, "Q8_0", 32, 34, ElementType::kQ8_0},
    {10, "Q2_K", 256, 84, ElementType::kUnsupported},
    {11, "Q3_K", 256, 110, ElementType::kUnsupported},
    {12, "Q4_K", 256, 144, ElementType::kQ4_K},
    {13, "Q5_K", 256, 176, ElementType::kQ5_K},
    {14, "Q6_K", 256, 210, ElementType::kQ6_K},
    {16, "IQ2_XXS", 256, 66, ElementType::kUnsupported},
    {17, "IQ2_XS", 256, 74, ElementType::kUnsupported},
    {18, "IQ3_XXS", 256, 98, ElementType::kUnsupported},
    {19, "IQ1_S", 256, 50, ElementType::kUnsupported},
    {20, "IQ4_NL", 32, 18, ElementType::kUnsupported},
    {21, "IQ3_S", 256, 110, ElementType::kUnsupported},
    {22, "IQ2_S", 256, 82, ElementType::kUnsupported},
    {23, "IQ4_XS", 256, 136, ElementType::kUnsupported},
    {24, "I8", 1, 1, ElementType::kUnsupported},
    {25, "I16", 1, 2, ElementType::kUnsupported},
    {26, "I32", 1, 4, ElementType::kUnsupported},
    {27, "I64", 1, 8, ElementType::kUnsupported},
    {28, "F64", 1, 8, ElementType::kUnsupported},
    {29, "IQ1_M", 256, 56, ElementType::kUnsupported},
    {30, "BF16", 1, 2, ElementType::kBF16},
    {34, "TQ1_0", 256, 54, ElementType::kUnsupported},
    {35, "TQ2_0", 256, 66, ElementType::kUnsupported},
    {39, "MXFP4", 32, 17, ElementType::kUnsupported},
    {40, "NVFP4", 64, 36, ElementType::kUnsupported},
    {41, "Q1_0", 128, 18, ElementType::kUnsupported},
}};

const GgmlType* find_ggml_type(uint32_t id) {
  for (const GgmlType& row : kGgmlTypes) {
    if (row.id == id) return &row;
  }
  return nullptr;
}

Status corrupt(std::string message) { return Status(StatusCode::kCorrupt, std::move(message)); }

// Dimensions as the file lists them, fastest first.
Status read_shape(ByteReader& reader, TensorInfo& info) {
  const uint64_t offset = reader.position();
  SPIN_ASSIGN_OR_RETURN(const uint32_t count, reader.u32("number of dimensions"));
  if (count < 1 || count > kMaxDimensions) {
    return corrupt(fmt::format("number of dimensions: expected 1 to {} at offset {}, found {}",
                               kMaxDimensions, offset, count));
  }
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t place = reader.position();
    SPIN_ASSIGN_OR_RETURN(const uint64_t dimension, reader.u64("dimension"));
    if (dimension == 0) {
      return corrupt(
          fmt::format("dimension {}: expected at least 1 at offset {}, found 0", i, place));
    }
    info.shape.push_back(dimension);
  }
  std::reverse(info.shape.begin(), info.shape.end());
  const auto elements = base::checked_product(info.shape);
  if (!elements) {
    return corrupt(
        fmt::format("dimensions: expected a product below 2^64 at offset {}, found [{}] "
                    "(tensor size overflow)",
                    offset, fmt::join(info.shape, ", ")));
  }
  info.elements = *elements;
  return ok_status();
}

Status read_element_type(ByteReader& reader, TensorInfo& info) {
  const uint64_t offset = reader.position();
  SPIN_ASSIGN_OR_RETURN(const uint32_t id, reader.u32("element type"));
  const GgmlType* type = find_ggml_type(id);
  if (type == nullptr) {
    return Status(
        StatusCode::kUnsupported,
        fmt::format("element type: expected a known number at offset {}, found {}", offset, id));
  }
  info.type = type->type;
  info.type_name = std::string(type->name);
  if (info.row_elements() % type->block_elements != 0) {
    return corrupt(
        fmt::format("rows of {}: expected a multiple of {} values at offset {}, found "
                    "{}",
                    type->name, type->block_elements, offset, info.row_elements()));
  }
  const auto size =
      base::checked_mul<uint64_t>(info.elements / type->block_elements, type->block_bytes);
  if (!size) {
    return corrupt(
        fmt::format("size: expected below 2^64 bytes at offset {}, found {} values of "
                    "{} (tensor size overflow)",
                    offset, info.elements, type->name));
  }
  info.size_bytes = *size;
  return ok_status();
}

}  // namespace

Result<std::unique_ptr<GgufFile>> GgufFile::open(const std::string& path) {
  SPIN_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  return parse(std::move(file));
}

Result<std::unique_ptr<GgufFile>> GgufFile::parse(MappedFile file) {
  std::unique_ptr<GgufFile> out(new GgufFile(std::move(file)));
  const Status status = out->read();
  if (!status.ok()) return status.with_context(out->file_.name());
  return out;
}

Status GgufFile::read_header(ByteReader& reader, uint64_t& tensor_count, uint64_t& value_count) {
  SPIN_ASSIGN_OR_RETURN(const auto magic, reader.bytes(4, "magic"));
  if (std::memcmp(magic.data(), "GGUF", 4) != 0) {
    return corrupt(fmt::format(
        "magic: expected 'GGUF' at offset 0, found {:02x}",
        fmt::join(std::span(reinterpret_cast<const uint8_t*>(magic.data()), magic.size()), " ")));
  }
  SPIN_ASSIGN_OR_RETURN(version_, reader.u32("version"));
  if (version_ != 2 && version_ != 3) {
    const bool swapped = (version_ & 0xFFFF) == 0 && version_ != 0;
    return Status(StatusCode::kUnsupported,
                  fmt::format("version: expected 2 or 3 at offset 4, found {}{}", version_,
                              swapped ? " (a big-endian file?)" : ""));
  }
  SPIN_ASSIGN_OR_RETURN(tensor_count, reader.u64("number of tensors"));
  SPIN_ASSIGN_OR_RETURN(value_count, reader.u64("number of keys"));
  SPIN_RETURN_IF_ERROR(
      reader.need_elements(tensor_count, kMinTensorEntryBytes, "number of tensors"));
  if (tensor_count > kMaxGgufTensors) {
    return corrupt(fmt::format("number of tensors: expected at most {} at offset 8, found {}",
                               kMaxGgufTensors, tensor_count));
  }
  return ok_status();
}

Status GgufFile::read_alignment() {
  const auto* value = metadata_.find(kAlignmentKey);
  if (value == nullptr) return ok_status();
  if (value->type != GgufType::kU32) {
    return corrupt(fmt::format("{}: expected u32 at offset {}, found {}", kAlignmentKey,
                               value->offset, gguf_type_name(value->type)));
  }
  SPIN_ASSIGN_OR_RETURN(alignment_, metadata_.get_uint(kAlignmentKey));
  if (!std::has_single_bit(alignment_) || alignment_ > kMaxGgufAlignment) {
    return corrupt(fmt::format("{}: expected a power of two up to {} at offset {}, found {}",
                               kAlignmentKey, kMaxGgufAlignment, value->offset, alignment_));
  }
  return ok_status();
}

Status GgufFile::refuse_splits() const {
  const auto* value = metadata_.find(kSplitCountKey);
  if (value == nullptr) return ok_status();
  SPIN_ASSIGN_OR_RETURN(const uint64_t parts, metadata_.get_uint(kSplitCountKey));
  if (parts <= 1) return ok_status();
  return Status(StatusCode::kUnsupported,
                fmt::format("{}: expected one file, found a part of {} at offset {}; merge them "
                            "first",
                            kSplitCountKey, parts, value->offset));
}

Status GgufFile::read_tensor(ByteReader& reader, TensorInfo& info) const {
  SPIN_RETURN_IF_ERROR(read_shape(reader, info));
  SPIN_RETURN_IF_ERROR(read_element_type(reader, info));
  const uint64_t place = reader.position();
  SPIN_ASSIGN_OR_RETURN(info.offset, reader.u64("offset"));
  if (info.offset % alignment_ != 0) {
    return corrupt(fmt::format("offset: expected a multiple of {} at offset {}, found {}",
                               alignment_, place, info.offset));
  }
  return ok_status();
}

Status GgufFile::place_tensors(uint64_t header_end, std::vector<TensorInfo>& tensors) const {
  const auto data_start = base::checked_align_up(header_end, alignment_);
  for (TensorInfo& info : tensors) {
    const auto begin = data_start ? base::checked_add(*data_start, info.offset) : std::nullopt;
    const auto end = begin ? base::checked_add(*begin, info.size_bytes) : std::nullopt;
    if (!end || *end > file_.size()) {
      return corrupt(
          fmt::format("tensor {}: expected {} bytes at data offset {} (data begin at "
                      "offset {}), found a file of {} bytes",
                      quote_text(info.name), info.size_bytes, info.offset, data_start.value_or(0),
                      file_.size()));
    }
    info.offset = *begin;
  }
  std::vector<uint32_t> order(tensors.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return tensors[a].offset < tensors[b].offset; });
  for (size_t i = 1; i < order.size(); ++i) {
    const TensorInfo& before = tensors[order[i - 1]];
    const TensorInfo& info = tensors[order[i]];
    if (info.offset < before.offset + before.size_bytes) {
      return corrupt(
          fmt::format("tensor {}: expected to begin at offset {} or later, after {}, "
                      "found {}",
                      quote_text(info.name), before.offset + before.size_bytes,
                      quote_text(before.name), info.offset));
    }
  }
  return ok_status();
}

Status GgufFile::read() {
  ByteReader reader(file_.bytes());
  uint64_t tensor_count = 0;
  uint64_t value_count = 0;
  SPIN_RETURN_IF_ERROR(read_header(reader, tensor_count, value_count));
  SPIN_RETURN_IF_ERROR(metadata_.read(reader, value_count));
  SPIN_RETURN_IF_ERROR(read_alignment());
  SPIN_RETURN_IF_ERROR(refuse_splits());
  SPIN_RETURN_IF_ERROR(
      reader.need_elements(tensor_count, kMinTensorEntryBytes, "number of tensors"));
  std::vector<TensorInfo> tensors;
  for (uint64_t i = 0; i < tensor_count; ++i) {
    TensorInfo info;
    SPIN_ASSIGN_OR_RETURN(const auto name,
                          reader.string_u64(kMaxGgufTensorNameBytes, "tensor name"));
    info.name = std::string(name);
    const Status status = read_tensor(reader, info);
    if (!status.ok()) return status.with_context("tensor " + quote_text(name));
    tensors.push_back(std::move(info));
  }
  SPIN_RETURN_IF_ERROR(place_tensors(reader.position(), tensors));
  return set_tensors(std::move(tensors));
}

Result<std::span<const std::byte>> GgufFile::bytes(const TensorInfo& info) const {
  return file_.slice(info.offset, info.size_bytes);
}

void GgufFile::drop(const TensorInfo& info) const { file_.drop(info.offset, info.size_bytes); }

}  // namespace spin::io
