// SPDX-License-Identifier: Apache-2.0
// Keys rebuilt from their factors, for a whole prompt or for fetched pages. Both fill the rows of a
// tile and leave the rest to rebuild_tile(): the same instructions in the same order, hence the
// same bits.
#include <algorithm>

#include <cuda_bf16.h>

#include "backend/cuda/cuda_sparse_ops.h"
#include "backend/cuda/cuda_stream.h"
#include "backend/cuda/kernel_support.cuh"
#include "backend/cuda/lowrank_support.cuh"
#include "backend/cuda/quads.cuh"

namespace spin::backend::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kTileTokens = 32;
constexpr unsigned kTilePairs = 64;  // (i, i + head_dim / 2)
constexpr unsigned kTileRanks = 32;  // multiplied at a time
// A warp has so many tokens, a lane so many pairs of them.
constexpr unsigned kOwnTokens = kTileTokens / (kThreads / kWarp);
constexpr unsigned kOwnPairs = kTilePairs / kWarp;
// What a thread loads of a step's factors.
constexpr unsigned kTokenLoads = kTileTokens * kTileRanks / kThreads;
constexpr unsigned kHeadLoads = 2 * kTilePairs * kTileRanks / kQuad / kThreads;
constexpr unsigned kMostTileBlocks = 16;  // of an item and head; they take turns

static_assert(kOwnTokens == 4 && kTileRanks == kWarp);

struct TileBuffers {                                     // shared
  alignas(16) float token[kTileRanks][kTileTokens + 4];  // rows apart: fewer conflicts
  alignas(16) float head[kTileRanks][2][kTilePairs];     // first and second halves
  // Rows of the tile: where the key goes (null: nowhere) and the token's number and position.
  std::byte* keys[kTileTokens];
  uint32_t positions[kTileTokens];
};

// The factors of a step on their way from memory, and the sums that they go into.
template <typename Element>
class FactorProduct {
 public:
  __device__ FactorProduct(const KeyFactors& factors,
                           uint32_t head_dim,
                           uint32_t head,
                           uint32_t first_pair,
                           TileBuffers& buffers)
      : tokens_(static_cast<const Element*>(factors.token)),
        head_(static_cast<const Element*>(factors.head) + uint64_t{head} * factors.rank * head_dim),
        rank_(factors.rank),
        dim_(head_dim),
        first_pair_(first_pair),
        buffers_(buffers) {}

  // sums[token][pair][half] += over all ranks, ascending.
  __device__ __forceinline__ void run(float (&sums)[kOwnTokens][kOwnPairs][2]) {
    load(0);
    for (uint32_t first = 0; first < rank_; first += kTileRanks) {
      store();
      __syncthreads();
      if (first + kTileRanks < rank_) load(first + kTileRanks);
      multiply(sums);
      __syncthreads();
    }
  }

