// SPDX-License-Identifier: Apache-2.0
// What attention kernels share: the order of every sum, so that a row gets the same bits in a tile
// of a prompt, in a decode step, over a list of pages and in any batch.
//
// A row's keys are cut at fixed positions into splits of kSplitTokens and blocks of kBlockKeys:
//
//   score   s_j = one chain of fmaf over the head's elements, in order; q is scaled before
//   block   max = max(max, s_j); keep = 2^(old max - max); p_j = 2^(s_j - max)
//           total = fmaf(total, keep, block_weights()); sums = sums * keep, then one chain of
//           fmaf(p_j, v_j, sums) over the block's keys, in order
//   split   begins with no keys; states of splits are merged in order (SplitMerge)
//   result  sums / total
//
// A key that a row does not see takes part in none of its operations: what lies there may be NaN.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include <cuda_bf16.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/cuda_stream.h"
#include "backend/cuda/kernel_support.cuh"
#include "backend/ops.h"
#include "backend/tensor.h"

namespace spin::backend::cuda {

inline constexpr uint32_t kSplitTokens = 512;
inline constexpr uint32_t kBlockKeys = 64;
inline constexpr uint32_t kSplitBlocks = kSplitTokens / kBlockKeys;
// Elements of a head that a staged row holds; larger heads are taken in several chunks.
inline constexpr uint32_t kChunkDims = 128;
inline constexpr uint32_t kAttentionThreads = 128;
// States of splits that kernels hand to each other are bounded by this, or by what one item needs.
inline constexpr uint64_t kStateBytes = uint64_t{64} << 20;

inline constexpr uint64_t splits_for(uint64_t tokens) {
  return (tokens + kSplitTokens - 1) / kSplitTokens;
}
inline constexpr uint32_t chunks_for(uint32_t head_dim) {
  return (head_dim + kChunkDims - 1) / kChunkDims;
}

// What is equal for all items of a call. The state of (row, split): totals[i] = {max, total} and
// sums[i, head_dim], i = state_index().
struct AttentionArgs {
  const float* q = nullptr;  // [rows, kv_heads * group * head_dim]
  int64_t q_stride = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
  const unsigned char* pool = nullptr;
  uint64_t page_bytes = 0;
  uint64_t plane_bytes = 0;
  uint32_t row_bytes = 0;
  uint32_t page_tokens = 0;
  uint32_t head_dim = 0;
  uint32_t kv_heads = 0;
  uint32_t group = 0;
  float scale = 1.0f;  // to scores of base 2
  float* sums = nullptr;
  float2* totals = nullptr;
  uint32_t* fault = nullptr;

