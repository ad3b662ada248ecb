// SPDX-License-Identifier: Apache-2.0
// Summaries of ranges: means and boxes of partitions, how far keys stray from their mean, sizes.
#include <algorithm>

#include "backend/cuda/cuda_sparse_ops.h"
#include "backend/cuda/score_support.cuh"
#include "base/check.h"

namespace spin::backend::cuda {
namespace {

using layout::DType;
using layout::PagedTokens;

constexpr uint32_t kPoolThreads = 256;
constexpr uint32_t kStrayThreads = 256;
constexpr uint32_t kStrayWarps = kStrayThreads / kWarp;
constexpr uint32_t kFillThreads = 512;

// Rows of a head's keys. Token numbers have 32 bits, because their division is on every path.
template <typename T>
__device__ auto key_row(const PagedTokens& tokens, uint32_t head, uint32_t token) -> const uint4* {
  const uint32_t page = token / tokens.geometry.page_tokens;
  const uint32_t slot = __ldg(tokens.slots + head * tokens.slot_stride + page);
  const uint64_t row = token - page * tokens.geometry.page_tokens;
  return reinterpret_cast<const uint4*>(tokens.base + slot * tokens.geometry.page_bytes()) +
         row * (tokens.geometry.head_dim / kChunk<T>);
}

// Elements [element, element + kCount) of a vector.
template <uint32_t kCount>
__device__ void store_chunk(const HeadVectors& to,
                            uint32_t head,
                            uint64_t index,
                            uint32_t element,
                            const float (&x)[kCount]) {
  if (to.data == nullptr) return;
  const uint64_t offset = head * to.head_stride + index * to.width + element;
  if (to.dtype == DType::kF32) {
    auto* const out = reinterpret_cast<float4*>(static_cast<float*>(to.data) + offset);
#pragma unroll
    for (uint32_t i = 0; i < kCount; i += 4) {
      out[i / 4] = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
    return;
  }
  auto* const out =
      reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(to.data) + offset);
#pragma unroll
  for (uint32_t i = 0; i < kCount; i += 2) out[i / 2] = __floats2bfloat162_rn(x[i], x[i + 1]);
}

template <uint32_t kCount>
__device__ void load_chunk(
    const HeadVectors& from, uint32_t head, uint64_t index, uint32_t element, float (&x)[kCount]) {
  const uint64_t offset = head * from.head_stride + index * from.width + element;
  if (from.dtype == DType::kF32) {
    const auto* const in =
        reinterpret_cast<const float4*>(static_cast<const float*>(from.data) + offset);
#pragma unroll
    for (uint32_t i = 0; i < kCount; i += 4) {
      const float4 four = in[i / 4];
      x[i] = four.x;
      x[i + 1] = four.y;
      x[i + 2] = four.z;
      x[i + 3] = four.w;
    }
    return;
  }
  const auto* const in = reinterpret_cast<const __nv_bfloat162*>(
      static_cast<const __nv_bfloat16*>(from.data) + offset);
#pragma unroll
  for (uint32_t i = 0; i < kCount; i += 2) {
    const float2 two = __bfloat1622float2(in[i / 2]);
    x[i] = two.x;
    x[i + 1] = two.y;
  }
}

// ---- Means and boxes. A thread takes 16 bytes of a partition's rows and adds them up token by
// token: one chain, the same wherever the tokens lie.
// Bytes: the keys once, the vectors that are wanted once.

template <typename T>
__device__ void pool_chunk(const PoolKeysItem& item, uint32_t head, uint64_t index) {
  constexpr uint32_t kElements = kChunk<T>;
  const layout::KvGeometry& g = item.tokens.geometry;
  const uint32_t chunks = g.head_dim / kElements;
  const uint64_t partition = index / chunks;
  const auto chunk = static_cast<uint32_t>(index % chunks);
  if (partition >= item.count) return;
  float sum[kElements];
  float least[kElements];
  float most[kElements];
#pragma unroll
  for (uint32_t i = 0; i < kElements; ++i) {
    sum[i] = 0.0f;
    least[i] = INFINITY;
    most[i] = -INFINITY;
  }
  uint32_t token = (item.first + static_cast<uint32_t>(partition)) * item.partition_tokens;
  const uint32_t end = token + item.partition_tokens;
  while (token < end) {  // page by page
    const uint32_t rows = min(g.page_tokens - token % g.page_tokens, end - token);
    const uint4* row = key_row<T>(item.tokens, head, token) + chunk;
    token += rows;
#pragma unroll 8
    for (uint32_t t = 0; t < rows; ++t, row += chunks) {
      float key[kElements];
      unpack_chunk<T>(__ldg(row), key);
#pragma unroll
      for (uint32_t i = 0; i < kElements; ++i) {
        sum[i] += key[i];
        least[i] = fminf(least[i], key[i]);
        most[i] = fmaxf(most[i], key[i]);
      }
    }
  }
  const auto count = static_cast<float>(item.partition_tokens);
#pragma unroll
  for (uint32_t i = 0; i < kElements; ++i) sum[i] /= count;
  const uint64_t out = item.out_first + partition;
  store_chunk(item.mean, head, out, chunk * kElements, sum);
  store_chunk(item.min, head, out, chunk * kElements, least);
  store_chunk(item.max, head, out, chunk * kElements, most);
}

// Grid (chunks of all partitions, KV heads, items).
__global__ void __launch_bounds__(kPoolThreads)
    pool_keys_kernel(const __grid_constant__ ItemPack<PoolKeysItem> items) {
  const PoolKeysItem& item = items[blockIdx.z];
  if (blockIdx.y >= item.tokens.geometry.kv_heads) return;
  const uint64_t index = uint64_t{blockIdx.x} * kPoolThreads + threadIdx.x;
  if (item.tokens.geometry.dtype == DType::kF32) {
    pool_chunk<float>(item, blockIdx.y, index);
  } else {
    pool_chunk<__nv_bfloat16>(item, blockIdx.y, index);
  }
}

// ---- Strays. A warp per partition, eight lanes a key.
// Bytes: the keys and their means once.

// Sum over the eight lanes of a vector, which all get it.
__device__ float sum_of_lanes(float x) {
#pragma unroll
  for (unsigned step = kLanesPerVector / 2; step > 0; step /= 2) {
    x += __shfl_xor_sync(kFullMask, x, step);
  }
  return x;
}

template <typename T>
__device__ float least_cosine(const ScoreStraysItem& item, uint32_t head, uint32_t partition) {
  constexpr uint32_t kElements = kChunk<T>;
  const uint32_t chunks = item.tokens.geometry.head_dim / kElements;
  const uint32_t lane = threadIdx.x % kLanesPerVector;
  float mean[kElements];
  float mean_square = 0.0f;
  for (uint32_t c = lane; c < chunks; c += kLanesPerVector) {
    load_chunk(item.mean, head, partition, c * kElements, mean);
#pragma unroll
    for (uint32_t i = 0; i < kElements; ++i) mean_square = fmaf(mean[i], mean[i], mean_square);
  }
  const float mean_length = sqrtf(sum_of_lanes(mean_square));
  const uint32_t first = partition * item.partition_tokens;
  float least = 1.0f;
  for (uint32_t base = 0; base < item.partition_tokens; base += kVectorsPerWarp) {
    // Past the end the last one again.
    const uint32_t t = min(base + threadIdx.x % kWarp / kLanesPerVector, item.partition_tokens - 1);
    const uint4* row = key_row<T>(item.tokens, head, first + t);
    float dot = 0.0f;
    float key_square = 0.0f;
    for (uint32_t c = lane; c < chunks; c += kLanesPerVector) {
      float key[kElements];
      unpack_chunk<T>(__ldg(row + c), key);
      load_chunk(item.mean, head, partition, c * kElements, mean);
#pragma unroll
      for (uint32_t i = 0; i < kElements; ++i) {
        dot = fmaf(key[i], mean[i], dot);
        key_square = fmaf(key[i], key[i], key_square);
      }
    }
    const float lengths = sqrtf(sum_of_lanes(key_square)) * mean_length;
    dot = sum_of_lanes(dot);
    least = fminf(least, lengths > 0.0f ? dot / lengths : 0.0f);
  }
  for (unsigned step = kWarp / 2; step >= kLanesPerVector; step /= 2) {
    least = fminf(least, __shfl_xor_sync(kFullMask, least, step));
  }
  return least;
}

// Grid (partitions, KV heads, items).
__global__ void __launch_bounds__(kStrayThreads)
    score_strays_kernel(const __grid_constant__ ItemPack<ScoreStraysItem> items) {
  const ScoreStraysItem& item = items[blockIdx.z];
  const uint32_t head = blockIdx.y;
  const uint64_t index = uint64_t{blockIdx.x} * kStrayWarps + threadIdx.x / kWarp;
  if (head >= item.tokens.geometry.kv_heads || index >= item.count) return;
  const uint32_t partition = item.first + static_cast<uint32_t>(index);
  const float least = item.tokens.geometry.dtype == DType::kF32
                          ? least_cosine<float>(item, head, partition)
                          : least_cosine<__nv_bfloat16>(item, head, partition);
  if (threadIdx.x % kWarp == 0) item.scores[head * item.score_stride + index] = -least;
}

// ---- Sizes. A block per (KV head, item), because what is listed is written after the rest.
// Bytes: the sizes once.

__global__ void __launch_bounds__(kFillThreads)
    fill_sizes_kernel(const __grid_constant__ ItemPack<FillSizesItem> items) {
  const FillSizesItem& item = items[blockIdx.y];
  const uint32_t head = blockIdx.x;
  uint32_t* sizes = item.sizes + head * item.size_stride;
  for (uint32_t i = threadIdx.x; i < item.count; i += kFillThreads) {
    sizes[uint64_t{item.first} + i] = item.value;
  }
  if (item.ids == nullptr) return;
  __syncthreads();
  const uint32_t* ids = item.ids + uint64_t{head} * item.id_stride;
  const uint32_t count = item.counts[head];
  for (uint32_t i = threadIdx.x; i < count; i += kFillThreads) sizes[ids[i]] = 0;
}

// ---- What is asked of arguments, and grids.

void check_partitions(const PagedTokens& tokens,
                      uint32_t partition_tokens,
                      uint32_t first,
                      uint32_t count) {
  SPIN_CHECK(partition_tokens > 0 && tokens.geometry.head_dim % 8 == 0);
  SPIN_CHECK(reinterpret_cast<uintptr_t>(tokens.base) % 16 == 0);
  const uint64_t end = (uint64_t{first} + count) * partition_tokens;
  SPIN_CHECK(end <= tokens.tokens && end <= UINT32_MAX);
}

void check_wanted(const HeadVectors& vectors, uint32_t width) {
  if (vectors.data != nullptr) check_chunks(vectors, width);
}

// The largest need of a pack's items: blocks for their partitions and KV heads.
struct PartitionGrid {
  unsigned blocks = 0;
  unsigned heads = 0;

