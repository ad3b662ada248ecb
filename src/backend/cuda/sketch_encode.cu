// SPDX-License-Identifier: Apache-2.0
// Makes sketches: means, rotation, codes, scales. A token's sketch depends on its row and its mean
// alone, a mean on the order of its tokens alone, so that it makes no difference in how many pieces
// an index is built.
#include <algorithm>
#include <bit>
#include <utility>

#include "backend/cuda/cuda_sparse_ops.h"
#include "backend/cuda/sketch_support.cuh"
#include "base/check.h"

namespace spin::backend::cuda {
namespace {

using layout::DType;
using layout::KvGeometry;
using layout::PagedTokens;

// Token numbers have 32 bits, because their division is on every path.
const __device__ std::byte* row_of(const PagedTokens& tokens,
                                   Plane plane,
                                   uint32_t head,
                                   uint32_t token) {
  const KvGeometry& geometry = tokens.geometry;
  const uint32_t page = token / geometry.page_tokens;
  const uint32_t row = token - page * geometry.page_tokens;
  return tokens.base + tokens.slots[head * tokens.slot_stride + page] * geometry.page_bytes() +
         row * geometry.row_bytes() + (plane == Plane::kValues ? geometry.plane_bytes() : 0);
}

void check_rows(const PagedTokens& tokens, uint64_t first, uint64_t count) {
  SPIN_CHECK(first + count <= tokens.tokens && tokens.tokens <= UINT32_MAX);
  SPIN_CHECK(tokens.geometry.head_dim > 0 && tokens.geometry.head_dim % kPieceDims == 0);
  SPIN_CHECK(reinterpret_cast<uintptr_t>(tokens.base) % 16 == 0);
}

// ---- Means.

constexpr uint32_t kMeanTokens = 64;  // staged at a time
constexpr uint32_t kMeanDims = 128;   // of a block, a thread each

// One chain of additions per dimension, in the order of the tokens. Grid (slices of the dimensions,
// KV heads, items). Bytes: the rows once. The chain's latency binds, not the bytes: rows are staged
// in shared memory so that many are on their way at once.
__global__ void __launch_bounds__(kMeanDims)
    sketch_mean_kernel(const __grid_constant__ ItemPack<SketchMeanItem> items) {
  const __shared__ std::byte* rows[kMeanTokens];
  __shared__ float4 staged[kMeanTokens][kMeanDims / 4];
  const SketchMeanItem& item = items[blockIdx.z];
  const KvGeometry& geometry = item.tokens.geometry;
  const uint32_t head = blockIdx.y;
  const uint32_t first_dim = blockIdx.x * kMeanDims;
  if (head >= geometry.kv_heads || first_dim >= geometry.head_dim) return;
  const uint32_t dims = min(kMeanDims, geometry.head_dim - first_dim);
  const uint32_t pieces = dims / kPieceDims;
  const uint32_t dim = min(threadIdx.x, dims - 1);  // threads past the end repeat the last one
  float* const mean = item.mean + uint64_t{head} * geometry.head_dim + first_dim + dim;
  float sum = item.begin ? 0.0f : *mean;
  for (uint64_t done = 0; done < item.count; done += kMeanTokens) {
    const auto count = static_cast<uint32_t>(min(uint64_t{kMeanTokens}, item.count - done));
    if (threadIdx.x < count) {
      const auto token = static_cast<uint32_t>(item.first + done) + threadIdx.x;
      rows[threadIdx.x] = row_of(item.tokens, item.plane, head, token);
    }
    __syncthreads();
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < count * pieces; i += kMeanDims) {
      const uint32_t t = i / pieces;
      const uint32_t piece = i - t * pieces;
      float x[kPieceDims];
      load_piece(rows[t], geometry.dtype, first_dim / kPieceDims + piece, x);
      staged[t][2 * piece] = make_float4(x[0], x[1], x[2], x[3]);
      staged[t][2 * piece + 1] = make_float4(x[4], x[5], x[6], x[7]);
    }
    __syncthreads();
    const float* column = reinterpret_cast<const float*>(staged) + dim;
#pragma unroll 8
    for (uint32_t t = 0; t < count; ++t) sum += column[t * kMeanDims];
  }
  if (item.factor != 0.0f) sum *= item.factor;
  if (threadIdx.x < dims) *mean = sum;
}

// ---- Codes and scales.

// Boundary between levels kCode and kCode + 1, in units of the rms.
template <int kBits, int kCode>
inline constexpr float kBoundary =
    0.5f * sketch_levels(kBits).unit* static_cast<float>(sketch_level(kBits, kCode) +
                                                         sketch_level(kBits, kCode + 1));

template <int kBits, int kCode>
inline constexpr auto kLevel = static_cast<float>(sketch_level(kBits, kCode));

// The nearest level of u and its code.
template <int kBits, int... kCodes>
__device__ void nearest_level(float u,
                              std::integer_sequence<int, kCodes...> /*below the highest*/,
                              uint32_t& code,
                              float& level) {
  code = 0;
  level = kLevel<kBits, 0>;
  const auto pass = [&](float boundary, uint32_t next, float next_level) {
    if (u >= boundary) {
      code = next;
      level = next_level;
    }
  };
  (pass(kBoundary<kBits, kCodes>, kCodes + 1, kLevel<kBits, kCodes + 1>), ...);
}

// What a lane finds of its token's sketch.
template <int kPieces>
struct Encoded {
  uint32_t codes[kPieces];  // of 8 dimensions
  float scale;
};

// Sketch of y, rotated and without its mean. Sums run over the lanes of a group in a fixed tree.
template <int kBits, int kPieces>
__device__ Encoded<kPieces> encode(uint32_t head_dim,
                                   uint32_t lane,
                                   uint32_t lanes,
                                   const float (&y)[kPieces][kPieceDims]) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
#pragma unroll
    for (uint32_t i = 0; i < kPieceDims; ++i) squares = fmaf(y[j][i], y[j][i], squares);
  }
  const float rms = sqrtf(group_sum(squares, lanes) / static_cast<float>(head_dim));
  const bool usable = rms > 0.0f && isfinite(rms);
  const float inverse = usable ? 1.0f / rms : 0.0f;
  Encoded<kPieces> out;
  float product = 0.0f;
  float norm = 0.0f;  // exact: a sum of integers below 2^24
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    out.codes[j] = 0;
    if (j * lanes + lane >= head_dim / kPieceDims) continue;
