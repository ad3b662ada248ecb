// SPDX-License-Identifier: Apache-2.0
// Low-rank factors of keys: a randomised range finder over the Gram matrix of the keys.
//
//   per chunk of tokens      turn_back: A, the chunk's keys without RoPE, in scratch (it stays in
//                            the second cache); gram: A^T A, added to one of a few partial sums
//   trace, finish_gram       G = A^T A / its trace, so that powers neither overflow nor vanish
//   start                    W
//   `power` times            image: Y = G Q (W at first); orthonormalize: Q of Y (below)
//   per chunk                turn_back; tokens: A Q
//   heads                    Q^T
//
// Sums are cut by the item's sizes alone. Model: 2 n^2 tokens operations for G (half of it is its
// mirror), 2 n rank tokens for A Q, n = kv_heads * head_dim: arithmetic binds at 32K tokens and
// more, the launches of orthonormalize below. Keys are read twice, token factors written once.
//
// Orthonormal columns. Y is orthonormalised in double by block Gram-Schmidt: panels of 16 columns
// are made orthogonal to all columns before them (two small products), then to each other by
// modified Gram-Schmidt. What is left of a column y when those before it have been taken off, r,
// carries errors of c u |y|, u = 2^-53, c a small power of n; so
//   - q = r / |r| is orthogonal to the columns before it to c u |y| / |r|: below 1e-4, because
//     columns with |r| <= 1e-10 |y| become zero. The float sums that y comes from are wrong by
//     more, so such a column holds nothing, and A Q Q^T is the same without it;
//   - a second pass over the panel, which begins with |r| / |y| near 1, leaves c u.
// Either way Y is represented to c u |y|, which is all that a power but the last needs; the last
// one makes both passes, panel by panel, so that all columns before a panel are orthonormal.
#include <algorithm>

#include "backend/cuda/cuda_sparse_ops.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/cuda_stream.h"
#include "backend/cuda/kernel_support.cuh"
#include "backend/cuda/lowrank_support.cuh"
#include "backend/cuda/scratch_parts.h"
#include "backend/cuda/tile_product.cuh"

