// SPDX-License-Identifier: Apache-2.0
// bf16 matrix products with the AVX-512 BF16 dot instruction. The functions carry their target as
// an attribute: a flag for the whole file would also compile shared inline functions for it, and
// the linker could pick those for other processors.
#include "backend/cpu/kernels.h"
#include "base/check.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define SPIN_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace spin::backend::cpu {
namespace {

constexpr int kBf16BlockRows = 6;  // x 64 columns: 24 sums

// Two floats rounded to nearest even as a pair, the first in the low half.
// The instruction flushes subnormal inputs to zero, as the dot product does anyway.
SPIN_AVX512_BF16 void pack_bf16(
    const float* x, int64_t x_stride, int64_t rows, int64_t k, void* a) {
  auto* out = static_cast<uint32_t*>(a);
  const int64_t units = (k + 1) / 2;
  for (int64_t r = 0; r < rows; ++r) {
    const float* in = x + r * x_stride;
    for (int64_t i = 0; i < k; i += 16) {
      const int64_t left = k - i;
      const __mmask16 mask = left >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << left) - 1);
      const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, in + i));
      alignas(32) uint32_t pairs[8];
      _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), (__m256i)rounded);
      for (int64_t u = 0; u < 8 && i / 2 + u < units; ++u) {
        out[(i / 2 + u) * rows + r] = pairs[u];
      }
    }
  }
}

template <int kRows, int kVectors, bool kPrefetch>
SPIN_AVX512_BF16 inline void dot_tile(const uint32_t* a,
                                      const uint32_t* b,
                                      int64_t b_width,
                                      int64_t units,
                                      bool add,
                                      float* c,
                                      int64_t c_stride,
                                      const char* prefetch) {
  __m512 sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = add ? _mm512_loadu_ps(c + r * c_stride + v * 16) : _mm512_setzero_ps();
    }
  }
  for (int64_t i = 0; i < units; ++i) {
    __m512bh columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      columns[v] = (__m512bh)_mm512_loadu_si512(b + v * 16);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512bh left = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r]));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], columns[v], left);
      }
    }
    if constexpr (kPrefetch) {
      _mm_prefetch(prefetch, _MM_HINT_T1);
      _mm_prefetch(prefetch + 64, _MM_HINT_T1);
      prefetch += 128;
    }
    a += kRows;
    b += b_width;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      _mm512_storeu_ps(c + r * c_stride + v * 16, sums[r][v]);
    }
  }
}

template <int kRows>
SPIN_AVX512_BF16 void dot_rows(const uint32_t* a,
                               const uint32_t* b,
                               int64_t b_width,
                               int64_t cols,
                               int64_t units,
                               bool add,
                               float* c,
                               int64_t c_stride,
                               const char* prefetch) {
  if (prefetch != nullptr && cols == 64) {
    return dot_tile<kRows, 4, true>(a, b, b_width, units, add, c, c_stride, prefetch);
  }
  switch (cols) {
    case 16:
      return dot_tile<kRows, 1, false>(a, b, b_width, units, add, c, c_stride, nullptr);
    case 32:
      return dot_tile<kRows, 2, false>(a, b, b_width, units, add, c, c_stride, nullptr);
    case 48:
      return dot_tile<kRows, 3, false>(a, b, b_width, units, add, c, c_stride, nullptr);
    default:
      return dot_tile<kRows, 4, false>(a, b, b_width, units, add, c, c_stride, nullptr);
  }
}

using DotRows = void (*)(const uint32_t* a,
                         const uint32_t* b,
                         int64_t b_width,
                         int64_t cols,
                         int64_t units,
                         bool add,
                         float* c,
                         int64_t c_stride,
                         const char* prefetch);

// By number of rows.
constexpr DotRows kDotRows[kBf16BlockRows + 1] = {
    nullptr, dot_rows<1>, dot_rows<2>, dot_rows<3>, dot_rows<4>, dot_rows<5>, dot_rows<6>};

void multiply_dot(const void* a,
                  int64_t rows,
                  const void* b,
                  int64_t b_width,
                  int64_t cols,
                  int64_t units,
                  bool add,
                  float* c,
                  int64_t c_stride,
                  const char* prefetch) {
  kDotRows[rows](static_cast<const uint32_t*>(a), static_cast<const uint32_t*>(b), b_width, cols,
                 units, add, c, c_stride, prefetch);
}

}  // namespace

bool cpu_has_fast_bf16() {
  // Both also ask the operating system whether it saves the wide registers.
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

void fill_avx512_bf16_kernels(KernelSet& set) {
  set.matmul_bf16 = {kBf16BlockRows, sizeof(uint32_t), pack_bf16, multiply_dot};
  set.has_fast_bf16 = true;
}

}  // namespace spin::backend::cpu

#else

namespace spin::backend::cpu {

bool cpu_has_fast_bf16() { return false; }

void fill_avx512_bf16_kernels(KernelSet&) { SPIN_CHECK(false); }

}  // namespace spin::backend::cpu

#endif
