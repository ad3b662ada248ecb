// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/kernel_support.cuh"
#include "backend/cuda/linear_kernels.h"
#include "backend/cuda/quads.cuh"
#include "backend/cuda/tensor_views.h"

namespace spin::backend::cuda {
namespace {

constexpr unsigned kThreads = 256;

// A block per row and kThreads quads of it.
dim3 row_grid(int64_t rows, int64_t cols) {
  return dim3(static_cast<unsigned>(rows),
              blocks_for(quads_in(static_cast<uint64_t>(cols)), kThreads));
}

__device__ uint64_t first_column() {
  return (uint64_t{blockIdx.y} * kThreads + threadIdx.x) * kQuad;
}

template <typename To>
__global__ void __launch_bounds__(kThreads) round_rows_kernel(const float* from,
                                                              uint64_t from_stride,
                                                              uint64_t cols,
                                                              bool vector,
                                                              To* to,
                                                              uint64_t to_stride) {
  const uint64_t c = first_column();
  if (c >= to_stride) return;
  float4 quad = {0.0f, 0.0f, 0.0f, 0.0f};
  if (c < cols) quad = load_quad(from + blockIdx.x * from_stride + c, cols - c, vector);
  store_quad(to + blockIdx.x * to_stride + c, quad, to_stride - c, true);
}

__global__ void __launch_bounds__(kThreads) add_bias_kernel(const float* from,
                                                            uint64_t from_stride,
                                                            const float* bias,
                                                            uint64_t cols,
                                                            bool vector,
                                                            float* to,
                                                            uint64_t to_stride) {
  const uint64_t c = first_column();
  if (c >= cols) return;
  float4 quad = {0.0f, 0.0f, 0.0f, 0.0f};
  if (from != nullptr) quad = load_quad(from + blockIdx.x * from_stride + c, cols - c, vector);
  if (bias != nullptr) {
    const float4 added = load_quad(bias + c, cols - c, vector);
    quad.x += added.x;
    quad.y += added.y;
    quad.z += added.z;
    quad.w += added.w;
  }
  store_quad(to + blockIdx.x * to_stride + c, quad, cols - c, vector);
}

template <typename To>
__global__ void __launch_bounds__(kThreads)
    fill_random_kernel(uint64_t count, uint32_t seed, To* to) {
  const uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  // The finaliser of MurmurHash3.
  uint32_t hash = static_cast<uint32_t>(i) * 0x9E37'79B1u + seed;
  hash = (hash ^ (hash >> 16)) * 0x85EB'CA6Bu;
  hash = (hash ^ (hash >> 13)) * 0xC2B2'AE35u;
  hash ^= hash >> 16;
  const float unit = static_cast<float>(static_cast<int32_t>(hash)) * 0x1p-31f;
  store_quad(to + i, {unit / static_cast<float>(1u << (hash & 7)), 0.0f, 0.0f, 0.0f}, 1, false);
}

// Bits, so that NaN equals itself.
__global__ void __launch_bounds__(kThreads) compare_rows_kernel(
    const uint32_t* a, const uint32_t* b, uint64_t cols, uint64_t stride, uint32_t* differ) {
  const uint64_t first = first_column();
  const uint64_t last = first + kQuad < cols ? first + kQuad : cols;
  for (uint64_t c = first; c < last; ++c) {
    const uint64_t i = blockIdx.x * stride + c;
    if (a[i] != b[i]) *differ = 1;  // every writer writes the same
  }
}

}  // namespace

void launch_round_rows(const float* from,
                       int64_t from_stride,
                       int64_t rows,
                       int64_t cols,
                       layout::DType dtype,
                       void* to,
                       int64_t to_stride,
                       cudaStream_t stream) {
  const bool vector =
      is_aligned(TensorRef{const_cast<float*>(from), layout::DType::kF32, rows, cols, from_stride});
  const dim3 grid = row_grid(rows, to_stride);
  if (dtype == layout::DType::kF32) {
    round_rows_kernel<<<grid, kThreads, 0, stream>>>(from, from_stride, cols, vector,
                                                     static_cast<float*>(to), to_stride);
  } else {
    round_rows_kernel<<<grid, kThreads, 0, stream>>>(from, from_stride, cols, vector,
                                                     static_cast<__nv_bfloat16*>(to), to_stride);
  }
}

void launch_add_bias(const float* from,
                     int64_t from_stride,
                     const float* bias,
                     int64_t rows,
                     int64_t cols,
                     float* to,
                     int64_t to_stride,
                     cudaStream_t stream) {
  const auto aligned = [&](const float* data, int64_t stride) {
    return is_aligned(TensorRef{const_cast<float*>(data), layout::DType::kF32, rows, cols, stride});
  };
  const bool vector =
      (from == nullptr || aligned(from, from_stride)) && aligned(to, to_stride) && is_aligned(bias);
  add_bias_kernel<<<row_grid(rows, cols), kThreads, 0, stream>>>(from, from_stride, bias, cols,
                                                                 vector, to, to_stride);
}

void launch_fill_random(
    layout::DType dtype, uint64_t count, uint32_t seed, void* to, cudaStream_t stream) {
  const unsigned blocks = blocks_for(count, kThreads);
  if (dtype == layout::DType::kF32) {
    fill_random_kernel<<<blocks, kThreads, 0, stream>>>(count, seed, static_cast<float*>(to));
  } else {
    fill_random_kernel<<<blocks, kThreads, 0, stream>>>(count, seed,
                                                        static_cast<__nv_bfloat16*>(to));
  }
}

void launch_compare_rows(const float* a,
                         const float* b,
                         int64_t rows,
                         int64_t cols,
                         int64_t stride,
                         uint32_t* differ,
                         cudaStream_t stream) {
  compare_rows_kernel<<<row_grid(rows, cols), kThreads, 0, stream>>>(
      reinterpret_cast<const uint32_t*>(a), reinterpret_cast<const uint32_t*>(b), cols, stride,
      differ);
}

}  // namespace spin::backend::cuda