namespace spin::backend::cuda {
namespace {

constexpr uint64_t kChunkTokens = 4096;  // of 1024 columns they are 16 MiB
constexpr unsigned kThreads = 256;
constexpr unsigned kWarps = kThreads / kWarp;

// Products of keys; the second is for matrices of some hundred rows.
using KeyTile = ProductTile<2, 1>;
using ImageTile = ProductTile<1, 1>;

// Blocks that keep a GPU busy with KeyTiles.
constexpr uint32_t kBusyBlocks = 264;
constexpr uint32_t kMostGramParts = 16;
constexpr unsigned kMirror = 32;  // side of a tile of finish_gram

constexpr uint32_t kPanel = 16;  // columns that are orthonormalised together
constexpr unsigned kPanelThreads = kPanel * kWarp;
constexpr uint32_t kDotColumns = 8;
constexpr uint32_t kSubtractColumns = 4;
constexpr double kLeastRemainder = 1e-10;

constexpr uint64_t kStartSeed = 0x5350494E;  // of the fixed start matrix

// Arrays in scratch and sizes.
struct Factoring {
  uint32_t columns = 0;  // n
  uint32_t rank = 0;
  uint32_t rank_width = 0;  // rank rounded up to 4; Q is zero there
  uint32_t gram_parts = 0;
  float* keys = nullptr;    // [chunk tokens, columns] A
  float* parts = nullptr;   // [gram_parts, columns, columns] sums, upper triangle
  float* gram = nullptr;    // [columns, columns] G
  float* scale = nullptr;   // [1]
  float* basis = nullptr;   // [columns, rank_width] Q as floats
  double* y = nullptr;      // [rank, columns] Y, then Q
  double* norms = nullptr;  // [rank] |y|
  double* dots = nullptr;   // [rank, kPanel]
};

__device__ double warp_sum_double(double x) {
#pragma unroll
  for (unsigned step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullMask, x, step);
  return x;
}

// ---- Keys and their Gram matrix.

// A block per token: its keys of all heads turned back. RoPE multiplies by f (cos a, sin a), its
// inverse by (cos a, -sin a) / f.
// Bytes: the keys read, 4 per element written.
__global__ void __launch_bounds__(kThreads)
    turn_back_kernel(const __grid_constant__ layout::PagedTokens tokens,
                     const __grid_constant__ RopeArgument rope,
                     uint64_t first,
                     float* keys) {
  __shared__ Rotation rotations[kLargestRopeDim / 2];
  const layout::KvGeometry& geometry = tokens.geometry;
  const uint32_t half = geometry.head_dim / 2;
  const uint64_t token = first + blockIdx.x;
  for (uint32_t i = threadIdx.x; i < half; i += kThreads) {
    const Rotation there =
        rotation_of(static_cast<uint32_t>(token), rope.inv_freq[i], 1.0f / rope.factor);
    rotations[i] = {there.cos, -there.sin};
  }
  __syncthreads();
  float* row = keys + uint64_t{blockIdx.x} * geometry.kv_heads * geometry.head_dim;
  for (uint32_t pair = threadIdx.x; pair < geometry.kv_heads * half; pair += kThreads) {
    const uint32_t head = pair / half;
    const uint32_t i = pair % half;
    const std::byte* key = tokens.key(head, token);
    const float2 turned = rotated(load_element(key, geometry.dtype, i),
                                  load_element(key, geometry.dtype, half + i), rotations[i]);
    row[head * geometry.head_dim + i] = turned.x;
    row[head * geometry.head_dim + half + i] = turned.y;
  }
}

__host__ __device__ constexpr bool is_upper_tile(uint32_t row_tile, uint32_t col_tile) {
  return (col_tile + 1) * KeyTile::kCols > row_tile * KeyTile::kRows;
}

// A block per (64 columns, 128 rows, part of the chunk's tokens), of tiles that reach above the
// diagonal: part += A^T A over its tokens.
// Bytes: the chunk from the second cache once per tile row and column; 2 n^2 / 2 operations per
// token bind.
__global__ void __launch_bounds__(kThreads, 2)
    gram_kernel(const __grid_constant__ Factoring f, uint32_t tokens) {
  __shared__ KeyTile::Buffers buffers;
  if (!is_upper_tile(blockIdx.y, blockIdx.x)) return;
  const uint32_t per_part = (tokens - 1) / f.gram_parts + 1;
  const uint32_t first = min(tokens, blockIdx.z * per_part);
  const uint32_t depth = min(per_part, tokens - first);
  const uint32_t row = blockIdx.y * KeyTile::kRows;
  const uint32_t col = blockIdx.x * KeyTile::kCols;
  const float* keys = f.keys + uint64_t{first} * f.columns;
  const AcrossDepth a = {keys + row, f.columns, depth, f.columns - row};
  const AcrossDepth b = {keys + col, f.columns, depth, f.columns - col};
  KeyTile tile;
  tile.clear();
  tile.accumulate(buffers, (depth + kProductDepth - 1) / kProductDepth, a, b);
  const uint32_t c = col + KeyTile::col(0);
  if (c >= f.columns) return;
  float* part = f.parts + uint64_t{blockIdx.z} * f.columns * f.columns;
#pragma unroll
  for (int i = 0; i < KeyTile::kOwnRows; ++i) {
    const uint32_t r = row + KeyTile::row(i);
    if (r >= f.columns) continue;
    auto* to = reinterpret_cast<float4*>(part + uint64_t{r} * f.columns + c);
    const float4 before = *to;
    *to = make_float4(before.x + tile.sums[i][0], before.y + tile.sums[i][1],
                      before.z + tile.sums[i][2], before.w + tile.sums[i][3]);
  }
}

// One block: scale = 1 / trace.
__global__ void __launch_bounds__(kThreads) trace_kernel(const __grid_constant__ Factoring f) {
  __shared__ double sums[kWarps];
  const uint64_t size = uint64_t{f.columns} * f.columns;
  double sum = 0;
  for (uint32_t part = 0; part < f.gram_parts; ++part) {
    for (uint32_t i = threadIdx.x; i < f.columns; i += kThreads) {
      sum += f.parts[part * size + uint64_t{i} * f.columns + i];
    }
  }
  sum = warp_sum_double(sum);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double trace = 0;
  for (const double warp : sums) trace += warp;
  *f.scale = trace > 0 ? static_cast<float>(1 / trace) : 1.0f;
}

// A block of 32 x 8 threads per tile of 32 x 32 of the upper triangle: adds the parts in their
// order, scales, and writes the tile and its mirror.
// Bytes: 4 n^2 (parts / 2 + 1).
__global__ void __launch_bounds__(kThreads)
    finish_gram_kernel(const __grid_constant__ Factoring f) {
  __shared__ float tile[kMirror][kMirror + 1];
  if (blockIdx.x < blockIdx.y) return;
  const uint64_t size = uint64_t{f.columns} * f.columns;
  const float scale = *f.scale;
  const uint32_t row = blockIdx.y * kMirror;
  const uint32_t col = blockIdx.x * kMirror;
  for (uint32_t r = threadIdx.y; r < kMirror; r += kThreads / kMirror) {
    const uint32_t c = threadIdx.x;
    float sum = 0.0f;
    if (row + r < f.columns && col + c < f.columns) {
      const uint64_t at = uint64_t{row + r} * f.columns + col + c;
      for (uint32_t part = 0; part < f.gram_parts; ++part) sum += f.parts[part * size + at];
    }
    tile[r][c] = sum * scale;
  }
  __syncthreads();
  const bool diagonal = row == col;
  for (uint32_t r = threadIdx.y; r < kMirror; r += kThreads / kMirror) {
    const uint32_t c = threadIdx.x;
    if (row + r < f.columns && col + c < f.columns && (!diagonal || c >= r)) {
      f.gram[uint64_t{row + r} * f.columns + col + c] = tile[r][c];
    }
    // The same threads go along the mirror's rows.
    if (col + r < f.columns && row + c < f.columns && (!diagonal || c < r)) {
      f.gram[uint64_t{col + r} * f.columns + row + c] = tile[c][r];
    }
  }
}

// ---- The basis.

// Uniform in [0, 1) with 53 bits: base::counter_uniform() (base/counter_rng.h) of stream 0, Philox
// 4x32 with 10 rounds.
__device__ double counter_uniform(uint64_t seed, uint64_t position) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0,
                         0};
  auto key0 = static_cast<uint32_t>(seed);
  auto key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter[0] = static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0;
    counter[1] = static_cast<uint32_t>(product1);
    counter[2] = static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1;
    counter[3] = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const uint64_t wide = uint64_t{counter[0]} << 32 | counter[1];
  return static_cast<double>(wide >> 11) * 0x1.0p-53;
}

