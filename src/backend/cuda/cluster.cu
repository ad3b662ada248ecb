// SPDX-License-Identifier: Apache-2.0
// Segmented spherical k-means, all KV heads of an item at once, items one after the other in the
// same scratch. An item is
//
//   mean_parts, mean     mu
//   start                the first centroids
//   `iterations` times   assign over the runs; update: new centroids
//   assign               all tokens to all centroids, counted
//   deal_pages           sizes and pages (cluster_pages.cu)
//   write                centroids, value sums, token ids
//
// queued in order: the host looks at nothing in between. Keys are read from their pages in every
// pass and centred in registers.
//
// Which tokens a cluster has is not sorted: a block of update or write looks through the
// assignments for its 16 clusters at once and finds each one's members in ascending order, so that
// sums are chains in token order and no float is added atomically. That is a comparison for each
// product of the assignment: some 2 % of its instructions at head_dim 128.
#include <algorithm>
#include <type_traits>

#include "backend/cuda/cluster_support.cuh"
#include "backend/cuda/cuda_sparse_ops.h"
#include "backend/cuda/cuda_stream.h"
#include "backend/cuda/kernel_support.cuh"
#include "backend/cuda/quads.cuh"
#include "backend/cuda/scratch_parts.h"
#include "backend/cuda/tile_product.cuh"
#include "base/check.h"

