// SPDX-License-Identifier: Apache-2.0
// Learned gates (backend/gate_items.h). A block's gate vector and a row's scores are functions of
// their own inputs alone: sums are cut by the sizes of the weights, never by what else is computed
// beside them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/cuda/cuda_sparse_ops.h"
#include "backend/cuda/lowrank_support.cuh"
#include "backend/cuda/score_support.cuh"
#include "base/check.h"

namespace spin::backend::cuda {
namespace {

using layout::DType;
using layout::KvGeometry;

constexpr uint32_t kMostWidth = 1024;
constexpr uint32_t kMostPoolings = 3;
constexpr uint32_t kSharedFloats = 48 * 1024 / sizeof(float);  // that a block gets unasked

// One projection and what follows it, as a kernel argument. Frequencies lie in host memory: they
// travel with it.
struct GateSide {
  const float* weights = nullptr;  // [kv_heads, inputs, width]
  const float* norm = nullptr;     // [width]; null: none
  float epsilon = 0.0f;
  uint32_t width = 0;
  uint32_t head_dim = 0;
  uint32_t inputs = 0;
  uint32_t poolings = 0;
  Pooling order[kMostPoolings] = {};
  bool turns = false;  // gate vectors are rotated
  RopeArgument model;  // factor: of the inverse rotation
  RopeArgument gate;
};

// ---- Projections.
//
// Shared memory holds the inputs of kRows vectors, [kRows][inputs]; then sums of slices of the
// inputs, [slices][kRows][width]; then the vectors, [kRows][width].

template <int kRows>
constexpr uint32_t projection_floats(uint32_t inputs, uint32_t width, uint32_t threads) {
  return kRows * std::max({inputs, width, threads});
}

// Projects `rows` [kRows][inputs] in place. Slices of the inputs are as many as there are threads
// for; each is one chain over ascending inputs, and they are added in order. weights: [inputs,
// width]; inputs: a multiple of 4.
template <int kRows, int kThreads>
__device__ void project(const float* weights, uint32_t inputs, uint32_t width, float* rows) {
  constexpr uint32_t kColumns = (kMostWidth + kThreads - 1) / kThreads;  // of a thread
  const uint32_t slices = width < kThreads ? kThreads / width : 1;
  const uint32_t share = (inputs / 4 + slices - 1) / slices * 4;
  const uint32_t slice = threadIdx.x / width;  // width >= kThreads: 0
  const uint32_t first = threadIdx.x - slice * width;
  const uint32_t begin = min(inputs, slice * share);
  const uint32_t end = slice < slices ? min(inputs, begin + share) : begin;
  float sums[kColumns][kRows] = {};
#pragma unroll
  for (uint32_t c = 0; c < kColumns; ++c) {
    const uint32_t column = first + c * kThreads;
    if (column >= width) break;
#pragma unroll 4
    for (uint32_t i = begin; i < end; i += 4) {
      float w[4];
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) w[k] = __ldg(weights + uint64_t{i + k} * width + column);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 x = *reinterpret_cast<const float4*>(rows + r * inputs + i);
        float sum = sums[c][r];
        sum = fmaf(x.x, w[0], sum);
        sum = fmaf(x.y, w[1], sum);
        sum = fmaf(x.z, w[2], sum);
        sums[c][r] = fmaf(x.w, w[3], sum);
      }
    }
  }
  __syncthreads();  // the inputs have been read
#pragma unroll
  for (uint32_t c = 0; c < kColumns; ++c) {
    const uint32_t column = first + c * kThreads;
    if (slice >= slices || column >= width) break;
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[(slice * kRows + r) * width + column] = sums[c][r];
  }
  __syncthreads();
  if (slices == 1) return;
  for (uint32_t i = threadIdx.x; i < kRows * width; i += kThreads) {
    float sum = rows[i];
    for (uint32_t s = 1; s < slices; ++s) sum += rows[s * kRows * width + i];
    rows[i] = sum;  // no other thread reads it before the barrier
  }
  __syncthreads();
}