// A thread per element of the basis: W, and zeros behind the rank.
__global__ void __launch_bounds__(kThreads) start_kernel(const __grid_constant__ Factoring f) {
  const uint64_t at = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= uint64_t{f.columns} * f.rank_width) return;
  const uint64_t row = at / f.rank_width;
  const uint64_t i = at % f.rank_width;
  f.basis[at] =
      i < f.rank ? static_cast<float>(2 * counter_uniform(kStartSeed, row * f.rank + i) - 1) : 0.0f;
}

// A block per (64 ranks, 64 columns of the keys): Y = G Q, transposed. G is its own transpose.
// Bytes: G and Q once per 64 of the others, through the second cache; 8 n rank written.
__global__ void __launch_bounds__(kThreads, 2) image_kernel(const __grid_constant__ Factoring f) {
  __shared__ ImageTile::Buffers buffers;
  const uint32_t row = blockIdx.y * ImageTile::kRows;
  const uint32_t col = blockIdx.x * ImageTile::kCols;
  const AcrossDepth a = {f.gram + row, f.columns, f.columns, f.columns - row};
  const AcrossDepth b = {f.basis + col, f.rank_width, f.columns, f.rank_width - col};
  ImageTile tile;
  tile.clear();
  tile.accumulate(buffers, (f.columns + kProductDepth - 1) / kProductDepth, a, b);
#pragma unroll
  for (int j = 0; j < ImageTile::kOwnCols; ++j) {
    const uint32_t i = col + ImageTile::col(j);
    if (i >= f.rank) continue;
#pragma unroll
    for (int r = 0; r < ImageTile::kOwnRows; ++r) {
      const uint32_t c = row + ImageTile::row(r);
      if (c < f.columns) f.y[uint64_t{i} * f.columns + c] = tile.sums[r][j];
    }
  }
}