namespace spin::backend::cuda {
namespace {

constexpr uint32_t kMostDim = 1024;

constexpr uint32_t kMeanTokens = 256;  // of one part of the mean
constexpr unsigned kMeanThreads = 256;
constexpr unsigned kStartThreads = 256;

constexpr unsigned kSumThreads = 512;
constexpr unsigned kSumClusters = kSumThreads / kWarp;  // of a block, one per warp
constexpr uint32_t kSumTokens = 2048;                   // looked through at a time
constexpr uint32_t kQuadTokens = kWarp * kQuad;         // by a warp at once
constexpr uint32_t kNoCluster = 0xFFFF'FFFF;            // behind the last token
constexpr uint32_t kIdle = 0xFFFF'FFFE;                 // of a warp without a cluster

using AssignTile = ProductTile<2, 2>;

// Tokens and clusters that are assigned to each other, in `count` runs of so many.
struct Runs {
  uint32_t count = 0;
  uint32_t tokens = 0;
  uint32_t clusters = 0;
};

template <layout::DType kType>
using ElementOf = std::conditional_t<kType == layout::DType::kF32, float, __nv_bfloat16>;

template <layout::DType kType>
__device__ float4 load_quad_of(const std::byte* row, uint32_t first) {
  return load_whole_quad(reinterpret_cast<const ElementOf<kType>*>(row) + first);
}

__device__ float4 plus(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ float4 minus(float4 a, float4 b) {
  return make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
}
__device__ float4 divided(float4 a, float by) {
  return make_float4(a.x / by, a.y / by, a.z / by, a.w / by);
}

__device__ void store_quad_of(
    const HeadVectors& vectors, uint64_t head, uint64_t index, uint32_t first, float4 x) {
  const uint64_t at = head * vectors.head_stride + index * vectors.width + first;
  store_element(vectors.data, vectors.dtype, at, x.x);
  store_element(vectors.data, vectors.dtype, at + 1, x.y);
  store_element(vectors.data, vectors.dtype, at + 2, x.z);
  store_element(vectors.data, vectors.dtype, at + 3, x.w);
}

// ---- The mean and the first centroids.

// A block per (part, head): a row of threads has all quads of dimensions, rows take the tokens in
// turn; their sums are added in the order of the rows.
// Bytes: the part's keys once.
template <layout::DType kType>
__global__ void __launch_bounds__(kMeanThreads)
    mean_parts_kernel(const __grid_constant__ ClusterItem item,
                      const __grid_constant__ ClusterScratch scratch) {
  __shared__ float4 shared[kMeanThreads];
  const uint32_t dim = item.source.geometry.head_dim;
  const uint32_t quads = dim / kQuad;
  const uint32_t rows = kMeanThreads / quads;
  const uint32_t row = threadIdx.x / quads;
  const uint32_t first_dim = threadIdx.x % quads * kQuad;
  const uint32_t first = blockIdx.x * kMeanTokens;
  const uint32_t count = min(kMeanTokens, item.tokens - first);
  const uint32_t head = blockIdx.y;
  float4 sums = make_float4(0, 0, 0, 0);
  if (row < rows) {
#pragma unroll 4
    for (uint32_t t = row; t < count; t += rows) {
      const std::byte* key = item.source.key(head, item.first_token + first + t);
      sums = plus(sums, load_quad_of<kType>(key, first_dim));
    }
  }
  shared[threadIdx.x] = sums;
  __syncthreads();
  if (row != 0) return;
  for (uint32_t r = 1; r < rows; ++r) sums = plus(sums, shared[r * quads + threadIdx.x]);
  const uint64_t part = uint64_t{head} * gridDim.x + blockIdx.x;
  *reinterpret_cast<float4*>(scratch.mean_parts + part * dim + first_dim) = sums;
}

// A block per head: the parts in their order.
// Bytes: 4 head_dim per part.
__global__ void __launch_bounds__(kMeanThreads)
    mean_kernel(const __grid_constant__ ClusterItem item,
                const __grid_constant__ ClusterScratch scratch,
                uint32_t parts) {
  const uint32_t dim = item.source.geometry.head_dim;
  const uint64_t head = blockIdx.x;
  for (uint32_t d = threadIdx.x; d < dim; d += kMeanThreads) {
    const float* from = scratch.mean_parts + head * parts * dim + d;
    float sum = 0.0f;
#pragma unroll 8
    for (uint32_t part = 0; part < parts; ++part) sum += from[uint64_t{part} * dim];
    scratch.mean[head * dim + d] = sum / static_cast<float>(item.tokens);
  }
}

// A warp per (cluster, head): its first centroid; no token is counted yet.
// Bytes: a key read and head_dim floats written per cluster.
template <layout::DType kType>
__global__ void __launch_bounds__(kStartThreads)
    start_kernel(const __grid_constant__ ClusterItem item,
                 const __grid_constant__ ClusterScratch scratch) {
  const uint32_t dim = item.source.geometry.head_dim;
  const uint32_t head = blockIdx.y;
  const uint64_t cluster = uint64_t{blockIdx.x} * (kStartThreads / kWarp) + threadIdx.x / kWarp;
  if (cluster >= item.clusters) return;
  const uint64_t token = (2 * cluster + 1) * item.tokens / (2 * uint64_t{item.clusters});
  const std::byte* key = item.source.key(head, item.first_token + token);
  const float* mean = scratch.mean + uint64_t{head} * dim;
  const uint64_t at = uint64_t{head} * item.clusters + cluster;
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t d = lane * kQuad; d < dim; d += kQuadTokens) {
    *reinterpret_cast<float4*>(scratch.centroids + at * dim + d) =
        minus(load_quad_of<kType>(key, d), load_whole_quad(mean + d));
  }
  if (lane == 0) scratch.counts[at] = 0;
}

// ---- Assignment.

// Operand A: this thread's token.
template <layout::DType kType>
struct CentredKey {
  using Loaded = std::conditional_t<kType == layout::DType::kF32, float4, uint2>;
  static constexpr bool kAlongDepth = true;
  const std::byte* key = nullptr;  // null: no token; what is found for it is not used
  const float* mean = nullptr;     // zeros from `dim` on
  uint32_t dim = 0;

