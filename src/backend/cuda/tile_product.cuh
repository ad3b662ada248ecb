// SPDX-License-Identifier: Apache-2.0
// Matrix products in float by blocks of 256 threads: tiles go through shared memory, sums stay in
// registers. Every sum is one chain of fused multiply-adds over ascending depth, so that its bits
// depend on its own row and column alone, never on the tile that it falls into.
//
// Model: a step of a 128 x 128 tile reads 16 KiB through the second cache and makes 2^18
// multiply-adds, 8 bytes in each cycle of a multiprocessor at the full rate: the arithmetic binds.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace spin::backend::cuda {

inline constexpr unsigned kProductThreads = 256;
inline constexpr unsigned kProductDepth = 16;  // of one step

// A and B of a product are read by operands:
//   Loaded load(step, depth, index)         four elements of step `step`, as they lie in memory:
//     kAlongDepth    depths [depth, depth + 4) of row (A) or column (B) `index`
//     otherwise      rows or columns [index, index + 4) at depth `depth`
//   float4 finish(loaded, step, depth)      the same as floats, zeros behind the last depth
// so that a step's loads are on their way while the one before is multiplied. With kAlongDepth a
// thread always asks for the index  threadIdx.x % kRows  (or kCols).

// Four columns of a matrix at each depth: [depths, stride], `columns` of them from `data` on.
struct AcrossDepth {
  using Loaded = float4;
  static constexpr bool kAlongDepth = false;
  const float* data = nullptr;  // aligned to 16 bytes
  uint64_t stride = 0;          // a multiple of 4
  uint32_t depths = 0;
  uint32_t columns = 0;  // a multiple of 4

  __device__ __forceinline__ float4 load(unsigned step, unsigned depth, unsigned index) const {
    const unsigned d = step * kProductDepth + depth;
    if (d >= depths || index >= columns) return make_float4(0, 0, 0, 0);
    return *reinterpret_cast<const float4*>(data + d * stride + index);
  }
  __device__ __forceinline__ float4 finish(float4 x, unsigned, unsigned) const { return x; }
};

// Rows that lie along the depth: [rows, stride].
struct AlongDepth {
  using Loaded = float4;
  static constexpr bool kAlongDepth = true;
  const float* data = nullptr;  // aligned to 16 bytes
  uint64_t stride = 0;          // a multiple of 4
  uint32_t depths = 0;          // a multiple of 4
  uint32_t rows = 0;

  __device__ __forceinline__ float4 load(unsigned step, unsigned depth, unsigned index) const {
    const unsigned d = step * kProductDepth + depth;
    if (d >= depths || index >= rows) return make_float4(0, 0, 0, 0);
    return *reinterpret_cast<const float4*>(data + index * stride + d);
  }
  __device__ __forceinline__ float4 finish(float4 x, unsigned, unsigned) const { return x; }
};

// What a thread carries from an operand to the tile of the next step.
template <int kQuads, typename Operand>
struct StagedTile {
  static constexpr unsigned kWidth = 64 * kQuads;
  typename Operand::Loaded values[kQuads];

  static __device__ __forceinline__ unsigned depth_of(unsigned i) {
    return Operand::kAlongDepth ? i / kWidth * 4 : i / (kWidth / 4);
  }
  static __device__ __forceinline__ unsigned index_of(unsigned i) {
    return Operand::kAlongDepth ? i % kWidth : i % (kWidth / 4) * 4;
  }

  __device__ __forceinline__ void load(const Operand& from, unsigned step) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const unsigned i = threadIdx.x + q * kProductThreads;
      values[q] = from.load(step, depth_of(i), index_of(i));
    }
  }

  __device__ __forceinline__ void store(const Operand& from,
                                        unsigned step,
                                        float (*to)[kWidth]) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const unsigned i = threadIdx.x + q * kProductThreads;
      const unsigned depth = depth_of(i);
      const unsigned index = index_of(i);
      const float4 x = from.finish(values[q], step, depth);
      if constexpr (Operand::kAlongDepth) {
        to[depth][index] = x.x;
        to[depth + 1][index] = x.y;
        to[depth + 2][index] = x.z;
        to[depth + 3][index] = x.w;
      } else {
        *reinterpret_cast<float4*>(&to[depth][index]) = x;
      }
    }
  }
};