// A thread per (column of the keys, rank): Q as floats.
__global__ void __launch_bounds__(kThreads) basis_kernel(const __grid_constant__ Factoring f) {
  const uint32_t c = blockIdx.x * kThreads + threadIdx.x;
  if (c >= f.columns) return;
  const uint64_t i = blockIdx.y;
  f.basis[uint64_t{c} * f.rank_width + i] = static_cast<float>(f.y[i * f.columns + c]);
}

// ---- Orthonormal columns. A column of Y is a row of y.

// A warp per column: its length.
__global__ void __launch_bounds__(kThreads) norms_kernel(const __grid_constant__ Factoring f) {
  const uint32_t i = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (i >= f.rank) return;
  const double* y = f.y + uint64_t{i} * f.columns;
  double sum = 0;
  for (uint32_t c = threadIdx.x % kWarp; c < f.columns; c += kWarp) sum += y[c] * y[c];
  sum = warp_sum_double(sum);
  if (threadIdx.x % kWarp == 0) f.norms[i] = sqrt(sum);
}

// A warp per (column before the panel, 8 columns of the panel): their products.
// Bytes: the columns before and, per 8 of them, the panel, from the second cache.
__global__ void __launch_bounds__(kThreads)
    dots_kernel(const __grid_constant__ Factoring f, uint32_t before, uint32_t count) {
  const uint32_t i = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (i >= before) return;
  const uint32_t first = blockIdx.y * kDotColumns;
  const double* q = f.y + uint64_t{i} * f.columns;
  const double* panel[kDotColumns];
#pragma unroll
  for (uint32_t j = 0; j < kDotColumns; ++j) {
    // Those behind the last are computed as it is, and not used.
    panel[j] = f.y + uint64_t{before + min(first + j, count - 1)} * f.columns;
  }
  double sums[kDotColumns] = {};
#pragma unroll 2
  for (uint32_t c = threadIdx.x % kWarp; c < f.columns; c += kWarp) {
    const double x = q[c];
#pragma unroll
    for (uint32_t j = 0; j < kDotColumns; ++j) sums[j] += x * panel[j][c];
  }
#pragma unroll
  for (uint32_t j = 0; j < kDotColumns; ++j) {
    const double sum = warp_sum_double(sums[j]);
    if (threadIdx.x % kWarp == 0) f.dots[uint64_t{i} * kPanel + first + j] = sum;
  }
}