  uint64_t state_bytes() const { return head_dim * sizeof(float) + sizeof(float2); }
};

AttentionArgs attention_args(
    TensorRef q, const KvPoolRef& pool, float scale, TensorRef out, const CudaStream& stream);
// Scratch for `states`. False: the stream has failed.
bool take_states(uint64_t states, AttentionArgs& args, CudaStream& stream);

// One query row over the pages of a sequence or of a list (list_attention.cu).
struct DecodeItem {
  const uint32_t* slots = nullptr;  // [kv_heads, slot_stride]
  uint64_t slot_stride = 0;
  // A list: valid tokens [kv_heads, slot_stride] and numbers [kv_heads] of its pages. Null: pages
  // are full, up to `context` tokens.
  const uint8_t* tokens = nullptr;
  const uint32_t* counts = nullptr;
  uint64_t context = 0;
  uint64_t row = 0;  // of q and out
  float* log_sum_exp = nullptr;
  uint64_t first_state = 0;  // set when launched
  uint32_t splits = 1;       // at most so many, of any head; 1: no states are kept
};

// States that launch_decode() keeps at once.
uint64_t decode_states(std::span<DecodeItem> items, const AttentionArgs& args);
void launch_decode(std::span<DecodeItem> items,
                   layout::DType dtype,
                   const AttentionArgs& args,
                   CudaStream& stream);

// States of `rows` rows of every KV head, to be merged into rows of `out` (merge.cu). Row r is
// query head head * group + r % group of row first_row + r / group of `out`.
struct StateItem {
  uint64_t first_state = 0;
  uint64_t first_row = 0;
  uint64_t first_sees = 0;           // keys that row 0 sees, each later token one more
  const uint32_t* counts = nullptr;  // lists: pages of each head; a single split is out already
  float* log_sum_exp = nullptr;      // [q_heads]
  uint32_t stride = 0;               // lists: bound of counts
  uint32_t rows = 0;
  uint32_t splits = 0;  // as the states are laid out
};

void launch_merge_states(std::span<const StateItem> items,
                         const AttentionArgs& args,
                         CudaStream& stream);

// ---- Device side.

__device__ inline uint64_t state_index(uint64_t first_state,
                                       uint32_t splits,
                                       uint32_t rows,
                                       uint32_t head,
                                       uint32_t split,
                                       uint32_t row) {
  return first_state + (uint64_t{head} * splits + split) * rows + row;
}

// Where query head `row % group` of a KV head lies in a row of q or out.
__device__ inline int64_t head_offset(const AttentionArgs& args, uint32_t head, uint32_t row) {
  return (int64_t{head} * args.group + row % args.group) * args.head_dim;
}

// Elements of chunk `chunk` of a head.
__device__ inline uint32_t chunk_dims(uint32_t head_dim, uint32_t chunk) {
  return min(kChunkDims, head_dim - chunk * kChunkDims);
}

// Both elements of a bf16 pair.
__device__ inline void widen(uint32_t pair, float& low, float& high) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xFFFF'0000u);
}

// kCount elements in one piece; aligned to it, at most 16 bytes a load.
template <int kCount>
__device__ inline void load_elements(const __nv_bfloat16* from, float (&x)[kCount]) {
  static_assert(kCount == 2 || kCount == 4 || kCount == 8);
  if constexpr (kCount == 2) {
    widen(*reinterpret_cast<const uint32_t*>(from), x[0], x[1]);
  } else if constexpr (kCount == 4) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    widen(words.x, x[0], x[1]);
    widen(words.y, x[2], x[3]);
  } else {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    widen(words.x, x[0], x[1]);
    widen(words.y, x[2], x[3]);
    widen(words.z, x[4], x[5]);
    widen(words.w, x[6], x[7]);
  }
}

template <int kCount>
__device__ inline void load_elements(const float* from, float (&x)[kCount]) {
  static_assert(kCount == 2 || kCount % 4 == 0);
  if constexpr (kCount == 2) {
    const float2 pair = *reinterpret_cast<const float2*>(from);
    x[0] = pair.x;
    x[1] = pair.y;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      x[i] = four.x;
      x[i + 1] = four.y;
      x[i + 2] = four.z;
      x[i + 3] = four.w;
    }
  }
}

// A block of one row lies in the 16 lanes of half a warp, keys lane, lane + 16, + 32, + 48.
inline constexpr unsigned kRowLanes = 16;
inline constexpr int kLaneKeys = kBlockKeys / kRowLanes;

__device__ inline float block_max(const float (&scores)[kLaneKeys]) {
  float most = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
#pragma unroll
  for (unsigned step = kRowLanes / 2; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(kFullMask, most, step));
  }
  return most;
}

// Turns scores into weights, 0 for keys from `visible` on, and returns their sum.
__device__ inline float block_weights(float (&scores)[kLaneKeys],
                                      float max,
                                      int visible,
                                      int lane) {
#pragma unroll
  for (int c = 0; c < kLaneKeys; ++c) {
    const float weight = exp2f(scores[c] - max);
    scores[c] = lane + c * static_cast<int>(kRowLanes) < visible ? weight : 0.0f;
  }
  float sum = ((scores[0] + scores[1]) + scores[2]) + scores[3];
#pragma unroll
  for (unsigned step = kRowLanes / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(kFullMask, sum, step);
  }
  return sum;
}

