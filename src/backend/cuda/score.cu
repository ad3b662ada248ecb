// SPDX-License-Identifier: Apache-2.0
// Scores of partitions by means (or keys) and by boxes. First a block per tile of 256 keys, query
// heads in shared memory, eight lanes a key; then the log-sum-exps and one score per partition
// (score_support.cuh). Items are taken in waves that bound the scratch memory and keep it in the
// L2 cache.
//
// Bytes: all vectors once; in the cache 8 bytes per query head and partition.
#include <algorithm>
#include <vector>

#include "backend/cuda/cuda_sparse_ops.h"
#include "backend/cuda/score_support.cuh"
#include "base/check.h"

namespace spin::backend::cuda {
namespace {

using layout::DType;

constexpr uint32_t kScoreThreads = 128;
constexpr uint32_t kScoreWarps = kScoreThreads / kWarp;
constexpr uint32_t kTileKeys = 256;  // scores of a tile lie in shared memory
constexpr uint32_t kMostRows = 8;    // query heads of a block: their sums lie in registers
constexpr uint64_t kWaveBytes = uint64_t{32} << 20;

// One item of either kind.
struct ScoreUnit {
  ScoreItem item;
  HeadVectors keys;   // boxes: the smallest elements
  HeadVectors upper;  // data == nullptr: no boxes
  uint32_t keys_per_partition = 1;
  uint32_t tile_partitions = 1;  // all keys of a partition lie in one tile
  ScoreRows rows;
};

struct ScoreArgs {
  const float* q = nullptr;
  int64_t row_stride = 0;
  uint32_t group = 0;
  uint32_t parts = 0;  // blocks that share a group
  uint32_t rows = 0;   // query heads of each, but for the last one
  uint32_t head_dim = 0;
  float scale = 1.0f;
};

// Keys and partitions of one (tile, KV head) and the query heads of its block.
struct Tile {
  uint32_t keys = 0;
  uint32_t per = 0;                 // keys of a partition
  const uint4* low = nullptr;       // of the tile's first key
  const uint4* high = nullptr;      // null: no boxes
  const uint32_t* sizes = nullptr;  // of the tile's first partition; null: all are scored
  uint32_t chunks = 0;              // of a vector
  uint32_t rows = 0;
};

template <typename T>
__device__ auto vectors_at(const HeadVectors& vectors, uint32_t head, uint64_t index)
    -> const uint4* {
  return reinterpret_cast<const uint4*>(static_cast<const T*>(vectors.data) +
                                        head * vectors.head_stride + index * vectors.width);
}

template <typename T, bool kBox>
__device__ Tile tile_of(const ScoreUnit& unit, uint32_t index, uint32_t head, uint32_t rows) {
  const ScoreItem& item = unit.item;
  const uint32_t first = index * unit.tile_partitions;
  const uint64_t partition = uint64_t{item.first} + first;
  Tile tile;
  tile.per = unit.keys_per_partition;
  tile.keys = min(unit.tile_partitions, item.count - first) * tile.per;
  tile.low = vectors_at<T>(unit.keys, head, partition * tile.per);
  if constexpr (kBox) tile.high = vectors_at<T>(unit.upper, head, partition * tile.per);
  if (item.sizes != nullptr) tile.sizes = item.sizes + head * item.size_stride + partition;
  tile.chunks = unit.keys.width / kChunk<T>;
  tile.rows = rows;
  return tile;
}

// Scores [rows, kTileKeys] of keys [begin, begin + count) of the tile.
template <typename T, bool kBox, int kRows>
__device__ void score_keys(
    const Tile& tile, const float4* q, uint32_t begin, uint32_t count, float* scores) {
  constexpr int kKeys = kBox ? 2 : 4;  // of eight lanes; boxes take twice the registers
  constexpr uint32_t kWarpKeys = kKeys * kVectorsPerWarp;
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t base = threadIdx.x / kWarp * kWarpKeys; base < count;
       base += kScoreWarps * kWarpKeys) {
    uint64_t at[kKeys];
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {  // past the end the last one again
      const uint32_t key = min(base + k * kVectorsPerWarp + lane / kLanesPerVector, count - 1);
      at[k] = uint64_t{begin + key} * tile.chunks;
    }
    float sums[kRows][kKeys] = {};
    add_products<T, kBox>(q, tile.rows, tile.chunks, tile.low, tile.high, at, sums);
    const uint32_t key = base + summed_key<kKeys>() * kVectorsPerWarp + lane / kLanesPerVector;
    const bool stored = is_first_of_sum<kKeys>() && key < count;
    const bool scored =
        !stored || tile.sizes == nullptr || tile.sizes[(begin + key) / tile.per] != 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= static_cast<int>(tile.rows)) break;
      const float score = sum_parts(sums[r]);
      if (stored) scores[r * kTileKeys + key] = scored ? score : -INFINITY;
    }
  }
}

