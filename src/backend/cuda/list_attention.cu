// SPDX-License-Identifier: Apache-2.0
// Attention of single query rows, over the pages of a sequence or of a list: decode steps.
// The order of sums is that of attention_core.cuh.
#include <type_traits>
#include <vector>

#include "backend/cuda/attention_core.cuh"
#include "backend/cuda/cuda_kv_ops.h"
#include "layout/head_pages.h"

namespace spin::backend::cuda {
namespace {

constexpr uint32_t kMostRows = 8;   // query heads of a block; larger groups take several blocks
constexpr int kMostThreadRows = 4;  // of a thread
constexpr int kStages = 3;          // staged tiles: one in use, the others on their way
constexpr uint64_t kBlocks = 2048;  // of a launch, about: so many that the end is even
constexpr uint32_t kScoreParts = kAttentionThreads / kBlockKeys;
static_assert(kAttentionThreads == kSplitBlocks * kRowLanes);
static_assert(kScoreParts == 2 && kMostRows <= kScoreParts * kMostThreadRows);

// How a call's groups are cut, and the sizes of dynamic shared memory: tiles, q, scores.
struct DecodeShape {
  uint32_t passes = 1;       // blocks for one group
  uint32_t rows = 1;         // of a pass, at most
  uint32_t tile_stride = 0;  // elements from row to row, no multiple of 128 bytes
  size_t bytes = 0;

