// SPDX-License-Identifier: Apache-2.0
// The register tile of float products, once per instruction set. Thread: pure functions.
#if defined(SPIN_BACKEND_CPU_MATMUL_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPIN_BACKEND_CPU_MATMUL_TILE_INL_H_
#undef SPIN_BACKEND_CPU_MATMUL_TILE_INL_H_
#else
#define SPIN_BACKEND_CPU_MATMUL_TILE_INL_H_
#endif

#include "backend/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace spin::backend::cpu {
namespace HWY_NAMESPACE {

constexpr int kBlockRows = 6;
// 24 of 32 registers hold sums with AVX-512, 12 of 16 otherwise.
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;

// How a tile reads its left operand.
enum class Rows { kPacked, kStrided };

// c[r, j] (+)= sum_k a[r, k] * b[k, j], r < kRows, j < kVectors * kLanes. Every sum is one chain
// over ascending k, so its bits do not depend on the tile's shape.
// a: kPacked: [k][kRows]; kStrided: [kRows][k] with row stride a_stride. b: row stride b_stride.
// Not inlined: beside other code the compiler runs out of registers and spills sums in the loop.
template <int kRows, int kVectors, Rows kLayout>
HWY_NOINLINE void float_tile(const float* HWY_RESTRICT a,
                             int64_t a_stride,
                             const float* HWY_RESTRICT b,
                             int64_t b_stride,
                             int64_t k,
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
  for (int64_t i = 0; i < k; ++i) {
    VF32 columns[kVectors];
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) columns[v] = hn::LoadU(d, b + v * kLanes);
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const VF32 left = hn::Set(d, kLayout == Rows::kPacked ? a[r] : a[r * a_stride]);
      HWY_UNROLL(8)
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(left, columns[v], sums[r][v]);
    }
    a += kLayout == Rows::kPacked ? kRows : 1;
    b += b_stride;
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, c + r * c_stride + v * kLanes);
  }
}

// As float_tile for a number of columns that is a multiple of 16.
template <int kRows, Rows kLayout>
HWY_INLINE void float_rows(const float* HWY_RESTRICT a,
                           int64_t a_stride,
                           const float* HWY_RESTRICT b,
                           int64_t b_stride,
                           int64_t cols,
                           int64_t k,
                           bool add,
                           float* HWY_RESTRICT c,
                           int64_t c_stride) {
  constexpr int64_t kStep = kTileVectors * kLanes;
  int64_t j = 0;
  if constexpr (kRows == 1 && kLanes < 16 && kLanes > 1) {
    // One row is bound by memory: take the whole width of a panel, one stream.
    constexpr int kWide = 8;
    for (; j + kWide * kLanes <= cols; j += kWide * kLanes) {
      float_tile<kRows, kWide, kLayout>(a, a_stride, b + j, b_stride, k, add, c + j, c_stride);
    }
  }
  for (; j + kStep <= cols; j += kStep) {
    float_tile<kRows, kTileVectors, kLayout>(a, a_stride, b + j, b_stride, k, add, c + j, c_stride);
  }
  if constexpr (kLanes == 16) {
    if (cols - j == 48) {
      float_tile<kRows, 3, kLayout>(a, a_stride, b + j, b_stride, k, add, c + j, c_stride);
    } else if (cols - j == 32) {
      float_tile<kRows, 2, kLayout>(a, a_stride, b + j, b_stride, k, add, c + j, c_stride);
    } else if (cols - j == 16) {
      float_tile<kRows, 1, kLayout>(a, a_stride, b + j, b_stride, k, add, c + j, c_stride);
    }
  }
}

template <Rows kLayout>
HWY_INLINE void float_block(const float* HWY_RESTRICT a,
                            int64_t a_stride,
                            int64_t rows,
                            const float* HWY_RESTRICT b,
                            int64_t b_stride,
                            int64_t cols,
                            int64_t k,
                            bool add,
                            float* HWY_RESTRICT c,
                            int64_t c_stride) {
  switch (rows) {
    case 1:
      return float_rows<1, kLayout>(a, a_stride, b, b_stride, cols, k, add, c, c_stride);
    case 2:
      return float_rows<2, kLayout>(a, a_stride, b, b_stride, cols, k, add, c, c_stride);
    case 3:
      return float_rows<3, kLayout>(a, a_stride, b, b_stride, cols, k, add, c, c_stride);
    case 4:
      return float_rows<4, kLayout>(a, a_stride, b, b_stride, cols, k, add, c, c_stride);
    case 5:
      return float_rows<5, kLayout>(a, a_stride, b, b_stride, cols, k, add, c, c_stride);
    default:
      return float_rows<6, kLayout>(a, a_stride, b, b_stride, cols, k, add, c, c_stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace spin::backend::cpu
HWY_AFTER_NAMESPACE();

#endif  // per target