// The sums of one thread of a tile of 64 kRowQuads x 64 kColQuads.
template <int kRowQuads, int kColQuads>
struct ProductTile {
  static constexpr unsigned kRows = 64 * kRowQuads;
  static constexpr unsigned kCols = 64 * kColQuads;
  static constexpr int kOwnRows = 4 * kRowQuads;
  static constexpr int kOwnCols = 4 * kColQuads;

  struct Buffers {  // shared; one half is read while the other is written
    alignas(16) float a[2][kProductDepth][kRows];
    alignas(16) float b[2][kProductDepth][kCols];
  };

  float sums[kOwnRows][kOwnCols];

  // Row and column in the tile of sums[i][j]; ascending in i and j.
  static __device__ __forceinline__ unsigned row(int i) {
    return static_cast<unsigned>(i) / 4 * 64 + threadIdx.x / 16 * 4 + static_cast<unsigned>(i) % 4;
  }
  static __device__ __forceinline__ unsigned col(int j) {
    return static_cast<unsigned>(j) / 4 * 64 + threadIdx.x % 16 * 4 + static_cast<unsigned>(j) % 4;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
      for (int j = 0; j < kOwnCols; ++j) sums[i][j] = 0.0f;
    }
  }

  // sums += a b over `steps` steps. All threads of the block call it; nobody reads the buffers any
  // more when it returns.
  template <typename A, typename B>
  __device__ __forceinline__ void accumulate(Buffers& buffers,
                                             unsigned steps,
                                             const A& a,
                                             const B& b) {
    if (steps == 0) return;
    StagedTile<kRowQuads, A> next_a;
    StagedTile<kColQuads, B> next_b;
    next_a.load(a, 0);
    next_b.load(b, 0);
    next_a.store(a, 0, buffers.a[0]);
    next_b.store(b, 0, buffers.b[0]);
    __syncthreads();
    for (unsigned step = 0; step < steps; ++step) {
      const unsigned next = step + 1;
      if (next < steps) {
        next_a.load(a, next);
        next_b.load(b, next);
      }
      multiply(buffers.a[step % 2], buffers.b[step % 2]);
      if (next < steps) {
        next_a.store(a, next, buffers.a[next % 2]);
        next_b.store(b, next, buffers.b[next % 2]);
      }
      __syncthreads();
    }
  }

 private:
  __device__ __forceinline__ void multiply(const float (*a)[kRows], const float (*b)[kCols]) {
#pragma unroll
    for (unsigned k = 0; k < kProductDepth; ++k) {
      float4 rows[kRowQuads];
      float4 cols[kColQuads];
#pragma unroll
      for (int q = 0; q < kRowQuads; ++q) {
        rows[q] = *reinterpret_cast<const float4*>(&a[k][row(4 * q)]);
      }
#pragma unroll
      for (int q = 0; q < kColQuads; ++q) {
        cols[q] = *reinterpret_cast<const float4*>(&b[k][col(4 * q)]);
      }
#pragma unroll
      for (int r = 0; r < kRowQuads; ++r) {
#pragma unroll
        for (int c = 0; c < kColQuads; ++c) {
          add_quad(&sums[4 * r], 4 * c, rows[r], cols[c]);
        }
      }
    }
  }

  static __device__ __forceinline__ void add_quad(float (*to)[kOwnCols],
                                                  int first,
                                                  float4 rows,
                                                  float4 cols) {
    add_row(to[0] + first, rows.x, cols);
    add_row(to[1] + first, rows.y, cols);
    add_row(to[2] + first, rows.z, cols);
    add_row(to[3] + first, rows.w, cols);
  }

  static __device__ __forceinline__ void add_row(float* to, float x, float4 cols) {
    to[0] = fmaf(x, cols.x, to[0]);
    to[1] = fmaf(x, cols.y, to[1]);
    to[2] = fmaf(x, cols.z, to[2]);
    to[3] = fmaf(x, cols.w, to[3]);
  }
};

}  // namespace spin::backend::cuda