  template <typename T>
  static DecodeShape make(const AttentionArgs& args) {
    DecodeShape shape;
    shape.passes = (args.group + kMostRows - 1) / kMostRows;
    shape.rows = (args.group + shape.passes - 1) / shape.passes;
    const uint32_t dims = std::min(args.head_dim, kChunkDims);
    const uint32_t pieces = static_cast<uint32_t>(dims * sizeof(T) / 16) | 1;
    shape.tile_stride = static_cast<uint32_t>(pieces * 16 / sizeof(T));
    shape.bytes = kStages * kBlockKeys * shape.tile_stride * sizeof(T) +
                  shape.rows * (args.head_dim + kSplitTokens) * sizeof(float);
    return shape;
  }
};

// What the softmax of a split leaves, per row and block.
struct SplitStats {
  float block_max[kMostRows][kSplitBlocks];
  float keep[kMostRows][kSplitBlocks];
  float sum[kMostRows][kSplitBlocks];
  float max[kMostRows];
};

// ---- Where the keys of a list's split are.

// Entries of a list before `entry` hold `tokens` tokens.
struct ListPlace {
  uint32_t entry = 0;
  uint64_t tokens = 0;
};

// Valid tokens of an entry; 0 for one without a slot.
__device__ uint32_t entry_tokens(const uint32_t* slots, const uint8_t* tokens, uint32_t i) {
  const uint32_t count = tokens[i];
  return slots[i] == layout::kNoSlot ? 0 : count;
}

// Sum of a value of every thread. All threads; `parts` may be used again after a barrier.
__device__ uint32_t block_sum(uint32_t value, uint32_t* parts) {
  value = __reduce_add_sync(kFullMask, value);
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  uint32_t sum = 0;
  for (unsigned w = 0; w < kAttentionThreads / kWarp; ++w) sum += parts[w];
  return sum;
}

// Moves `place` on by entries that end before token `begin` whatever their fills.
__device__ void skip_entries(const uint32_t* slots,
                             const uint8_t* tokens,
                             uint32_t entries,
                             uint64_t begin,
                             uint32_t page_tokens,
                             uint32_t* parts,
                             ListPlace& place) {
  for (;;) {
    const uint64_t skip =
        min((begin - place.tokens) / page_tokens, uint64_t{entries - place.entry});
    if (skip < kAttentionThreads) return;
    const uint32_t end = place.entry + static_cast<uint32_t>(skip);
    uint32_t sum = 0;
#pragma unroll 8
    for (uint32_t i = place.entry + threadIdx.x; i < end; i += kAttentionThreads) {
      sum += entry_tokens(slots, tokens, i);
    }
    place.tokens += block_sum(sum, parts);
    place.entry = end;
    __syncthreads();
  }
}

// As find_paged_keys(), for tokens [begin, begin + kSplitTokens) of a list of `entries` pages.
// `place` is at or before `begin`, and afterwards at or before the end of the split.
// An entry is a thread; its position in the list is a prefix sum of valid tokens.
__device__ uint32_t find_list_keys(const AttentionArgs& args,
                                   const uint32_t* slots,
                                   const uint8_t* tokens,
                                   uint32_t entries,
                                   uint64_t begin,
                                   uint32_t* parts,
                                   ListPlace& place,
                                   KeyPlaces& places) {
  skip_entries(slots, tokens, entries, begin, args.page_tokens, parts, place);
  const uint64_t end = begin + kSplitTokens;
  ListPlace at = place;
  while (at.entry < entries && at.tokens < end) {
    place = at;
    const uint32_t i = at.entry + threadIdx.x;
    const uint32_t own = i < entries ? entry_tokens(slots, tokens, i) : 0;
    uint32_t before = own;  // becomes the inclusive sum within the warp
    for (unsigned step = 1; step < kWarp; step *= 2) {
      const uint32_t other = __shfl_up_sync(kFullMask, before, step);
      if (threadIdx.x % kWarp >= step) before += other;
    }
    if (threadIdx.x % kWarp == kWarp - 1) parts[threadIdx.x / kWarp] = before;
    __syncthreads();
    uint32_t sum = 0;
    for (unsigned w = 0; w < kAttentionThreads / kWarp; ++w) {
      if (w < threadIdx.x / kWarp) before += parts[w];
      sum += parts[w];
    }
    const uint64_t first = at.tokens + before - own;  // token of the list
    const uint32_t slot = own > 0 ? slots[i] : 0;
    for (uint32_t token = 0; token < own; ++token) {
      const uint64_t position = first + token;
      if (position < begin || position >= end) continue;
      places.set(static_cast<uint32_t>(position - begin), slot, token);
    }
    at.tokens += sum;
    at.entry += kAttentionThreads;
    __syncthreads();
  }
  return at.tokens <= begin ? 0 : static_cast<uint32_t>(min(at.tokens, end) - begin);
}

// ---- A split.

// scores[i] = q[i] . key, row by row; the key is one of the tile's rows.
template <int kRows, typename T>
__device__ void add_scores(const T* key,
                           const float* q,
                           uint32_t q_stride,
                           uint32_t dims,
                           float (&scores)[kMostThreadRows]) {
#pragma unroll 2
  for (uint32_t d = 0; d < dims; d += 8) {
    float k[8];
    load_elements(key + d, k);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float x[8];
      load_elements(q + i * q_stride + d, x);
#pragma unroll
      for (int e = 0; e < 8; ++e) scores[i] = fmaf(x[e], k[e], scores[i]);
    }
  }
}

// sums[i] += weights of row i times values, for two columns. weights: row_step from row to row.
template <int kRows, typename T>
__device__ void add_values(const T* values,
                           uint32_t tile_stride,
                           const float* weights,
                           uint32_t row_step,
                           uint32_t count,
                           float (&sums)[kMostThreadRows][2]) {
  uint32_t j = 0;
#pragma unroll 2
  for (; j + 4 <= count; j += 4) {
    float w[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) load_elements(weights + i * row_step + j, w[i]);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float v[2];
      load_elements(values + (j + k) * tile_stride, v);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        sums[i][0] = fmaf(w[i][k], v[0], sums[i][0]);
        sums[i][1] = fmaf(w[i][k], v[1], sums[i][1]);
      }
    }
  }
  for (; j < count; ++j) {
    float v[2];
    load_elements(values + j * tile_stride, v);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float w = weights[i * row_step + j];
      sums[i][0] = fmaf(w, v[0], sums[i][0]);
      sums[i][1] = fmaf(w, v[1], sums[i][1]);
    }
  }
}

// Calls f(kRows as a constant) for `rows` of 1 .. 4, nothing for 0.
template <typename F>
__device__ void with_rows(uint32_t rows, F&& f) {
  switch (rows) {
    case 1:
      f(std::integral_constant<int, 1>());
      break;
    case 2:
      f(std::integral_constant<int, 2>());
      break;
    case 3:
      f(std::integral_constant<int, 3>());
      break;
    case 4:
      f(std::integral_constant<int, 4>());
      break;
    default:
      break;
  }
}

// A block's lane of one row's scores, -infinity from `visible` on.
__device__ void load_scores(const float* scores, int visible, int lane, float (&x)[kLaneKeys]) {
#pragma unroll
  for (int c = 0; c < kLaneKeys; ++c) {
    const int key = lane + c * static_cast<int>(kRowLanes);
    x[c] = key < visible ? scores[key] : -INFINITY;
  }
}

