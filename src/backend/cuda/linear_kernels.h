// SPDX-License-Identifier: Apache-2.0
// The kernels around cuBLASLt's products: packing and rounding of rows, bias, and the trials of
// matmul_plan.h. All enqueue on `stream`; cudaGetLastError() has a launch's error.
// Requires: rows, cols > 0; cols < 2^26. Strides are in elements.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "layout/dtype.h"

namespace spin::backend::cuda {

// to[r, c] = from[r, c] as `dtype` for c < cols, 0 for cols <= c < to_stride. `from` may be pinned
// host memory. Requires: `to` and its rows are aligned (tensor_views.h).
// Bytes: 4 per element read, its size written.
void launch_round_rows(const float* from,
                       int64_t from_stride,
                       int64_t rows,
                       int64_t cols,
                       layout::DType dtype,
                       void* to,
                       int64_t to_stride,
                       cudaStream_t stream);

// to[r, c] = from[r, c] + bias[c]; `from` (may be `to`) and `bias` may be null: 0.
// Bytes: 4 per element read (unless null) and 4 written.
void launch_add_bias(const float* from,
                     int64_t from_stride,
                     const float* bias,
                     int64_t rows,
                     int64_t cols,
                     float* to,
                     int64_t to_stride,
                     cudaStream_t stream);

// Random values between -1 and 1 over eight binary orders of magnitude, so that sums in another
// order round differently.
void launch_fill_random(
    layout::DType dtype, uint64_t count, uint32_t seed, void* to, cudaStream_t stream);

// Sets *differ to 1 if a[r, c] and b[r, c] differ in a bit anywhere. `differ` may be pinned.
void launch_compare_rows(const float* a,
                         const float* b,
                         int64_t rows,
                         int64_t cols,
                         int64_t stride,
                         uint32_t* differ,
                         cudaStream_t stream);

}  // namespace spin::backend::cuda