  void add(uint64_t work, unsigned per_block, uint32_t kv_heads) {
    blocks = std::max(blocks, blocks_for(work, per_block));
    heads = std::max(heads, kv_heads);
  }
  dim3 of(uint32_t items) const { return dim3(blocks, heads, items); }
  bool empty() const { return blocks == 0 || heads == 0; }
};

}  // namespace

void CudaSparseOps::enqueue_pool_keys(std::span<const PoolKeysItem> items, StreamRef stream_ref) {
  for (const PoolKeysItem& item : items) {
    check_partitions(item.tokens, item.partition_tokens, item.first, item.count);
    const uint32_t width = item.tokens.geometry.head_dim;
    check_wanted(item.mean, width);
    check_wanted(item.min, width);
    check_wanted(item.max, width);
  }
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || !stream.begin()) return;
  launch_packs(items, [&](const ItemPack<PoolKeysItem>& pack, uint32_t count, size_t first) {
    PartitionGrid grid;
    for (const PoolKeysItem& item : items.subspan(first, count)) {
      const layout::KvGeometry& g = item.tokens.geometry;
      const uint64_t chunks = g.row_bytes() / 16;
      grid.add(item.count * chunks, kPoolThreads, g.kv_heads);
    }
    if (grid.empty()) return;
    pool_keys_kernel<<<grid.of(count), kPoolThreads, 0, stream.handle()>>>(pack);
    stream.end("pool_keys");
  });
}