// Turns the scores of a split, [rows, kSplitTokens], of which `count` are there, into weights. Half
// a warp is a block: it sees the maxima of the blocks before it, as the running softmax would.
__device__ void make_weights(uint32_t rows, uint32_t count, float* scores, SplitStats& stats) {
  const int lane = threadIdx.x % kRowLanes;
  const uint32_t block = threadIdx.x / kRowLanes;
  const int visible = static_cast<int>(count) - static_cast<int>(block * kBlockKeys);
  float* const mine = scores + block * kBlockKeys;
  float x[kLaneKeys];
  __syncthreads();
  for (uint32_t r = 0; r < rows; ++r) {
    load_scores(mine + r * kSplitTokens, visible, lane, x);
    const float most = block_max(x);
    if (lane == 0) stats.block_max[r][block] = most;
  }
  __syncthreads();
  for (uint32_t r = 0; r < rows; ++r) {
    float before = -INFINITY;
    for (uint32_t b = 0; b < block; ++b) before = fmaxf(before, stats.block_max[r][b]);
    const float max = fmaxf(before, stats.block_max[r][block]);
    load_scores(mine + r * kSplitTokens, visible, lane, x);
    const float sum = block_weights(x, max, visible, lane);
#pragma unroll
    for (int c = 0; c < kLaneKeys; ++c) {
      mine[r * kSplitTokens + lane + c * static_cast<int>(kRowLanes)] = x[c];
    }
    if (lane != 0) continue;
    stats.keep[r][block] = exp2f(before - max);
    stats.sum[r][block] = sum;
    if (block == kSplitBlocks - 1) stats.max[r] = max;
  }
  __syncthreads();
}

// One block's work: some query heads of an item's KV head.
template <typename T>
struct Decode {
  const AttentionArgs& args;
  const DecodeItem& item;
  const DecodeShape& shape;
  uint32_t head;       // KV head
  uint32_t first_row;  // of the group
  uint32_t rows;
  T* tiles;       // [kStages, kBlockKeys, tile_stride]
  float* q;       // [rows, head_dim], scaled
  float* scores;  // [rows, kSplitTokens]
  KeyPlaces& places;
  SplitStats& stats;

  __device__ T* tile(uint32_t number) const {
    return tiles + number % kStages * (kBlockKeys * shape.tile_stride);
  }

  // A split's tiles: its keys, block by block and within it chunk by chunk; then its values, chunk
  // by chunk and within it block by block. Always one group of copies.
  __device__ void stage_tile(uint32_t number, uint32_t count) const {
    const uint32_t blocks = (count + kBlockKeys - 1) / kBlockKeys;
    const uint32_t chunks = chunks_for(args.head_dim);
    const uint32_t half = blocks * chunks;
    if (number < 2 * half) {
      const bool is_value = number >= half;
      const uint32_t i = is_value ? number - half : number;
      const uint32_t block = is_value ? i % blocks : i / chunks;
      const uint32_t chunk = is_value ? i / blocks : i % chunks;
      const uint32_t first = block * kBlockKeys;
      const uint64_t plane = is_value ? args.plane_bytes : 0;
      stage_rows(args, places, first, min(kBlockKeys, count - first),
                 plane + chunk * kChunkDims * sizeof(T),
                 chunk_dims(args.head_dim, chunk) * static_cast<uint32_t>(sizeof(T)),
                 shape.tile_stride, tile(number));
    }
    __pipeline_commit();
  }

  // Waits for tile `number` and starts to copy into the place of the one before it.
  __device__ void next_tile(uint32_t number, uint32_t count) const {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();
    stage_tile(number + kStages - 1, count);
  }

  // Scores of the split. A thread is a key and half of the rows.
  __device__ void score(uint32_t count) const {
    const uint32_t key = threadIdx.x % kBlockKeys;
    const uint32_t part = threadIdx.x / kBlockKeys;
    const uint32_t cut = (rows + 1) / kScoreParts;
    const uint32_t first = part == 0 ? 0 : cut;
    const uint32_t own = part == 0 ? cut : rows - cut;
    const uint32_t chunks = chunks_for(args.head_dim);
    uint32_t number = 0;
    for (uint32_t begin = 0; begin < count; begin += kBlockKeys) {
      float s[kMostThreadRows] = {};
      const bool has_key = begin + key < count;
      for (uint32_t chunk = 0; chunk < chunks; ++chunk, ++number) {
        next_tile(number, count);
        with_rows(has_key ? own : 0, [&](auto n) {
          add_scores<n.value>(tile(number) + key * shape.tile_stride,
                              q + first * args.head_dim + chunk * kChunkDims, args.head_dim,
                              chunk_dims(args.head_dim, chunk), s);
        });
      }
#pragma unroll
      for (uint32_t i = 0; i < kMostThreadRows; ++i) {
        if (has_key && i < own) scores[(first + i) * kSplitTokens + begin + key] = s[i];
      }
    }
  }

