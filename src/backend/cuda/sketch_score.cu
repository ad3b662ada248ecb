// SPDX-License-Identifier: Apache-2.0
// Scores of pages by sketches (backend/sketch_ops.h), in three steps: queries are rotated and
// rounded; tiles of tokens are scored (sketch_tiles.cuh has the model of their bytes) and leave the
// largest score of each page, 4 bytes a query head; log-sum-exps and one score per page
// (score_support.cuh). What goes from step to step stays in the L2 cache.
#include <algorithm>
#include <numeric>
#include <vector>

#include "backend/cuda/cuda_sparse_ops.h"
#include "backend/cuda/sketch_tiles.cuh"
#include "base/check.h"

namespace spin::backend::cuda {
namespace {

// ---- Queries.

// Where the rounded dimension `dim` of query head g lies, in bytes.
__device__ uint32_t
rounded_at(uint32_t dim, uint32_t head_dim, uint32_t bits, uint32_t g, uint32_t group) {
  const uint32_t steps = 4 / bits;  // of a word
  const uint32_t word = dim / (32 / bits);
  const uint32_t i = dim % (32 / bits);
  const uint32_t step = word * steps + i % steps;
  const uint32_t half = i / (4 * steps);
  const uint32_t byte = i / steps % 4;
  const uint32_t first = g / kPartHeads * kPartHeads;
  const uint32_t heads = min(kPartHeads, group - first);
  const uint32_t at =
      first * rounded_words(head_dim, bits) + (step * heads + (g - first)) * 2 + half;
  return at * 4 + byte;
}

// A warp per query head. Grid (query heads of a group, KV heads, items). The rotation and the
// rounding are the CPU's to the bit.
template <int kPieces>
__global__ void __launch_bounds__(kWarp)
    prepare_sketch_query_kernel(const __grid_constant__ ItemPack<PrepareItem> items,
                                const SketchCall call) {
  const PrepareItem& item = items[blockIdx.z];
  const uint32_t g = blockIdx.x;
  const uint32_t head = blockIdx.y;
  const uint32_t lane = threadIdx.x;
  const uint32_t bits = item.keys.bits;
  const uint32_t pieces = call.head_dim / kPieceDims;
  uint32_t* const prepared = item.prepared + head * prepared_words(call.head_dim, bits, call.group);
  const float* q = call.q + static_cast<int64_t>(item.row) * call.row_stride +
                   (uint64_t{head} * call.group + g) * call.head_dim;
  float y[kPieces][kPieceDims] = {};
  float biases[2] = {};
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const uint32_t piece = j * kWarp + lane;
    if (piece >= pieces) continue;
#pragma unroll
    for (uint32_t i = 0; i < kPieceDims; ++i) y[j][i] = q[piece * kPieceDims + i];
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      float mu[kPieceDims];
      load_piece(sketch_mean(item.keys, call.kv_heads, call.head_dim, head, second != 0),
                 layout::DType::kF32, piece, mu);
#pragma unroll
      for (uint32_t i = 0; i < kPieceDims; ++i) {
        biases[second] = fmaf(y[j][i], mu[i], biases[second]);
      }
    }
  }
  rotate_pieces(pieces, lane, kWarp, y);
  float largest = 0.0f;
  bool finite = true;
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
#pragma unroll
    for (uint32_t i = 0; i < kPieceDims; ++i) {
      largest = fmaxf(largest, fabsf(y[j][i]));
      finite = finite && isfinite(y[j][i]);
    }
  }
  largest = warp_max(largest);
  finite = __all_sync(kFullMask, finite);
  const float step = finite && largest > 0.0f ? largest / 127.0f : 0.0f;
  auto* const rounded = reinterpret_cast<int8_t*>(prepared);
  const uint32_t dims = sketch_words(call.head_dim, bits) * (32 / bits);  // those past the head: 0
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const uint32_t first = (j * kWarp + lane) * kPieceDims;
    if (first >= dims) continue;