 private:
  __device__ __forceinline__ void load(uint32_t first) {
#pragma unroll
    for (unsigned l = 0; l < kTokenLoads; ++l) {
      const unsigned row = threadIdx.x / kTileRanks + l * (kThreads / kTileRanks);
      const uint32_t i = first + threadIdx.x % kTileRanks;
      const bool is_one = i < rank_ && buffers_.keys[row] != nullptr;
      token_[l] = is_one
                      ? static_cast<float>(tokens_[uint64_t{buffers_.positions[row]} * rank_ + i])
                      : 0.0f;
    }
    const uint32_t half = dim_ / 2;
#pragma unroll
    for (unsigned l = 0; l < kHeadLoads; ++l) {
      const Place at = place(l);
      const uint32_t i = first + at.rank;
      const bool is_one = i < rank_ && first_pair_ + at.pair < half;
      quads_[l] =
          is_one
              ? load_whole_quad(head_ + uint64_t{i} * dim_ + at.half * half + first_pair_ + at.pair)
              : make_float4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (unsigned l = 0; l < kTokenLoads; ++l) {
      const unsigned row = threadIdx.x / kTileRanks + l * (kThreads / kTileRanks);
      buffers_.token[threadIdx.x % kTileRanks][row] = token_[l];
    }
#pragma unroll
    for (unsigned l = 0; l < kHeadLoads; ++l) {
      const Place at = place(l);
      *reinterpret_cast<float4*>(&buffers_.head[at.rank][at.half][at.pair]) = quads_[l];
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[kOwnTokens][kOwnPairs][2]) {
    const unsigned lane = threadIdx.x % kWarp;
    const unsigned first = threadIdx.x / kWarp * kOwnTokens;
#pragma unroll 8
    for (unsigned i = 0; i < kTileRanks; ++i) {
      const auto quad = *reinterpret_cast<const float4*>(&buffers_.token[i][first]);
      const float token[kOwnTokens] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
      for (unsigned p = 0; p < kOwnPairs; ++p) {
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
          const float x = buffers_.head[i][half][lane + p * kWarp];
#pragma unroll
          for (unsigned t = 0; t < kOwnTokens; ++t) {
            sums[t][p][half] = fmaf(token[t], x, sums[t][p][half]);
          }
        }
      }
    }
  }

  struct Place {
    unsigned rank, half, pair;
  };
  // Of this thread's l-th quad of the head's factors.
  static __device__ __forceinline__ Place place(unsigned l) {
    const unsigned i = threadIdx.x + l * kThreads;
    constexpr unsigned kQuads = kTilePairs / kQuad;
    return {i / (2 * kQuads), i / kQuads % 2, i % kQuads * kQuad};
  }

  const Element* const tokens_;
  const Element* const head_;
  const uint32_t rank_;
  const uint32_t dim_;
  const uint32_t first_pair_;
  TileBuffers& buffers_;
  float token_[kTokenLoads];
  float4 quads_[kHeadLoads];
};

template <typename Element>
__device__ __forceinline__ void rebuild_tile_of(const KeyFactors& factors,
                                                const layout::KvGeometry& geometry,
                                                const RopeArgument& rope,
                                                uint32_t head,
                                                uint32_t first_pair,
                                                TileBuffers& buffers) {
  float sums[kOwnTokens][kOwnPairs][2] = {};
  FactorProduct<Element>(factors, geometry.head_dim, head, first_pair, buffers).run(sums);
  const uint32_t half = geometry.head_dim / 2;
#pragma unroll
  for (unsigned t = 0; t < kOwnTokens; ++t) {
    const unsigned row = threadIdx.x / kWarp * kOwnTokens + t;
    std::byte* const key = buffers.keys[row];
    if (key == nullptr) continue;
#pragma unroll
    for (unsigned p = 0; p < kOwnPairs; ++p) {
      const uint32_t i = first_pair + threadIdx.x % kWarp + p * kWarp;
      if (i >= half) continue;
      const Rotation by = rotation_of(buffers.positions[row], rope.inv_freq[i], rope.factor);
      const float2 turned = rotated(sums[t][p][0], sums[t][p][1], by);
      store_element(key, geometry.dtype, i, turned.x);
      store_element(key, geometry.dtype, half + i, turned.y);
    }
  }
}

// Rebuilds the rows of a tile, pairs [first_pair, first_pair + kTilePairs) of one head. The block's
// threads all call it, and see the rows.
__device__ __forceinline__ void rebuild_tile(const KeyFactors& factors,
                                             const layout::KvGeometry& geometry,
                                             const RopeArgument& rope,
                                             uint32_t head,
                                             uint32_t first_pair,
                                             TileBuffers& buffers) {
  if (factors.dtype == layout::DType::kF32) {
    rebuild_tile_of<float>(factors, geometry, rope, head, first_pair, buffers);
  } else {
    rebuild_tile_of<__nv_bfloat16>(factors, geometry, rope, head, first_pair, buffers);
  }
}

__device__ bool is_kept(const layout::PageList& kept, uint32_t head, uint32_t page) {
  if (kept.counts == nullptr) return false;
  const uint32_t* pages = kept.pages + uint64_t{head} * kept.stride;
  uint32_t first = 0;
  uint32_t end = kept.counts[head];
  while (first < end) {
    const uint32_t middle = first + (end - first) / 2;
    if (pages[middle] < page) {
      first = middle + 1;
    } else {
      end = middle;
    }
  }
  return first < kept.counts[head] && pages[first] == page;
}

// A block per (32 tokens, head, 64 pairs).
// Bytes: token factors once per head and pair tile, head factors once per 32 tokens, through the
// second cache; keys written once. 2 rank head_dim float operations per token and head bind.
__global__ void __launch_bounds__(kThreads)
    rebuild_tokens_kernel(const __grid_constant__ RebuildTokensItem item,
                          const __grid_constant__ RopeArgument rope) {
  __shared__ TileBuffers buffers;
  const layout::KvGeometry& geometry = item.tokens.geometry;
  const uint32_t head = blockIdx.y;
  bool is_one = false;
  if (threadIdx.x < kTileTokens) {
    const uint64_t token = uint64_t{item.first_page} * geometry.page_tokens +
                           uint64_t{blockIdx.x} * kTileTokens + threadIdx.x;
    const auto page = static_cast<uint32_t>(token / geometry.page_tokens);
    is_one = page < item.end_page && !is_kept(item.kept, head, page);
    std::byte* key = nullptr;
    if (is_one) {
      const uint64_t slot = item.tokens.slots[head * item.tokens.slot_stride + page];
      key = item.base + slot * geometry.page_bytes() +
            token % geometry.page_tokens * geometry.row_bytes();
    }
    buffers.keys[threadIdx.x] = key;
    buffers.positions[threadIdx.x] = static_cast<uint32_t>(token);
  }
  if (__syncthreads_or(is_one ? 1 : 0) == 0) return;
  rebuild_tile(item.factors, geometry, rope, head, blockIdx.z * kTilePairs, buffers);
}

// Blocks (x: of 64 pairs, taking turns at the fetched pages' tokens; head; item).
// Bytes: as above, for the fetched pages alone.
__global__ void __launch_bounds__(kThreads)
    rebuild_pages_kernel(const __grid_constant__ ItemPack<RebuildPagesItem> items,
                         const __grid_constant__ KvPoolRef pool,
                         const __grid_constant__ RopeArgument rope,
                         uint32_t pair_tiles) {
  __shared__ TileBuffers buffers;
  const RebuildPagesItem& item = items[blockIdx.z];
  const layout::KvGeometry& geometry = pool.geometry;
  const uint32_t head = blockIdx.y;
  const uint64_t list = uint64_t{head} * item.list.stride;
  const uint64_t tokens = uint64_t{item.fetched_counts[head]} * geometry.page_tokens;
  const uint64_t turns = gridDim.x / pair_tiles;
  for (uint64_t tile = blockIdx.x / pair_tiles; tile * kTileTokens < tokens; tile += turns) {
    bool is_one = false;
    if (threadIdx.x < kTileTokens) {
      const uint64_t i = tile * kTileTokens + threadIdx.x;
      std::byte* key = nullptr;
      uint64_t token = 0;
      if (i < tokens) {
        const uint64_t at = list + item.fetched[list + i / geometry.page_tokens];
        const uint32_t page = item.list.pages[at];
        is_one = page < item.end_page;
        if (is_one) {
          const uint64_t in_page = i % geometry.page_tokens;
          token = uint64_t{page} * geometry.page_tokens + in_page;
          key = static_cast<std::byte*>(pool.base) + item.slots[at] * geometry.page_bytes() +
                in_page * geometry.row_bytes();
        }
      }
      buffers.keys[threadIdx.x] = key;
      buffers.positions[threadIdx.x] = static_cast<uint32_t>(token);
    }
    if (__syncthreads_or(is_one ? 1 : 0) != 0) {
      rebuild_tile(item.factors, geometry, rope, head, blockIdx.x % pair_tiles * kTilePairs,
                   buffers);
    }
    __syncthreads();  // the rows have been read
  }
}

}  // namespace

