// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/packed_matrix.h"

#include <cstring>
#include <string>

#include "base/check.h"
#include "base/checked_math.h"

namespace spin::backend::cpu {

Result<uint64_t> CpuPackedMatrix::packed_bytes(int64_t rows, int64_t cols, layout::DType dtype) {
  std::string shape("[");
  shape.append(std::to_string(rows)).append(", ").append(std::to_string(cols)).append("]");
  if (rows < 1 || cols < 1) {
    return Status(StatusCode::kInvalidArgument,
                  "expected a matrix of at least 1 x 1, found " + shape);
  }
  const uint64_t unit = dtype == layout::DType::kBF16 ? 2 : 1;
  const auto padded_rows = base::checked_align_up(static_cast<uint64_t>(rows), kPanelUnit);
  const auto padded_cols = base::checked_align_up(static_cast<uint64_t>(cols), unit);
  if (padded_rows && padded_cols) {
    const uint64_t factors[] = {*padded_rows, *padded_cols, layout::dtype_bytes(dtype)};
    const auto bytes = base::checked_product(factors);
    if (bytes && *bytes <= static_cast<uint64_t>(INT64_MAX)) return *bytes;
  }
  return Status(StatusCode::kInvalidArgument, "a matrix of " + shape + " is too large");
}

void CpuPackedMatrix::clear_padding() {
  const int64_t stored = stored_cols();
  const auto element = static_cast<int64_t>(layout::dtype_bytes(dtype_));
  const int64_t last = panels() - 1;
  const auto clear = [&](int64_t first, int64_t count) {
    std::memset(buffer_.as<char>() + first * element, 0, static_cast<size_t>(count * element));
  };
  clear(panel_offset(last), panel_width(last) * stored);
  if (stored == cols_) return;
  for (int64_t panel = 0; panel < last; ++panel) {
    clear(panel_offset(panel) + (stored - 2) * kPanelCols, 2 * kPanelCols);
  }
}

void CpuPackedMatrix::store_rows(int64_t first, int64_t count, std::span<const float> values) {
  SPIN_CHECK(first >= 0 && count >= 0 && first + count <= rows_);
  SPIN_CHECK(values.size() == static_cast<size_t>(count * cols_));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t panel_index = (first + i) / kPanelCols;
    const int64_t column = (first + i) % kPanelCols;
    const int64_t width = panel_width(panel_index);
    const float* row = values.data() + i * cols_;
    if (dtype_ == layout::DType::kF32) {
      float* out = buffer_.as<float>() + panel_offset(panel_index) + column;
      for (int64_t k = 0; k < cols_; ++k) out[k * width] = row[k];
      continue;
    }
    auto* out = buffer_.as<base::Bf16>() + panel_offset(panel_index) + 2 * column;
    for (int64_t k = 0; k < cols_; ++k) out[(k / 2) * 2 * width + k % 2] = base::to_bf16(row[k]);
  }
}

void CpuPackedMatrix::load_row(int64_t row, float* out) const {
  const int64_t panel_index = row / kPanelCols;
  const int64_t column = row % kPanelCols;
  const int64_t width = panel_width(panel_index);
  if (dtype_ == layout::DType::kF32) {
    const float* in = buffer_.as<float>() + panel_offset(panel_index) + column;
    for (int64_t k = 0; k < cols_; ++k) out[k] = in[k * width];
    return;
  }
  const auto* in = buffer_.as<base::Bf16>() + panel_offset(panel_index) + 2 * column;
  for (int64_t k = 0; k < cols_; ++k) out[k] = base::to_float(in[(k / 2) * 2 * width + k % 2]);
}

}  // namespace spin::backend::cpu