// The largest score of each partition of a tile whose keys are all in `scores`; to: row stride
// `count`.
__device__ void store_partitions(const Tile& tile, const float* scores, uint32_t count, float* to) {
  const uint32_t partitions = tile.keys / tile.per;
  for (uint32_t i = threadIdx.x; i < tile.rows * partitions; i += kScoreThreads) {
    const uint32_t row = i / partitions;
    const float* mine = scores + row * kTileKeys + i % partitions * tile.per;
    float most = mine[0];
    for (uint32_t k = 1; k < tile.per; ++k) most = fmaxf(most, mine[k]);
    to[uint64_t{row} * count + i % partitions] = most;
  }
}

// Grid (tiles, KV heads x parts, items).
template <typename T, bool kBox, int kRows>
__global__ void __launch_bounds__(kScoreThreads, 4)
    score_kernel(const __grid_constant__ ItemPack<ScoreUnit> units, const ScoreArgs args) {
  constexpr uint32_t kWarpRows = (kRows + kScoreWarps - 1) / kScoreWarps;
  extern __shared__ float4 shared[];
  const ScoreUnit& unit = units[blockIdx.z];
  if (blockIdx.x >= unit.rows.tiles) return;
  const uint32_t head = blockIdx.y / args.parts;
  const uint32_t first_row = blockIdx.y % args.parts * args.rows;
  const Tile tile =
      tile_of<T, kBox>(unit, blockIdx.x, head, min(args.rows, args.group - first_row));
  const uint64_t q_head = uint64_t{head} * args.group + first_row;
  auto* const scores = reinterpret_cast<float*>(shared + args.rows * args.head_dim / 4);
  stage_queries<T>(
      args.q + static_cast<int64_t>(unit.item.row) * args.row_stride + q_head * args.head_dim,
      tile.rows, args.head_dim, args.scale, shared);
  __syncthreads();

  const uint32_t warp = threadIdx.x / kWarp;
  float2 stats[kWarpRows];  // of row warp + i * kScoreWarps
#pragma unroll
  for (uint32_t i = 0; i < kWarpRows; ++i) stats[i] = {-INFINITY, 0.0f};
  float* const out =
      unit.rows.scores + q_head * unit.item.count + uint64_t{blockIdx.x} * unit.tile_partitions;
  // More than once only where one partition has more keys than shared memory has room for.
  for (uint32_t begin = 0; begin < tile.keys; begin += kTileKeys) {
    const uint32_t count = min(kTileKeys, tile.keys - begin);
    score_keys<T, kBox, kRows>(tile, shared, begin, count, scores);
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < kWarpRows; ++i) {
      const uint32_t row = warp + i * kScoreWarps;
      if (row >= tile.rows) continue;
      stats[i] = merge_stats(stats[i], warp_stats(scores + row * kTileKeys, count));
    }
    if (tile.keys <= kTileKeys) store_partitions(tile, scores, unit.item.count, out);
    __syncthreads();
  }
#pragma unroll
  for (uint32_t i = 0; i < kWarpRows; ++i) {
    const uint32_t row = warp + i * kScoreWarps;
    if (row >= tile.rows || threadIdx.x % kWarp != 0) continue;
    unit.rows.stats[(q_head + row) * unit.rows.tiles + blockIdx.x] = stats[i];
    // The only partition of its tile.
    if (tile.keys > kTileKeys) out[uint64_t{row} * unit.item.count] = stats[i].x;
  }
}

constexpr uint32_t kFinishThreads = 256;
constexpr uint32_t kFinishPartitions = 1024;  // of a block; all blocks of a head sum up its tiles

