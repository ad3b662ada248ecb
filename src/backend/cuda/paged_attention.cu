// SPDX-License-Identifier: Apache-2.0
// Causal attention of a step's new tokens over their sequences' pages: single tokens by
// launch_decode(), longer runs in tiles of query rows. The order of sums is that of
// attention_core.cuh.
#include <vector>

#include "backend/cuda/attention_core.cuh"
#include "backend/cuda/cuda_ops.h"
#include "layout/ragged_batch.h"

namespace spin::backend::cuda {
namespace {

constexpr uint32_t kTileRows = 64;
constexpr uint32_t kRowStep = kAttentionThreads / kRowLanes;  // rows of a thread: y, y + 8, ...
constexpr int kThreadRows = kTileRows / kRowStep;
constexpr int kTileBlocks = 2;  // of an SM: what registers and shared memory allow
// At most so many rows over more than one split are worth a state per split; beyond that there are
// blocks enough without.
constexpr uint64_t kMostSplitRows = 1024;

// A sequence's run of new tokens. Its rows are (token, query head of a KV head's group), token
// first.
struct TileItem {
  const uint32_t* slots = nullptr;  // [kv_heads, slot_stride]
  uint64_t slot_stride = 0;
  uint64_t first_row = 0;   // of q and out
  uint64_t first_sees = 0;  // keys that the first token sees, each later one one more
  uint64_t first_state = 0;
  uint32_t rows = 0;    // of one KV head
  uint32_t splits = 0;  // of a state each; 0: a block takes all splits of its tile
};

// Rows are further apart than they are long, so that lanes that read a column of them meet no bank
// twice: 16 bytes for keys and values, half the banks for weights, which two rows write at once.
template <typename T, int kDim>
struct alignas(16) TileMemory {
  float q[kTileRows][kDim + 4];  // scaled
  T keys[kBlockKeys][kDim + 16 / sizeof(T)];
  T values[kBlockKeys][kDim + 16 / sizeof(T)];
  float weights[kTileRows][kBlockKeys + kRowLanes];
  KeyPlaces places;
  int sees[kTileRows];  // keys of the split that a row sees
};

// A thread's rows of the state of a split. Its columns are kVector at a time, x * kVector on.
template <int kDim>
struct TileState {
  static constexpr int kColumns = kDim / static_cast<int>(kRowLanes);
  static constexpr int kVector = kColumns % 4 == 0 ? 4 : 2;
  float sums[kThreadRows][kColumns];
  float max[kThreadRows];
  float total[kThreadRows];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[i][c] = 0.0f;
      max[i] = -INFINITY;
      total[i] = 0.0f;
    }
  }
  // Column of the chunk that sums[.][c] is.
  __device__ static constexpr uint32_t column(uint32_t x, int c) {
    return (x + c / kVector * kRowLanes) * kVector + c % kVector;
  }
};

// One block's work: kTileRows rows of a KV head, and one chunk of the columns of `out`.
template <typename T, int kDim>
struct Tile {
  using State = TileState<kDim>;
  using Memory = TileMemory<T, kDim>;

  const AttentionArgs& args;
  const TileItem& item;
  Memory& memory;
  uint32_t head;
  uint32_t chunk;
  uint32_t first;  // row of the item
  uint32_t rows;

  // Place of this thread: keys and columns by x, rows by y.
  __device__ static uint32_t x() { return threadIdx.x % kRowLanes; }
  __device__ static uint32_t y() { return threadIdx.x / kRowLanes; }

  __device__ uint64_t sees(uint32_t row) const {
    return item.first_sees + (first + row) / args.group;
  }
  __device__ float* out_row(uint32_t row) const {
    const uint32_t r = first + row;
    return args.out + static_cast<int64_t>(item.first_row + r / args.group) * args.out_stride +
           head_offset(args, head, r) + chunk * kChunkDims;
  }