// store(j, element j) of the norm and the rotation of z [width]. A warp calls it.
template <typename Store>
__device__ void finish_vector(const GateSide& side,
                              const float* z,
                              uint32_t position,
                              Store store) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t width = side.width;
  float factor = 1.0f;
  if (side.norm != nullptr) {
    float squares = 0.0f;
    for (uint32_t j = lane; j < width; j += kWarp) squares = fmaf(z[j], z[j], squares);
    factor = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(width) + side.epsilon);
  }
  const auto normed = [&](uint32_t j) {
    return side.norm != nullptr ? z[j] * factor * side.norm[j] : z[j];
  };
  if (!side.turns) {
    for (uint32_t j = lane; j < width; j += kWarp) store(j, normed(j));
    return;
  }
  const uint32_t half = width / 2;
  for (uint32_t i = lane; i < half; i += kWarp) {
    const Rotation by = rotation_of(position, side.gate.inv_freq[i], side.gate.factor);
    const float2 pair = rotated(normed(i), normed(i + half), by);
    store(i, pair.x);
    store(i + half, pair.y);
  }
}

// Of what the model's RoPE did.
__device__ Rotation inverse_rotation(const GateSide& side, uint32_t position, uint32_t pair) {
  const Rotation turn = rotation_of(position, side.model.inv_freq[pair], side.model.factor);
  return {turn.cos, -turn.sin};
}

// ---- Keys.

constexpr uint32_t kKeyThreads = 256;
constexpr uint32_t kKeyRows = 4;  // blocks of tokens that share the weights

// Row of a token's key. Token numbers have 32 bits, because their division is on every path.
const __device__ std::byte* key_row(const layout::PagedTokens& tokens,
                                    uint32_t head,
                                    uint32_t token) {
  const KvGeometry& geometry = tokens.geometry;
  const uint32_t page = token / geometry.page_tokens;
  const uint32_t row = token - page * geometry.page_tokens;
  return tokens.base + tokens.slots[head * tokens.slot_stride + page] * geometry.page_bytes() +
         row * geometry.row_bytes();
}

// Pools pair `pair` of the keys of a block, as they were before RoPE, over its tokens in ascending
// order: pooled [poolings][head_dim].
__device__ void pool_pair(const GateKeysItem& item,
                          const GateSide& side,
                          uint32_t head,
                          uint32_t block,
                          uint32_t pair,
                          float* pooled) {
  const uint32_t half = side.head_dim / 2;
  const uint32_t first = block * item.block_tokens;
  const auto position = static_cast<uint32_t>(item.first_position) + first;
  float2 kept[kMostPoolings];
#pragma unroll 4
  for (uint32_t t = 0; t < item.block_tokens; ++t) {
    const std::byte* row = key_row(item.tokens, head, first + t);
    const float2 key = rotated(load_element(row, item.tokens.geometry.dtype, pair),
                               load_element(row, item.tokens.geometry.dtype, pair + half),
                               inverse_rotation(side, position + t, pair));
#pragma unroll
    for (uint32_t p = 0; p < kMostPoolings; ++p) {
      if (t == 0) {
        kept[p] = key;
      } else if (side.order[p] == Pooling::kMax) {
        kept[p] = {fmaxf(kept[p].x, key.x), fmaxf(kept[p].y, key.y)};
      } else if (side.order[p] == Pooling::kMin) {
        kept[p] = {fminf(kept[p].x, key.x), fminf(kept[p].y, key.y)};
      } else {
        kept[p] = {kept[p].x + key.x, kept[p].y + key.y};
      }
    }
  }
  const float share = 1.0f / static_cast<float>(item.block_tokens);
#pragma unroll
  for (uint32_t p = 0; p < kMostPoolings; ++p) {
    if (p >= side.poolings) break;
    const float factor = side.order[p] == Pooling::kMean ? share : 1.0f;
    pooled[p * side.head_dim + pair] = kept[p].x * factor;
    pooled[p * side.head_dim + pair + half] = kept[p].y * factor;
  }
}

// Gate vectors of kKeyRows blocks. Grid (rows of blocks, KV heads, items). Bytes per block of
// tokens and KV head: its keys once, 4 inputs * width / kKeyRows of weights from the L2 cache,
// which bind.
__global__ void __launch_bounds__(kKeyThreads, 4)
    gate_keys_kernel(const __grid_constant__ ItemPack<GateKeysItem> items,
                     const __grid_constant__ GateSide side) {
  extern __shared__ float4 shared[];
  auto* const rows = reinterpret_cast<float*>(shared);
  const GateKeysItem& item = items[blockIdx.z];
  const uint32_t head = blockIdx.y;
  const uint32_t first = blockIdx.x * kKeyRows;
  if (first >= item.count || head >= item.tokens.geometry.kv_heads) return;
  const uint32_t count = min(kKeyRows, item.count - first);
  const uint32_t half = side.head_dim / 2;
  for (uint32_t i = threadIdx.x; i < kKeyRows * half; i += kKeyThreads) {
    const uint32_t row = min(i / half, count - 1);  // rows past the end repeat the last one
    pool_pair(item, side, head, item.first + first + row, i % half, rows + i / half * side.inputs);
  }
  __syncthreads();
  project<kKeyRows, kKeyThreads>(side.weights + uint64_t{head} * side.inputs * side.width,
                                 side.inputs, side.width, rows);
  const uint32_t row = threadIdx.x / kWarp;
  if (row >= count) return;
  const uint64_t position = item.first_position +
                            uint64_t{item.first + first + row} * item.block_tokens +
                            item.position_offset;
  const uint64_t at =
      head * item.out.head_stride + (uint64_t{item.out_first} + first + row) * side.width;
  finish_vector(
      side, rows + row * side.width, static_cast<uint32_t>(position),
      [&](uint32_t j, float x) { store_element(item.out.data, item.out.dtype, at + j, x); });
}