  // Sums of values, and their end. A thread is two columns and rows part, part + parts, ...
  __device__ void add_split(uint32_t split, uint32_t splits, uint32_t count) const {
    const uint32_t blocks = (count + kBlockKeys - 1) / kBlockKeys;
    const uint32_t chunks = chunks_for(args.head_dim);
    uint32_t number = blocks * chunks;
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
      const uint32_t dims = chunk_dims(args.head_dim, chunk);
      const uint32_t pairs = dims > 64 ? 64 : 32;
      const uint32_t parts = kAttentionThreads / pairs;
      const uint32_t part = threadIdx.x / pairs;
      const uint32_t column = 2 * (threadIdx.x % pairs);
      const uint32_t own = column < dims && part < rows ? (rows - part + parts - 1) / parts : 0;
      float sums[kMostThreadRows][2] = {};
      for (uint32_t block = 0; block < blocks; ++block, ++number) {
        next_tile(number, count);
        const uint32_t first = block * kBlockKeys;
        with_rows(own, [&](auto n) {
#pragma unroll
          for (int i = 0; i < n.value; ++i) {
            const float keep = stats.keep[part + i * parts][block];
            sums[i][0] *= keep;
            sums[i][1] *= keep;
          }
          add_values<n.value>(tile(number) + column, shape.tile_stride,
                              scores + part * kSplitTokens + first, parts * kSplitTokens,
                              min(kBlockKeys, count - first), sums);
        });
      }
#pragma unroll
      for (uint32_t i = 0; i < kMostThreadRows; ++i) {
        if (i >= own) continue;
        const uint32_t r = part + i * parts;
        finish_row(split, splits, blocks, r, chunk * kChunkDims + column, sums[i]);
      }
    }
  }

  // Two columns of a row go to `out` if this split is all of it, else to its states.
  __device__ void finish_row(uint32_t split,
                             uint32_t splits,
                             uint32_t blocks,
                             uint32_t r,
                             uint32_t column,
                             const float (&sums)[2]) const {
    float total = 0.0f;
    for (uint32_t b = 0; b < blocks; ++b) total = fmaf(total, stats.keep[r][b], stats.sum[r][b]);
    const uint32_t row = first_row + r;
    if (splits > 1) {
      const uint64_t index = state(split, row);
      *reinterpret_cast<float2*>(args.sums + index * args.head_dim + column) =
          make_float2(sums[0], sums[1]);
      if (column == 0) args.totals[index] = make_float2(stats.max[r], total);
      return;
    }
    float* const to = out_row(row) + column;
    to[0] = sums[0] / total;
    to[1] = sums[1] / total;
    if (column == 0 && item.log_sum_exp != nullptr) {
      item.log_sum_exp[head * args.group + row] = natural_log_sum(stats.max[r], total);
    }
  }

  // The split has no keys: nothing is seen in it, or in the whole list.
  __device__ void finish_empty(uint32_t split, uint32_t splits) const {
    for (uint32_t i = threadIdx.x; i < rows * args.head_dim; i += kAttentionThreads) {
      const uint32_t row = first_row + i / args.head_dim;
      const uint32_t column = i % args.head_dim;
      if (splits == 1) out_row(row)[column] = 0.0f;
      if (column != 0) continue;
      if (splits > 1) args.totals[state(split, row)] = make_float2(-INFINITY, 0.0f);
      if (splits == 1 && item.log_sum_exp != nullptr) {
        item.log_sum_exp[head * args.group + row] = -INFINITY;
      }
    }
  }

  __device__ uint64_t state(uint32_t split, uint32_t row) const {
    return state_index(item.first_state, item.splits, args.group, head, split, row);
  }
  __device__ float* out_row(uint32_t row) const {
    return args.out + static_cast<int64_t>(item.row) * args.out_stride +
           head_offset(args, head, row);
  }

  __device__ void load_queries() const {
    const float* const from = args.q + static_cast<int64_t>(item.row) * args.q_stride +
                              head_offset(args, head, first_row);
    for (uint32_t i = threadIdx.x; i < rows * args.head_dim; i += kAttentionThreads) {
      q[i] = from[i] * args.scale;
    }
  }
};

