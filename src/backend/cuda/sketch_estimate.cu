// SPDX-License-Identifier: Apache-2.0
// Estimates by sketches (backend/sketch_ops.h), in three steps: queries are rotated and rounded;
// tiles of tokens are scored (sketch_tiles.cuh), tokens on the list left out, and their values
// summed in the rotated space; the tiles' sums are combined and rotated back.
//
// Bytes per token and KV head: codes and scales of keys and values once (68 for 128 dimensions of 2
// bits each); the tiles' sums, 4 bytes per 1,024 tokens, dimension and query head, go through the
// L2 cache. Arithmetic binds: per token and dimension a product in float for each query head and
// the conversion of the level.
#include <algorithm>
#include <vector>

#include "backend/cuda/cuda_sparse_ops.h"
#include "backend/cuda/sketch_tiles.cuh"
#include "base/check.h"

namespace spin::backend::cuda {
namespace {

constexpr uint32_t kValueBits = 2;

struct EstimateUnit {
  EstimateSketchItem item;
  const uint32_t* prepared = nullptr;
  float4* stats = nullptr;  // [q_heads, tiles] largest s, sums of e^(s - largest) by mean
  float* sums = nullptr;    // [q_heads, tiles, padded dimensions] of e^(s - largest) b level
  uint32_t tile_count = 0;

  __host__ __device__ uint32_t tiles() const { return tile_count; }
};

__host__ __device__ constexpr uint32_t padded_dims(uint32_t head_dim) {
  return sketch_words(head_dim, kValueBits) * (32 / kValueBits);
}

// Number of pages [count], ascending, that are less than `page`. All threads of the block call it.
__device__ uint32_t lower_bound_of(const uint32_t* pages, uint32_t count, uint64_t page) {
  uint32_t lower = 0;
  while (count > 0) {
    const uint32_t step = (count + kSketchThreads - 1) / kSketchThreads;
    const uint32_t probe = threadIdx.x * step;
    const uint32_t less =
        static_cast<uint32_t>(__syncthreads_count(probe < count && pages[lower + probe] < page));
    if (less == 0) break;
    const uint32_t passed = (less - 1) * step + 1;
    lower += passed;
    count = min(step - 1, count - passed);
  }
  return lower;
}

// listed[t] = 1 for the tile's tokens that are on the list. All threads of the block call it.
__device__ void mark_listed(const layout::PageList& list,
                            uint32_t head,
                            const SketchCall& call,
                            const SketchTile& tile,
                            uint8_t* listed) {
  reinterpret_cast<uint32_t*>(listed)[threadIdx.x] = 0;
  const uint32_t* pages = list.pages + uint64_t{head} * list.stride;
  const uint32_t count = list.counts[head];
  __syncthreads();
  for (uint32_t i = lower_bound_of(pages, count, tile.begin / call.page_tokens) + threadIdx.x;
       i < count; i += kSketchThreads) {
    const uint64_t first = uint64_t{pages[i]} * call.page_tokens;
    if (first >= tile.end) break;
    for (uint32_t t = 0; t < call.page_tokens; ++t) listed[first - tile.origin + t] = 1;
  }
  __syncthreads();
}

// A warp turns a query head's scores of a tile, in shared memory, into the weights b e^(s -
// largest) of its tokens.
__device__ float4 weigh_tokens(const SketchArray& values,
                               uint32_t head,
                               const SketchTile& tile,
                               float* row) {
  const uint32_t lane = threadIdx.x % kWarp;
  auto* const fours = reinterpret_cast<float4*>(row);
  float most = -INFINITY;
  for (uint32_t i = lane; i < kSketchThreads; i += kWarp) {
    const float4 s = fours[i];
    most = fmaxf(most, fmaxf(fmaxf(s.x, s.y), fmaxf(s.z, s.w)));
  }
  most = warp_max(most);
  const bool none = most == -INFINITY;
  const base::Fp16* scales = values.scales + head * values.capacity + tile.origin;
  float first = 0.0f;
  float second = 0.0f;
#pragma unroll 2
  for (uint32_t i = lane; i < kSketchThreads; i += kWarp) {
    const float4 raw = fours[i];
    const float s[4] = {raw.x, raw.y, raw.z, raw.w};
    const uint64_t token = tile.origin + 4 * i;
    float b[4] = {};
    if (token < tile.end) load_scales(scales + 4 * i, b);
    float weights[4];
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float e = none ? 0.0f : expf(s[t] - most);
      sum += e;
      weights[t] = e > 0.0f ? e * b[t] : 0.0f;  // scales that are not there count for nothing
    }
    if (token >= values.split) {
      second += sum;
    } else {
      first += sum;
    }
    fours[i] = make_float4(weights[0], weights[1], weights[2], weights[3]);
  }
  return {most, warp_sum(first), warp_sum(second), 0.0f};
}

// sums[g][d] = sum over the tile's tokens of weight * level. Four neighbouring threads share a word
// of the codes, each takes four of its dimensions (half h and step s as of queries); groups of
// threads that hold all dimensions share the blocks, and are summed in order.
template <int kGroup>
__device__ void sum_values(const SketchArray& values,
                           uint32_t head,
                           const SketchCall& call,
                           const SketchTile& tile,
                           float* shared,
                           float* out,
                           uint64_t out_stride) {
  const uint32_t words = sketch_words(call.head_dim, kValueBits);
  const uint32_t units = words * 4;
  const uint32_t slices = kSketchThreads / units;
  const uint32_t slice = threadIdx.x / units;
  const uint32_t unit = threadIdx.x % units;
  const uint32_t half = unit / 2 % 2;
  const uint32_t step = unit % 2;
  const uint32_t shift = 16 * half + kValueBits * step;
  const auto blocks =
      static_cast<uint32_t>((tile.end - tile.origin + kSketchBlockTokens - 1) / kSketchBlockTokens);
  const uint4* codes =
      sketch_codes(values, head, words, tile.origin / kSketchBlockTokens) + unit / 4 * 4;
  float sums[kGroup][4] = {};
  for (uint32_t b = slice < slices ? slice : blocks; b < blocks; b += slices) {
    uint4 raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = __ldg(codes + uint64_t{b} * words * 4 + i);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
      float levels[4][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const uint32_t bytes =
            __byte_perm(level_bytes(kValueBits, 0), 0, (word[t] >> shift) & 0x3333u);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          levels[t][k] = static_cast<float>(static_cast<int8_t>(bytes >> (8 * k)));
        }
      }
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        const float4 four = *reinterpret_cast<const float4*>(shared + g * kSketchTile +
                                                             b * kSketchBlockTokens + 4 * i);
        const float weights[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int t = 0; t < 4; ++t) {
#pragma unroll
          for (int k = 0; k < 4; ++k) sums[g][k] = fmaf(weights[t], levels[t][k], sums[g][k]);
        }
      }
    }
  }
  __syncthreads();  // the weights have been read
  const uint32_t dims = units * 4;
  if (slice < slices) {
    const uint32_t first = unit / 4 * 16 + 8 * half + step;
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
#pragma unroll
      for (int k = 0; k < 4; ++k) shared[(slice * kGroup + g) * dims + first + 2 * k] = sums[g][k];
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kGroup * dims; i += kSketchThreads) {
    float sum = 0.0f;
    for (uint32_t s = 0; s < slices; ++s) sum += shared[s * kGroup * dims + i];
    const uint32_t g = i / dims;
    out[g * out_stride + (i - g * dims)] = sum;
  }
}

