// SPDX-License-Identifier: Apache-2.0
#include "io/tensor_source.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "base/checked_math.h"
#include "base/quote.h"
#include "io/block_quant.h"

namespace spin::io {

// A sorted list of indices rather than a hash table: the names come from the file, and a sort has
// no bad case for them to aim at.
Status TensorSource::set_tensors(std::vector<TensorInfo> tensors) {
  tensors_ = std::move(tensors);
  const auto count = base::checked_cast<uint32_t>(tensors_.size());
  if (!count) return Status(StatusCode::kUnsupported, "the checkpoint has over 2^32 tensors");
  by_name_.resize(*count);
  std::iota(by_name_.begin(), by_name_.end(), 0u);
  std::sort(by_name_.begin(), by_name_.end(), [this](uint32_t a, uint32_t b) {
    const int order = tensors_[a].name.compare(tensors_[b].name);
    return order < 0 || (order == 0 && a < b);
  });
  for (size_t i = 1; i < by_name_.size(); ++i) {
    const TensorInfo& one = tensors_[by_name_[i - 1]];
    const TensorInfo& other = tensors_[by_name_[i]];
    if (one.name == other.name) {
      return Status(StatusCode::kCorrupt,
                    fmt::format("tensor {}: expected the name once, found it for the bytes at "
                                "offset {} and at offset {}",
                                base::quote_text(one.name), one.offset, other.offset));
    }
  }
  return ok_status();
}

const TensorInfo* TensorSource::find(std::string_view name) const {
  const auto place =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [this](uint32_t i, std::string_view key) { return tensors_[i].name < key; });
  if (place == by_name_.end() || tensors_[*place].name != name) return nullptr;
  return &tensors_[*place];
}

Status TensorSource::read_rows_f32(const TensorInfo& info,
                                   uint64_t first_row,
                                   uint64_t rows,
                                   std::span<float> out) const {
  if (info.type == ElementType::kUnsupported) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("tensor {}: expected an element type that can be decoded, found {}",
                              base::quote_text(info.name), base::quote_text(info.type_name)));
  }
  if (first_row > info.rows() || rows > info.rows() - first_row) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("tensor {}: expected rows within [0, {}), found {} from row {}",
                              base::quote_text(info.name), info.rows(), rows, first_row));
  }
  const auto wanted = base::checked_mul(rows, info.row_elements());
  if (!wanted || *wanted != out.size()) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("tensor {}: expected room for {} rows of {} values, found {} values",
                              base::quote_text(info.name), rows, info.row_elements(), out.size()));
  }
  if (rows == 0) return ok_status();
  SPIN_ASSIGN_OR_RETURN(const auto encoded, bytes(info));
  // Row sizes cannot overflow: the whole tensor, which has at least one row, is in `encoded`.
  const uint64_t row_bytes = encoded.size() / info.rows();
  return decode_f32(info.type, encoded.subspan(first_row * row_bytes, rows * row_bytes), out);
}

}  // namespace spin::io