#pragma unroll
    for (uint32_t i = 0; i < kPieceDims; ++i) {
      const float r = step > 0.0f ? fminf(fmaxf(rintf(y[j][i] / step), -127.0f), 127.0f) : 0.0f;
      rounded[rounded_at(first + i, call.head_dim, bits, g, call.group)] = static_cast<int8_t>(r);
    }
  }
  biases[0] = warp_sum(biases[0]);
  biases[1] = warp_sum(biases[1]);
  if (lane != 0) return;
  auto* const terms =
      reinterpret_cast<float*>(prepared + call.group * rounded_words(call.head_dim, bits));
  terms[g] = call.scale * step;
  terms[call.group + g] = call.scale * biases[0];
  terms[2 * call.group + g] = call.scale * biases[1];
}

// ---- Scores of pages.

struct ScoreUnit {
  ScoreSketchItem item;
  const uint32_t* prepared = nullptr;
  ScoreRows rows;  // scores: the largest one of each page

  uint32_t tiles() const { return rows.tiles; }
};

// The largest of `count` scores. Requires: aligned to 16 bytes if count is a multiple of 4.
__device__ float largest_of(const float* scores, uint32_t count) {
  float most = scores[0];
  if (count % 4 == 0) {
    const auto* const fours = reinterpret_cast<const float4*>(scores);
    for (uint32_t i = 0; i < count / 4; ++i) {
      const float4 four = fours[i];
      most = fmaxf(most, fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
    }
  } else {
    for (uint32_t i = 1; i < count; ++i) most = fmaxf(most, scores[i]);
  }
  return most;
}

// As many as the sums' registers leave room for.
constexpr unsigned score_blocks_per_sm(int heads) {
  return heads == 1 ? 6 : heads == 2 ? 5 : heads <= 4 ? 4 : heads == 5 ? 3 : 2;
}

// Query heads [part * kPartHeads, ... + kGroup) of a group. Grid (tiles, KV heads, items).
template <int kBits, int kGroup>
__global__ void __launch_bounds__(kSketchThreads, score_blocks_per_sm(kGroup))
    score_sketch_kernel(const __grid_constant__ ItemPack<ScoreUnit> units,
                        const SketchCall call,
                        uint32_t part) {
  extern __shared__ float4 shared[];
  __shared__ float terms[3 * kGroup];
  const ScoreUnit& unit = units[blockIdx.z];
  const ScoreSketchItem& item = unit.item;
  if (blockIdx.x >= unit.rows.tiles) return;
  const uint32_t head = blockIdx.y;
  const SketchTile tile =
      sketch_tile(call, item.first / call.tile_pages + blockIdx.x, item.first, item.count);
  auto* const query = reinterpret_cast<uint2*>(shared + kGroup * kSketchThreads);
  stage_prepared<kBits, kGroup>(
      unit.prepared + head * prepared_words(call.head_dim, kBits, call.group), call, part, query,
      terms);
  __syncthreads();
  float scores[kGroup][4];
  score_tokens<kBits>(item.keys, head, call.head_dim, tile, query, terms, scores);
  store_scores(scores, shared);
  __syncthreads();

  const auto* const rows = reinterpret_cast<const float*>(shared);
  const uint64_t q_head = uint64_t{head} * call.group + part * kPartHeads;
  const uint32_t warp = threadIdx.x / kWarp;
  if (warp < kGroup) {
    const float2 stats = warp_stats(rows + warp * kSketchTile, kSketchTile);
    if (threadIdx.x % kWarp == 0) {
      unit.rows.stats[(q_head + warp) * unit.rows.tiles + blockIdx.x] = stats;
    }
  }
  const auto pages = static_cast<uint32_t>(tile.end - tile.begin) / call.page_tokens;
  const uint64_t first_page = tile.begin / call.page_tokens - item.first;
  for (uint32_t i = threadIdx.x; i < kGroup * pages; i += kSketchThreads) {
    const uint32_t g = i / pages;
    const uint32_t page = i - g * pages;
    const float* page_scores =
        rows + g * kSketchTile + (tile.begin - tile.origin) + page * call.page_tokens;
    unit.rows.scores[(q_head + g) * item.count + first_page + page] =
        largest_of(page_scores, call.page_tokens);
  }
}

// ---- Launches.

void run_wave(std::span<ScoreUnit> wave,
              std::byte* scratch,
              const SketchCall& call,
              CudaStream& stream) {
  std::vector<PrepareItem> queries;
  std::vector<ScoreRows> rows;
  for (ScoreUnit& unit : wave) {
    auto* const prepared = reinterpret_cast<uint32_t*>(scratch);
    unit.prepared = prepared;
    scratch += prepared_bytes(call, unit.item.keys);
    place_score_rows(unit.rows, call.q_heads(), scratch);
    scratch += score_rows_bytes(unit.rows, call.q_heads());
    queries.push_back({unit.item.keys, unit.item.row, prepared});
    rows.push_back(unit.rows);
  }
  launch_prepare_queries(queries, call, stream);
  launch_tiles(
      std::span<const ScoreUnit>(wave), call.group,
      [&](auto bits, auto heads, const auto& pack, uint32_t tiles, uint32_t count, uint32_t part) {
        constexpr int kBits = decltype(bits)::value;
        constexpr int kGroup = decltype(heads)::value;
        const size_t shared = tile_shared_bytes(call.head_dim, kBits, kGroup);
        score_sketch_kernel<kBits, kGroup>
            <<<dim3(tiles, call.kv_heads, count), kSketchThreads, shared, stream.handle()>>>(
                pack, call, part);
        stream.end("score_sketch");
      });
  launch_finish_scores(rows, call.kv_heads, call.group, Aggregation::kSoftmaxMax, stream);
}

}  // namespace