  // Chunk `part` of the tile's queries; a warp is a row at a time.
  __device__ void load_queries(uint32_t part) const {
    const uint32_t dims = chunk_dims(args.head_dim, part);
    for (uint32_t r = threadIdx.x / kWarp; r < kTileRows; r += kAttentionThreads / kWarp) {
      const uint32_t row = first + min(r, rows - 1);
      const float* const from =
          args.q + static_cast<int64_t>(item.first_row + row / args.group) * args.q_stride +
          head_offset(args, head, row) + part * kChunkDims;
      for (uint32_t d = threadIdx.x % kWarp; d < dims; d += kWarp) {
        memory.q[r][d] = from[d] * args.scale;
      }
    }
  }

  // Places of the split's keys, and what the rows see of them.
  __device__ void find_split(uint64_t begin, uint64_t end) const {
    __syncthreads();  // nobody uses the split before
    find_paged_keys(args, item.slots + head * item.slot_stride, begin, end, memory.places);
    if (threadIdx.x < kTileRows) {
      const uint64_t seen = threadIdx.x < rows ? sees(threadIdx.x) : 0;
      memory.sees[threadIdx.x] =
          seen <= begin ? 0 : static_cast<int>(min(seen - begin, uint64_t{kSplitTokens}));
    }
    __syncthreads();
  }

  // Starts to copy chunk `part` of the keys (or the tile's chunk of the values) of a block.
  __device__ void stage_keys(uint32_t first_key, uint32_t count, uint32_t part) const {
    stage(first_key, count, 0, part, &memory.keys[0][0]);
  }
  __device__ void stage_values(uint32_t first_key, uint32_t count) const {
    stage(first_key, count, args.plane_bytes, chunk, &memory.values[0][0]);
  }
  __device__ void stage(
      uint32_t first_key, uint32_t count, uint64_t plane, uint32_t part, T* to) const {
    stage_rows(args, memory.places, first_key, count, plane + part * kChunkDims * sizeof(T),
               chunk_dims(args.head_dim, part) * static_cast<uint32_t>(sizeof(T)),
               static_cast<uint32_t>(kDim + 16 / sizeof(T)), to);
    __pipeline_commit();
  }

