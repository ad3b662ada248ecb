// SPDX-License-Identifier: Apache-2.0
// Two-dimensional views of device memory, the currency of Ops. They own nothing.
// Lifetime: the memory outlives every operation enqueued with the view. Thread: plain data.
#pragma once

#include <cstdint>

#include "layout/dtype.h"

namespace spin::backend {

// [rows, cols], element (r, c) at data + (r * row_stride + c) elements; row_stride >= cols.
struct TensorRef {
  void* data = nullptr;
  layout::DType dtype = layout::DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;

  // Columns [first, first + count) of the same rows.
  TensorRef columns(int64_t first, int64_t count) const {
    TensorRef view = *this;
    view.data = static_cast<char*>(data) + first * static_cast<int64_t>(layout::dtype_bytes(dtype));
    view.cols = count;
    return view;
  }
  // Rows [first, first + count).
  TensorRef row_range(int64_t first, int64_t count) const {
    TensorRef view = *this;
    view.data = static_cast<char*>(data) +
                first * row_stride * static_cast<int64_t>(layout::dtype_bytes(dtype));
    view.rows = count;
    return view;
  }
};

}  // namespace spin::backend
