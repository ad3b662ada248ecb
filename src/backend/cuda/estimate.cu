// SPDX-License-Identifier: Apache-2.0
// Attention to partitions that stand for their tokens. A head's list is cut into at most 32 splits
// whose length depends on its own number of entries alone. A block takes one split and up to four
// query heads: scores as in score_support.cuh, then weighted sums of values, 128 entries at a time
// with a running maximum. A second kernel merges the splits in ascending order.
//
// Bytes: keys, sums of values, ids and sizes of the listed partitions once per four query heads (of
// these all but the first read from the L2 cache); 4 head_dim per query head and split, twice.
#include <algorithm>

#include "backend/cuda/cuda_sparse_ops.h"
#include "backend/cuda/score_support.cuh"
#include "base/check.h"

namespace spin::backend::cuda {
namespace {

using layout::DType;

constexpr uint32_t kEstimateThreads = 256;
constexpr uint32_t kEstimateWarps = kEstimateThreads / kWarp;
constexpr uint32_t kEntries = 128;  // at a time
constexpr uint32_t kMostSplits = 32;
constexpr int kRows = 4;  // query heads of a block: their sums lie in registers
constexpr int kKeys = 4;  // of eight lanes at a time
static_assert(kEntries == kEstimateWarps * kVectorsPerWarp * kKeys);  // each warp scores once
static_assert(kRows <= kEstimateWarps);                               // and weighs one row
static_assert(kMaxHeadDim / kChunk<float> <= kEstimateThreads);       // a thread has one chunk

struct EstimateArgs {
  const float* q = nullptr;
  int64_t row_stride = 0;
  uint32_t group = 0;
  uint32_t parts = 0;  // blocks that share a group
  uint32_t rows = 0;   // query heads of each, but for the last one
  uint32_t head_dim = 0;
  uint32_t q_heads = 0;
  uint32_t splits = 0;  // of the longest list there may be
  float scale = 1.0f;
  float* sums = nullptr;    // [items, q_heads, splits, head_dim]
  float2* stats = nullptr;  // [items, q_heads, splits] largest score, sum of n e^(s - largest)
};

__device__ uint32_t entries_of(const EstimateItem& item, uint32_t head) {
  const uint32_t count = item.counts[head];
  return count > item.skip ? count - item.skip : 0;
}

// Whole times kEntries.
__host__ __device__ constexpr uint32_t split_entries(uint32_t entries) {
  constexpr uint32_t kLeast = kMostSplits * kEntries;
  return (entries / kLeast + (entries % kLeast != 0 ? 1 : 0)) * kEntries;
}
__host__ __device__ constexpr uint32_t splits_of(uint32_t entries) {
  if (entries == 0) return 0;
  return (entries - 1) / split_entries(entries) + 1;
}

struct EstimateShared {
  uint32_t ids[kEntries];
  uint32_t sizes[kEntries];
  float weights[kRows][kEntries];  // scores first
  float most[kRows];               // running
  float total[kRows];
  float rescale[kRows];  // of what was added up before
};

// Scores of entries [count]; -infinity where a partition has no tokens.
template <typename Key>
__device__ void score_entries(const HeadVectors& keys,
                              uint32_t head,
                              const float4* q,
                              uint32_t rows,
                              uint32_t count,
                              EstimateShared& shared) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t base = threadIdx.x / kWarp * (kVectorsPerWarp * kKeys);
  if (base >= count) return;
  const uint32_t chunks = keys.width / kChunk<Key>;
  const auto* const data =
      reinterpret_cast<const uint4*>(static_cast<const Key*>(keys.data) + head * keys.head_stride);
  uint64_t at[kKeys];
#pragma unroll
  for (int k = 0; k < kKeys; ++k) {  // past the end the last one again
    const uint32_t entry = min(base + k * kVectorsPerWarp + lane / kLanesPerVector, count - 1);
    at[k] = uint64_t{shared.ids[entry]} * chunks;
  }
  float sums[kRows][kKeys] = {};
  add_products<Key, false>(q, rows, chunks, data, nullptr, at, sums);
  const uint32_t entry = base + summed_key<kKeys>() * kVectorsPerWarp + lane / kLanesPerVector;
  const bool stored = is_first_of_sum<kKeys>() && entry < count;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= static_cast<int>(rows)) break;
    const float score = sum_parts(sums[r]);
    if (stored) shared.weights[r][entry] = shared.sizes[entry] != 0 ? score : -INFINITY;
  }
}