// Pages of a head's list, as many as its arrays hold.
__device__ uint32_t list_entries(const DecodeItem& item, const AttentionArgs& args, uint32_t head) {
  const uint32_t count = item.counts[head];
  if (count <= item.slot_stride) return count;
  report_fault(args.fault, KernelFault::kListTooLong);
  return static_cast<uint32_t>(item.slot_stride);
}

// A block is up to 8 query heads of one KV head of an item and takes every gridDim.x-th split:
// scores of all its keys, the softmax, then the values. Tiles of 64 keys or values stream through
// kStages buffers by asynchronous 16-byte copies.
// Bytes: keys and values once, 2 * row_bytes a token and KV head (again per pass for groups above
// 8); a list's entries up to the split; states of splits, 4 * (head_dim + 2) a query head.
template <typename T>
__global__ __launch_bounds__(kAttentionThreads) void decode_kernel(
    const __grid_constant__ ItemPack<DecodeItem> items,
    const __grid_constant__ AttentionArgs args,
    const __grid_constant__ DecodeShape shape) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ KeyPlaces places;
  __shared__ SplitStats stats;
  __shared__ uint32_t parts[kAttentionThreads / kWarp];
  const DecodeItem& item = items[blockIdx.z];
  const uint32_t head = blockIdx.y / shape.passes;
  const uint32_t first_row = blockIdx.y % shape.passes * shape.rows;
  T* const tiles = reinterpret_cast<T*>(memory);
  float* const q = reinterpret_cast<float*>(tiles + kStages * kBlockKeys * shape.tile_stride);
  const Decode<T> decode = {.args = args,
                            .item = item,
                            .shape = shape,
                            .head = head,
                            .first_row = first_row,
                            .rows = min(shape.rows, args.group - first_row),
                            .tiles = tiles,
                            .q = q,
                            .scores = q + shape.rows * args.head_dim,
                            .places = places,
                            .stats = stats};
  const uint64_t first_page = head * item.slot_stride;
  const uint32_t entries = item.counts == nullptr ? 0 : list_entries(item, args, head);
  const uint64_t bound =
      item.counts == nullptr ? item.context : uint64_t{entries} * args.page_tokens;
  const auto splits = static_cast<uint32_t>(max(splits_for(bound), uint64_t{1}));
  if (blockIdx.x >= splits) return;
  decode.load_queries();
  ListPlace place;
  for (uint32_t split = blockIdx.x; split < splits; split += gridDim.x) {
    __syncthreads();  // nobody uses the memory of the split before
    const uint64_t begin = uint64_t{split} * kSplitTokens;
    const uint32_t count =
        item.counts == nullptr
            ? find_paged_keys(args, item.slots + first_page, begin, item.context, places)
            : find_list_keys(args, item.slots + first_page, item.tokens + first_page, entries,
                             begin, parts, place, places);
    if (count == 0) {
      decode.finish_empty(split, splits);
      continue;
    }
    __syncthreads();
    for (uint32_t number = 0; number < kStages - 1; ++number) decode.stage_tile(number, count);
    decode.score(count);
    make_weights(decode.rows, count, decode.scores, stats);
    decode.add_split(split, splits, count);
  }
}

// ---- Host side.

// How many of the first items go into one launch; sets where their states lie.
size_t take_group(std::span<DecodeItem> items, const AttentionArgs& args, uint64_t& states) {
  const uint64_t most = kStateBytes / args.state_bytes();
  const uint64_t limit = std::min<uint64_t>(items.size(), ItemPack<DecodeItem>::kMost);
  states = 0;
  size_t count = 0;
  for (; count < limit; ++count) {
    DecodeItem& item = items[count];
    const uint64_t own = item.splits > 1 ? uint64_t{item.splits} * args.kv_heads * args.group : 0;
    if (count > 0 && states + own > most) break;
    item.first_state = states;
    states += own;
  }
  return count;
}

template <typename T>
void launch_splits(std::span<const DecodeItem> items,
                   const AttentionArgs& args,
                   CudaStream& stream) {
  const DecodeShape shape = DecodeShape::make<T>(args);
  uint64_t splits = 1;
  for (const DecodeItem& item : items) splits = std::max<uint64_t>(splits, item.splits);
  const uint64_t others = items.size() * args.kv_heads * shape.passes;
  const uint64_t blocks = std::min(splits, (kBlocks + others - 1) / others);
  if (!allow_shared_memory(decode_kernel<T>, shape.bytes, stream)) return;
  launch_packs(items, [&](const ItemPack<DecodeItem>& pack, uint32_t count, size_t /*first*/) {
    const dim3 grid(static_cast<unsigned>(blocks), args.kv_heads * shape.passes, count);
    decode_kernel<T><<<grid, kAttentionThreads, shape.bytes, stream.handle()>>>(pack, args, shape);
    stream.end("attention of single rows");
  });
}

}  // namespace