  // scores += q . key over `dims` elements, for the thread's 8 rows and 4 keys.
  __device__ void add_scores(uint32_t dims, float (&scores)[kThreadRows][kLaneKeys]) const {
#pragma unroll 1
    for (uint32_t d = 0; d < dims; d += 8) {
      float k[kLaneKeys][8];
#pragma unroll
      for (int c = 0; c < kLaneKeys; ++c) {
        load_elements(&memory.keys[x() + c * kRowLanes][d], k[c]);
      }
#pragma unroll
      for (int i = 0; i < kThreadRows; i += 2) {
        float q[2][8];
        load_elements(&memory.q[y() + i * kRowStep][d], q[0]);
        load_elements(&memory.q[y() + (i + 1) * kRowStep][d], q[1]);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
#pragma unroll
          for (int c = 0; c < kLaneKeys; ++c) {
            scores[i][c] = fmaf(q[0][e], k[c][e], scores[i][c]);
            scores[i + 1][c] = fmaf(q[1][e], k[c][e], scores[i + 1][c]);
          }
        }
      }
    }
  }

  // The running softmax's step over the block that begins at `first_key` of the split.
  __device__ void make_weights(uint32_t first_key,
                               float (&scores)[kThreadRows][kLaneKeys],
                               State& state) const {
    const int lane = static_cast<int>(x());
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const uint32_t row = y() + i * kRowStep;
      const int visible = memory.sees[row] - static_cast<int>(first_key);
#pragma unroll
      for (int c = 0; c < kLaneKeys; ++c) {
        if (lane + c * static_cast<int>(kRowLanes) >= visible) scores[i][c] = -INFINITY;
      }
      const float most = fmaxf(state.max[i], block_max(scores[i]));
      const float keep = visible > 0 ? exp2f(state.max[i] - most) : 1.0f;
      const float sum = block_weights(scores[i], most, visible, lane);
      state.total[i] = fmaf(state.total[i], keep, sum);
      state.max[i] = most;
#pragma unroll
      for (int c = 0; c < State::kColumns; ++c) state.sums[i][c] *= keep;
#pragma unroll
      for (int c = 0; c < kLaneKeys; ++c) memory.weights[row][x() + c * kRowLanes] = scores[i][c];
    }
  }

  __device__ void load_value(uint32_t key, float (&v)[State::kColumns]) const {
#pragma unroll
    for (int c = 0; c < State::kColumns; c += State::kVector) {
      float part[State::kVector];
      load_elements(&memory.values[key][State::column(x(), c)], part);
#pragma unroll
      for (int e = 0; e < State::kVector; ++e) v[c + e] = part[e];
    }
  }

  // sums += weights times values; every row sees all keys of the block.
  __device__ void add_values(State& state) const {
#pragma unroll 1
    for (uint32_t j = 0; j < kBlockKeys; j += 4) {
      float w[kThreadRows][4];
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        load_elements(&memory.weights[y() + i * kRowStep][j], w[i]);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float v[State::kColumns];
        load_value(j + k, v);
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
          for (int c = 0; c < State::kColumns; ++c) {
            state.sums[i][c] = fmaf(w[i][k], v[c], state.sums[i][c]);
          }
        }
      }
    }
  }

  // The same where rows see different numbers of the block's keys, `count` at most.
  __device__ void add_values_masked(uint32_t first_key, uint32_t count, State& state) const {
    int visible[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      visible[i] = memory.sees[y() + i * kRowStep] - static_cast<int>(first_key);
    }
#pragma unroll 1
    for (uint32_t j = 0; j < count; ++j) {
      float v[State::kColumns];
      load_value(j, v);
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        if (static_cast<int>(j) >= visible[i]) continue;
        const float w = memory.weights[y() + i * kRowStep][j];
#pragma unroll
        for (int c = 0; c < State::kColumns; ++c) {
          state.sums[i][c] = fmaf(w, v[c], state.sums[i][c]);
        }
      }
    }
  }

  // Adds the keys [first_key, ...) of a split of `count` keys to the rows' states. The block's keys
  // are on their way; values are copied during the scores, the next keys during the values.
  __device__ void attend_block(uint32_t first_key, uint32_t count, State& state) const {
    const uint32_t here = min(kBlockKeys, count - first_key);
    const uint32_t parts = chunks_for(args.head_dim);
    float scores[kThreadRows][kLaneKeys] = {};
    for (uint32_t part = 0; part < parts; ++part) {
      if (part > 0) {
        __syncthreads();
        stage_keys(first_key, here, part);
      }
      if (parts > 1) load_queries(part);
      __pipeline_wait_prior(0);
      __syncthreads();
      if (part == 0) stage_values(first_key, here);
      add_scores(chunk_dims(args.head_dim, part), scores);
    }
    make_weights(first_key, scores, state);
    __pipeline_wait_prior(0);
    __syncthreads();
    const uint32_t next = first_key + kBlockKeys;
    if (next < count) stage_keys(next, min(kBlockKeys, count - next), 0);
    if (memory.sees[0] >= static_cast<int>(next)) {  // the row that sees least
      add_values(state);
    } else {
      add_values_masked(first_key, here, state);
    }
  }

  __device__ void attend_split(uint64_t begin, uint64_t end, State& state) const {
    const auto count = static_cast<uint32_t>(min(uint64_t{kSplitTokens}, end - begin));
    state.clear();
    find_split(begin, end);
    stage_keys(0, min(kBlockKeys, count), 0);
    for (uint32_t key = 0; key < count; key += kBlockKeys) attend_block(key, count, state);
  }

  __device__ void store_state(uint32_t split, const State& state) const {
    const uint32_t dims = chunk_dims(args.head_dim, chunk);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const uint32_t row = y() + i * kRowStep;
      if (row >= rows) continue;
      const uint64_t index =
          state_index(item.first_state, item.splits, item.rows, head, split, first + row);
      float* const to = args.sums + index * args.head_dim + chunk * kChunkDims;
#pragma unroll
      for (int c = 0; c < State::kColumns; ++c) {
        const uint32_t column = State::column(x(), c);
        if (column < dims) to[column] = state.sums[i][c];
      }
      if (x() == 0 && chunk == 0) args.totals[index] = make_float2(state.max[i], state.total[i]);
    }
  }

  // Merges the state of a split into that of the splits before it, whose sums lie in `out`: each
  // thread reads what it wrote itself.
  __device__ void merge_state(bool is_first,
                              bool is_last,
                              const State& state,
                              float (&max)[kThreadRows],
                              float (&total)[kThreadRows]) const {
    const uint32_t dims = chunk_dims(args.head_dim, chunk);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const uint32_t row = y() + i * kRowStep;
      if (row >= rows) continue;
      const bool is_seen = state.total[i] != 0.0f;
      const SplitMerge merge(is_first ? state.max[i] : max[i], state.max[i]);
      if (is_first) {
        max[i] = state.max[i];
        total[i] = state.total[i];
      } else if (is_seen) {
        max[i] = fmaxf(max[i], state.max[i]);
        total[i] = merge.apply(total[i], state.total[i]);
      }
      float* const to = out_row(row);
#pragma unroll
      for (int c = 0; c < State::kColumns; ++c) {
        const uint32_t column = State::column(x(), c);
        if (column >= dims) continue;
        float sum = state.sums[i][c];
        if (!is_first) sum = is_seen ? merge.apply(to[column], sum) : to[column];
        to[column] = is_last ? sum / total[i] : sum;
      }
    }
  }
};

