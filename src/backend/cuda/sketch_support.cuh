// SPDX-License-Identifier: Apache-2.0
// What encoding and scoring of sketches (backend/sketch_ops.h) share: the rotation and the levels.
//
// A vector is cut into pieces of 8 dimensions. Piece p lies in lane p % lanes of a group of `lanes`
// neighbouring lanes (a power of two, at most a warp) as its y[p / lanes]; lanes without a piece
// hold zeros. More than one piece per lane: the group is a warp.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backend/cuda/kernel_support.cuh"
#include "backend/sketch_ops.h"
#include "base/check.h"
#include "layout/kv_geometry.h"

namespace spin::backend::cuda {

inline constexpr uint32_t kPieceDims = 8;
inline constexpr uint32_t kMostSketchDims = 1024;

// ---- Arguments.

inline void check_sketches(const SketchArray& array, uint64_t tokens, uint32_t head_dim) {
  SPIN_CHECK(array.bits == 1 || array.bits == 2 || array.bits == 4);
  SPIN_CHECK(array.capacity % kSketchBlockTokens == 0 && tokens <= array.capacity);
  SPIN_CHECK(array.split % kSketchBlockTokens == 0);
  SPIN_CHECK(head_dim > 0 && head_dim % kPieceDims == 0 && head_dim <= kMostSketchDims);
  // Codes and means are read 16 bytes at a time, scales 8.
  SPIN_CHECK(reinterpret_cast<uintptr_t>(array.codes) % 16 == 0);
  SPIN_CHECK(reinterpret_cast<uintptr_t>(array.means) % 16 == 0);
  SPIN_CHECK(reinterpret_cast<uintptr_t>(array.scales) % 8 == 0);
}

// use(std::integral_constant<int, pieces per lane>) for a group of a whole warp, or of as few lanes
// as hold one piece each.
template <typename Use>
void with_pieces(uint32_t head_dim, Use&& use) {
  const uint32_t pieces = head_dim / kPieceDims;
  if (pieces <= kWarp) return use(std::integral_constant<int, 1>{});
  if (pieces <= 2 * kWarp) return use(std::integral_constant<int, 2>{});
  use(std::integral_constant<int, 4>{});
}

template <typename Use>
void with_bits(uint32_t bits, Use&& use) {
  if (bits == 1) return use(std::integral_constant<int, 1>{});
  if (bits == 2) return use(std::integral_constant<int, 2>{});
  use(std::integral_constant<int, 4>{});
}

// ---- Levels.

constexpr int sketch_level(uint32_t bits, uint32_t code) {
  const SketchLevels levels = sketch_levels(bits);
  return levels.shifted[code] - levels.offset;
}

// Levels of four codes from `first` on, a byte each, the first one lowest.
constexpr uint32_t level_bytes(uint32_t bits, uint32_t first) {
  uint32_t bytes = 0;
  for (uint32_t i = 0; i < 4 && first + i < 1u << bits; ++i) {
    bytes |= static_cast<uint32_t>(sketch_level(bits, first + i) & 0xFF) << (8 * i);
  }
  return bytes;
}

// ---- Places in a SketchArray, of a head.

__device__ inline const uint4* sketch_codes(const SketchArray& array,
                                            uint32_t head,
                                            uint32_t words,
                                            uint64_t block) {
  const uint64_t first = head * array.capacity + block * kSketchBlockTokens;
  return reinterpret_cast<const uint4*>(array.codes + first * words);
}

__device__ inline const float* sketch_mean(
    const SketchArray& array, uint32_t kv_heads, uint32_t head_dim, uint32_t head, bool second) {
  return array.means + ((second ? uint64_t{kv_heads} : 0) + head) * head_dim;
}

// ---- Vectors in pieces.

// Requires: rows are 16-byte aligned.
__device__ inline void load_piece(const void* row,
                                  layout::DType dtype,
                                  uint32_t piece,
                                  float (&x)[kPieceDims]) {
  const auto* const from = static_cast<const uint4*>(row);
  if (dtype == layout::DType::kF32) {
    const uint4 raw[2] = {from[2 * piece], from[2 * piece + 1]};
    const uint32_t words[] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w,
                              raw[1].x, raw[1].y, raw[1].z, raw[1].w};
#pragma unroll
    for (uint32_t i = 0; i < kPieceDims; ++i) x[i] = __uint_as_float(words[i]);
  } else {
    const uint4 raw = from[piece];
    const uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (uint32_t i = 0; i < kPieceDims / 2; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF'0000u);
    }
  }
}

// Over the lanes of a group; all lanes of the warp call it.
__device__ inline float group_sum(float x, uint32_t lanes) {
  for (uint32_t step = 1; step < lanes; step *= 2) x += __shfl_xor_sync(kFullMask, x, step);
  return x;
}

// y = H y. Adds and subtracts in the order of the CPU backend, so that both find the same bits.
//
// Blocks of the rotation are powers of two, the largest first: piece p lies in the one of the
// highest bit in which p and `pieces` differ, and its partners are p ^ 1, p ^ 2, ... below that
// bit. All lanes of the warp call it.
template <int kPieces>
__device__ inline void rotate_pieces(uint32_t pieces,
                                     uint32_t lane,
                                     uint32_t lanes,
                                     float (&y)[kPieces][kPieceDims]) {
  uint32_t block[kPieces];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const uint32_t piece = j * lanes + lane;
    block[j] = piece < pieces ? 1u << (31 - __clz(static_cast<int>(piece ^ pieces))) : 1u;
#pragma unroll
    for (uint32_t half = 1; half < kPieceDims; half *= 2) {
#pragma unroll
      for (uint32_t i = 0; i < kPieceDims; ++i) {
        if ((i & half) != 0) continue;
        const float low = y[j][i];
        const float high = y[j][i + half];
        y[j][i] = low + high;
        y[j][i + half] = low - high;
      }
    }
  }
  for (uint32_t step = 1; step < lanes; step *= 2) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const bool high = (lane & step) != 0;
#pragma unroll
      for (uint32_t i = 0; i < kPieceDims; ++i) {
        const float other = __shfl_xor_sync(kFullMask, y[j][i], step);
        if (step < block[j]) y[j][i] = high ? other - y[j][i] : y[j][i] + other;
      }
    }
  }
#pragma unroll
  for (int step = 1; step < kPieces; step *= 2) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      if ((j & step) != 0 || step * lanes >= block[j]) continue;
#pragma unroll
      for (uint32_t i = 0; i < kPieceDims; ++i) {
        const float low = y[j][i];
        const float high = y[j + step][i];
        y[j][i] = low + high;
        y[j + step][i] = low - high;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const float norm = 1.0f / sqrtf(static_cast<float>(block[j] * kPieceDims));
#pragma unroll
    for (uint32_t i = 0; i < kPieceDims; ++i) y[j][i] *= norm;
  }
}

}  // namespace spin::backend::cuda