// As many as the sums' registers leave room for.
constexpr unsigned estimate_blocks_per_sm(int heads) { return heads <= 2 ? 4 : heads <= 4 ? 3 : 2; }

// Query heads [part * kPartHeads, ... + kGroup) of a group. Grid (tiles, KV heads, items).
template <int kBits, int kGroup>
__global__ void __launch_bounds__(kSketchThreads, estimate_blocks_per_sm(kGroup))
    estimate_sketch_kernel(const __grid_constant__ ItemPack<EstimateUnit> units,
                           const SketchCall call,
                           uint32_t part) {
  extern __shared__ float4 shared[];
  __shared__ float terms[3 * kGroup];
  __shared__ alignas(4) uint8_t listed[kSketchTile];
  const EstimateUnit& unit = units[blockIdx.z];
  const EstimateSketchItem& item = unit.item;
  if (blockIdx.x >= unit.tiles()) return;
  const uint32_t head = blockIdx.y;
  const SketchTile tile = sketch_tile(call, blockIdx.x, 0, item.tokens / call.page_tokens);
  auto* const query = reinterpret_cast<uint2*>(shared + kGroup * kSketchThreads);
  stage_prepared<kBits, kGroup>(
      unit.prepared + head * prepared_words(call.head_dim, kBits, call.group), call, part, query,
      terms);
  mark_listed(item.list, head, call, tile, listed);  // ends in a barrier
  float scores[kGroup][4];
  score_tokens<kBits>(item.keys, head, call.head_dim, tile, query, terms, scores);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    if (listed[4 * threadIdx.x + t] == 0) continue;
#pragma unroll
    for (int g = 0; g < kGroup; ++g) scores[g][t] = -INFINITY;
  }
  store_scores(scores, shared);
  __syncthreads();

  auto* const rows = reinterpret_cast<float*>(shared);
  const uint64_t q_head = uint64_t{head} * call.group + part * kPartHeads;
  const uint32_t warp = threadIdx.x / kWarp;
  if (warp < kGroup) {
    const float4 stats = weigh_tokens(item.values, head, tile, rows + warp * kSketchTile);
    if (threadIdx.x % kWarp == 0) {
      unit.stats[(q_head + warp) * unit.tiles() + blockIdx.x] = stats;
    }
  }
  __syncthreads();
  const uint64_t dims = padded_dims(call.head_dim);
  sum_values<kGroup>(item.values, head, call, tile, rows,
                     unit.sums + (q_head * unit.tiles() + blockIdx.x) * dims, unit.tiles() * dims);
}

