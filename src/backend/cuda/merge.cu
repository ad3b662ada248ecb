// SPDX-License-Identifier: Apache-2.0
// Merging: the states of a row's splits into its output (attention_core.cuh), and a part that was
// computed elsewhere into a row.
#include "backend/cuda/attention_core.cuh"
#include "backend/cuda/cuda_kv_ops.h"

namespace spin::backend::cuda {
namespace {

constexpr unsigned kWarps = kAttentionThreads / kWarp;

// The largest of all threads' values up to and with this one's, and of `before`. All threads.
__device__ float prefix_max(float value, float before, float (&warp_max)[kWarps]) {
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned warp = threadIdx.x / kWarp;
  for (unsigned step = 1; step < kWarp; step *= 2) {
    const float other = __shfl_up_sync(kFullMask, value, step);
    if (lane >= step) value = fmaxf(value, other);
  }
  if (lane == kWarp - 1) warp_max[warp] = value;
  __syncthreads();
  for (unsigned w = 0; w < warp; ++w) value = fmaxf(value, warp_max[w]);
  return fmaxf(value, before);
}

__device__ uint32_t splits_of(const StateItem& item,
                              const AttentionArgs& args,
                              uint32_t head,
                              uint32_t row) {
  if (item.counts == nullptr) {
    return static_cast<uint32_t>(splits_for(item.first_sees + row / args.group));
  }
  const uint64_t pages = min(item.counts[head], item.stride);
  return static_cast<uint32_t>(splits_for(pages * args.page_tokens));
}

// out[row] = the row's states, merged in order of their splits, over their total.
// A block is (row, KV head and chunk of its columns, item), a thread is a column. The factors of
// 128 splits at a time come from a prefix maximum, so that the chain is two operations a split.
// Bytes: splits * (4 head_dim + 8) read per row and head, mostly from L2; 4 head_dim written.
__global__ __launch_bounds__(kAttentionThreads) void merge_states_kernel(
    const __grid_constant__ ItemPack<StateItem> items, const __grid_constant__ AttentionArgs args) {
  __shared__ float prefix[kAttentionThreads];
  __shared__ float keep[kAttentionThreads];
  __shared__ float take[kAttentionThreads];
  __shared__ float totals[kAttentionThreads];
  __shared__ float warp_max[kWarps];
  const StateItem& item = items[blockIdx.z];
  const uint32_t row = blockIdx.x;
  if (row >= item.rows) return;
  const uint32_t head = blockIdx.y % args.kv_heads;
  const uint32_t chunk = blockIdx.y / args.kv_heads;
  const uint32_t splits = splits_of(item, args, head, row);
  if (item.counts != nullptr && splits <= 1) return;
  const uint32_t t = threadIdx.x;
  const uint32_t column = chunk * kChunkDims + t;
  const bool has_column = column < args.head_dim;
  const uint64_t first_index = state_index(item.first_state, item.splits, item.rows, head, 0, row);
  const float* const sums = args.sums + first_index * args.head_dim + (has_column ? column : 0);
  const uint64_t step = uint64_t{item.rows} * args.head_dim;  // from split to split

  float sum = 0.0f;
  float total = 0.0f;
  float max = -INFINITY;
  for (uint32_t first = 0; first < splits; first += kAttentionThreads) {
    const uint32_t here = min(splits - first, kAttentionThreads);
    float2 mine = make_float2(-INFINITY, 0.0f);
    if (t < here) mine = args.totals[first_index + uint64_t{first + t} * item.rows];
    // Splits without keys are the last ones, of a list that is shorter than its bound.
    const auto count = static_cast<uint32_t>(__syncthreads_count(mine.y != 0.0f));
    prefix[t] = prefix_max(mine.x, max, warp_max);
    totals[t] = mine.y;
    __syncthreads();
    const SplitMerge merge(t == 0 ? max : prefix[t - 1], mine.x);
    keep[t] = merge.keep;
    take[t] = merge.take;
    __syncthreads();
    if (count > 0) max = prefix[count - 1];
    uint32_t s = 0;
    if (first == 0 && count > 0) {
      sum = sums[0];
      total = totals[0];
      s = 1;
    }
#pragma unroll 8
    for (; s < count; ++s) {
      sum = fmaf(__ldg(sums + (first + s) * step), take[s], sum * keep[s]);
      total = fmaf(totals[s], take[s], total * keep[s]);
    }
    if (count < here) break;
    __syncthreads();
  }
  const bool is_empty = total == 0.0f;
  float* const out = args.out +
                     static_cast<int64_t>(item.first_row + row / args.group) * args.out_stride +
                     head_offset(args, head, row);
  if (has_column) out[column] = is_empty ? 0.0f : sum / total;
  if (item.log_sum_exp != nullptr && column == 0) {
    item.log_sum_exp[head * args.group + row % args.group] =
        is_empty ? -INFINITY : natural_log_sum(max, total);
  }
}

constexpr unsigned kMergeWarps = 8;

// A warp is one query head of one item. Bytes: 12 head_dim per head. The two weights are those of
// the CPU backend, in double: the logarithms may be large and close to each other.
__global__ void merge_kernel(const __grid_constant__ ItemPack<MergeItem> items,
                             uint32_t q_heads,
                             uint32_t head_dim,
                             float* out,
                             int64_t out_stride) {
  const MergeItem& item = items[blockIdx.y];
  const uint32_t head = blockIdx.x * kMergeWarps + threadIdx.x / kWarp;
  if (head >= q_heads) return;
  const double ours = item.log_sum_exp[head];
  const double theirs = item.part_log_sum_exp[head];
  if (theirs == -INFINITY) return;
  // 1 / (1 + e^x) needs no maximum taken off; e^x of an infinite x is right, too.
  const auto keep = static_cast<float>(1.0 / (1.0 + exp(theirs - ours)));
  const auto take = static_cast<float>(1.0 / (1.0 + exp(ours - theirs)));
  const uint64_t first = uint64_t{head} * head_dim;
  const float* const part = item.part + first;
  float* const to = out + static_cast<int64_t>(item.row) * out_stride + first;
  for (uint32_t i = threadIdx.x % kWarp; i < head_dim; i += kWarp) {
    to[i] = fmaf(take, part[i], keep * to[i]);
  }
}

}  // namespace

void launch_merge_states(std::span<const StateItem> items,
                         const AttentionArgs& args,
                         CudaStream& stream) {
  launch_packs(items, [&](const ItemPack<StateItem>& pack, uint32_t count, size_t first) {
    uint32_t rows = 0;
    for (const StateItem& item : items.subspan(first, count)) rows = std::max(rows, item.rows);
    if (rows == 0) return;
    const dim3 grid(rows, args.kv_heads * chunks_for(args.head_dim), count);
    merge_states_kernel<<<grid, kAttentionThreads, 0, stream.handle()>>>(pack, args);
    stream.end("merge attention splits");
  });
}

void CudaKvOps::enqueue_merge(std::span<const MergeItem> items,
                              int64_t q_heads,
                              int64_t head_dim,
                              TensorRef out,
                              StreamRef stream_ref) {
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || q_heads == 0 || !stream.begin()) return;
  launch_packs(items, [&](const ItemPack<MergeItem>& pack, uint32_t count, size_t /*first*/) {
    const dim3 grid(blocks_for(static_cast<uint64_t>(q_heads), kMergeWarps), count);
    merge_kernel<<<grid, kMergeWarps * kWarp, 0, stream.handle()>>>(
        pack, static_cast<uint32_t>(q_heads), static_cast<uint32_t>(head_dim),
        static_cast<float*>(out.data), out.row_stride);
    stream.end("merge");
  });
}

}  // namespace spin::backend::cuda