  __device__ __forceinline__ Loaded load(unsigned step, unsigned depth, unsigned /*row*/) const {
    const uint32_t d = step * kProductDepth + depth;
    if (key == nullptr || d >= dim) return Loaded{};
    return *reinterpret_cast<const Loaded*>(reinterpret_cast<const ElementOf<kType>*>(key) + d);
  }
  __device__ __forceinline__ float4 finish(Loaded x, unsigned step, unsigned depth) const {
    const float4 centre = load_whole_quad(mean + step * kProductDepth + depth);
    return minus(load_quad_of<kType>(reinterpret_cast<const std::byte*>(&x), 0), centre);
  }
};

// The best centroids of a thread's tokens so far: of equal ones the lowest, which is also what
// tokens get whose products are no numbers.
struct Nearest {
  float best[AssignTile::kOwnRows];
  uint32_t index[AssignTile::kOwnRows];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < AssignTile::kOwnRows; ++i) {
      best[i] = -INFINITY;
      index[i] = 0;
    }
  }

  // Centroids in ascending order, those of earlier tiles first.
  __device__ __forceinline__ void take(const AssignTile& tile, uint32_t first, uint32_t clusters) {
#pragma unroll
    for (int j = 0; j < AssignTile::kOwnCols; ++j) {
      const uint32_t cluster = first + AssignTile::col(j);
#pragma unroll
      for (int i = 0; i < AssignTile::kOwnRows; ++i) {
        if (cluster < clusters && tile.sums[i][j] > best[i]) {
          best[i] = tile.sums[i][j];
          index[i] = cluster;
        }
      }
    }
  }

  // Over the 16 lanes that have the same tokens.
  __device__ __forceinline__ void merge() {
#pragma unroll
    for (int i = 0; i < AssignTile::kOwnRows; ++i) {
#pragma unroll
      for (unsigned step = 8; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(kFullMask, best[i], step);
        const uint32_t other_index = __shfl_xor_sync(kFullMask, index[i], step);
        if (other > best[i] || (other == best[i] && other_index < index[i])) {
          best[i] = other;
          index[i] = other_index;
        }
      }
    }
  }
};

// A block per (128 tokens of a run, head): nearest[t] = argmax_i x_t . c_i over the run's
// centroids, each product one chain over ascending dimensions; with `counted` also how many tokens
// a cluster has (whole numbers: their sums have no order).
// Bytes: keys and centroids once per 128 of the others, through the second cache; 2 head_dim float
// operations per token and centroid bind (60 TFLOP/s).
template <layout::DType kType>
__global__ void __launch_bounds__(kProductThreads, 2)
    assign_kernel(const __grid_constant__ ClusterItem item,
                  const __grid_constant__ ClusterScratch scratch,
                  Runs runs,
                  bool counted) {
  __shared__ AssignTile::Buffers buffers;
  __shared__ alignas(16) float mean[kMostDim];
  const uint32_t tiles = (runs.tokens - 1) / AssignTile::kRows + 1;
  const uint32_t run = blockIdx.x / tiles;
  const uint32_t in_run = blockIdx.x % tiles * AssignTile::kRows;
  const uint32_t first = run * runs.tokens + in_run;
  const uint32_t count = min(AssignTile::kRows, runs.tokens - in_run);
  const uint32_t head = blockIdx.y;
  const uint32_t dim = item.source.geometry.head_dim;
  const uint32_t steps = (dim - 1) / kProductDepth + 1;
  const uint64_t first_cluster = uint64_t{head} * item.clusters + run * runs.clusters;
  const float* centroids = scratch.centroids + first_cluster * dim;
  for (uint32_t d = threadIdx.x; d < steps * kProductDepth; d += kProductThreads) {
    mean[d] = d < dim ? scratch.mean[uint64_t{head} * dim + d] : 0.0f;
  }
  __syncthreads();
  const uint32_t row = threadIdx.x % AssignTile::kRows;
  const CentredKey<kType> keys = {
      row < count ? item.source.key(head, item.first_token + first + row) : nullptr, mean, dim};
  AssignTile tile;
  Nearest nearest;
  nearest.clear();
  for (uint32_t c = 0; c < runs.clusters; c += AssignTile::kCols) {
    tile.clear();
    tile.accumulate(buffers, steps, keys,
                    AlongDepth{centroids + uint64_t{c} * dim, dim, dim, runs.clusters - c});
    nearest.take(tile, c, runs.clusters);
  }
  nearest.merge();
  if (threadIdx.x % 16 != 0) return;
#pragma unroll
  for (int i = 0; i < AssignTile::kOwnRows; ++i) {
    const uint32_t t = AssignTile::row(i);
    if (t >= count) continue;
    const uint32_t cluster = run * runs.clusters + nearest.index[i];
    scratch.nearest[uint64_t{head} * item.tokens + first + t] = cluster;
    if (counted) atomicAdd(&scratch.counts[uint64_t{head} * item.clusters + cluster], 1u);
  }
}

