// SPDX-License-Identifier: Apache-2.0
// What operations that score share. They run in two kernels around scratch memory: the operation's
// own scores tiles of keys and leaves each query head's scores and each tile's largest one and sum
// (ScoreRows); launch_finish_scores() adds the sums up to log-sum-exps and makes one score of a
// group's. Tiles lie at fixed places of an item, so that no bit depends on the grid or the batch.
//
// Vectors are read in chunks of 16 bytes. Requires: they are aligned to that, as all arrays of
// vectors are whose width is a multiple of 8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "backend/cuda/kernel_support.cuh"
#include "backend/head_vectors.h"
#include "backend/sparse_ops.h"
#include "base/check.h"

namespace spin::backend::cuda {

// ---- Between the two kernels.

// Scores of one item. Thread: plain data.
struct ScoreRows {
  float* scores = nullptr;  // [kv_heads, group, count] s of each partition; -infinity: not scored
  float2* stats = nullptr;  // [kv_heads, group, tiles] largest s of a tile, sum of e^(s - largest);
                            // (-infinity, 0) if nothing was scored
  uint32_t count = 0;
  uint32_t tiles = 0;
  float* out = nullptr;  // [kv_heads, out_stride]
  uint64_t out_stride = 0;
};

constexpr uint64_t scratch_part(uint64_t bytes) { return (bytes + 255) / 256 * 256; }

// Scratch that rows of `q_heads` query heads take, and its division.
inline uint64_t score_rows_bytes(const ScoreRows& rows, uint64_t q_heads) {
  return scratch_part(q_heads * rows.count * sizeof(float)) +
         scratch_part(q_heads * rows.tiles * sizeof(float2));
}
inline void place_score_rows(ScoreRows& rows, uint64_t q_heads, std::byte* scratch) {
  rows.scores = reinterpret_cast<float*>(scratch);
  rows.stats =
      reinterpret_cast<float2*>(scratch + scratch_part(q_heads * rows.count * sizeof(float)));
}

// out[h, j] = max over g of (scores[h, g, j] - lse[h, g]), or ln of the sum of e^ of these;
// lse[h, g] over the tiles of its stats. score.cu.
void launch_finish_scores(std::span<const ScoreRows> rows,
                          uint32_t kv_heads,
                          uint32_t group,
                          Aggregation aggregation,
                          CudaStream& stream);

// ---- What is asked of arguments.

// Vectors of `width` elements that can be read in chunks.
inline void check_chunks(const HeadVectors& vectors, uint32_t width) {
  constexpr uint64_t kBytes = 16;
  SPIN_CHECK(vectors.width == width && width % 8 == 0);
  SPIN_CHECK(reinterpret_cast<uintptr_t>(vectors.data) % kBytes == 0);
  SPIN_CHECK(vectors.head_stride * layout::dtype_bytes(vectors.dtype) % kBytes == 0);
}

inline constexpr uint32_t kMaxHeadDim = 1024;  // queries lie in shared memory

inline void check_queries(const TensorRef& q, const layout::KvGeometry& geometry) {
  SPIN_CHECK(q.dtype == layout::DType::kF32 && geometry.head_dim > 0 && geometry.kv_heads > 0);
  SPIN_CHECK(q.cols > 0 && q.cols % (int64_t{geometry.head_dim} * geometry.kv_heads) == 0);
  SPIN_CHECK(geometry.head_dim <= kMaxHeadDim);
}

// Query heads per KV head.
inline uint32_t group_of(const TensorRef& q, const layout::KvGeometry& geometry) {
  return static_cast<uint32_t>(q.cols / geometry.head_dim / geometry.kv_heads);
}

// ---- Softmax states: (largest, sum of e^(s - largest)). All lanes of a warp call and get them.

__device__ inline float2 merge_stats(float2 a, float2 b) {
  if (a.x == -INFINITY) return b;
  if (b.x == -INFINITY) return a;
  const float most = fmaxf(a.x, b.x);
  return {most, a.y * expf(a.x - most) + b.y * expf(b.x - most)};
}

// Of scores [count].
__device__ inline float2 warp_stats(const float* scores, uint32_t count) {
  const uint32_t lane = threadIdx.x % kWarp;
  float most = -INFINITY;
  for (uint32_t i = lane; i < count; i += kWarp) most = fmaxf(most, scores[i]);
  most = warp_max(most);
  if (most == -INFINITY) return {most, 0.0f};
  float sum = 0.0f;
  for (uint32_t i = lane; i < count; i += kWarp) sum += expf(scores[i] - most);
  return {most, warp_sum(sum)};
}

// Of stats [tiles] together.
__device__ inline float2 warp_merged_stats(const float2* stats, uint32_t tiles) {
  const uint32_t lane = threadIdx.x % kWarp;
  float most = -INFINITY;
  for (uint32_t i = lane; i < tiles; i += kWarp) most = fmaxf(most, stats[i].x);
  most = warp_max(most);
  if (most == -INFINITY) return {most, 0.0f};
  float sum = 0.0f;
  for (uint32_t i = lane; i < tiles; i += kWarp) {
    const float2 stat = stats[i];
    if (stat.x != -INFINITY) sum += stat.y * expf(stat.x - most);
  }
  return {most, warp_sum(sum)};
}

// ---- Products of query heads with vectors. Eight lanes share a vector.

inline constexpr uint32_t kLanesPerVector = 8;
inline constexpr uint32_t kVectorsPerWarp = kWarp / kLanesPerVector;  // at a time

template <typename T>
inline constexpr uint32_t kChunk = 16 / sizeof(T);  // elements of 16 bytes

template <typename T>
__device__ inline void unpack_chunk(const uint4& raw, float (&to)[kChunk<T>]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      to[i] = __uint_as_float(words[i]);
    } else {
      to[2 * i] = __uint_as_float(words[i] << 16);
      to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF'0000u);
    }
  }
}