// A block of 32 x 8 threads per (32 elements, 4 columns of the panel): takes off what the columns
// before explain. Each row of threads sums over every eighth column, their sums are added in order.
// Bytes: the columns before once per 4 of the panel, from the second cache.
__global__ void __launch_bounds__(kThreads)
    subtract_kernel(const __grid_constant__ Factoring f, uint32_t before, uint32_t count) {
  __shared__ double parts[kWarps][kSubtractColumns][kWarp];
  const uint32_t c = blockIdx.x * kWarp + threadIdx.x;
  const uint32_t first = blockIdx.y * kSubtractColumns;
  double sums[kSubtractColumns] = {};
  if (c < f.columns) {
#pragma unroll 4
    for (uint32_t i = threadIdx.y; i < before; i += kWarps) {
      const double q = f.y[uint64_t{i} * f.columns + c];
#pragma unroll
      for (uint32_t j = 0; j < kSubtractColumns; ++j) {
        sums[j] += q * f.dots[uint64_t{i} * kPanel + first + j];
      }
    }
  }
#pragma unroll
  for (uint32_t j = 0; j < kSubtractColumns; ++j) parts[threadIdx.y][j][threadIdx.x] = sums[j];
  __syncthreads();
  const uint32_t j = threadIdx.y;
  if (j >= kSubtractColumns || first + j >= count || c >= f.columns) return;
  double sum = 0;
  for (uint32_t part = 0; part < kWarps; ++part) sum += parts[part][j][threadIdx.x];
  f.y[uint64_t{before + first + j} * f.columns + c] -= sum;
}

__device__ double dot_by_warp(const double* a, const double* b, uint32_t size) {
  double sum = 0;
#pragma unroll 4
  for (uint32_t c = threadIdx.x % kWarp; c < size; c += kWarp) sum += a[c] * b[c];
  return warp_sum_double(sum);
}

// One block, a warp per column of the panel: modified Gram-Schmidt. Columns of which at most
// `least` of their length is left become zero.
// Bytes: some 16 n per column and later one of the panel, from the first cache.
__global__ void __launch_bounds__(kPanelThreads) panel_kernel(const __grid_constant__ Factoring f,
                                                              uint32_t before,
                                                              uint32_t count,
                                                              double least) {
  double* panel = f.y + uint64_t{before} * f.columns;
  const uint32_t mine = threadIdx.x / kWarp;
  const uint32_t lane = threadIdx.x % kWarp;
  double* own = panel + uint64_t{mine} * f.columns;
  for (uint32_t k = 0; k < count; ++k) {
    const double* column = panel + uint64_t{k} * f.columns;
    if (mine == k) {
      const double norm = sqrt(dot_by_warp(own, own, f.columns));
      const double by = norm <= least * f.norms[before + k] ? 0.0 : 1 / norm;
#pragma unroll 4
      for (uint32_t c = lane; c < f.columns; c += kWarp) own[c] *= by;
    }
    __syncthreads();
    if (mine <= k || mine >= count) continue;
    const double dot = dot_by_warp(column, own, f.columns);
#pragma unroll 4
    for (uint32_t c = lane; c < f.columns; c += kWarp) own[c] -= dot * column[c];
  }
}

// ---- Factors.

// A block per (64 ranks, 128 tokens of the chunk from `first` on): token = A Q.
// Bytes: the chunk once per 64 ranks from the second cache, factors written once.
__global__ void __launch_bounds__(kThreads, 2)
    tokens_kernel(const __grid_constant__ Factoring f,
                  const __grid_constant__ KeyFactors factors,
                  uint64_t first,
                  uint32_t tokens) {
  __shared__ KeyTile::Buffers buffers;
  const uint32_t row = blockIdx.y * KeyTile::kRows;
  const uint32_t col = blockIdx.x * KeyTile::kCols;
  const AlongDepth a = {f.keys + uint64_t{row} * f.columns, f.columns, f.columns, tokens - row};
  const AcrossDepth b = {f.basis + col, f.rank_width, f.columns, f.rank_width - col};
  KeyTile tile;
  tile.clear();
  tile.accumulate(buffers, (f.columns + kProductDepth - 1) / kProductDepth, a, b);
#pragma unroll
  for (int r = 0; r < KeyTile::kOwnRows; ++r) {
    const uint32_t t = row + KeyTile::row(r);
    if (t >= tokens) continue;
#pragma unroll
    for (int j = 0; j < KeyTile::kOwnCols; ++j) {
      const uint32_t i = col + KeyTile::col(j);
      if (i >= f.rank) continue;
      store_element(factors.token, factors.dtype, (first + t) * f.rank + i, tile.sums[r][j]);
    }
  }
}