// A warp makes the scores [count] of one row weights relative to the largest score so far.
__device__ void weigh_row(EstimateShared& shared, uint32_t row, uint32_t count) {
  const uint32_t lane = threadIdx.x % kWarp;
  float* const weights = shared.weights[row];
  float most = -INFINITY;
  for (uint32_t i = lane; i < count; i += kWarp) most = fmaxf(most, weights[i]);
  const float before = shared.most[row];
  most = fmaxf(before, warp_max(most));
  const bool none = most == -INFINITY;
  float total = 0.0f;
  for (uint32_t i = lane; i < count; i += kWarp) {
    const float weight = none ? 0.0f : expf(weights[i] - most);
    weights[i] = weight;
    total = fmaf(static_cast<float>(shared.sizes[i]), weight, total);
  }
  total = warp_sum(total);
  __syncwarp();
  if (lane != 0) return;
  const float rescale = none ? 1.0f : expf(before - most);
  shared.most[row] = most;
  shared.total[row] = fmaf(shared.total[row], rescale, total);
  shared.rescale[row] = rescale;
}

// sums[r] += what entries first, first + step, ... add to this thread's elements.
template <typename Value>
__device__ void add_values(const uint4* values,
                           uint32_t chunks,
                           uint32_t rows,
                           uint32_t first,
                           uint32_t step,
                           uint32_t count,
                           const EstimateShared& shared,
                           float (&sums)[kRows][kChunk<Value>]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= static_cast<int>(rows)) break;
    const float rescale = shared.rescale[r];
#pragma unroll
    for (uint32_t i = 0; i < kChunk<Value>; ++i) sums[r][i] *= rescale;
  }
#pragma unroll 4
  for (uint32_t entry = first; entry < count; entry += step) {
    // What has no tokens may hold anything.
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (shared.sizes[entry] != 0) raw = __ldg(values + uint64_t{shared.ids[entry]} * chunks);
    float value[kChunk<Value>];
    unpack_chunk<Value>(raw, value);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= static_cast<int>(rows)) break;
      const float weight = shared.weights[r][entry];
#pragma unroll
      for (uint32_t i = 0; i < kChunk<Value>; ++i) sums[r][i] = fmaf(weight, value[i], sums[r][i]);
    }
  }
}

