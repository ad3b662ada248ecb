// SPDX-License-Identifier: Apache-2.0
// Placing first decides which entry each page gets (a block per head, tables only), then fills
// pages wherever they go (many at a time, tables read only).
#include <algorithm>

#include "backend/cuda/cuda_kv_ops.h"
#include "backend/cuda/head_tables.cuh"
#include "backend/cuda/kernel_support.cuh"
#include "backend/cuda/page_copy.cuh"

namespace spin::backend::cuda {
namespace {

using layout::HeadPages;
using layout::kNoEntry;
using layout::kNoPage;
using layout::kNoSlot;

// Blocks of all heads together: enough for the bus where pages go to the host, else for the memory.
constexpr uint32_t kHostBlocks = 32;
constexpr uint32_t kFastBlocks = 512;

// An item whose map, a host structure, is taken along.
struct PlaceWork {
  PlaceItem item;
  layout::PageMap map;
};

// One page of a prompt and the tokens of the source that it holds.
struct PlacedPage {
  uint32_t id = 0;
  uint32_t tokens = 0;
  const uint32_t* token_ids = nullptr;  // null: those from first_token on
  uint64_t first_token = 0;
  bool is_tail = false;
};

// The pages of a layer's head by number: in token order, by map, tail.
struct HeadPlan {
  uint64_t ordered = 0;
  uint64_t mapped = 0;
  uint64_t tail = 0;

  __host__ __device__ uint64_t sealed() const { return ordered + mapped; }
  __host__ __device__ uint64_t pages() const { return sealed() + tail; }
};

__host__ __device__ inline HeadPlan plan_of(const PlaceItem& item,
                                            uint64_t mapped,
                                            uint32_t page_tokens) {
  HeadPlan plan;
  plan.ordered = item.tail_first_token / page_tokens;
  if (item.map != nullptr && item.sink_pages < plan.ordered) plan.ordered = item.sink_pages;
  plan.mapped = mapped;
  plan.tail = (uint64_t{item.tail.tokens} + page_tokens - 1) / page_tokens;
  return plan;
}

// More pages than the map has room for are a fault and left out.
__device__ HeadPlan plan_head(const PlaceWork& work,
                              uint32_t h,
                              uint32_t page_tokens,
                              uint32_t* fault) {
  if (work.item.map == nullptr) return plan_of(work.item, 0, page_tokens);
  uint32_t mapped = work.map.counts[h];
  if (mapped >= work.map.page_stride) {
    if (threadIdx.x == 0) report_fault(fault, KernelFault::kTooManyPages);
    mapped = work.map.page_stride - 1;
  }
  return plan_of(work.item, mapped, page_tokens);
}

// Ids of pages outside the tail, ascending.
__device__ uint32_t sealed_id(const PlaceItem& item, const HeadPlan& plan, uint64_t i) {
  return static_cast<uint32_t>(i < plan.ordered ? i : item.first_mapped_page + (i - plan.ordered));
}

// ---- Tables.

// Who is in which pinned entry, by the number of the entry's turn.
struct Zones {
  uint32_t sinks = 0;
  uint32_t pinned = 0;
  uint32_t tail = 0;