#pragma unroll
    for (uint32_t i = 0; i < kPieceDims; ++i) {
      const float u = usable ? y[j][i] * inverse : 0.0f;
      uint32_t code;
      float level;
      nearest_level<kBits>(u, std::make_integer_sequence<int, (1 << kBits) - 1>{}, code, level);
      out.codes[j] |= code << (i * kBits);
      product = fmaf(u, level, product);
      norm = fmaf(level, level, norm);
    }
  }
  product = group_sum(product, lanes);
  norm = group_sum(norm, lanes);
  constexpr float kLargestScale = 65504.0f;  // of fp16
  out.scale = usable ? fminf(rms * (product / norm), kLargestScale) : 0.0f;
  return out;
}

// A block of 16 tokens at its place in the output; a group of `lanes` lanes per token. Grid
// (blocks of tokens, KV heads, items); shared: the block's codes, u32 [words, 16]. A block whose
// first token is among those wanted is written as a whole, zeros behind the last one; no other
// thread block writes to it. Bytes: rows read once, sketches written once; means come from the
// cache. Requires: lanes >= 4, as many as hold one piece each or a warp.
template <int kBits, int kPieces>
__global__ void __launch_bounds__(kSketchBlockTokens* kWarp)
    encode_sketch_kernel(const __grid_constant__ ItemPack<EncodeSketchItem> items, uint32_t lanes) {
  extern __shared__ uint32_t codes[];
  __shared__ __half scales[kSketchBlockTokens];
  const EncodeSketchItem& item = items[blockIdx.z];
  const KvGeometry& geometry = item.tokens.geometry;
  const uint32_t head = blockIdx.y;
  const uint64_t begin = (item.out_first / kSketchBlockTokens + blockIdx.x) * kSketchBlockTokens;
  const uint64_t end = item.out_first + item.count;
  if (head >= geometry.kv_heads || begin >= end) return;
  const uint32_t head_dim = geometry.head_dim;
  const uint32_t pieces = head_dim / kPieceDims;
  const uint32_t words = sketch_words(head_dim, kBits);
  const uint32_t lane = threadIdx.x % lanes;
  const uint32_t column = threadIdx.x / lanes;  // the token's place in the block
  const uint64_t token = begin + column;
  const bool wanted = token >= item.out_first && token < end;

  float y[kPieces][kPieceDims] = {};
  if (wanted) {
    const auto from = static_cast<uint32_t>(item.first + (token - item.out_first));
    const std::byte* row = row_of(item.tokens, item.plane, head, from);
    const float* mean =
        sketch_mean(item.out, geometry.kv_heads, head_dim, head, token >= item.out.split);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const uint32_t piece = j * lanes + lane;
      if (piece >= pieces) continue;
      float mu[kPieceDims];
      load_piece(row, geometry.dtype, piece, y[j]);
      load_piece(mean, DType::kF32, piece, mu);
#pragma unroll
      for (uint32_t i = 0; i < kPieceDims; ++i) y[j][i] -= mu[i];
    }
  }
  rotate_pieces(pieces, lane, lanes, y);
  const Encoded<kPieces> mine = encode<kBits>(head_dim, lane, lanes, y);
  constexpr uint32_t kWordPieces = 4 / kBits;
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const uint32_t piece = j * lanes + lane;
    uint32_t word = wanted ? mine.codes[j] << (piece % kWordPieces * kPieceDims * kBits) : 0;