// ---- Scores.

constexpr uint32_t kQueryThreads = 1024;
constexpr uint32_t kQueryRows = 4;  // rows that share the weights, where their inputs fit
constexpr uint32_t kScoreThreads = 128;
constexpr uint32_t kScoreWarps = kScoreThreads / kWarp;
constexpr uint32_t kTileVectors = 128;

struct GateScoreUnit {
  GateScoreItem item;
  float* query = nullptr;  // [kv_heads, width]
  ScoreRows rows;
};

// Gate queries of kRows rows. Grid (rows, KV heads). Bytes per row and KV head: 4 inputs * width /
// kRows of weights.
template <int kRows>
__global__ void __launch_bounds__(kQueryThreads)
    gate_queries_kernel(const __grid_constant__ ItemPack<GateScoreUnit> units,
                        uint32_t unit_count,
                        const float* q,
                        int64_t row_stride,
                        const __grid_constant__ GateSide side) {
  extern __shared__ float4 shared[];
  auto* const rows = reinterpret_cast<float*>(shared);
  const uint32_t head = blockIdx.y;
  const uint32_t first = blockIdx.x * kRows;
  const uint32_t count = min(uint32_t{kRows}, unit_count - first);
  const uint32_t half = side.head_dim / 2;
  const uint32_t pairs = side.inputs / 2;  // of a row
  for (uint32_t i = threadIdx.x; i < kRows * pairs; i += kQueryThreads) {
    const uint32_t row = i / pairs;
    const uint32_t g = (i - row * pairs) / half;
    const uint32_t pair = (i - row * pairs) - g * half;
    const GateScoreItem& item = units[first + min(row, count - 1)].item;
    const float* from = q + static_cast<int64_t>(item.row) * row_stride +
                        uint64_t{head} * side.inputs + g * side.head_dim + pair;
    const float2 turned = rotated(
        from[0], from[half], inverse_rotation(side, static_cast<uint32_t>(item.position), pair));
    float* const to = rows + row * side.inputs + g * side.head_dim + pair;
    to[0] = turned.x;
    to[half] = turned.y;
  }
  __syncthreads();
  project<kRows, kQueryThreads>(side.weights + uint64_t{head} * side.inputs * side.width,
                                side.inputs, side.width, rows);
  const uint32_t row = threadIdx.x / kWarp;
  if (row >= count) return;
  const GateScoreUnit& unit = units[first + row];
  float* const query = unit.query + uint64_t{head} * side.width;
  finish_vector(side, rows + row * side.width, static_cast<uint32_t>(unit.item.position),
                [&](uint32_t j, float x) { query[j] = x; });
}