// ---- Sums over the members of clusters.

struct MemberBuffers {  // shared
  alignas(16) uint32_t nearest[kSumTokens];
  uint32_t found[kSumClusters][kWarp + kQuadTokens];  // a warp's members that wait to be visited
};

// What a warp of visit_members() carries along.
struct Found {
  uint32_t* members = nullptr;  // [kWarp + kQuadTokens]
  uint32_t count = 0;

  // Appends those of a quad of tokens per lane, the first of them at `first`, that are in
  // `cluster`.
  __device__ __forceinline__ void append(uint4 quad, uint32_t first, uint32_t cluster) {
    const bool is_member[kQuad] = {quad.x == cluster, quad.y == cluster, quad.z == cluster,
                                   quad.w == cluster};
    if (!__any_sync(kFullMask, is_member[0] || is_member[1] || is_member[2] || is_member[3])) {
      return;
    }
    const uint32_t lane = threadIdx.x % kWarp;
    uint32_t at = count;
#pragma unroll
    for (unsigned e = 0; e < kQuad; ++e) {
      const uint32_t lanes = __ballot_sync(kFullMask, is_member[e]);
      at += __popc(lanes & ((1u << lane) - 1));
      count += __popc(lanes);
    }
#pragma unroll
    for (unsigned e = 0; e < kQuad; ++e) {
      if (is_member[e]) members[at++] = first + lane * kQuad + e;
    }
    __syncwarp();
  }

  // Calls visit(member of this lane, 32) for whole warps of members.
  template <typename Visit>
  __device__ __forceinline__ void visit_whole(const Visit& visit) {
    if (count < kWarp) return;
    const uint32_t lane = threadIdx.x % kWarp;
    uint32_t done = 0;
    for (; count - done >= kWarp; done += kWarp) visit(members[done + lane], kWarp);
    count -= done;
    const uint32_t kept = members[done + lane];
    __syncwarp();
    if (lane < count) members[lane] = kept;
    __syncwarp();
  }
};

// Calls visit(token of this lane, number of tokens, <= 32) until all tokens with nearest[t] ==
// cluster have been visited, in ascending order over calls and lanes. All threads of the block
// call it, each warp with its cluster.
template <typename Visit>
__device__ __forceinline__ void visit_members(const uint32_t* nearest,
                                              uint32_t tokens,
                                              uint32_t cluster,
                                              MemberBuffers& shared,
                                              const Visit& visit) {
  const uint32_t lane = threadIdx.x % kWarp;
  Found found = {shared.found[threadIdx.x / kWarp]};
  for (uint64_t first = 0; first < tokens; first += kSumTokens) {
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < kSumTokens; i += kSumThreads) {
      shared.nearest[i] = first + i < tokens ? nearest[first + i] : kNoCluster;
    }
    __syncthreads();
    for (uint32_t i = 0; i < kSumTokens; i += kQuadTokens) {
      const auto quad = *reinterpret_cast<const uint4*>(&shared.nearest[i + lane * kQuad]);
      found.append(quad, static_cast<uint32_t>(first) + i, cluster);
      found.visit_whole(visit);
    }
  }
  if (found.count == 0) return;
  visit(lane < found.count ? found.members[lane] : 0, found.count);
}