// A thread per (column of the keys, rank): head = Q^T.
__global__ void __launch_bounds__(kThreads) heads_kernel(const __grid_constant__ Factoring f,
                                                         const __grid_constant__ KeyFactors factors,
                                                         uint32_t head_dim) {
  const uint32_t c = blockIdx.x * kThreads + threadIdx.x;
  if (c >= f.columns) return;
  const uint64_t i = blockIdx.y;
  const uint64_t at = (uint64_t{c / head_dim} * f.rank + i) * head_dim + c % head_dim;
  store_element(factors.head, factors.dtype, at, static_cast<float>(f.y[i * f.columns + c]));
}

// ---- The operation.

// Parts of the sum over tokens: so many that they and the tiles make a GPU busy.
uint32_t gram_parts(uint32_t columns) {
  uint32_t tiles = 0;
  for (uint32_t row = 0; row < blocks_for(columns, KeyTile::kRows); ++row) {
    for (uint32_t col = 0; col < blocks_for(columns, KeyTile::kCols); ++col) {
      tiles += is_upper_tile(row, col) ? 1 : 0;
    }
  }
  return std::clamp(kBusyBlocks / tiles, 1u, kMostGramParts);
}

class FactorLaunch {
 public:
  FactorLaunch(const FactorKeysItem& item, const RopeParams& rope, cudaStream_t stream)
      : item_(item), rope_(rope_argument(rope)), stream_(stream) {
    const layout::KvGeometry& g = item.tokens.geometry;
    f_.columns = g.kv_heads * g.head_dim;
    f_.rank = item.factors.rank;
    f_.rank_width = (f_.rank + 3) / 4 * 4;
    f_.gram_parts = gram_parts(f_.columns);
  }

  // Places the arrays from `memory` on; the bytes they take.
  size_t place(void* memory) {
    const uint64_t n = f_.columns;
    ScratchParts parts;
    const size_t keys = parts.add<float>(std::min(item_.tokens.tokens, kChunkTokens) * n);
    const size_t sums = parts.add<float>(part_floats());
    const size_t gram = parts.add<float>(n * n);
    const size_t scale = parts.add<float>(1);
    const size_t basis = parts.add<float>(n * f_.rank_width);
    const size_t y = parts.add<double>(n * f_.rank);
    const size_t norms = parts.add<double>(f_.rank);
    const size_t dots = parts.add<double>(uint64_t{f_.rank} * kPanel);
    if (memory != nullptr) {
      f_.keys = ScratchParts::at<float>(memory, keys);
      f_.parts = ScratchParts::at<float>(memory, sums);
      f_.gram = ScratchParts::at<float>(memory, gram);
      f_.scale = ScratchParts::at<float>(memory, scale);
      f_.basis = ScratchParts::at<float>(memory, basis);
      f_.y = ScratchParts::at<double>(memory, y);
      f_.norms = ScratchParts::at<double>(memory, norms);
      f_.dots = ScratchParts::at<double>(memory, dots);
    }
    return parts.bytes();
  }

  // Requires: place() with memory.
  cudaError_t launch() const {
    const cudaError_t error = cudaMemsetAsync(f_.parts, 0, part_floats() * sizeof(float), stream_);
    if (error != cudaSuccess) return error;
    for_chunks([this](uint64_t, uint32_t tokens) {
      const dim3 grid(blocks_for(f_.columns, KeyTile::kCols),
                      blocks_for(f_.columns, KeyTile::kRows), f_.gram_parts);
      gram_kernel<<<grid, kThreads, 0, stream_>>>(f_, tokens);
    });
    trace_kernel<<<1, kThreads, 0, stream_>>>(f_);
    const unsigned side = blocks_for(f_.columns, kMirror);
    finish_gram_kernel<<<dim3(side, side), dim3(kMirror, kThreads / kMirror), 0, stream_>>>(f_);
    find_basis();
    for_chunks([this](uint64_t first, uint32_t tokens) {
      const dim3 grid(blocks_for(f_.rank, KeyTile::kCols), blocks_for(tokens, KeyTile::kRows));
      tokens_kernel<<<grid, kThreads, 0, stream_>>>(f_, item_.factors, first, tokens);
    });
    heads_kernel<<<columns_by_rank(), kThreads, 0, stream_>>>(f_, item_.factors,
                                                              item_.tokens.geometry.head_dim);
    return cudaSuccess;
  }