SketchCall make_sketch_call(const TensorRef& q, const layout::KvGeometry& geometry, float scale) {
  check_queries(q, geometry);
  SPIN_CHECK(geometry.page_tokens > 0);
  const uint32_t unit = std::lcm(geometry.page_tokens, kSketchBlockTokens);
  SPIN_CHECK(unit <= kSketchTile);
  SketchCall call;
  call.q = static_cast<const float*>(q.data);
  call.row_stride = q.row_stride;
  call.kv_heads = geometry.kv_heads;
  call.group = group_of(q, geometry);
  call.head_dim = geometry.head_dim;
  call.page_tokens = geometry.page_tokens;
  call.tile_pages = kSketchTile / unit * unit / geometry.page_tokens;
  call.scale = scale;
  return call;
}

void launch_prepare_queries(std::span<const PrepareItem> items,
                            const SketchCall& call,
                            CudaStream& stream) {
  with_pieces(call.head_dim, [&](auto pieces) {
    launch_packs(items, [&](const ItemPack<PrepareItem>& pack, uint32_t count, size_t /*first*/) {
      prepare_sketch_query_kernel<decltype(pieces)::value>
          <<<dim3(call.group, call.kv_heads, count), kWarp, 0, stream.handle()>>>(pack, call);
      stream.end("prepare_sketch_query");
    });
  });
}

void CudaSparseOps::enqueue_score_sketch(TensorRef q,
                                         std::span<const ScoreSketchItem> items,
                                         const layout::KvGeometry& geometry,
                                         float scale,
                                         StreamRef stream_ref) {
  const SketchCall call = make_sketch_call(q, geometry, scale);
  std::vector<ScoreUnit> units;
  for (const ScoreSketchItem& item : items) {
    const uint64_t end = uint64_t{item.first} + item.count;
    check_sketches(item.keys, end * geometry.page_tokens, geometry.head_dim);
    SPIN_CHECK(item.row < static_cast<uint64_t>(q.rows) && item.count <= item.score_stride);
    if (item.count == 0) continue;
    ScoreUnit unit{item};
    unit.rows.count = item.count;
    unit.rows.tiles =
        static_cast<uint32_t>((end - 1) / call.tile_pages - item.first / call.tile_pages + 1);
    unit.rows.out = item.scores;
    unit.rows.out_stride = item.score_stride;
    units.push_back(unit);
  }
  CudaStream& stream = cuda_stream(stream_ref);
  if (units.empty() || !stream.begin()) return;
  const auto bytes_of = [&](const ScoreUnit& unit) {
    return prepared_bytes(call, unit.item.keys) + score_rows_bytes(unit.rows, call.q_heads());
  };
  run_waves(std::span(units), stream, bytes_of, [&](std::span<ScoreUnit> wave, std::byte* scratch) {
    run_wave(wave, scratch, call, stream);
  });
}

}  // namespace spin::backend::cuda