// Grid (splits, KV heads x parts, items).
template <typename Key, typename Value>
__global__ void __launch_bounds__(kEstimateThreads, 2)
    estimate_kernel(const __grid_constant__ ItemPack<EstimateItem> items, const EstimateArgs args) {
  extern __shared__ float4 q[];
  __shared__ EstimateShared shared;
  __shared__ float lanes[kEstimateThreads * kChunk<Value>];
  const EstimateItem& item = items[blockIdx.z];
  const uint32_t head = blockIdx.y / args.parts;
  const uint32_t first_row = blockIdx.y % args.parts * args.rows;
  const uint32_t rows = min(args.rows, args.group - first_row);
  const uint32_t entries = entries_of(item, head);
  if (blockIdx.x >= splits_of(entries)) return;
  const uint32_t begin = blockIdx.x * split_entries(entries);
  const uint32_t end = min(entries, begin + split_entries(entries));
  const uint64_t q_head = uint64_t{head} * args.group + first_row;
  stage_queries<Key>(
      args.q + static_cast<int64_t>(item.row) * args.row_stride + q_head * args.head_dim, rows,
      args.head_dim, args.scale, q);
  if (threadIdx.x < kRows) {
    shared.most[threadIdx.x] = -INFINITY;
    shared.total[threadIdx.x] = 0.0f;
  }
  const uint32_t* ids = item.ids + uint64_t{head} * item.id_stride + item.skip;
  const uint32_t* sizes = item.sizes + head * item.size_stride;
  const uint32_t chunks = args.head_dim / kChunk<Value>;
  const uint32_t sharers = kEstimateThreads / chunks;  // threads with the same elements
  const uint32_t sharer = threadIdx.x / chunks;
  const uint4* const values =
      reinterpret_cast<const uint4*>(static_cast<const Value*>(item.value_sums.data) +
                                     head * item.value_sums.head_stride) +
      threadIdx.x % chunks;
  float sums[kRows][kChunk<Value>] = {};
  for (uint32_t from = begin; from < end; from += kEntries) {
    const uint32_t count = min(kEntries, end - from);
    __syncthreads();
    if (threadIdx.x < count) {
      const uint32_t id = ids[from + threadIdx.x];
      shared.ids[threadIdx.x] = id;
      shared.sizes[threadIdx.x] = sizes[id];
    }
    __syncthreads();
    score_entries<Key>(item.keys, head, q, rows, count, shared);
    __syncthreads();
    if (threadIdx.x / kWarp < rows) weigh_row(shared, threadIdx.x / kWarp, count);
    __syncthreads();
    if (sharer < sharers) {
      add_values<Value>(values, chunks, rows, sharer, sharers, count, shared, sums);
    }
  }

  const uint64_t out = (blockIdx.z * uint64_t{args.q_heads} + q_head) * args.splits + blockIdx.x;
  if (threadIdx.x < rows) {
    args.stats[out + uint64_t{threadIdx.x} * args.splits] = {shared.most[threadIdx.x],
                                                             shared.total[threadIdx.x]};
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {  // sharers in ascending order
    if (r >= static_cast<int>(rows)) break;
    __syncthreads();
    if (sharer < sharers) {
#pragma unroll
      for (uint32_t i = 0; i < kChunk<Value>; ++i) {
        lanes[threadIdx.x * kChunk<Value> + i] = sums[r][i];
      }
    }
    __syncthreads();
    float* const to = args.sums + (out + static_cast<uint64_t>(r) * args.splits) * args.head_dim;
    for (uint32_t d = threadIdx.x; d < args.head_dim; d += kEstimateThreads) {
      float sum = 0.0f;
      for (uint32_t i = 0; i < sharers; ++i) sum += lanes[i * args.head_dim + d];
      to[d] = sum;
    }
  }
}

constexpr uint32_t kMergeThreads = 128;

// Grid (query heads, items).
__global__ void __launch_bounds__(kMergeThreads)
    merge_estimate_kernel(const __grid_constant__ ItemPack<EstimateItem> items,
                          const EstimateArgs args) {
  __shared__ float factors[kMostSplits];
  const EstimateItem& item = items[blockIdx.y];
  const uint32_t q_head = blockIdx.x;
  const uint32_t splits = splits_of(entries_of(item, q_head / args.group));
  const uint64_t first = (blockIdx.y * uint64_t{args.q_heads} + q_head) * args.splits;
  const float2* stats = args.stats + first;
  const float* sums = args.sums + first * args.head_dim;
  const float2 all = warp_merged_stats(stats, splits);
  const bool none = all.x == -INFINITY;
  if (threadIdx.x < splits) factors[threadIdx.x] = none ? 0.0f : expf(stats[threadIdx.x].x - all.x);
  __syncthreads();
  float* const part = item.part + uint64_t{q_head} * args.head_dim;
  for (uint32_t d = threadIdx.x; d < args.head_dim; d += kMergeThreads) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < splits; ++i) {
      sum = fmaf(factors[i], sums[uint64_t{i} * args.head_dim + d], sum);
    }
    part[d] = none ? 0.0f : sum / all.y;
  }
  if (threadIdx.x == 0) item.log_sum_exp[q_head] = none ? -INFINITY : all.x + logf(all.y);
}