// Scores of a tile of vectors, eight lanes a vector. Grid (tiles, KV heads, items). Bytes: the
// vectors once. Vectors before the first one wanted count in the sums only.
template <typename T>
__global__ void __launch_bounds__(kScoreThreads)
    gate_scores_kernel(const __grid_constant__ ItemPack<GateScoreUnit> units,
                       uint32_t width,
                       float scale) {
  constexpr int kKeys = 4;  // of eight lanes at a time
  constexpr uint32_t kWarpKeys = kKeys * kVectorsPerWarp;
  extern __shared__ float4 staged[];
  __shared__ float scores[kTileVectors];
  const GateScoreUnit& unit = units[blockIdx.z];
  const GateScoreItem& item = unit.item;
  if (blockIdx.x >= unit.rows.tiles) return;
  const uint32_t head = blockIdx.y;
  const uint32_t begin = blockIdx.x * kTileVectors;
  const uint32_t count = min(kTileVectors, item.first + item.count - begin);
  const uint32_t chunks = width / kChunk<T>;
  stage_queries<T>(unit.query + uint64_t{head} * width, 1, width, scale, staged);
  __syncthreads();
  const auto* const keys = reinterpret_cast<const uint4*>(static_cast<const T*>(item.keys.data) +
                                                          head * item.keys.head_stride);
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t base = threadIdx.x / kWarp * kWarpKeys; base < count;
       base += kScoreWarps * kWarpKeys) {
    uint64_t at[kKeys];
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {  // past the end the last one again
      const uint32_t key = min(base + k * kVectorsPerWarp + lane / kLanesPerVector, count - 1);
      at[k] = uint64_t{begin + key} * chunks;
    }
    float sums[1][kKeys] = {};
    add_products<T, false>(staged, 1, chunks, keys, keys, at, sums);
    const float score = sum_parts(sums[0]);
    const uint32_t key = base + summed_key<kKeys>() * kVectorsPerWarp + lane / kLanesPerVector;
    if (is_first_of_sum<kKeys>() && key < count) scores[key] = score;
  }
  __syncthreads();
  float* const out = unit.rows.scores + uint64_t{head} * item.count;
  for (uint32_t i = threadIdx.x; i < count; i += kScoreThreads) {
    if (begin + i >= item.first) out[begin + i - item.first] = scores[i];
  }
  if (threadIdx.x >= kWarp) return;
  const float2 stats = warp_stats(scores, count);
  if (lane == 0) unit.rows.stats[uint64_t{head} * unit.rows.tiles + blockIdx.x] = stats;
}

// ---- Launches.

GateSide make_side(const GateWeights& weights, uint32_t head_dim) {
  SPIN_CHECK(weights.width > 0 && weights.width % 16 == 0 && weights.width <= kMostWidth);
  SPIN_CHECK(weights.poolings >= 1 && weights.poolings <= weights.order.size());
  SPIN_CHECK(weights.key != nullptr && weights.query != nullptr);
  SPIN_CHECK(head_dim > 0 && head_dim <= kLargestRopeDim && head_dim % 8 == 0);
  SPIN_CHECK(weights.model_rope.inv_freq.size() == head_dim / 2);
  SPIN_CHECK(weights.gate_rope.inv_freq.empty() ||
             weights.gate_rope.inv_freq.size() == weights.width / 2);
  GateSide side;
  side.epsilon = weights.epsilon;
  side.width = weights.width;
  side.head_dim = head_dim;
  side.turns = !weights.gate_rope.inv_freq.empty();
  side.model = rope_argument(weights.model_rope);
  side.model.factor = 1.0f / weights.model_rope.attention_factor;
  side.gate = rope_argument(weights.gate_rope);
  return side;
}

void launch_queries(std::span<const GateScoreUnit> units,
                    const TensorRef& q,
                    const GateSide& side,
                    uint32_t kv_heads,
                    CudaStream& stream) {
  const auto* const data = static_cast<const float*>(q.data);
  launch_packs(units, [&](const ItemPack<GateScoreUnit>& pack, uint32_t count, size_t /*first*/) {
    uint32_t floats = projection_floats<kQueryRows>(side.inputs, side.width, kQueryThreads);
    if (floats <= kSharedFloats) {
      const dim3 grid(blocks_for(count, kQueryRows), kv_heads);
      gate_queries_kernel<kQueryRows>
          <<<grid, kQueryThreads, floats * sizeof(float), stream.handle()>>>(pack, count, data,
                                                                             q.row_stride, side);
    } else {
      floats = projection_floats<1>(side.inputs, side.width, kQueryThreads);
      gate_queries_kernel<1>
          <<<dim3(count, kv_heads), kQueryThreads, floats * sizeof(float), stream.handle()>>>(
              pack, count, data, q.row_stride, side);
    }
    stream.end("gate_queries");
  });
}

// Requires: units of one type of vectors.
template <typename T>
void launch_scores(std::span<const GateScoreUnit> units,
                   uint32_t width,
                   uint32_t kv_heads,
                   CudaStream& stream) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));
  launch_packs(units, [&](const ItemPack<GateScoreUnit>& pack, uint32_t count, size_t first) {
    uint32_t tiles = 0;
    for (const GateScoreUnit& unit : units.subspan(first, count)) {
      tiles = std::max(tiles, unit.rows.tiles);
    }
    gate_scores_kernel<T>
        <<<dim3(tiles, kv_heads, count), kScoreThreads, width * sizeof(float), stream.handle()>>>(
            pack, width, scale);
    stream.end("gate_scores");
  });
}

}  // namespace