// Grid (partitions, KV heads, items).
__global__ void __launch_bounds__(kFinishThreads)
    finish_scores_kernel(const __grid_constant__ ItemPack<ScoreRows> items,
                         uint32_t group,
                         Aggregation aggregation) {
  extern __shared__ float lse[];  // [group rounded up to 4]: loads are joined to 16 bytes
  const ScoreRows& rows = items[blockIdx.z];
  const uint32_t begin = blockIdx.x * kFinishPartitions;
  if (begin >= rows.count) return;
  const uint64_t q_head = uint64_t{blockIdx.y} * group;
  for (uint32_t g = threadIdx.x / kWarp; g < group; g += kFinishThreads / kWarp) {
    const float2 all = warp_merged_stats(rows.stats + (q_head + g) * rows.tiles, rows.tiles);
    // Nothing scored: 0 keeps -infinity minus it defined.
    if (threadIdx.x % kWarp == 0) lse[g] = all.x == -INFINITY ? 0.0f : all.x + logf(all.y);
  }
  __syncthreads();
  const float* scores = rows.scores + q_head * rows.count;
  const uint32_t end = min(rows.count, begin + kFinishPartitions);
  for (uint32_t j = begin + threadIdx.x; j < end; j += kFinishThreads) {
    float score = -INFINITY;
    for (uint32_t g = 0; g < group; ++g) {
      score = fmaxf(score, scores[uint64_t{g} * rows.count + j] - lse[g]);
    }
    if (aggregation == Aggregation::kSoftmaxSum && score != -INFINITY) {
      float total = 0.0f;
      for (uint32_t g = 0; g < group; ++g) {
        total += expf(scores[uint64_t{g} * rows.count + j] - lse[g] - score);
      }
      score += logf(total);
    }
    rows.out[blockIdx.y * rows.out_stride + j] = score;
  }
}

template <typename T, bool kBox, int kRows>
void launch_score_as(std::span<const ScoreUnit> units,
                     const ScoreArgs& args,
                     uint32_t kv_heads,
                     CudaStream& stream) {
  launch_packs(units, [&](const ItemPack<ScoreUnit>& pack, uint32_t count, size_t first) {
    uint32_t tiles = 0;
    for (const ScoreUnit& unit : units.subspan(first, count)) {
      tiles = std::max(tiles, unit.rows.tiles);
    }
    const size_t shared = size_t{args.rows} * (args.head_dim + kTileKeys) * sizeof(float);
    score_kernel<T, kBox, kRows>
        <<<dim3(tiles, kv_heads * args.parts, count), kScoreThreads, shared, stream.handle()>>>(
            pack, args);
    stream.end(kBox ? "score_boxes" : "score_means");
  });
}

// Requires: units of one type of vectors.
void launch_score(std::span<const ScoreUnit> units,
                  const ScoreArgs& args,
                  uint32_t kv_heads,
                  CudaStream& stream) {
  const bool f32 = units.front().keys.dtype == DType::kF32;
  const bool box = units.front().upper.data != nullptr;
  const bool few = args.rows <= kMostRows / 2;
  const auto launch = [&](auto&& of_few, auto&& of_many) {
    (few ? of_few : of_many)(units, args, kv_heads, stream);
  };
  constexpr int kFew = kMostRows / 2;
  constexpr int kMany = kMostRows;
  if (f32 && box) {
    launch(launch_score_as<float, true, kFew>, launch_score_as<float, true, kMany>);
  } else if (f32) {
    launch(launch_score_as<float, false, kFew>, launch_score_as<float, false, kMany>);
  } else if (box) {
    launch(launch_score_as<__nv_bfloat16, true, kFew>, launch_score_as<__nv_bfloat16, true, kMany>);
  } else {
    launch(launch_score_as<__nv_bfloat16, false, kFew>,
           launch_score_as<__nv_bfloat16, false, kMany>);
  }
}

ScoreUnit make_unit(const ScoreItem& item,
                    const HeadVectors& keys,
                    const HeadVectors& upper,
                    uint32_t keys_per_partition) {
  ScoreUnit unit;
  unit.item = item;
  unit.keys = keys;
  unit.upper = upper;
  unit.keys_per_partition = keys_per_partition;
  unit.tile_partitions = std::max(1u, kTileKeys / keys_per_partition);
  unit.rows.count = item.count;
  unit.rows.tiles = blocks_for(item.count, unit.tile_partitions);
  unit.rows.out = item.scores;
  unit.rows.out_stride = item.score_stride;
  return unit;
}

// The first units that run together: one type, no more scratch than kWaveBytes unless one alone
// takes more. bytes: what they take.
size_t wave_units(std::span<const ScoreUnit> units, uint64_t q_heads, uint64_t* bytes) {
  *bytes = score_rows_bytes(units.front().rows, q_heads);
  size_t count = 1;
  for (; count < units.size() && units[count].keys.dtype == units.front().keys.dtype; ++count) {
    const uint64_t more = score_rows_bytes(units[count].rows, q_heads);
    if (*bytes + more > kWaveBytes) break;
    *bytes += more;
  }
  return count;
}

