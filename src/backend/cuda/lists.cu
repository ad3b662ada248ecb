// SPDX-License-Identifier: Apache-2.0
// Lists of pages: what a row attends to, and how ranked clusters are dealt out. A block per (KV
// head, item).
#include <algorithm>
#include <bit>
#include <vector>

#include "backend/cuda/block_support.cuh"
#include "backend/cuda/cuda_sparse_ops.h"
#include "base/check.h"

namespace spin::backend::cuda {
namespace {

// ---- Lists. Everything that is attended to is a run of pages: the sinks, each pinned page, each
// selected partition, the tail. Runs are sorted by their first pages unless they are already;
// prefix maxima of their ends say which of a run's pages no earlier run has, prefix sums of these
// where they go; then a thread writes one page after the other, finding its run by bisection.
//
// Bytes: 8 per run, 5 per page. Runs lie in shared memory up to kRunsAtOnce, else in scratch.

constexpr uint32_t kListThreads = 512;
constexpr uint32_t kRunsAtOnce = 2048;

// First page in the upper half, tokens in the lower one; sorts by the first page.
using Run = uint64_t;
constexpr Run kEmptyRun = uint64_t{layout::kNoPage} << 32;  // behind all others

__device__ Run make_run(uint32_t first_page, uint32_t tokens) {
  return tokens == 0 ? kEmptyRun : uint64_t{first_page} << 32 | tokens;
}
__device__ uint32_t first_page(Run run) { return static_cast<uint32_t>(run >> 32); }
__device__ uint32_t run_tokens(Run run) { return static_cast<uint32_t>(run); }
__device__ uint32_t pages_of(uint32_t tokens, uint32_t page_tokens) {
  return tokens / page_tokens + (tokens % page_tokens != 0 ? 1 : 0);
}
// The page behind the run's last one; 0 if it has none.
__device__ uint32_t end_page(Run run, uint32_t page_tokens) {
  return run_tokens(run) == 0 ? 0 : first_page(run) + pages_of(run_tokens(run), page_tokens);
}

struct ListUnit {
  BuildListItem item;
  // What shared memory cannot hold: [kv_heads, run_stride]. null: it can.
  Run* runs = nullptr;
  uint32_t* places = nullptr;
  uint64_t run_stride = 0;  // a power of two
};

struct ListShared {
  Run runs[kRunsAtOnce];
  uint32_t places[kRunsAtOnce];
  BlockScan scan;
  uint32_t tokens;
};

// Run `i` of a head: the sinks, `pinned` pages, the selected partitions, behind them the tail.
__device__ Run load_run(const BuildListItem& item,
                        uint32_t head,
                        uint32_t page_tokens,
                        uint32_t pinned,
                        uint32_t selected,
                        uint32_t i) {
  if (i == 0) return make_run(0, item.sink_pages * page_tokens);
  if (i <= pinned) {
    const uint64_t at = uint64_t{head} * item.pinned.stride + i - 1;
    return make_run(item.pinned.pages[at], item.pinned.tokens[at]);
  }
  if (i <= pinned + selected) {
    const uint32_t j = item.ids[uint64_t{head} * item.id_stride + i - pinned - 1];
    if (item.pages_per_partition > 0) {
      return make_run(j * item.pages_per_partition, item.pages_per_partition * page_tokens);
    }
    const uint64_t at = head * item.cluster_stride + j;
    return make_run(item.first_pages[at], item.sizes[at]);
  }
  return make_run(item.tail_first_page, static_cast<uint32_t>(item.tail_tokens));
}

// Runs [count], padded to `padded` ones, in ascending order.
__device__ void sort_runs(Run* runs, uint32_t count, uint32_t padded, ListShared& shared) {
  __syncthreads();
  bool falls = false;
  for (uint32_t i = threadIdx.x; i + 1 < count; i += kListThreads) {
    falls = falls || runs[i] > runs[i + 1];
  }
  if (__syncthreads_or(falls) == 0) return;
  if (runs == shared.runs) {
    sort_within(runs, padded, 0, 2, padded);
  } else {
    sort_by_parts(runs, padded, shared.runs, kRunsAtOnce);
  }
}

// places[i]: where the pages of run i go that no earlier run has. Returns how many there are of
// all.
__device__ uint32_t place_runs(
    const Run* runs, uint32_t count, uint32_t page_tokens, uint32_t* places, BlockScan& scan) {
  uint32_t covered = 0;  // pages below are those of earlier runs, where later ones have them too
  uint32_t listed = 0;
  for (uint32_t base = 0; base < count; base += kListThreads) {
    const uint32_t i = base + threadIdx.x;
    const Run run = i < count ? runs[i] : kEmptyRun;
    const uint32_t end = end_page(run, page_tokens);
    const Scanned ends = block_max(end, scan);
    const uint32_t begin = max(first_page(run), max(covered, ends.before));
    const Scanned pages = block_sum(end > begin ? end - begin : 0, scan);
    if (i < count) places[i] = listed + pages.before;
    covered = max(covered, ends.total);
    listed += pages.total;
  }
  __syncthreads();
  return listed;
}

// Writes pages [listed] of the list; returns this thread's tokens.
__device__ uint32_t write_pages(const Run* runs,
                                const uint32_t* places,
                                uint32_t count,
                                uint32_t listed,
                                uint32_t page_tokens,
                                uint32_t* pages,
                                uint8_t* tokens) {
  uint32_t sum = 0;
  for (uint32_t at = threadIdx.x; at < listed; at += kListThreads) {
    uint32_t low = 0;  // the last run that is placed at or before `at`: the others there are empty
    for (uint32_t high = count; high - low > 1;) {
      const uint32_t middle = low + (high - low) / 2;
      if (places[middle] <= at) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const Run run = runs[low];
    const uint32_t next = low + 1 < count ? places[low + 1] : listed;
    const uint32_t page = end_page(run, page_tokens) - (next - at);
    const uint32_t left = run_tokens(run) - (page - first_page(run)) * page_tokens;
    const uint32_t held = min(left, page_tokens);
    pages[at] = page;
    tokens[at] = static_cast<uint8_t>(held);
    sum += held;
  }
  return sum;
}

// Grid (KV heads, items).
__global__ void __launch_bounds__(kListThreads)
    build_lists_kernel(const __grid_constant__ ItemPack<ListUnit> units,
                       uint32_t page_tokens,
                       uint32_t* fault) {
  __shared__ ListShared shared;
  const ListUnit& unit = units[blockIdx.y];
  const BuildListItem& item = unit.item;
  const uint32_t head = blockIdx.x;
  if (threadIdx.x == 0) shared.tokens = 0;
  const uint32_t pinned = item.pinned.counts != nullptr ? item.pinned.counts[head] : 0;
  const uint32_t selected = item.counts != nullptr ? item.counts[head] : 0;
  const uint32_t count = pinned + selected + 2;
  const uint32_t padded = power_of_two(count);
  const bool fits = padded <= kRunsAtOnce;
  Run* const runs = fits ? shared.runs : unit.runs + head * unit.run_stride;
  uint32_t* const places = fits ? shared.places : unit.places + head * unit.run_stride;
  for (uint32_t i = threadIdx.x; i < padded; i += kListThreads) {
    runs[i] = i < count ? load_run(item, head, page_tokens, pinned, selected, i) : kEmptyRun;
  }
  sort_runs(runs, count, padded, shared);
  const uint32_t listed = place_runs(runs, count, page_tokens, places, shared.scan);
  if (listed > item.list.stride) {
    if (threadIdx.x == 0) {
      item.list.counts[head] = 0;  // what follows must not read what is not there
      report_fault(fault, KernelFault::kListTooLong);
    }
    return;
  }
  const uint64_t row = uint64_t{head} * item.list.stride;
  const uint32_t tokens = write_pages(runs, places, count, listed, page_tokens,
                                      item.list.pages + row, item.list.tokens + row);
  const uint32_t of_warp = __reduce_add_sync(kFullMask, tokens);
  if (threadIdx.x % kWarp == 0) atomicAdd(&shared.tokens, of_warp);
  __syncthreads();
  if (threadIdx.x != 0) return;
  item.list.counts[head] = listed;
  if (item.attended != nullptr) item.attended[head] += shared.tokens;
}

uint64_t most_runs(const BuildListItem& item) {
  return 2 + (item.pinned.counts != nullptr ? uint64_t{item.pinned.stride} : 0) +
         (item.counts != nullptr ? uint64_t{item.id_stride} : 0);
}

// Deals out scratch, the same to one pack after the other; returns the bytes that takes.
// memory == nullptr: only counts.
uint64_t place_units(std::span<ListUnit> units, uint32_t kv_heads, std::byte* memory) {
  uint64_t most = 0;
  uint64_t used = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    if (i % ItemPack<ListUnit>::kMost == 0) used = 0;
    ListUnit& unit = units[i];
    const uint64_t runs = std::bit_ceil(most_runs(unit.item));
    if (runs <= kRunsAtOnce) continue;
    unit.run_stride = runs;
    const uint64_t all = runs * kv_heads;  // a multiple of kRunsAtOnce: all parts are aligned
    if (memory != nullptr) {
      unit.runs = reinterpret_cast<Run*>(memory + used);
      unit.places = reinterpret_cast<uint32_t*>(memory + used + all * sizeof(Run));
    }
    used += all * (sizeof(Run) + sizeof(uint32_t));
    most = std::max(most, used);
  }
  return most;
}

// ---- Ranked clusters. The first warp takes 32 candidates after the other from those that all
// threads have looked up; what is refused ends the prefix sum of pages that it is part of, and with
// it goes all behind it that cannot fit either.
// Bytes: ids and what comes of them once, sizes of the candidates.

constexpr uint32_t kSplitThreads = 256;

struct SplitShared {
  uint32_t ids[kSplitThreads];
  uint32_t pages[kSplitThreads];
};

__device__ uint64_t warp_prefix_sum(uint64_t x) {
  for (uint32_t step = 1; step < kWarp; step *= 2) {
    const uint64_t other = __shfl_up_sync(kFullMask, static_cast<unsigned long long>(x), step);
    if (threadIdx.x % kWarp >= step) x += other;
  }
  return x;
}

// Whether this lane's candidate, which takes `pages`, fits beside those before it. `used`: pages
// that are taken, added to.
__device__ bool fits_beside(bool is_candidate, uint32_t pages, uint64_t limit, uint64_t& used) {
  const uint32_t lane = threadIdx.x % kWarp;
  bool fits = is_candidate;
  while (true) {
    const uint64_t through = warp_prefix_sum(fits ? pages : 0);
    const uint32_t beyond = __ballot_sync(kFullMask, fits && used + through > limit);
    if (beyond == 0) {
      used += __shfl_sync(kFullMask, static_cast<unsigned long long>(through), kWarp - 1);
      return fits;
    }
    // Those before the first that does not fit do; the others have at least these beside them.
    const uint32_t first = __ffs(beyond) - 1;
    const uint64_t before =
        used + __shfl_sync(kFullMask, static_cast<unsigned long long>(through - pages), first);
    if (lane >= first && before + pages > limit) fits = false;
  }
}

// Grid (KV heads, items).
__global__ void __launch_bounds__(kSplitThreads)
    split_ranked_kernel(const __grid_constant__ ItemPack<SplitRankedItem> items,
                        uint32_t page_tokens) {
  __shared__ SplitShared shared;
  __shared__ uint32_t exact_count;
  const SplitRankedItem& item = items[blockIdx.y];
  const uint32_t head = blockIdx.x;
  const uint32_t* ids = item.ids + uint64_t{head} * item.id_stride;
  const uint32_t* sizes = item.sizes + head * item.size_stride;
  uint32_t* exact = item.exact + uint64_t{head} * item.exact_stride;
  uint32_t* estimated = item.estimated + uint64_t{head} * item.id_stride;
  const uint32_t count = item.counts[head];
  const uint32_t candidates = min(count, item.most);
  uint32_t taken = 0;  // these two: of the first warp
  uint64_t used = 0;
  for (uint32_t begin = 0; begin < candidates; begin += kSplitThreads) {
    const uint32_t here = min(kSplitThreads, candidates - begin);
    __syncthreads();
    if (threadIdx.x < here) {
      const uint32_t id = ids[begin + threadIdx.x];
      shared.ids[threadIdx.x] = id;
      shared.pages[threadIdx.x] = pages_of(sizes[id], page_tokens);
    }
    __syncthreads();
    if (threadIdx.x >= kWarp) continue;
    for (uint32_t base = 0; base < here; base += kWarp) {
      const uint32_t i = base + threadIdx.x;
      const bool is_candidate = i < here;
      const bool takes =
          fits_beside(is_candidate, is_candidate ? shared.pages[i] : 0, item.page_limit, used);
      const uint32_t lower_lanes = (1u << threadIdx.x) - 1;
      const uint32_t takers = __ballot_sync(kFullMask, takes);
      const uint32_t place = __popc(takers & lower_lanes);
      if (takes) exact[taken + place] = shared.ids[i];
      if (is_candidate && !takes) {
        estimated[begin + base - taken + threadIdx.x - place] = shared.ids[i];
      }
      taken += __popc(takers);
    }
  }
  if (threadIdx.x == 0) exact_count = taken;
  __syncthreads();
  taken = exact_count;
  const uint32_t refused = candidates - taken;
  for (uint32_t i = candidates + threadIdx.x; i < count; i += kSplitThreads) {
    estimated[i - taken] = ids[i];
  }
  if (threadIdx.x != 0) return;
  item.exact_counts[head] = taken;
  item.estimated_counts[head] = count - taken;
  if (item.exact_total != nullptr) item.exact_total[head] += taken;
  if (item.overflows != nullptr) item.overflows[head] += refused;
}

}  // namespace

void CudaSparseOps::enqueue_build_lists(std::span<const BuildListItem> items,
                                        const layout::KvGeometry& geometry,
                                        StreamRef stream_ref) {
  SPIN_CHECK(geometry.page_tokens > 0 && geometry.page_tokens <= UINT8_MAX);
  std::vector<ListUnit> units;
  for (const BuildListItem& item : items) {
    const uint64_t tokens = uint64_t{item.sink_pages} * geometry.page_tokens + item.tail_tokens;
    SPIN_CHECK(tokens <= UINT32_MAX && most_runs(item) <= 1u << 31);
    units.push_back({item});
  }
  CudaStream& stream = cuda_stream(stream_ref);
  const uint32_t kv_heads = geometry.kv_heads;
  if (units.empty() || kv_heads == 0 || !stream.begin()) return;
  if (const uint64_t bytes = place_units(units, kv_heads, nullptr); bytes > 0) {
    auto* const scratch = static_cast<std::byte*>(stream.scratch(bytes));
    if (scratch == nullptr) return;
    place_units(units, kv_heads, scratch);
  }
  const std::span<const ListUnit> all(units);
  launch_packs(all, [&](const ItemPack<ListUnit>& pack, uint32_t count, size_t /*first*/) {
    build_lists_kernel<<<dim3(kv_heads, count), kListThreads, 0, stream.handle()>>>(
        pack, geometry.page_tokens, stream.fault());
    stream.end("build_lists");
  });
}

void CudaSparseOps::enqueue_split_ranked(std::span<const SplitRankedItem> items,
                                         const layout::KvGeometry& geometry,
                                         StreamRef stream_ref) {
  SPIN_CHECK(geometry.page_tokens > 0);
  for (const SplitRankedItem& item : items) SPIN_CHECK(item.exact_stride >= item.most);
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || geometry.kv_heads == 0 || !stream.begin()) return;
  launch_packs(items, [&](const ItemPack<SplitRankedItem>& pack, uint32_t count, size_t /*first*/) {
    split_ranked_kernel<<<dim3(geometry.kv_heads, count), kSplitThreads, 0, stream.handle()>>>(
        pack, geometry.page_tokens);
    stream.end("split_ranked");
  });
}

}  // namespace spin::backend::cuda