// Sums of the rows of a cluster's members, minus a mean: a lane has kVectors quads of dimensions.
template <layout::DType kType, int kVectors>
struct MemberSums {
  float4 sums[kVectors];
  float4 mean[kVectors];
  uint32_t dim;

  static __device__ __forceinline__ uint32_t first_dim(int v) {
    return (static_cast<unsigned>(v) * kWarp + threadIdx.x % kWarp) * kQuad;
  }

  // mean_from null: nothing is taken off.
  __device__ __forceinline__ MemberSums(uint32_t head_dim, const float* mean_from) : dim(head_dim) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      sums[v] = make_float4(0, 0, 0, 0);
      const bool is_one = mean_from != nullptr && first_dim(v) < dim;
      mean[v] = is_one ? load_whole_quad(mean_from + first_dim(v)) : sums[v];
    }
  }

  // Adds the rows of lanes [0, count), in that order.
  __device__ __forceinline__ void add(const std::byte* row, uint32_t count) {
    constexpr int kInFlight = kVectors == 1 ? 8 : kVectors == 2 ? 2 : 1;
    const auto address = reinterpret_cast<uint64_t>(row);
#pragma unroll kInFlight
    for (uint32_t j = 0; j < count; ++j) {
      const auto* from =
          reinterpret_cast<const std::byte*>(__shfl_sync(kFullMask, address, static_cast<int>(j)));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (first_dim(v) >= dim) continue;
        sums[v] = plus(sums[v], minus(load_quad_of<kType>(from, first_dim(v)), mean[v]));
      }
    }
  }

  __device__ __forceinline__ void divide(float by) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sums[v] = divided(sums[v], by);
  }

  // Over all dimensions.
  __device__ __forceinline__ float squares() const {
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float4 x = sums[v];
      sum += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
    }
    return warp_sum(sum);
  }

  template <typename Store>
  __device__ __forceinline__ void for_quads(const Store& store) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first_dim(v) < dim) store(first_dim(v), v);
    }
  }
};

// A warp per (cluster of a run, head): its new centroid.
// Bytes: the members' keys, and the run's assignments once per 16 clusters, through the second
// cache.
template <layout::DType kType, int kVectors>
__global__ void __launch_bounds__(kSumThreads, kVectors <= 2 ? 2 : 1)
    update_kernel(const __grid_constant__ ClusterItem item,
                  const __grid_constant__ ClusterScratch scratch,
                  Runs runs) {
  __shared__ MemberBuffers shared;
  const uint32_t blocks = (runs.clusters - 1) / kSumClusters + 1;  // of a run
  const uint32_t run = blockIdx.x / blocks;
  const uint32_t in_run = blockIdx.x % blocks * kSumClusters + threadIdx.x / kWarp;
  const uint32_t cluster = in_run < runs.clusters ? run * runs.clusters + in_run : kIdle;
  const uint32_t head = blockIdx.y;
  const uint32_t dim = item.source.geometry.head_dim;
  const uint64_t first = uint64_t{run} * runs.tokens;
  MemberSums<kType, kVectors> sums(dim, scratch.mean + uint64_t{head} * dim);
  uint32_t members = 0;
  visit_members(scratch.nearest + uint64_t{head} * item.tokens + first, runs.tokens, cluster,
                shared, [&](uint32_t token, uint32_t count) {
                  sums.add(item.source.key(head, item.first_token + first + token), count);
                  members += count;
                });
  if (members == 0) return;
  sums.divide(static_cast<float>(members));
  const float squares = sums.squares();
  sums.divide(squares > 0.0f ? sqrtf(squares) : 1.0f);
  float* centroid = scratch.centroids + (uint64_t{head} * item.clusters + cluster) * dim;
  sums.for_quads(
      [&](uint32_t d, int v) { *reinterpret_cast<float4*>(centroid + d) = sums.sums[v]; });
}