// A block is (tile of 64 rows, KV head and chunk of columns, item), of all splits that the tile
// sees or of one. A thread is 8 rows by 4 keys of the scores, then 8 rows by kDim / 16 columns.
// Bound by arithmetic: 4 * head_dim operations per row and key; keys and values, 2 * row_bytes per
// key, are read once per tile, mostly from L2. Sums of splits go through `out` every 512 keys.
template <typename T, int kDim>
__global__ void __launch_bounds__(kAttentionThreads, kTileBlocks)
    tile_kernel(const __grid_constant__ ItemPack<TileItem> items,
                const __grid_constant__ AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const TileItem& item = items[blockIdx.z];
  const uint32_t tiles = (item.rows + kTileRows - 1) / kTileRows;
  const uint32_t splits = item.splits > 0 ? item.splits : 1;
  if (blockIdx.x >= uint64_t{tiles} * splits) return;
  // Tiles that see most keys go first, so that the end is even.
  const uint32_t first = (tiles - 1 - blockIdx.x % tiles) * kTileRows;
  const Tile<T, kDim> tile = {.args = args,
                              .item = item,
                              .memory = *reinterpret_cast<TileMemory<T, kDim>*>(shared),
                              .head = blockIdx.y % args.kv_heads,
                              .chunk = blockIdx.y / args.kv_heads,
                              .first = first,
                              .rows = min(kTileRows, item.rows - first)};
  const uint64_t end = tile.sees(tile.rows - 1);
  uint64_t begin = uint64_t{blockIdx.x / tiles} * kSplitTokens;
  if (begin >= end) return;
  if (chunks_for(args.head_dim) == 1) tile.load_queries(0);
  TileState<kDim> state;
  float max[kThreadRows];
  float total[kThreadRows];
  do {
    tile.attend_split(begin, end, state);
    if (item.splits > 0) {
      tile.store_state(static_cast<uint32_t>(begin / kSplitTokens), state);
      return;
    }
    tile.merge_state(begin == 0, begin + kSplitTokens >= end, state, max, total);
    begin += kSplitTokens;
  } while (begin < end);
}

// ---- Host side.

// Cuts into splits of a state each what is worth it and fits; returns the number of states.
uint64_t plan_tiles(std::span<TileItem> items, const AttentionArgs& args) {
  const uint64_t most = kStateBytes / args.state_bytes();
  uint64_t states = 0;
  for (TileItem& item : items) {
    const uint64_t splits = splits_for(item.first_sees + (item.rows - 1) / args.group);
    const uint64_t own = splits * item.rows * args.kv_heads;
    if (splits <= 1 || item.rows > kMostSplitRows || states + own > most) continue;
    item.splits = static_cast<uint32_t>(splits);
    item.first_state = states;
    states += own;
  }
  return states;
}

