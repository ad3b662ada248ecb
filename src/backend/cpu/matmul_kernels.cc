// SPDX-License-Identifier: Apache-2.0
// Matrix products for every Highway target: f32 matrices, and bf16 matrices widened in registers.
#include "backend/cpu/highway_targets.h"
#include "backend/cpu/kernels.h"
#include "base/bf16.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/matmul_kernels.cc"
#include "hwy/foreach_target.h"  // must come before highway.h and -inl.h files
//
#include "backend/cpu/matmul_tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spin::backend::cpu {
namespace HWY_NAMESPACE {

void pack_f32(const float* x, int64_t x_stride, int64_t rows, int64_t k, void* a) {
  auto* out = static_cast<float*>(a);
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t r = 0; r < rows; ++r) *out++ = x[r * x_stride + i];
  }
}

void multiply_f32(const void* a,
                  int64_t rows,
                  const void* b,
                  int64_t b_width,
                  int64_t cols,
                  int64_t units,
                  bool add,
                  float* c,
                  int64_t c_stride,
                  const char* /*prefetch*/) {
  float_block<Rows::kPacked>(static_cast<const float*>(a), 0, rows, static_cast<const float*>(b),
                             b_width, cols, units, add, c, c_stride);
}

// Units of two floats, rounded to bf16.
void pack_bf16_as_f32(const float* x, int64_t x_stride, int64_t rows, int64_t k, void* a) {
  auto* out = static_cast<float*>(a);
  for (int64_t i = 0; i < k; i += 2) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* in = x + r * x_stride + i;
      *out++ = base::to_float(base::to_bf16(in[0]));
      *out++ = i + 1 < k ? base::to_float(base::to_bf16(in[1])) : 0.0f;
    }
  }
}

// As float_tile, over pairs: a [units][kRows][2] floats, b [units][b_width] pairs of bf16.
template <int kRows, int kVectors>
HWY_INLINE void pair_tile(const float* HWY_RESTRICT a,
                          const uint32_t* HWY_RESTRICT b,
                          int64_t b_width,
                          int64_t units,
                          bool add,
                          float* HWY_RESTRICT c,
                          int64_t c_stride) {
  const F32 d;
  VF32 sums[kRows][kVectors];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = add ? hn::LoadU(d, c + r * c_stride + v * kLanes) : hn::Zero(d);
    }
  }
  for (int64_t i = 0; i < units; ++i) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) {
      const auto pairs = hn::LoadU(U32(), b + v * kLanes);
      const VF32 even = even_bf16(d, pairs);
      const VF32 odd = odd_bf16(d, pairs);
      HWY_UNROLL(8)
      for (int r = 0; r < kRows; ++r) {
        sums[r][v] = hn::MulAdd(hn::Set(d, a[2 * r]), even, sums[r][v]);
        sums[r][v] = hn::MulAdd(hn::Set(d, a[2 * r + 1]), odd, sums[r][v]);
      }
    }
    a += 2 * kRows;
    b += b_width;
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, c + r * c_stride + v * kLanes);
  }
}

template <int kRows>
HWY_INLINE void pair_rows(const float* a,
                          const uint32_t* b,
                          int64_t b_width,
                          int64_t cols,
                          int64_t units,
                          bool add,
                          float* c,
                          int64_t c_stride) {
  constexpr int64_t kStep = kTileVectors * kLanes;
  int64_t j = 0;
  if constexpr (kRows == 1 && kLanes < 16 && kLanes > 1) {
    constexpr int kWide = 8;
    for (; j + kWide * kLanes <= cols; j += kWide * kLanes) {
      pair_tile<kRows, kWide>(a, b + j, b_width, units, add, c + j, c_stride);
    }
  }
  for (; j + kStep <= cols; j += kStep) {
    pair_tile<kRows, kTileVectors>(a, b + j, b_width, units, add, c + j, c_stride);
  }
  if constexpr (kLanes == 16) {
    for (; j < cols; j += kLanes) {
      pair_tile<kRows, 1>(a, b + j, b_width, units, add, c + j, c_stride);
    }
  }
}

void multiply_bf16(const void* a,
                   int64_t rows,
                   const void* b,
                   int64_t b_width,
                   int64_t cols,
                   int64_t units,
                   bool add,
                   float* c,
                   int64_t c_stride,
                   const char* /*prefetch*/) {
  const auto* left = static_cast<const float*>(a);
  const auto* right = static_cast<const uint32_t*>(b);
  switch (rows) {
    case 1:
      return pair_rows<1>(left, right, b_width, cols, units, add, c, c_stride);
    case 2:
      return pair_rows<2>(left, right, b_width, cols, units, add, c, c_stride);
    case 3:
      return pair_rows<3>(left, right, b_width, cols, units, add, c, c_stride);
    case 4:
      return pair_rows<4>(left, right, b_width, cols, units, add, c, c_stride);
    case 5:
      return pair_rows<5>(left, right, b_width, cols, units, add, c, c_stride);
    default:
      return pair_rows<6>(left, right, b_width, cols, units, add, c, c_stride);
  }
}

void fill_matmul(KernelSet& set) {
  set.matmul_f32 = {kBlockRows, sizeof(float), pack_f32, multiply_f32};
  set.matmul_bf16 = {kBlockRows, 2 * sizeof(float), pack_bf16_as_f32, multiply_bf16};
}

}  // namespace HWY_NAMESPACE
}  // namespace spin::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spin::backend::cpu {

void fill_matmul_kernels(int64_t target, KernelSet& set) {
  SPIN_CALL_FOR_TARGET(target, fill_matmul, set);
}

}  // namespace spin::backend::cpu
#endif  // HWY_ONCE