void CudaSparseOps::enqueue_rebuild_tokens(const RebuildTokensItem& item,
                                           const RopeParams& rope,
                                           StreamRef stream_ref) {
  const layout::KvGeometry& g = item.tokens.geometry;
  check_factors(item.factors, g, rope);
  SPIN_CHECK(item.first_page <= item.end_page && item.base == item.tokens.base);
  SPIN_CHECK(uint64_t{item.end_page} * g.page_tokens <= item.tokens.tokens);
  CudaStream& stream = cuda_stream(stream_ref);
  if (item.first_page == item.end_page || !stream.begin()) return;
  const uint64_t tokens = uint64_t{item.end_page - item.first_page} * g.page_tokens;
  const dim3 grid(blocks_for(tokens, kTileTokens), g.kv_heads,
                  blocks_for(g.head_dim / 2, kTilePairs));
  rebuild_tokens_kernel<<<grid, kThreads, 0, stream.handle()>>>(item, rope_argument(rope));
  stream.end("rebuild_tokens");
}

void CudaSparseOps::enqueue_rebuild_pages(std::span<const RebuildPagesItem> items,
                                          const KvPoolRef& pool,
                                          const RopeParams& rope,
                                          StreamRef stream_ref) {
  const layout::KvGeometry& g = pool.geometry;
  uint64_t most_pages = 0;  // on a list
  for (const RebuildPagesItem& item : items) {
    check_factors(item.factors, g, rope);
    most_pages = std::max<uint64_t>(most_pages, item.list.stride);
  }
  CudaStream& stream = cuda_stream(stream_ref);
  if (most_pages == 0 || !stream.begin()) return;
  const RopeArgument argument = rope_argument(rope);
  const unsigned tiles =
      std::min(blocks_for(most_pages * g.page_tokens, kTileTokens), kMostTileBlocks);
  const unsigned pair_tiles = blocks_for(g.head_dim / 2, kTilePairs);
  launch_packs(items, [&](const ItemPack<RebuildPagesItem>& pack, uint32_t count, size_t) {
    const dim3 grid(tiles * pair_tiles, g.kv_heads, count);
    rebuild_pages_kernel<<<grid, kThreads, 0, stream.handle()>>>(pack, pool, argument, pair_tiles);
    stream.end("rebuild_pages");
  });
}

}  // namespace spin::backend::cuda
