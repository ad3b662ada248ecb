// SPDX-License-Identifier: Apache-2.0
// Which pages the clusters of an item take: prefix sums over their sizes.
#include "backend/cuda/cluster_support.cuh"
#include "backend/cuda/kernel_support.cuh"

namespace spin::backend::cuda {
namespace {

constexpr unsigned kScanThreads = 1024;
constexpr unsigned kScanWarps = kScanThreads / kWarp;
constexpr unsigned kStartThreads = 256;

// Tokens in the lower half, pages in the upper: both totals are below 2^32, so that one sum adds
// them both.
__device__ uint64_t packed(uint32_t tokens, uint32_t pages) {
  return uint64_t{pages} << 32 | tokens;
}
__device__ uint32_t tokens_of(uint64_t sums) { return static_cast<uint32_t>(sums); }
__device__ uint32_t pages_of(uint64_t sums) { return static_cast<uint32_t>(sums >> 32); }

__device__ uint64_t inclusive_scan_of_warp(uint64_t x) {
#pragma unroll
  for (unsigned step = 1; step < kWarp; step *= 2) {
    const uint64_t other = __shfl_up_sync(kFullMask, x, step);
    if (threadIdx.x % kWarp >= step) x += other;
  }
  return x;
}

// Sum over the threads up to this one, itself included; `total`: of all. Scans may follow each
// other.
__device__ uint64_t inclusive_scan(uint64_t x, uint64_t* warps, uint64_t& total) {
  const unsigned warp = threadIdx.x / kWarp;
  const unsigned lane = threadIdx.x % kWarp;
  const uint64_t mine = inclusive_scan_of_warp(x);
  __syncthreads();  // an earlier scan has been read
  if (lane == kWarp - 1) warps[warp] = mine;
  __syncthreads();
  const uint64_t all = inclusive_scan_of_warp(lane < kScanWarps ? warps[lane] : 0);
  total = __shfl_sync(kFullMask, all, kWarp - 1);
  const uint64_t through = __shfl_sync(kFullMask, all, warp);  // this warp's last one
  return through - warps[warp] + mine;
}

// A block per head. counts [clusters] -> sizes, begins, first_pages, page_counts and the end of the
// last page.
// Bytes: 16 per cluster.
__global__ void __launch_bounds__(kScanThreads)
    deal_kernel(const __grid_constant__ ClusterItem item,
                const __grid_constant__ ClusterScratch scratch) {
  __shared__ uint64_t warps[kScanWarps];
  const uint64_t head = blockIdx.x;
  const uint32_t page_tokens = item.source.geometry.page_tokens;
  const uint32_t* counts = scratch.counts + head * item.clusters;
  uint32_t* begins = scratch.begins + head * item.clusters;
  const uint64_t out = head * item.cluster_stride + item.out_first;
  uint64_t before = 0;
  for (uint64_t first = 0; first < item.clusters; first += kScanThreads) {
    const uint64_t cluster = first + threadIdx.x;
    const bool is_one = cluster < item.clusters;
    const uint32_t count = is_one ? counts[cluster] : 0;
    const uint32_t pages = count / page_tokens + (count % page_tokens != 0 ? 1 : 0);
    uint64_t total = 0;
    const uint64_t through = before + inclusive_scan(packed(count, pages), warps, total);
    if (is_one) {
      item.sizes[out + cluster] = count;
      begins[cluster] = tokens_of(through) - count;
      item.first_pages[out + cluster] = item.first_page_id + pages_of(through) - pages;
    }
    before += total;
  }
  if (threadIdx.x == 0) {
    item.page_counts[head] = pages_of(before);
    item.page_starts[head * item.page_stride + pages_of(before)] = item.tokens;
  }
}

// A warp per cluster: the starts of its pages.
// Bytes: 12 per cluster, 4 per page.
__global__ void __launch_bounds__(kStartThreads)
    starts_kernel(const __grid_constant__ ClusterItem item,
                  const __grid_constant__ ClusterScratch scratch) {
  const uint64_t head = blockIdx.y;
  const uint64_t cluster = uint64_t{blockIdx.x} * (kStartThreads / kWarp) + threadIdx.x / kWarp;
  if (cluster >= item.clusters) return;
  const uint32_t page_tokens = item.source.geometry.page_tokens;
  const uint64_t at = head * item.clusters + cluster;
  const uint32_t count = scratch.counts[at];
  const uint32_t pages = count / page_tokens + (count % page_tokens != 0 ? 1 : 0);
  const uint32_t begin = scratch.begins[at];
  const uint64_t out = head * item.cluster_stride + item.out_first + cluster;
  uint32_t* starts =
      item.page_starts + head * item.page_stride + (item.first_pages[out] - item.first_page_id);
  for (uint32_t page = threadIdx.x % kWarp; page < pages; page += kWarp) {
    starts[page] = begin + page * page_tokens;
  }
}

}  // namespace

void launch_deal_pages(const ClusterItem& item,
                       const ClusterScratch& scratch,
                       cudaStream_t stream) {
  const uint32_t heads = item.source.geometry.kv_heads;
  deal_kernel<<<heads, kScanThreads, 0, stream>>>(item, scratch);
  const dim3 grid(blocks_for(item.clusters, kStartThreads / kWarp), heads);
  starts_kernel<<<grid, kStartThreads, 0, stream>>>(item, scratch);
}

}  // namespace spin::backend::cuda
