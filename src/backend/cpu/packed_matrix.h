// SPDX-License-Identifier: Apache-2.0
// The CPU's packed form of a weight matrix w [n, k] (docs/decisions/0003-own-matrix-products.md).
//
//   panel p = output rows [64 p, 64 p + width(p)), width = 64, the last one 16, 32, 48 or 64
//   f32:  panel = [k][width] floats
//   bf16: panel = [ceil(k / 2)][width][2]: the two neighbours of k lie together, as the bf16 dot
//         instruction wants them
//
// Missing rows and the odd k are zero. One copy serves single rows (a panel is one stream of
// memory), large batches (a panel's slice stays in the first cache) and embedding look-up.
// Thread: immutable once filled.
#pragma once

#include <cstdint>
#include <span>

#include "backend/ops.h"
#include "base/bf16.h"

namespace spin::backend::cpu {

inline constexpr int64_t kPanelCols = 64;  // output rows of a full panel
inline constexpr int64_t kPanelUnit = 16;  // widths are multiples of this

class CpuPackedMatrix final : public PackedMatrix {
 public:
  CpuPackedMatrix(int64_t rows, int64_t cols, layout::DType dtype, Buffer buffer)
      : rows_(rows), cols_(cols), dtype_(dtype), buffer_(std::move(buffer)) {}

  // Bytes that [rows, cols] take packed. Errors: kInvalidArgument for sizes < 1 or overflow.
  static Result<uint64_t> packed_bytes(int64_t rows, int64_t cols, layout::DType dtype);

  int64_t rows() const override { return rows_; }
  int64_t cols() const override { return cols_; }
  layout::DType dtype() const override { return dtype_; }
  uint64_t size_bytes() const override { return buffer_.size_bytes(); }

  int64_t panels() const { return (rows_ + kPanelCols - 1) / kPanelCols; }
  int64_t panel_width(int64_t panel) const {
    const int64_t left = rows_ - panel * kPanelCols;
    return left >= kPanelCols ? kPanelCols : (left + kPanelUnit - 1) / kPanelUnit * kPanelUnit;
  }
  // k rounded up to what is stored.
  int64_t stored_cols() const {
    return dtype_ == layout::DType::kBF16 ? (cols_ + 1) / 2 * 2 : cols_;
  }
  const void* panel(int64_t index) const {
    return buffer_.as<char>() + panel_offset(index) * layout::dtype_bytes(dtype_);
  }

  // Zeroes what no row of the matrix fills: the last panel and the odd k.
  void clear_padding();

  // Writes rows [first, first + count) from `values` ([count, cols]). The ranges of all calls cover
  // the matrix once. Thread: distinct panels may be written at the same time.
  void store_rows(int64_t first, int64_t count, std::span<const float> values);

  // Reads row `row` into out [cols].
  void load_row(int64_t row, float* out) const;

 private:
  int64_t panel_offset(int64_t index) const { return index * kPanelCols * stored_cols(); }

  int64_t rows_;
  int64_t cols_;
  layout::DType dtype_;
  Buffer buffer_;
};

}  // namespace spin::backend::cpu