#pragma unroll
    for (uint32_t step = 1; step < kWordPieces; step *= 2) {
      word |= __shfl_xor_sync(kFullMask, word, step);
    }
    if (piece < pieces && piece % kWordPieces == 0) {
      codes[piece / kWordPieces * kSketchBlockTokens + column] = word;
    }
  }
  if (lane == 0) scales[column] = __float2half_rn(wanted ? mine.scale : 0.0f);
  __syncthreads();

  const bool whole = begin >= item.out_first;
  const auto written = [&](uint32_t i) {
    const uint64_t t = begin + i % kSketchBlockTokens;
    return whole || (t >= item.out_first && t < end);
  };
  const uint64_t at = head * item.out.capacity + begin;
  for (uint32_t i = threadIdx.x; i < words * kSketchBlockTokens; i += blockDim.x) {
    if (written(i)) item.out.codes[at * words + i] = codes[i];
  }
  if (threadIdx.x < kSketchBlockTokens && written(threadIdx.x)) {
    item.out.scales[at + threadIdx.x].bits = __half_as_ushort(scales[threadIdx.x]);
  }
}

uint64_t sketch_blocks(const EncodeSketchItem& item) {
  if (item.count == 0) return 0;
  return (item.out_first + item.count - 1) / kSketchBlockTokens -
         item.out_first / kSketchBlockTokens + 1;
}

// Requires: items of one head size and number of bits.
template <int kBits, int kPieces>
void launch_encode(std::span<const EncodeSketchItem> items, CudaStream& stream) {
  const uint32_t head_dim = items.front().tokens.geometry.head_dim;
  const uint32_t lanes = std::clamp(std::bit_ceil(head_dim / kPieceDims), 4u, kWarp);
  const size_t shared = sketch_words(head_dim, kBits) * kSketchBlockTokens * sizeof(uint32_t);
  launch_packs(items, [&](const ItemPack<EncodeSketchItem>& pack, uint32_t count, size_t first) {
    uint64_t blocks = 0;
    uint32_t heads = 0;
    for (const EncodeSketchItem& item : items.subspan(first, count)) {
      blocks = std::max(blocks, sketch_blocks(item));
      heads = std::max(heads, item.tokens.geometry.kv_heads);
    }
    if (blocks == 0) return;
    const dim3 grid(static_cast<unsigned>(blocks), heads, count);
    encode_sketch_kernel<kBits, kPieces>
        <<<grid, kSketchBlockTokens * lanes, shared, stream.handle()>>>(pack, lanes);
    stream.end("encode_sketch");
  });
}

}  // namespace

void CudaSparseOps::enqueue_sketch_mean(std::span<const SketchMeanItem> items,
                                        StreamRef stream_ref) {
  for (const SketchMeanItem& item : items) check_rows(item.tokens, item.first, item.count);
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || !stream.begin()) return;
  launch_packs(items, [&](const ItemPack<SketchMeanItem>& pack, uint32_t count, size_t first) {
    uint32_t slices = 0;
    uint32_t heads = 0;
    for (const SketchMeanItem& item : items.subspan(first, count)) {
      slices = std::max(slices, blocks_for(item.tokens.geometry.head_dim, kMeanDims));
      heads = std::max(heads, item.tokens.geometry.kv_heads);
    }
    if (heads == 0) return;
    sketch_mean_kernel<<<dim3(slices, heads, count), kMeanDims, 0, stream.handle()>>>(pack);
    stream.end("sketch_mean");
  });
}

void CudaSparseOps::enqueue_encode_sketch(std::span<const EncodeSketchItem> items,
                                          StreamRef stream_ref) {
  for (const EncodeSketchItem& item : items) {
    check_rows(item.tokens, item.first, item.count);
    check_sketches(item.out, item.out_first + item.count, item.tokens.geometry.head_dim);
  }
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || !stream.begin()) return;
  const auto same = [](const EncodeSketchItem& a, const EncodeSketchItem& b) {
    return a.tokens.geometry.head_dim == b.tokens.geometry.head_dim && a.out.bits == b.out.bits;
  };
  for_runs(items, same, [&](std::span<const EncodeSketchItem> run) {
    with_bits(run.front().out.bits, [&](auto bits) {
      with_pieces(run.front().tokens.geometry.head_dim, [&](auto pieces) {
        launch_encode<decltype(bits)::value, decltype(pieces)::value>(run, stream);
      });
    });
  });
}

}  // namespace spin::backend::cuda