// Log-sum-exp of a query head's tiles and the shares of both means' tokens. All lanes of a warp
// call it and get them.
__device__ float combine_stats(const float4* stats, uint32_t tiles, float (&mass)[2]) {
  const uint32_t lane = threadIdx.x % kWarp;
  float most = -INFINITY;
  for (uint32_t t = lane; t < tiles; t += kWarp) most = fmaxf(most, stats[t].x);
  most = warp_max(most);
  mass[0] = mass[1] = 0.0f;
  if (most == -INFINITY) return most;
  for (uint32_t t = lane; t < tiles; t += kWarp) {
    const float4 stat = stats[t];
    const float weight = expf(stat.x - most);
    mass[0] = fmaf(weight, stat.y, mass[0]);
    mass[1] = fmaf(weight, stat.z, mass[1]);
  }
  mass[0] = warp_sum(mass[0]);
  mass[1] = warp_sum(mass[1]);
  const float total = mass[0] + mass[1];
  mass[0] /= total;
  mass[1] /= total;
  return most + logf(total);
}

// A block per query head: the tiles' sums together, rotated back, plus the means' shares. Grid
// (query heads of a group, KV heads, items). Bytes: the sums, from the cache.
template <int kPieces>
__global__ void __launch_bounds__(kSketchThreads)
    finish_estimate_sketch_kernel(const __grid_constant__ ItemPack<EstimateUnit> units,
                                  const SketchCall call) {
  __shared__ float4 partial[kSketchThreads];
  const EstimateUnit& unit = units[blockIdx.z];
  const EstimateSketchItem& item = unit.item;
  const uint32_t head = blockIdx.y;
  const uint64_t q_head = uint64_t{head} * call.group + blockIdx.x;
  const float4* stats = unit.stats + q_head * unit.tiles();
  float* const part = item.part + q_head * call.head_dim;
  float mass[2];
  const float lse = combine_stats(stats, unit.tiles(), mass);
  if (threadIdx.x == 0) item.log_sum_exp[q_head] = lse;
  if (lse == -INFINITY) {
    for (uint32_t d = threadIdx.x; d < call.head_dim; d += kSketchThreads) part[d] = 0.0f;
    return;
  }
  const uint32_t quads = padded_dims(call.head_dim) / 4;
  const uint32_t slices = kSketchThreads / quads;
  const uint32_t slice = threadIdx.x / quads;
  const auto* const sums = reinterpret_cast<const float4*>(unit.sums) +
                           q_head * unit.tiles() * quads + threadIdx.x % quads;
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
  for (uint32_t t = slice < slices ? slice : unit.tiles(); t < unit.tiles(); t += slices) {
    const float weight = expf(stats[t].x - lse);
    const float4 more = sums[uint64_t{t} * quads];
    sum.x = fmaf(weight, more.x, sum.x);
    sum.y = fmaf(weight, more.y, sum.y);
    sum.z = fmaf(weight, more.z, sum.z);
    sum.w = fmaf(weight, more.w, sum.w);
  }
  partial[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= kWarp) return;

  const uint32_t pieces = call.head_dim / kPieceDims;
  float y[kPieces][kPieceDims] = {};
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const uint32_t piece = j * kWarp + threadIdx.x;
    for (uint32_t s = 0; s < slices && piece < pieces; ++s) {
      float more[kPieceDims];
      load_piece(partial + s * quads, layout::DType::kF32, piece, more);
#pragma unroll
      for (uint32_t i = 0; i < kPieceDims; ++i) y[j][i] += more[i];
    }
  }
  rotate_pieces(pieces, threadIdx.x, kWarp, y);
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const uint32_t piece = j * kWarp + threadIdx.x;
    if (piece >= pieces) continue;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      if (mass[second] == 0.0f) continue;  // that mean may not be there yet
      float mu[kPieceDims];
      load_piece(sketch_mean(item.values, call.kv_heads, call.head_dim, head, second != 0),
                 layout::DType::kF32, piece, mu);