void CudaSparseOps::enqueue_gate_keys(std::span<const GateKeysItem> items,
                                      const GateWeights& weights,
                                      StreamRef stream_ref) {
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || !stream.begin()) return;
  GateSide side = make_side(weights, items.front().tokens.geometry.head_dim);
  side.weights = weights.key;
  side.norm = weights.key_norm;
  side.poolings = weights.poolings;
  std::copy(weights.order.begin(), weights.order.end(), side.order);
  side.inputs = side.poolings * side.head_dim;
  const uint32_t floats = projection_floats<kKeyRows>(side.inputs, side.width, kKeyThreads);
  SPIN_CHECK(floats <= kSharedFloats);
  for (const GateKeysItem& item : items) {
    SPIN_CHECK(item.tokens.geometry.head_dim == side.head_dim);
    SPIN_CHECK(item.block_tokens > 0 && item.out.width == side.width);
    SPIN_CHECK((uint64_t{item.first} + item.count) * item.block_tokens <= item.tokens.tokens);
    SPIN_CHECK(item.position_offset < item.block_tokens && item.tokens.tokens <= UINT32_MAX);
  }
  launch_packs(items, [&](const ItemPack<GateKeysItem>& pack, uint32_t count, size_t first) {
    uint32_t blocks = 0;
    uint32_t heads = 0;
    for (const GateKeysItem& item : items.subspan(first, count)) {
      blocks = std::max(blocks, blocks_for(item.count, kKeyRows));
      heads = std::max(heads, item.tokens.geometry.kv_heads);
    }
    if (blocks == 0 || heads == 0) return;
    gate_keys_kernel<<<dim3(blocks, heads, count), kKeyThreads, floats * sizeof(float),
                       stream.handle()>>>(pack, side);
    stream.end("gate_keys");
  });
}

void CudaSparseOps::enqueue_gate_scores(TensorRef q,
                                        std::span<const GateScoreItem> items,
                                        const GateWeights& weights,
                                        const KvGeometry& geometry,
                                        StreamRef stream_ref) {
  check_queries(q, geometry);
  GateSide side = make_side(weights, geometry.head_dim);
  side.weights = weights.query;
  side.norm = weights.query_norm;
  side.inputs = group_of(q, geometry) * side.head_dim;
  SPIN_CHECK(projection_floats<1>(side.inputs, side.width, kQueryThreads) <= kSharedFloats);
  uint64_t bytes = 0;
  std::vector<GateScoreUnit> units;
  const uint64_t query_bytes =
      scratch_part(uint64_t{geometry.kv_heads} * side.width * sizeof(float));
  for (const GateScoreItem& item : items) {
    SPIN_CHECK(item.row < static_cast<uint64_t>(q.rows) && item.count <= item.score_stride);
    check_chunks(item.keys, side.width);
    if (item.count == 0) continue;
    GateScoreUnit unit{item};
    unit.rows.count = item.count;
    unit.rows.tiles = blocks_for(uint64_t{item.first} + item.count, kTileVectors);
    unit.rows.out = item.scores;
    unit.rows.out_stride = item.score_stride;
    bytes += query_bytes + score_rows_bytes(unit.rows, geometry.kv_heads);
    units.push_back(unit);
  }
  CudaStream& stream = cuda_stream(stream_ref);
  if (units.empty() || !stream.begin()) return;
  auto* scratch = static_cast<std::byte*>(stream.scratch(bytes));
  if (scratch == nullptr) return;
  std::vector<ScoreRows> rows;
  for (GateScoreUnit& unit : units) {
    unit.query = reinterpret_cast<float*>(scratch);
    place_score_rows(unit.rows, geometry.kv_heads, scratch + query_bytes);
    scratch += query_bytes + score_rows_bytes(unit.rows, geometry.kv_heads);
    rows.push_back(unit.rows);
  }
  launch_queries(units, q, side, geometry.kv_heads, stream);
  const auto same = [](const GateScoreUnit& a, const GateScoreUnit& b) {
    return a.item.keys.dtype == b.item.keys.dtype;
  };
  for_runs(std::span<const GateScoreUnit>(units), same, [&](std::span<const GateScoreUnit> run) {
    if (run.front().item.keys.dtype == DType::kF32) {
      launch_scores<float>(run, side.width, geometry.kv_heads, stream);
    } else {
      launch_scores<__nv_bfloat16>(run, side.width, geometry.kv_heads, stream);
    }
  });
  launch_finish_scores(rows, geometry.kv_heads, 1, Aggregation::kSoftmaxMax, stream);
}

}  // namespace spin::backend::cuda