template <typename T, int kDim>
void launch_tiles(std::span<const TileItem> items, const AttentionArgs& args, CudaStream& stream) {
  constexpr size_t kBytes = sizeof(TileMemory<T, kDim>);
  if (!allow_shared_memory(tile_kernel<T, kDim>, kBytes, stream)) return;
  launch_packs(items, [&](const ItemPack<TileItem>& pack, uint32_t count, size_t first) {
    uint64_t blocks = 1;
    for (const TileItem& item : items.subspan(first, count)) {
      blocks = std::max(
          blocks, uint64_t{blocks_for(item.rows, kTileRows)} * std::max<uint64_t>(item.splits, 1));
    }
    const dim3 grid(static_cast<unsigned>(blocks), args.kv_heads * chunks_for(args.head_dim),
                    count);
    tile_kernel<T, kDim><<<grid, kAttentionThreads, kBytes, stream.handle()>>>(pack, args);
    stream.end("attention of tiles");
  });
}

template <typename T>
void launch_tiles(std::span<const TileItem> items, const AttentionArgs& args, CudaStream& stream) {
  if (args.head_dim <= 64) {
    launch_tiles<T, 64>(items, args, stream);
  } else if (args.head_dim <= 96) {
    launch_tiles<T, 96>(items, args, stream);
  } else {
    launch_tiles<T, static_cast<int>(kChunkDims)>(items, args, stream);
  }
}

void launch_tiles(std::span<const TileItem> items,
                  layout::DType dtype,
                  const AttentionArgs& args,
                  CudaStream& stream) {
  if (items.empty()) return;
  if (dtype == layout::DType::kF32) {
    launch_tiles<float>(items, args, stream);
  } else {
    launch_tiles<__nv_bfloat16>(items, args, stream);
  }
  std::vector<StateItem> merges;
  for (const TileItem& item : items) {
    if (item.splits == 0) continue;
    merges.push_back({.first_state = item.first_state,
                      .first_row = item.first_row,
                      .first_sees = item.first_sees,
                      .rows = item.rows,
                      .splits = item.splits});
  }
  launch_merge_states(merges, args, stream);
}

}  // namespace

void CudaOps::enqueue_paged_attention(TensorRef q,
                                      std::span<const layout::SequenceSlice> slices,
                                      const KvPoolRef& pool,
                                      float scale,
                                      TensorRef out,
                                      StreamRef stream_ref) {
  CudaStream& stream = cuda_stream(stream_ref);
  if (slices.empty() || !stream.begin()) return;
  AttentionArgs args = attention_args(q, pool, scale, out, stream);
  std::vector<DecodeItem> decode;
  std::vector<TileItem> tiles;
  for (const layout::SequenceSlice& slice : slices) {
    if (slice.query_tokens == 0) continue;
    if (slice.query_tokens == 1) {
      decode.push_back({.slots = slice.slots,
                        .slot_stride = slice.slot_stride,
                        .context = slice.context_tokens,
                        .row = slice.first_row,
                        .splits = static_cast<uint32_t>(splits_for(slice.context_tokens))});
    } else {
      tiles.push_back({.slots = slice.slots,
                       .slot_stride = slice.slot_stride,
                       .first_row = slice.first_row,
                       .first_sees = slice.context_tokens - slice.query_tokens + 1,
                       .rows = static_cast<uint32_t>(slice.query_tokens * args.group)});
    }
  }
  const uint64_t states = std::max(decode_states(decode, args), plan_tiles(tiles, args));
  if (!take_states(states, args, stream)) return;
  launch_decode(decode, pool.geometry.dtype, args, stream);
  launch_tiles(tiles, pool.geometry.dtype, args, stream);
}

}  // namespace spin::backend::cuda