template <typename Key, typename Value>
void launch_estimate_as(std::span<const EstimateItem> items,
                        const EstimateArgs& args,
                        uint32_t kv_heads,
                        CudaStream& stream) {
  launch_packs(items, [&](const ItemPack<EstimateItem>& pack, uint32_t count, size_t /*first*/) {
    if (args.splits > 0) {
      const size_t shared = size_t{args.rows} * args.head_dim * sizeof(float);
      const dim3 grid(args.splits, kv_heads * args.parts, count);
      estimate_kernel<Key, Value><<<grid, kEstimateThreads, shared, stream.handle()>>>(pack, args);
      stream.end("estimate");
    }
    merge_estimate_kernel<<<dim3(args.q_heads, count), kMergeThreads, 0, stream.handle()>>>(pack,
                                                                                            args);
    stream.end("merge_estimate");
  });
}

bool has_types(const EstimateItem& item, DType keys, DType values) {
  return item.keys.dtype == keys && item.value_sums.dtype == values;
}

// Requires: items of the same types as the first.
void launch_estimate(std::span<const EstimateItem> items,
                     const EstimateArgs& args,
                     uint32_t kv_heads,
                     CudaStream& stream) {
  using Bf16 = __nv_bfloat16;
  const EstimateItem& first = items.front();
  if (has_types(first, DType::kF32, DType::kF32)) {
    launch_estimate_as<float, float>(items, args, kv_heads, stream);
  } else if (has_types(first, DType::kF32, DType::kBF16)) {
    launch_estimate_as<float, Bf16>(items, args, kv_heads, stream);
  } else if (has_types(first, DType::kBF16, DType::kF32)) {
    launch_estimate_as<Bf16, float>(items, args, kv_heads, stream);
  } else {
    launch_estimate_as<Bf16, Bf16>(items, args, kv_heads, stream);
  }
}

}  // namespace

void CudaSparseOps::enqueue_estimate(TensorRef q,
                                     std::span<const EstimateItem> items,
                                     const layout::KvGeometry& geometry,
                                     float scale,
                                     StreamRef stream_ref) {
  check_queries(q, geometry);
  EstimateArgs args{static_cast<const float*>(q.data), q.row_stride, group_of(q, geometry)};
  args.parts = blocks_for(args.group, kRows);
  args.rows = blocks_for(args.group, args.parts);
  args.head_dim = geometry.head_dim;
  args.q_heads = geometry.kv_heads * args.group;
  args.scale = scale;
  for (const EstimateItem& item : items) {
    check_chunks(item.keys, geometry.head_dim);
    check_chunks(item.value_sums, geometry.head_dim);
    SPIN_CHECK(item.row < static_cast<uint64_t>(q.rows));
    // A shorter list has no more splits than fit: at most this many, and one per kEntries.
    const uint32_t entries = item.id_stride - std::min(item.id_stride, item.skip);
    args.splits = std::max(args.splits, std::min(kMostSplits, blocks_for(entries, kEntries)));
  }
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || !stream.begin()) return;
  // One pack after the other uses the same.
  const uint64_t vectors =
      std::min<uint64_t>(items.size(), ItemPack<EstimateItem>::kMost) * args.q_heads * args.splits;
  const uint64_t sum_bytes = scratch_part(vectors * args.head_dim * sizeof(float));
  auto* const scratch =
      static_cast<std::byte*>(stream.scratch(sum_bytes + vectors * sizeof(float2)));
  if (scratch == nullptr && vectors > 0) return;
  args.sums = reinterpret_cast<float*>(scratch);
  args.stats = reinterpret_cast<float2*>(scratch + sum_bytes);
  for (size_t first = 0, count = 0; first < items.size(); first += count) {
    const EstimateItem& like = items[first];
    for (count = 1; first + count < items.size(); ++count) {
      if (!has_types(items[first + count], like.keys.dtype, like.value_sums.dtype)) break;
    }
    launch_estimate(items.subspan(first, count), args, geometry.kv_heads, stream);
  }
}

}  // namespace spin::backend::cuda