AttentionArgs attention_args(
    TensorRef q, const KvPoolRef& pool, float scale, TensorRef out, const CudaStream& stream) {
  const layout::KvGeometry& geometry = pool.geometry;
  AttentionArgs args;
  args.q = static_cast<const float*>(q.data);
  args.q_stride = q.row_stride;
  args.out = static_cast<float*>(out.data);
  args.out_stride = out.row_stride;
  args.pool = static_cast<const unsigned char*>(pool.base);
  args.page_bytes = geometry.page_bytes();
  args.plane_bytes = geometry.plane_bytes();
  args.row_bytes = static_cast<uint32_t>(geometry.row_bytes());
  args.page_tokens = geometry.page_tokens;
  args.head_dim = geometry.head_dim;
  args.kv_heads = geometry.kv_heads;
  args.group = static_cast<uint32_t>(q.cols / geometry.head_dim / geometry.kv_heads);
  args.scale = scale * 1.44269504f;  // weights are 2^(score - max)
  args.fault = stream.fault();
  return args;
}

bool take_states(uint64_t states, AttentionArgs& args, CudaStream& stream) {
  if (states == 0) return true;
  const uint64_t sums_bytes = (states * args.head_dim * sizeof(float) + 255) / 256 * 256;
  void* const memory = stream.scratch(sums_bytes + states * sizeof(float2));
  if (memory == nullptr) return false;
  args.sums = static_cast<float*>(memory);
  args.totals = reinterpret_cast<float2*>(static_cast<unsigned char*>(memory) + sums_bytes);
  return true;
}

uint64_t decode_states(std::span<DecodeItem> items, const AttentionArgs& args) {
  uint64_t most = 0;
  while (!items.empty()) {
    uint64_t states = 0;
    items = items.subspan(take_group(items, args, states));
    most = std::max(most, states);
  }
  return most;
}

void launch_decode(std::span<DecodeItem> items,
                   layout::DType dtype,
                   const AttentionArgs& args,
                   CudaStream& stream) {
  while (!items.empty()) {
    uint64_t states = 0;
    const std::span<DecodeItem> group = items.first(take_group(items, args, states));
    items = items.subspan(group.size());
    if (dtype == layout::DType::kF32) {
      launch_splits<float>(group, args, stream);
    } else {
      launch_splits<__nv_bfloat16>(group, args, stream);
    }
    std::vector<StateItem> merges;
    for (const DecodeItem& item : group) {
      if (item.splits <= 1) continue;
      merges.push_back({.first_state = item.first_state,
                        .first_row = item.row,
                        .first_sees = item.context,
                        .counts = item.counts,
                        .log_sum_exp = item.log_sum_exp,
                        .stride = static_cast<uint32_t>(item.slot_stride),
                        .rows = args.group,
                        .splits = item.splits});
    }
    launch_merge_states(merges, args, stream);
  }
}

void CudaKvOps::enqueue_list_attention(TensorRef q,
                                       std::span<const ListAttentionItem> items,
                                       const KvPoolRef& pool,
                                       float scale,
                                       TensorRef out,
                                       StreamRef stream_ref) {
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || !stream.begin()) return;
  AttentionArgs args = attention_args(q, pool, scale, out, stream);
  std::vector<DecodeItem> decode;
  decode.reserve(items.size());
  for (const ListAttentionItem& item : items) {
    const uint64_t bound = uint64_t{item.pages.stride} * pool.geometry.page_tokens;
    decode.push_back({.slots = item.slots,
                      .slot_stride = item.pages.stride,
                      .tokens = item.pages.tokens,
                      .counts = item.pages.counts,
                      .row = item.row,
                      .log_sum_exp = item.log_sum_exp,
                      .splits = static_cast<uint32_t>(std::max<uint64_t>(1, splits_for(bound)))});
  }
  if (!take_states(decode_states(decode, args), args, stream)) return;
  launch_decode(decode, pool.geometry.dtype, args, stream);
}

}  // namespace spin::backend::cuda