void CudaSparseOps::enqueue_score_strays(std::span<const ScoreStraysItem> items,
                                         StreamRef stream_ref) {
  for (const ScoreStraysItem& item : items) {
    check_partitions(item.tokens, item.partition_tokens, item.first, item.count);
    check_chunks(item.mean, item.tokens.geometry.head_dim);
  }
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || !stream.begin()) return;
  launch_packs(items, [&](const ItemPack<ScoreStraysItem>& pack, uint32_t count, size_t first) {
    PartitionGrid grid;
    for (const ScoreStraysItem& item : items.subspan(first, count)) {
      grid.add(item.count, kStrayWarps, item.tokens.geometry.kv_heads);
    }
    if (grid.empty()) return;
    score_strays_kernel<<<grid.of(count), kStrayThreads, 0, stream.handle()>>>(pack);
    stream.end("score_strays");
  });
}

void CudaSparseOps::enqueue_fill_sizes(std::span<const FillSizesItem> items,
                                       uint32_t kv_heads,
                                       StreamRef stream_ref) {
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || kv_heads == 0 || !stream.begin()) return;
  launch_packs(items, [&](const ItemPack<FillSizesItem>& pack, uint32_t count, size_t /*first*/) {
    fill_sizes_kernel<<<dim3(kv_heads, count), kFillThreads, 0, stream.handle()>>>(pack);
    stream.end("fill_sizes");
  });
}

}  // namespace spin::backend::cuda
