// SPDX-License-Identifier: Apache-2.0
// Checks of the tensors that operations take. Thread: pure functions.
#pragma once

#include <cstdint>

#include "backend/tensor.h"
#include "base/check.h"

namespace spin::backend::cuda {

// What a vector load or store needs, and cuBLASLt's fast kernels.
inline constexpr uint64_t kVectorBytes = 16;

inline void check_f32(const TensorRef& tensor) {
  SPIN_CHECK(tensor.dtype == layout::DType::kF32);
  SPIN_CHECK(tensor.rows >= 0 && tensor.cols >= 0 && tensor.row_stride >= tensor.cols);
}

inline bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}

// Whether every row begins at a multiple of kVectorBytes. It depends on the stride, not on the
// number of rows, so that one row alone goes the way that it goes among others.
inline bool is_aligned(const TensorRef& tensor) {
  const uint64_t row_bytes =
      static_cast<uint64_t>(tensor.row_stride) * layout::dtype_bytes(tensor.dtype);
  return is_aligned(tensor.data) && row_bytes % kVectorBytes == 0;
}

}  // namespace spin::backend::cuda