// A warp per (cluster, head, plane): centroids from the keys, value sums and token ids from the
// values.
// Bytes: all keys and values once, 4 per token id, and as update_kernel.
template <layout::DType kType, int kVectors>
__global__ void __launch_bounds__(kSumThreads, kVectors <= 2 ? 2 : 1)
    write_kernel(const __grid_constant__ ClusterItem item,
                 const __grid_constant__ ClusterScratch scratch) {
  __shared__ MemberBuffers shared;
  const uint32_t in_head = blockIdx.x * kSumClusters + threadIdx.x / kWarp;
  const uint32_t cluster = in_head < item.clusters ? in_head : kIdle;
  const uint32_t head = blockIdx.y;
  const bool values = blockIdx.z == 1;
  const uint32_t dim = item.source.geometry.head_dim;
  const uint64_t plane = values ? item.source.geometry.plane_bytes() : 0;
  const float* mean = values ? nullptr : scratch.mean + uint64_t{head} * dim;
  const bool lists = values && cluster != kIdle;
  uint32_t* ids = nullptr;
  if (lists) {
    ids = item.token_ids + head * item.token_stride +
          scratch.begins[uint64_t{head} * item.clusters + cluster];
  }
  MemberSums<kType, kVectors> sums(dim, mean);
  uint32_t members = 0;
  visit_members(scratch.nearest + uint64_t{head} * item.tokens, item.tokens, cluster, shared,
                [&](uint32_t token, uint32_t count) {
                  const uint64_t id = item.first_token + token;
                  sums.add(item.source.key(head, id) + plane, count);
                  const uint32_t lane = threadIdx.x % kWarp;
                  if (lists && lane < count) ids[members + lane] = static_cast<uint32_t>(id);
                  members += count;
                });
  if (cluster == kIdle) return;
  const uint64_t out = uint64_t{item.out_first} + cluster;
  if (values) {
    sums.for_quads(
        [&](uint32_t d, int v) { store_quad_of(item.value_sums, head, out, d, sums.sums[v]); });
    return;
  }
  if (members > 0) sums.divide(static_cast<float>(members));
  sums.for_quads([&](uint32_t d, int v) {
    store_quad_of(item.centroids, head, out, d, plus(sums.sums[v], sums.mean[v]));
  });
}

// ---- An item.

void check_item(const ClusterItem& item) {
  const layout::KvGeometry& g = item.source.geometry;
  SPIN_CHECK(item.clusters > 0 && item.segments > 0 && item.clusters % item.segments == 0);
  SPIN_CHECK(item.tokens > 0 && item.first_token + item.tokens <= item.source.tokens);
  SPIN_CHECK(item.first_token + item.tokens <= UINT32_MAX && item.token_stride >= item.tokens);
  SPIN_CHECK(item.centroids.width == g.head_dim && item.value_sums.width == g.head_dim);
  SPIN_CHECK(uint64_t{item.out_first} + item.clusters <= item.cluster_stride);
  SPIN_CHECK(item.page_stride > most_cluster_pages(item.tokens, item.clusters, g.page_tokens));
  SPIN_CHECK(g.head_dim > 0 && g.head_dim % 8 == 0 && g.head_dim <= kMostDim);
  SPIN_CHECK(g.kv_heads > 0 && g.kv_heads <= 65535 && item.clusters < kIdle);
}

// Places an item's arrays from `memory` on; the bytes they take.
size_t place(const ClusterItem& item, void* memory, ClusterScratch& scratch) {
  const layout::KvGeometry& g = item.source.geometry;
  const uint64_t heads = g.kv_heads;
  ScratchParts parts;
  const size_t mean_parts =
      parts.add<float>(heads * blocks_for(item.tokens, kMeanTokens) * g.head_dim);
  const size_t mean = parts.add<float>(heads * g.head_dim);
  const size_t centroids = parts.add<float>(heads * item.clusters * g.head_dim);
  const size_t nearest = parts.add<uint32_t>(heads * item.tokens);
  const size_t counts = parts.add<uint32_t>(heads * item.clusters);
  const size_t begins = parts.add<uint32_t>(heads * item.clusters);
  if (memory != nullptr) {
    scratch = {
        ScratchParts::at<float>(memory, mean_parts), ScratchParts::at<float>(memory, mean),
        ScratchParts::at<float>(memory, centroids),  ScratchParts::at<uint32_t>(memory, nearest),
        ScratchParts::at<uint32_t>(memory, counts),  ScratchParts::at<uint32_t>(memory, begins)};
  }
  return parts.bytes();
}