  __device__ uint32_t count() const { return sinks + pinned + tail; }
};

__device__ uint32_t zone_entry(const PlaceItem& item,
                               const HeadPages& head,
                               const Zones& zones,
                               uint32_t i) {
  if (i < zones.sinks) return i;
  if (i < zones.sinks + zones.pinned) return item.zone_first_entry + (i - zones.sinks);
  return layout::tail_entry(head, item.tail, i - zones.sinks - zones.pinned);
}

__device__ uint32_t zone_page(const PlaceItem& item,
                              const uint32_t* pinned,
                              const Zones& zones,
                              uint32_t i) {
  if (i < zones.sinks) return i;
  if (i < zones.sinks + zones.pinned) return pinned[i - zones.sinks];
  return item.tail.first_page + (i - zones.sinks - zones.pinned);
}

// Whether a page has a pinned entry. `pinned`: ascending.
__device__ bool is_in_zones(const PlaceItem& item,
                            const uint32_t* pinned,
                            const Zones& zones,
                            uint32_t id) {
  if (id < zones.sinks) return true;
  if (id >= item.tail.first_page && id - item.tail.first_page < zones.tail) return true;
  uint32_t first = 0;
  uint32_t end = zones.pinned;
  while (first < end) {
    const uint32_t middle = first + (end - first) / 2;
    if (pinned[middle] < id) {
      first = middle + 1;
    } else {
      end = middle;
    }
  }
  return first < zones.pinned && pinned[first] == id;
}

// Fills the cache's entries from the last one down with the newest pages that have no other entry.
// Returns their number.
__device__ uint32_t fill_cache(const PlaceItem& item,
                               const HeadPages& head,
                               const HeadPlan& plan,
                               const Zones& zones,
                               const uint32_t* pinned,
                               RankRoom& ranks) {
  const uint32_t room = head.lease_pages - head.pinned_entries;
  uint32_t cached = 0;
  for (uint64_t done = 0; done < plan.sealed() && cached < room; done += kHeadThreads) {
    const uint64_t back = done + threadIdx.x;
    uint32_t id = kNoPage;
    if (back < plan.sealed()) id = sealed_id(item, plan, plan.sealed() - 1 - back);
    const bool is_wanted = id != kNoPage && !is_in_zones(item, pinned, zones, id);
    uint32_t total = 0;
    const uint32_t at = cached + block_rank(is_wanted, ranks, total);
    if (is_wanted && at < room) head.pages[head.lease_pages - 1 - at] = id;
    cached += total;
  }
  return min(cached, room);
}

// Block h: the entries of head h, if it is tiered: zones and tail where the host wants them, the
// cache filled with the newest of the other pages. Bytes: 13 for each entry of the lease, once or
// twice written.
__global__ void __launch_bounds__(kHeadThreads)
    place_tables_kernel(const __grid_constant__ PlaceWork work,
                        uint32_t page_tokens,
                        uint32_t* fault) {
  __shared__ RankRoom ranks;
  const PlaceItem& item = work.item;
  const uint32_t h = blockIdx.x;
  const HeadPages head = item.heads[h];
  if (head.is_flat()) return;
  const HeadPlan plan = plan_head(work, h, page_tokens, fault);
  const uint32_t* pinned = nullptr;
  Zones zones;
  zones.sinks = static_cast<uint32_t>(min(uint64_t{item.sink_pages}, plan.ordered));
  if (item.pinned.counts != nullptr) {
    pinned = item.pinned.pages + uint64_t{h} * item.pinned.stride;
    zones.pinned = item.pinned.counts[h];
  }
  zones.tail = static_cast<uint32_t>(plan.tail);
  for (uint32_t i = threadIdx.x; i < head.lease_pages; i += kHeadThreads) {
    head.pages[i] = kNoPage;
    head.stamps[i] = layout::unused_stamp(item.epoch);
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < zones.count(); i += kHeadThreads) {
    const uint32_t entry = zone_entry(item, head, zones, i);
    if (entry < head.lease_pages) {
      head.pages[entry] = zone_page(item, pinned, zones, i);
    } else {
      report_fault(fault, KernelFault::kTooManyPages);
    }
  }
  const uint32_t cached = fill_cache(item, head, plan, zones, pinned, ranks);
  __syncthreads();
  block_build_table(head, zones.count() + cached, [&](uint32_t key) {
    if (key >= zones.count()) return head.lease_pages - 1 - (key - zones.count());
    const uint32_t entry = zone_entry(item, head, zones, key);
    return entry < head.lease_pages ? entry : kNoEntry;
  });
  if (threadIdx.x == 0) item.heads[h].swept_epoch = item.epoch;
}

// ---- Pages.

__device__ PlacedPage placed_page(
    const PlaceWork& work, const HeadPlan& plan, uint32_t h, uint32_t page_tokens, uint64_t i) {
  const PlaceItem& item = work.item;
  PlacedPage page;
  page.tokens = page_tokens;
  if (i >= plan.sealed()) {
    const auto t = static_cast<uint32_t>(i - plan.sealed());
    page.id = item.tail.first_page + t;
    page.first_token = item.tail_first_token + uint64_t{t} * page_tokens;
    page.tokens = min(page_tokens, item.tail.tokens - t * page_tokens);
    page.is_tail = true;
    return page;
  }
  page.id = sealed_id(item, plan, i);
  page.first_token = i * page_tokens;
  if (i < plan.ordered) return page;
  const uint32_t* starts =
      work.map.starts + uint64_t{h} * work.map.page_stride + (i - plan.ordered);
  page.tokens = min(starts[1] - starts[0], page_tokens);
  page.token_ids = work.map.token_ids + h * work.map.token_stride + starts[0];
  return page;
}

// Slot of a page after place_tables_kernel; kNoSlot: it is not resident.
__device__ uint32_t placed_slot(const HeadPages& head, uint32_t id) {
  if (head.is_flat()) return id < head.lease_pages ? head.slots[id] : kNoSlot;
  const uint32_t entry = layout::find_entry(head, id);
  return entry == kNoEntry ? kNoSlot : head.slots[entry];
}

// Fills a page in the tiers it belongs to.
__device__ void place_page(const PlaceItem& item,
                           const TieredPoolRef& pool,
                           const HeadPages& head,
                           const PlacedPage& page,
                           uint32_t h,
                           uint32_t* fault) {
  if (page.tokens == 0) return;
  const uint32_t slot = placed_slot(head, page.id);
  const bool goes_to_host = item.write_host && !page.is_tail;
  const HostPage host = goes_to_host ? host_page(head, pool.host, page.id) : HostPage{};
  const bool needs_slot = !goes_to_host || head.is_flat();
  if ((needs_slot && slot == kNoSlot) || (goes_to_host && !host)) {
    if (lane_index() == 0) report_fault(fault, KernelFault::kTooManyPages);
  }
  const layout::PagedTokens& source = item.source;
  const auto row_of = [&](uint32_t r) {
    return source.key(h, page.token_ids != nullptr ? page.token_ids[r] : page.first_token + r);
  };
  std::byte* const to = slot != kNoSlot ? slot_address(pool.fast, slot) : nullptr;
  if (host) begin_host_page(host);
  warp_copy_rows(page.tokens, source.geometry.plane_bytes(), pool.fast.geometry, row_of, to,
                 host.bytes);
  if (host) end_host_page(host, head.owner, page.id, page.tokens);
}

// Blocks (i, h) share the pages of head h, a warp per page. Bytes: the prompt's keys and values
// once read, once written over the bus if the host gets them, and what is resident once written.
__global__ void __launch_bounds__(kHeadThreads)
    place_pages_kernel(const __grid_constant__ PlaceWork work,
                       const TieredPoolRef pool,
                       uint32_t* fault) {
  const uint32_t h = blockIdx.y;
  const uint32_t page_tokens = pool.fast.geometry.page_tokens;
  const HeadPages head = work.item.heads[h];
  const HeadPlan plan = plan_head(work, h, page_tokens, fault);
  const uint64_t step = uint64_t{gridDim.x} * kHeadWarps;
  for (uint64_t i = uint64_t{warp_index()} * gridDim.x + blockIdx.x; i < plan.pages(); i += step) {
    place_page(work.item, pool, head, placed_page(work, plan, h, page_tokens, i), h, fault);
  }
}

}  // namespace

void CudaKvOps::enqueue_place(const PlaceItem& item,
                              const TieredPoolRef& pool,
                              StreamRef stream_ref) {
  const layout::KvGeometry& from = item.source.geometry;
  const layout::KvGeometry& to = pool.fast.geometry;
  check_pages(to);
  SPIN_CHECK(from.head_dim == to.head_dim && from.dtype == to.dtype);
  SPIN_CHECK(from.kv_heads == to.kv_heads);
  SPIN_CHECK(item.tail_first_token % to.page_tokens == 0);
  SPIN_CHECK(item.tail_first_token + item.tail.tokens <= item.source.tokens);
  SPIN_CHECK(item.map == nullptr || item.map->page_stride > 0);
  CudaStream& stream = cuda_stream(stream_ref);
  if (!stream.begin()) return;
  PlaceWork work{item, {}};
  if (item.map != nullptr) work.map = *item.map;
  place_tables_kernel<<<to.kv_heads, kHeadThreads, 0, stream.handle()>>>(work, to.page_tokens,
                                                                         stream.fault());
  stream.end("place's tables");
  // Of a head, at most.
  const uint64_t pages = plan_of(item, work.map.page_stride, to.page_tokens).pages();
  if (pages == 0) return;
  const uint32_t most = (item.write_host ? kHostBlocks : kFastBlocks) / to.kv_heads;
  const uint64_t blocks = std::min<uint64_t>(std::max(1u, most), (pages - 1) / kHeadWarps + 1);
  place_pages_kernel<<<dim3(static_cast<unsigned>(blocks), to.kv_heads), kHeadThreads, 0,
                       stream.handle()>>>(work, pool, stream.fault());
  stream.end("place's pages");
}

}  // namespace spin::backend::cuda