 private:
  uint64_t part_floats() const { return uint64_t{f_.gram_parts} * f_.columns * f_.columns; }
  dim3 columns_by_rank() const { return dim3(blocks_for(f_.columns, kThreads), f_.rank); }

  // Calls body(first token, tokens) with the chunk's keys turned back.
  template <typename Body>
  void for_chunks(const Body& body) const {
    for (uint64_t first = 0; first < item_.tokens.tokens; first += kChunkTokens) {
      const auto tokens =
          static_cast<uint32_t>(std::min(kChunkTokens, item_.tokens.tokens - first));
      turn_back_kernel<<<tokens, kThreads, 0, stream_>>>(item_.tokens, rope_, first, f_.keys);
      body(first, tokens);
    }
  }

  void find_basis() const {
    const unsigned starts = blocks_for(uint64_t{f_.columns} * f_.rank_width, kThreads);
    start_kernel<<<starts, kThreads, 0, stream_>>>(f_);
    const uint32_t powers = std::max(1u, item_.power);
    for (uint32_t p = 0; p < powers; ++p) {
      const dim3 grid(blocks_for(f_.rank, ImageTile::kCols),
                      blocks_for(f_.columns, ImageTile::kRows));
      image_kernel<<<grid, kThreads, 0, stream_>>>(f_);
      orthonormalize(p + 1 == powers ? 2 : 1);
      basis_kernel<<<columns_by_rank(), kThreads, 0, stream_>>>(f_);
    }
  }

  void orthonormalize(uint32_t passes) const {
    norms_kernel<<<blocks_for(f_.rank, kWarps), kThreads, 0, stream_>>>(f_);
    for (uint32_t before = 0; before < f_.rank; before += kPanel) {
      const uint32_t count = std::min(kPanel, f_.rank - before);
      for (uint32_t pass = 0; pass < passes; ++pass) {
        if (before > 0) {
          const dim3 dots(blocks_for(before, kWarps), blocks_for(count, kDotColumns));
          dots_kernel<<<dots, kThreads, 0, stream_>>>(f_, before, count);
          const dim3 cuts(blocks_for(f_.columns, kWarp), blocks_for(count, kSubtractColumns));
          subtract_kernel<<<cuts, dim3(kWarp, kWarps), 0, stream_>>>(f_, before, count);
        }
        panel_kernel<<<1, kPanelThreads, 0, stream_>>>(f_, before, count,
                                                       pass == 0 ? kLeastRemainder : 0.0);
      }
    }
  }

  const FactorKeysItem& item_;
  const RopeArgument rope_;
  const cudaStream_t stream_;
  Factoring f_;
};

}  // namespace

void CudaSparseOps::enqueue_factor_keys(const FactorKeysItem& item,
                                        const RopeParams& rope,
                                        StreamRef stream_ref) {
  check_factors(item.factors, item.tokens.geometry, rope);
  CudaStream& stream = cuda_stream(stream_ref);
  if (!stream.begin()) return;
  FactorLaunch launch(item, rope, stream.handle());
  void* memory = stream.scratch(launch.place(nullptr));
  if (memory == nullptr) return;
  launch.place(memory);
  stream.fail(cuda_status(launch.launch(), "factor_keys"));
  stream.end("factor_keys");
}

}  // namespace spin::backend::cuda