// What a later split's state does to the merged one of those before: x = fmaf(later x, take,
// x * keep) for sums and total. A split whose total is 0 is left out; the first one is taken as is.
struct SplitMerge {
  float keep;
  float take;
  __device__ SplitMerge(float max, float later_max) {
    const float most = fmaxf(max, later_max);
    keep = exp2f(max - most);
    take = exp2f(later_max - most);
  }
  __device__ float apply(float x, float later) const { return fmaf(later, take, x * keep); }
};

__device__ inline float natural_log_sum(float max, float total) {
  constexpr double kLn2 = 0.69314718055994530942;
  return static_cast<float>((max + log2(static_cast<double>(total))) * kLn2);
}

// Where the keys of a split lie. Slots and tokens, not addresses: half the shared memory, which
// decides how many blocks an SM holds.
struct KeyPlaces {
  uint32_t slots[kSplitTokens];
  uint16_t tokens[kSplitTokens];  // within their pages

  __device__ void set(uint32_t key, uint32_t slot, uint32_t token) {
    slots[key] = slot;
    tokens[key] = static_cast<uint16_t>(token);
  }
  // Of the key, in bytes from the pool's begin.
  __device__ uint64_t offset(uint32_t key, const AttentionArgs& args) const {
    return slots[key] * args.page_bytes + uint64_t{tokens[key]} * args.row_bytes;
  }
};

// Finds keys [begin, end) of pages in token order, at most a split's, and returns how many it took.
__device__ inline uint32_t find_paged_keys(const AttentionArgs& args,
                                           const uint32_t* slots,
                                           uint64_t begin,
                                           uint64_t end,
                                           KeyPlaces& places) {
  const auto count = static_cast<uint32_t>(min(uint64_t{kSplitTokens}, end - begin));
  const uint32_t* const first_page = slots + begin / args.page_tokens;
  const auto skip = static_cast<uint32_t>(begin % args.page_tokens);
  for (uint32_t j = threadIdx.x; j < count; j += kAttentionThreads) {
    const uint32_t token = skip + j;
    places.set(j, first_page[token / args.page_tokens], token % args.page_tokens);
  }
  return count;
}

// Starts to copy `bytes`, a multiple of 16, of each of `count` keys' rows, `plane_offset` behind
// their places, to shared memory. All threads.
template <typename T>
__device__ inline void stage_rows(const AttentionArgs& args,
                                  const KeyPlaces& places,
                                  uint32_t first_key,
                                  uint32_t count,
                                  uint64_t plane_offset,
                                  uint32_t bytes,
                                  uint32_t tile_stride,
                                  T* tile) {
  const unsigned char* const plane = args.pool + plane_offset;
  const uint32_t pieces = bytes / 16;
  const uint32_t step_rows = kAttentionThreads / pieces;
  const uint32_t step_pieces = kAttentionThreads % pieces;
  uint32_t row = threadIdx.x / pieces;
  uint32_t piece = threadIdx.x % pieces;
#pragma unroll 4
  while (row < count) {
    __pipeline_memcpy_async(tile + row * tile_stride + piece * (16 / sizeof(T)),
                            plane + places.offset(first_key + row, args) + piece * 16, 16);
    row += step_rows;
    piece += step_pieces;
    if (piece >= pieces) {
      piece -= pieces;
      ++row;
    }
  }
}

// Lets a kernel use `bytes` of dynamic shared memory, and an SM give all it has to such blocks.
template <typename Kernel>
bool allow_shared_memory(Kernel* kernel, size_t bytes, CudaStream& stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(bytes));
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  stream.fail(cuda_status(error, "shared memory for attention"));
  return error == cudaSuccess;
}

}  // namespace spin::backend::cuda