// Query heads q [rows, width] times `scale` into shared memory, as add_products() reads them: four
// elements of all chunks lie together, so that eight lanes meet no bank twice. All threads call it.
template <typename T>
__device__ inline void stage_queries(
    const float* q, uint32_t rows, uint32_t width, float scale, float4* staged) {
  auto* const to = reinterpret_cast<float*>(staged);
  const uint32_t chunks = width / kChunk<T>;
  for (uint32_t i = threadIdx.x; i < rows * width; i += blockDim.x) {
    const uint32_t chunk = i % width / kChunk<T>;
    const uint32_t element = i % kChunk<T>;
    to[i / width * width + (element / 4 * chunks + chunk) * 4 + element % 4] = q[i] * scale;
  }
}

// sums[r][k] += this lane's part of q_r . low_k; of boxes of sum_d max(q_d low_d, q_d high_d): the
// upper corner counts where q_d >= 0. Vector k begins `at[k]` chunks behind low and high.
template <typename T, bool kBox, int kRows, int kKeys>
__device__ inline void add_products(const float4* staged,
                                    uint32_t rows,
                                    uint32_t chunks,
                                    const uint4* low,
                                    const uint4* high,
                                    const uint64_t (&at)[kKeys],
                                    float (&sums)[kRows][kKeys]) {
#pragma unroll 2
  for (uint32_t c = threadIdx.x % kLanesPerVector; c < chunks; c += kLanesPerVector) {
    uint4 raw[kKeys];
    uint4 upper[kBox ? kKeys : 1];
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      raw[k] = __ldg(low + at[k] + c);
      if constexpr (kBox) upper[k] = __ldg(high + at[k] + c);
    }
    float x[kKeys][kChunk<T>];
    float y[kBox ? kKeys : 1][kChunk<T>];
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      unpack_chunk<T>(raw[k], x[k]);
      if constexpr (kBox) unpack_chunk<T>(upper[k], y[k]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= static_cast<int>(rows)) break;
#pragma unroll
      for (uint32_t part = 0; part < kChunk<T> / 4; ++part) {
        const float4 four = staged[(r * (kChunk<T> / 4) + part) * chunks + c];
        const float q[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int k = 0; k < kKeys; ++k) {
            float key = x[k][part * 4 + i];
            if constexpr (kBox) key = q[i] >= 0.0f ? y[k][part * 4 + i] : key;
            sums[r][k] = fmaf(q[i], key, sums[r][k]);
          }
        }
      }
    }
  }
}

// Adds up the parts of eight lanes of each of kKeys values; each lane gets the one of summed_key().
// The tree is the same for all.
template <int kKeys>
__device__ inline float sum_parts(const float (&parts)[kKeys]) {
  static_assert(kKeys == 2 || kKeys == 4);
  float x[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) x[i] = parts[i];
  unsigned step = kLanesPerVector / 2;
#pragma unroll
  for (int n = kKeys / 2; n > 0; n /= 2, step /= 2) {
    const bool second = (threadIdx.x & step) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float sent = second ? x[i] : x[i + n];
      const float kept = second ? x[i + n] : x[i];
      x[i] = kept + __shfl_xor_sync(kFullMask, sent, step);
    }
  }
#pragma unroll
  for (; step > 0; step /= 2) x[0] += __shfl_xor_sync(kFullMask, x[0], step);
  return x[0];
}

template <int kKeys>
__device__ inline uint32_t summed_key() {
  return threadIdx.x % kLanesPerVector * kKeys / kLanesPerVector;
}

// Whether this lane is the first of those that have the same value.
template <int kKeys>
__device__ inline bool is_first_of_sum() {
  return threadIdx.x % (kLanesPerVector / kKeys) == 0;
}

}  // namespace spin::backend::cuda