void run_scores(const TensorRef& q,
                std::span<ScoreUnit> units,
                const layout::KvGeometry& geometry,
                float scale,
                Aggregation aggregation,
                CudaStream& stream) {
  const uint32_t group = group_of(q, geometry);
  const uint64_t q_heads = uint64_t{geometry.kv_heads} * group;
  ScoreArgs args{static_cast<const float*>(q.data), q.row_stride, group};
  args.parts = blocks_for(group, kMostRows);
  args.rows = blocks_for(group, args.parts);
  args.head_dim = geometry.head_dim;
  args.scale = scale;
  uint64_t most = 0;
  uint64_t bytes = 0;
  for (size_t first = 0; first < units.size(); most = std::max(most, bytes)) {
    first += wave_units(units.subspan(first), q_heads, &bytes);
  }
  auto* const scratch = static_cast<std::byte*>(stream.scratch(most));
  if (scratch == nullptr) return;
  for (size_t first = 0, count = 0; first < units.size(); first += count) {
    count = wave_units(units.subspan(first), q_heads, &bytes);
    const std::span<ScoreUnit> wave = units.subspan(first, count);
    std::vector<ScoreRows> rows;
    std::byte* at = scratch;
    for (ScoreUnit& unit : wave) {
      place_score_rows(unit.rows, q_heads, at);
      at += score_rows_bytes(unit.rows, q_heads);
      rows.push_back(unit.rows);
    }
    launch_score(wave, args, geometry.kv_heads, stream);
    launch_finish_scores(rows, geometry.kv_heads, group, aggregation, stream);
  }
}

}  // namespace

void launch_finish_scores(std::span<const ScoreRows> rows,
                          uint32_t kv_heads,
                          uint32_t group,
                          Aggregation aggregation,
                          CudaStream& stream) {
  launch_packs(rows, [&](const ItemPack<ScoreRows>& pack, uint32_t count, size_t first) {
    uint32_t most = 0;
    for (const ScoreRows& item : rows.subspan(first, count)) most = std::max(most, item.count);
    if (most == 0) return;
    const dim3 grid(blocks_for(most, kFinishPartitions), kv_heads, count);
    const size_t shared = (size_t{group} + 3) / 4 * 4 * sizeof(float);
    finish_scores_kernel<<<grid, kFinishThreads, shared, stream.handle()>>>(pack, group,
                                                                            aggregation);
    stream.end("finish_scores");
  });
}

void CudaSparseOps::enqueue_score_means(TensorRef q,
                                        std::span<const ScoreMeansItem> items,
                                        const layout::KvGeometry& geometry,
                                        float scale,
                                        Aggregation aggregation,
                                        StreamRef stream_ref) {
  check_queries(q, geometry);
  std::vector<ScoreUnit> units;
  for (const ScoreMeansItem& item : items) {
    check_chunks(item.keys, geometry.head_dim);
    SPIN_CHECK(item.keys_per_partition > 0 && item.row < static_cast<uint64_t>(q.rows));
    if (item.count > 0) units.push_back(make_unit(item, item.keys, {}, item.keys_per_partition));
  }
  CudaStream& stream = cuda_stream(stream_ref);
  if (units.empty() || !stream.begin()) return;
  run_scores(q, units, geometry, scale, aggregation, stream);
}

void CudaSparseOps::enqueue_score_boxes(TensorRef q,
                                        std::span<const ScoreBoxesItem> items,
                                        const layout::KvGeometry& geometry,
                                        float scale,
                                        Aggregation aggregation,
                                        StreamRef stream_ref) {
  check_queries(q, geometry);
  std::vector<ScoreUnit> units;
  for (const ScoreBoxesItem& item : items) {
    check_chunks(item.min, geometry.head_dim);
    check_chunks(item.max, geometry.head_dim);
    SPIN_CHECK(item.min.dtype == item.max.dtype && item.row < static_cast<uint64_t>(q.rows));
    if (item.count > 0) units.push_back(make_unit(item, item.min, item.max, 1));
  }
  CudaStream& stream = cuda_stream(stream_ref);
  if (units.empty() || !stream.begin()) return;
  run_scores(q, units, geometry, scale, aggregation, stream);
}

}  // namespace spin::backend::cuda