#pragma unroll
      for (uint32_t i = 0; i < kPieceDims; ++i) y[j][i] = fmaf(mass[second], mu[i], y[j][i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < kPieceDims; ++i) part[piece * kPieceDims + i] = y[j][i];
  }
}

// ---- Launches.

uint64_t stats_bytes(const SketchCall& call, const EstimateUnit& unit) {
  return scratch_part(call.q_heads() * unit.tiles() * sizeof(float4));
}

uint64_t sums_bytes(const SketchCall& call, const EstimateUnit& unit) {
  return scratch_part(call.q_heads() * unit.tiles() * padded_dims(call.head_dim) * sizeof(float));
}

void run_wave(std::span<EstimateUnit> wave,
              std::byte* scratch,
              const SketchCall& call,
              CudaStream& stream) {
  std::vector<PrepareItem> queries;
  for (EstimateUnit& unit : wave) {
    auto* const prepared = reinterpret_cast<uint32_t*>(scratch);
    unit.prepared = prepared;
    scratch += prepared_bytes(call, unit.item.keys);
    unit.stats = reinterpret_cast<float4*>(scratch);
    scratch += stats_bytes(call, unit);
    unit.sums = reinterpret_cast<float*>(scratch);
    scratch += sums_bytes(call, unit);
    queries.push_back({unit.item.keys, unit.item.row, prepared});
  }
  launch_prepare_queries(queries, call, stream);
  const std::span<const EstimateUnit> units = wave;
  launch_tiles(
      units, call.group,
      [&](auto bits, auto heads, const auto& pack, uint32_t tiles, uint32_t count, uint32_t part) {
        constexpr int kBits = decltype(bits)::value;
        constexpr int kGroup = decltype(heads)::value;
        const size_t shared = tile_shared_bytes(call.head_dim, kBits, kGroup);
        estimate_sketch_kernel<kBits, kGroup>
            <<<dim3(tiles, call.kv_heads, count), kSketchThreads, shared, stream.handle()>>>(
                pack, call, part);
        stream.end("estimate_sketch");
      });
  with_pieces(call.head_dim, [&](auto pieces) {
    launch_packs(units, [&](const ItemPack<EstimateUnit>& pack, uint32_t count, size_t /*first*/) {
      finish_estimate_sketch_kernel<decltype(pieces)::value>
          <<<dim3(call.group, call.kv_heads, count), kSketchThreads, 0, stream.handle()>>>(pack,
                                                                                           call);
      stream.end("finish_estimate_sketch");
    });
  });
}

}  // namespace

void CudaSparseOps::enqueue_estimate_sketch(TensorRef q,
                                            std::span<const EstimateSketchItem> items,
                                            const layout::KvGeometry& geometry,
                                            float scale,
                                            StreamRef stream_ref) {
  const SketchCall call = make_sketch_call(q, geometry, scale);
  std::vector<EstimateUnit> units;
  for (const EstimateSketchItem& item : items) {
    check_sketches(item.keys, item.tokens, geometry.head_dim);
    check_sketches(item.values, item.tokens, geometry.head_dim);
    SPIN_CHECK(item.keys.split == item.values.split && item.values.bits == kValueBits);
    SPIN_CHECK(item.row < static_cast<uint64_t>(q.rows));
    SPIN_CHECK(item.tokens % geometry.page_tokens == 0);
    EstimateUnit unit{item};
    unit.tile_count = blocks_for(item.tokens, call.tile_pages * call.page_tokens);
    units.push_back(unit);
  }
  CudaStream& stream = cuda_stream(stream_ref);
  if (units.empty() || !stream.begin()) return;
  const auto bytes_of = [&](const EstimateUnit& unit) {
    return prepared_bytes(call, unit.item.keys) + stats_bytes(call, unit) + sums_bytes(call, unit);
  };
  run_waves(std::span(units), stream, bytes_of,
            [&](std::span<EstimateUnit> wave, std::byte* scratch) {
              run_wave(wave, scratch, call, stream);
            });
}

}  // namespace spin::backend::cuda