template <layout::DType kType, int kVectors>
class Clustering {
 public:
  Clustering(const ClusterItem& item, const ClusterScratch& scratch, cudaStream_t stream)
      : item_(item), scratch_(scratch), stream_(stream), heads_(item.source.geometry.kv_heads) {}

  void launch() const {
    const unsigned parts = blocks_for(item_.tokens, kMeanTokens);
    mean_parts_kernel<kType><<<dim3(parts, heads_), kMeanThreads, 0, stream_>>>(item_, scratch_);
    mean_kernel<<<heads_, kMeanThreads, 0, stream_>>>(item_, scratch_, parts);
    const dim3 starts(blocks_for(item_.clusters, kStartThreads / kWarp), heads_);
    start_kernel<kType><<<starts, kStartThreads, 0, stream_>>>(item_, scratch_);
    const Runs runs = {item_.segments, item_.tokens / item_.segments,
                       item_.clusters / item_.segments};
    for (uint32_t i = 0; i < item_.iterations && runs.tokens > 0; ++i) {
      assign(runs, false);
      const dim3 grid(runs.count * blocks_for(runs.clusters, kSumClusters), heads_);
      update_kernel<kType, kVectors><<<grid, kSumThreads, 0, stream_>>>(item_, scratch_, runs);
    }
    assign({1, item_.tokens, item_.clusters}, true);
    launch_deal_pages(item_, scratch_, stream_);
    const dim3 grid(blocks_for(item_.clusters, kSumClusters), heads_, 2);
    write_kernel<kType, kVectors><<<grid, kSumThreads, 0, stream_>>>(item_, scratch_);
  }

 private:
  void assign(const Runs& runs, bool counted) const {
    const dim3 grid(runs.count * blocks_for(runs.tokens, AssignTile::kRows), heads_);
    assign_kernel<kType><<<grid, kProductThreads, 0, stream_>>>(item_, scratch_, runs, counted);
  }

  const ClusterItem& item_;
  const ClusterScratch& scratch_;
  const cudaStream_t stream_;
  const uint32_t heads_;
};

template <layout::DType kType>
void launch_item(const ClusterItem& item, const ClusterScratch& scratch, cudaStream_t stream) {
  const uint32_t dim = item.source.geometry.head_dim;
  if (dim <= kQuadTokens) {
    Clustering<kType, 1>(item, scratch, stream).launch();
  } else if (dim <= 2 * kQuadTokens) {
    Clustering<kType, 2>(item, scratch, stream).launch();
  } else {
    Clustering<kType, kMostDim / kQuadTokens>(item, scratch, stream).launch();
  }
}

}  // namespace

void CudaSparseOps::enqueue_cluster(std::span<const ClusterItem> items, StreamRef stream_ref) {
  ClusterScratch scratch;
  size_t bytes = 0;
  for (const ClusterItem& item : items) {
    check_item(item);
    bytes = std::max(bytes, place(item, nullptr, scratch));
  }
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || !stream.begin()) return;
  void* memory = stream.scratch(bytes);
  if (memory == nullptr) return;
  for (const ClusterItem& item : items) {
    place(item, memory, scratch);
    if (item.source.geometry.dtype == layout::DType::kF32) {
      launch_item<layout::DType::kF32>(item, scratch, stream.handle());
    } else {
      launch_item<layout::DType::kBF16>(item, scratch, stream.handle());
    }
  }
  stream.end("cluster");
}

}  // namespace spin::backend::cuda
