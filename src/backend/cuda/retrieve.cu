// SPDX-License-Identifier: Apache-2.0
// Retrieve in two kernels (the first once more for every 26 sequences):
//
//   tables   a block per head: stamps what is resident, chooses a victim for each missing page,
//            checks its host tag, writes slots and a list of copies
//   gather   a few blocks copy what is on the lists; beside them, a block per head gives the
//            victims' entries to the new pages: only the next operation looks these up
//
// Few blocks, because 8 of 512 threads saturate the bus (51 GB/s on an H200) and more of them slow
// down what runs beside them.
#include <vector>

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

constexpr uint32_t kGatherBlocks = 8;
constexpr uint32_t kGatherWarps = kGatherBlocks * kHeadWarps;

// One page to bring to a slot; zeros when `from` is null.
struct alignas(16) Copy {
  const std::byte* from = nullptr;
  uint32_t slot = 0;
  uint32_t keyless = 0;  // 1: only the values
};

// What the tables of one head leave to do: `misses` places of the lists from `first` on.
struct HeadWork {
  HeadPages* head = nullptr;
  uint64_t first = 0;
  uint32_t misses = 0;
};

struct GatherClock {
  unsigned long long begin_ns = 0;
  uint32_t blocks_done = 0;
};

// In scratch. A head of an item has room for as many pages as its list may have.
struct Lists {
  GatherClock* clock = nullptr;
  HeadWork* heads = nullptr;                      // [items * kv_heads]
  layout::RetrieveCounters** counters = nullptr;  // [items]
  Copy* copies = nullptr;                         // of each missing page
  uint32_t* victims = nullptr;                    // its entry
  uint32_t* pages = nullptr;   // its position in the wanted list, then what its entry will hold
  uint32_t* ghosts = nullptr;  // room to move ghosts in
};

// An item with its places in scratch.
struct TableItem {
  RetrieveItem item;
  uint64_t first = 0;        // of head 0 in the lists
  uint64_t first_ghost = 0;  // of head 0 in Lists::ghosts
};

// What one head of an item works on.
struct HeadCall {
  HeadPages* stored = nullptr;
  const uint32_t* pages = nullptr;  // [count]
  const uint8_t* tokens = nullptr;  // [count]
  uint32_t count = 0;
  uint32_t* slots = nullptr;    // out [count]
  uint32_t* fetched = nullptr;  // out [count], positions; or null
  layout::RetrieveCounters* counters = nullptr;
  uint32_t h = 0;
  uint32_t keyless_end = 0;  // pages with lower ids come without keys
  uint8_t epoch = 0;
  // In scratch.
  Copy* copies = nullptr;
  uint32_t* missing = nullptr;
  uint32_t* victims = nullptr;
};

struct TableRoom {
  RankRoom ranks;
  VictimRoom victims;
  ReuseRoom reuse;
  uint32_t evictions;
  uint32_t whole_pages;
  uint32_t keyless_pages;
  uint32_t faults;
};

struct Outcome {
  uint32_t hits = 0;
  uint32_t misses = 0;  // to be copied
  uint32_t fetched = 0;
};

__device__ HeadCall head_call(const TableItem& work, const Lists& lists, uint32_t* fault) {
  const RetrieveItem& item = work.item;
  const uint32_t h = blockIdx.x;
  const uint64_t at = uint64_t{h} * item.wanted.stride;
  HeadCall call;
  call.stored = item.heads + h;
  call.pages = item.wanted.pages + at;
  call.tokens = item.wanted.tokens + at;
  call.count = item.wanted.counts[h];
  if (call.count > item.wanted.stride) {
    if (threadIdx.x == 0) report_fault(fault, KernelFault::kListTooLong);
    call.count = item.wanted.stride;
  }
  call.slots = item.slots + at;
  call.fetched = item.fetched != nullptr ? item.fetched + at : nullptr;
  call.counters = item.counters + h;
  call.h = h;
  call.keyless_end = item.planes == layout::Planes::kValuesOnly ? item.planes_end : 0;
  call.epoch = item.epoch;
  call.copies = lists.copies + work.first + at;
  call.missing = lists.pages + work.first + at;
  call.victims = lists.victims + work.first + at;
  return call;
}

// Every page has its slot; a page without one is lost, and attention passes it over.
__device__ Outcome find_flat(const HeadCall& call, const HeadPages& head, TableRoom& room) {
  uint32_t lost = 0;
  for (uint32_t i = threadIdx.x; i < call.count; i += kHeadThreads) {
    const uint32_t page = call.pages[i];
    const uint32_t slot = page < head.lease_pages ? head.slots[page] : kNoSlot;
    call.slots[i] = slot;
    lost += slot == kNoSlot ? 1 : 0;
  }
  uint32_t faults = 0;
  (void)block_rank(lost, room.ranks, faults);
  if (threadIdx.x == 0) room.faults = faults;
  Outcome outcome;
  outcome.hits = call.count - faults;
  return outcome;
}

// Finds and stamps resident pages, lists the others in order and returns their number. With
// `is_turn` counts the cached ones by their ages, which their stamps still tell.
__device__ uint32_t look_up(const HeadCall& call,
                            const HeadPages& head,
                            bool is_turn,
                            TableRoom& room) {
  uint32_t misses = 0;
  for (uint32_t first = 0; first < call.count; first += kHeadThreads) {
    const uint32_t i = first + threadIdx.x;
    const uint32_t entry = i < call.count ? layout::find_entry(head, call.pages[i]) : kNoEntry;
    const bool is_missing = i < call.count && entry == kNoEntry;
    if (entry != kNoEntry) {
      if (is_turn && entry >= head.pinned_entries) {
        const uint32_t age = layout::age_of(call.epoch, head.stamps[entry]);
        atomicAdd(&room.reuse.hits[layout::age_bucket(age)], 1u);
      }
      head.stamps[entry] = call.epoch;
      call.slots[i] = head.slots[entry];
    }
    uint32_t total = 0;
    const uint32_t rank = block_rank(is_missing, room.ranks, total);
    if (is_missing) call.missing[misses + rank] = i;
    misses += total;
  }
  __syncthreads();
  return misses;
}

// How page `page` of `tokens` tokens comes to a slot.
__device__ Copy copy_of(const HeadCall& call,
                        const HeadPages& head,
                        const layout::HostExtentLayout& host,
                        uint32_t page,
                        uint32_t tokens,
                        uint32_t slot) {
  Copy copy;
  copy.slot = slot;
  const HostPage from = host_page(head, host, page);
  if (!from) return copy;
  const layout::HostPageTag tag = load_tag(from);
  if (tag.page != page || tag.owner != head.owner || tag.tokens != tokens) return copy;
  copy.from = from.bytes;
  copy.keyless = page < call.keyless_end ? 1 : 0;
  return copy;
}

__device__ void add_to_room(uint32_t& sum, bool is_one) {
  const uint32_t ones = __ballot_sync(kFullMask, is_one);
  if (lane_index() == 0 && ones != 0) atomicAdd(&sum, static_cast<uint32_t>(__popc(ones)));
}

// Gives the missing pages the victims' slots; the entries follow in the other kernel. Returns the
// number of `fetched`.
__device__ uint32_t replace_victims(const HeadCall& call,
                                    const HeadPages& head,
                                    const TieredPoolRef& pool,
                                    uint32_t misses,
                                    TableRoom& room) {
  uint32_t fetched = 0;
  for (uint32_t first = 0; first < misses; first += kHeadThreads) {
    const uint32_t m = first + threadIdx.x;
    const bool is_mine = m < misses;
    bool was_full = false;
    uint32_t i = 0;
    Copy copy;
    if (is_mine) {
      i = call.missing[m];
      const uint32_t page = call.pages[i];
      const uint32_t entry = call.victims[m];
      was_full = head.pages[entry] != kNoPage;
      copy = copy_of(call, head, pool.host, page, call.tokens[i], head.slots[entry]);
      call.slots[i] = copy.slot;
      head.stamps[entry] = call.epoch;
      call.copies[m] = copy;
      // What is not the page is not found again either.
      call.missing[m] = copy.from != nullptr ? page : kNoPage;
    }
    const bool is_good = copy.from != nullptr;
    add_to_room(room.evictions, was_full);
    add_to_room(room.whole_pages, is_good && copy.keyless == 0);
    add_to_room(room.keyless_pages, is_good && copy.keyless != 0);
    add_to_room(room.faults, is_mine && !is_good);
    if (call.fetched == nullptr) continue;
    const bool is_listed = is_good && (call.keyless_end == 0 || copy.keyless != 0);
    uint32_t total = 0;
    const uint32_t rank = block_rank(is_listed, room.ranks, total);
    if (is_listed) call.fetched[fetched + rank] = i;
    fetched += total;
  }
  __syncthreads();
  return fetched;
}

// The counters of a head that this kernel adds to, by number, and what it adds.
constexpr uint32_t kCounters = 5;

__device__ uint64_t* counter_of(layout::RetrieveCounters& counters, uint32_t i) {
  switch (i) {
    case 0:
      return &counters.hits;
    case 1:
      return &counters.misses;
    case 2:
      return &counters.evictions;
    case 3:
      return &counters.bytes;
    default:
      return &counters.faults;
  }
}

__device__ uint64_t count_of(const Outcome& outcome,
                             const TableRoom& room,
                             const layout::KvGeometry& geometry,
                             uint32_t i) {
  switch (i) {
    case 0:
      return outcome.hits;
    case 1:
      return outcome.misses;
    case 2:
      return room.evictions;
    case 3:
      return room.whole_pages * geometry.page_bytes() + room.keyless_pages * geometry.plane_bytes();
    default:
      return room.faults;
  }
}

__device__ Outcome update_head(const HeadCall& call,
                               const HeadPages& head,
                               const TieredPoolRef& pool,
                               const layout::ReuseProbe& reuse,
                               uint32_t* ghost_room,
                               TableRoom& room,
                               uint32_t* fault) {
  block_sweep_if_due(head, call.stored, call.epoch);
  const bool measures = reuse.counters != nullptr;
  const bool is_turn = measures && layout::is_turn(reuse.first_head + call.h, call.epoch);
  if (is_turn) {
    block_clear_hits(room.reuse);
    block_count_ages(head, call.epoch, room.victims);
  }
  const uint32_t misses = look_up(call, head, is_turn, room);
  if (is_turn) {
    block_count_turn(head, misses, reuse.mandatory, room.victims, room.reuse,
                     reuse.counters[call.h]);
  }
  Outcome outcome;
  outcome.hits = call.count - misses;
  if (misses == 0) return outcome;
  if (block_choose_victims(head, call.epoch, misses, call.victims, room.victims, room.ranks) <
      misses) {
    if (threadIdx.x == 0) report_fault(fault, KernelFault::kCacheTooSmall);
    for (uint32_t m = threadIdx.x; m < misses; m += kHeadThreads) {
      call.slots[call.missing[m]] = kNoSlot;
    }
    return outcome;
  }
  uint32_t* ghosts = measures ? layout::ghosts_of(reuse, call.h) : nullptr;
  if (ghosts != nullptr) {
    block_count_ghosts(head, call.pages, call.missing, misses, reuse, ghosts, room.victims,
                       room.reuse, reuse.counters[call.h]);
    block_give_up(head, call.victims, misses, ghosts, reuse.ghost_pages, ghost_room, room.ranks);
  }
  outcome.misses = misses;
  outcome.fetched = replace_victims(call, head, pool, misses, room);
  return outcome;
}

// Block (h, i): head h of item i. Bytes: for each wanted page two to three words of the table and
// its neighbours, once 5 bytes for each cache entry if a page is missing, 16 bytes over the bus for
// each missing page (its tag) and its 24 in the lists.
__global__ void __launch_bounds__(kHeadThreads, 2)  // so many registers that none are spilled
    retrieve_tables_kernel(const __grid_constant__ ItemPack<TableItem> items,
                           const TieredPoolRef pool,
                           const Lists lists,
                           uint32_t first_item,
                           uint32_t* fault) {
  __shared__ TableRoom room;
  const TableItem& work = items[blockIdx.y];
  const uint32_t item_index = first_item + blockIdx.y;
  const HeadCall call = head_call(work, lists, fault);
  const HeadPages head = *call.stored;
  // One thread each; over the bus, so that they had better be under way early.
  uint64_t* const counter = counter_of(*call.counters, threadIdx.x);
  const uint64_t counted = threadIdx.x < kCounters ? *counter : 0;
  if (threadIdx.x == 0) {
    room.evictions = room.whole_pages = room.keyless_pages = room.faults = 0;
    if (item_index == 0 && call.h == 0) *lists.clock = {~0ull, 0};
    if (call.h == 0) lists.counters[item_index] = work.item.counters;
  }
  Outcome outcome;
  __syncthreads();
  if (head.is_flat()) {
    outcome = find_flat(call, head, room);
  } else {
    uint32_t* ghost_room = lists.ghosts + work.first_ghost + ghost_words(work.item.reuse, call.h);
    outcome = update_head(call, head, pool, work.item.reuse, ghost_room, room, fault);
  }
  __syncthreads();
  if (threadIdx.x < kCounters) {
    *counter = counted + count_of(outcome, room, pool.fast.geometry, threadIdx.x);
  }
  if (threadIdx.x > 0) return;
  lists.heads[uint64_t{item_index} * gridDim.x + call.h] = {
      call.stored, work.first + uint64_t{call.h} * work.item.wanted.stride, outcome.misses};
  if (work.item.fetched_counts != nullptr) work.item.fetched_counts[call.h] = outcome.fetched;
}

// ---- The second kernel.

__device__ unsigned long long now_ns() {
  unsigned long long now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Heads whose copies are dealt out together; one per thread.
struct Tile {
  uint64_t first[kHeadThreads];  // of the head's copies in the lists
  uint32_t ends[kHeadThreads];   // copies of the heads up to it, itself included
};
static_assert(sizeof(Tile) <= kStageBytes);

__device__ Copy find_copy(const Tile& tile, const Copy* copies, uint32_t c) {
  uint32_t head = 0;  // the first whose end lies behind c
  for (uint32_t step = kHeadThreads / 2; step > 0; step /= 2) {
    if (tile.ends[head + step - 1] <= c) head += step;
  }
  const uint32_t before = head > 0 ? tile.ends[head - 1] : 0;
  return copies[tile.first[head] + (c - before)];
}

__device__ void copy_in(const Copy& copy, const KvPoolRef& pool) {
  const layout::KvGeometry& geometry = pool.geometry;
  std::byte* const to = slot_address(pool, copy.slot);
  const uint64_t skipped = copy.keyless != 0 ? geometry.plane_bytes() : 0;
  if (copy.from == nullptr) {
    warp_zero(to, geometry.page_bytes());
  } else {
    warp_copy(to + skipped, copy.from + skipped, geometry.page_bytes() - skipped);
  }
}

// All copies of all heads, a warp per page. Returns their number.
__device__ uint64_t
gather(const Lists& lists, const KvPoolRef& pool, uint64_t heads, Tile& tile, RankRoom& ranks) {
  // Neighbours on the lists go to different blocks: a few copies use all of them.
  const uint32_t warp = warp_index() * kGatherBlocks + blockIdx.x;
  uint64_t all = 0;
  for (uint64_t first = 0; first < heads; first += kHeadThreads) {
    HeadWork work;
    if (first + threadIdx.x < heads) work = lists.heads[first + threadIdx.x];
    uint32_t total = 0;
    const uint32_t rank = block_rank(work.misses, ranks, total);
    tile.first[threadIdx.x] = work.first;
    tile.ends[threadIdx.x] = rank + work.misses;
    __syncthreads();
    Copy next;
    if (warp < total) next = find_copy(tile, lists.copies, warp);
    for (uint32_t c = warp; c < total; c += kGatherWarps) {
      const Copy copy = next;
      if (c + kGatherWarps < total) next = find_copy(tile, lists.copies, c + kGatherWarps);
      copy_in(copy, pool);
    }
    all += total;
    __syncthreads();
  }
  return all;
}

// The step waits for all copies: each item's share by what it fetched.
__device__ void add_stalls(
    const Lists& lists, uint32_t items, uint32_t kv_heads, uint64_t stall_ns, uint64_t all) {
  for (uint32_t i = threadIdx.x; i < items; i += kHeadThreads) {
    uint64_t share = 0;
    for (uint32_t h = 0; h < kv_heads; ++h) {
      share += stall_ns * lists.heads[uint64_t{i} * kv_heads + h].misses / all;
    }
    if (share > 0) lists.counters[i]->stall_ns += share;
  }
}

// The entries of a head's victims change hands, in order: the table depends on it.
__device__ void replace_entries(const Lists& lists, const HeadWork& work, uint32_t* stage) {
  if (work.misses == 0) return;
  const HeadPages head = *work.head;
  HeadPages staged = stage_tables(head, stage);
  if (warp_index() == 0) {
    for (uint32_t first = 0; first < work.misses; first += kWarp) {
      const uint64_t at = work.first + first + lane_index();
      const uint32_t count = min(kWarp, work.misses - first);
      const uint32_t entry = lane_index() < count ? lists.victims[at] : 0;
      const uint32_t page = lane_index() < count ? lists.pages[at] : 0;
      for (uint32_t k = 0; k < count; ++k) {
        const uint32_t entry_k = __shfl_sync(kFullMask, entry, k);
        const uint32_t page_k = __shfl_sync(kFullMask, page, k);
        if (lane_index() == 0) layout::set_entry(staged, entry_k, page_k);
      }
    }
  }
  unstage_tables(staged, head);
}

// Blocks [0, kGatherBlocks) gather, the others have a head each. Bytes: each missing page once over
// the bus and once into its slot (4 KiB at 51 GB/s: 80 ns); 12 bytes for each entry of a lease that
// has a miss, twice. The stall is the time from the first gathering block's begin to the last one's
// end: what the stream waited for besides look-ups.
__global__ void __launch_bounds__(kHeadThreads) retrieve_gather_kernel(const Lists lists,
                                                                       const KvPoolRef pool,
                                                                       uint32_t items,
                                                                       uint32_t kv_heads) {
  extern __shared__ uint64_t shared[];  // a Tile, or a table
  __shared__ RankRoom ranks;
  __shared__ uint64_t stall_ns;
  if (blockIdx.x >= kGatherBlocks) {
    replace_entries(lists, lists.heads[blockIdx.x - kGatherBlocks],
                    reinterpret_cast<uint32_t*>(shared));
    return;
  }
  if (threadIdx.x == 0) atomicMin(&lists.clock->begin_ns, now_ns());
  const uint64_t all =
      gather(lists, pool, uint64_t{items} * kv_heads, *reinterpret_cast<Tile*>(shared), ranks);
  if (all == 0) return;
  if (threadIdx.x == 0) {
    __threadfence();
    stall_ns = 0;
    if (atomicAdd(&lists.clock->blocks_done, 1u) == kGatherBlocks - 1) {
      // At least 1: it is the mark of the last block.
      stall_ns = max(now_ns() - atomicMin(&lists.clock->begin_ns, ~0ull), 1ull);
    }
  }
  __syncthreads();
  if (stall_ns > 0) add_stalls(lists, items, kv_heads, stall_ns, all);
}

struct Scratch {
  std::vector<TableItem> items;
  uint64_t clock = 0;  // offsets of the parts of Lists
  uint64_t heads = 0;
  uint64_t counters = 0;
  uint64_t copies = 0;
  uint64_t victims = 0;
  uint64_t pages = 0;
  uint64_t ghosts = 0;
  uint64_t bytes = 0;
};

Scratch plan_scratch(std::span<const RetrieveItem> items, uint32_t kv_heads) {
  Scratch scratch;
  uint64_t pages = 0;
  uint64_t ghosts = 0;
  scratch.items.reserve(items.size());
  for (const RetrieveItem& item : items) {
    scratch.items.push_back({item, pages, ghosts});
    pages += uint64_t{kv_heads} * item.wanted.stride;
    ghosts += ghost_words(item.reuse, kv_heads);
  }
  ScratchPlan plan;
  scratch.clock = plan.add(sizeof(GatherClock));
  scratch.heads = plan.add(items.size() * kv_heads * sizeof(HeadWork));
  scratch.counters = plan.add(items.size() * sizeof(layout::RetrieveCounters*));
  scratch.copies = plan.add(pages * sizeof(Copy));
  scratch.victims = plan.add(pages * sizeof(uint32_t));
  scratch.pages = plan.add(pages * sizeof(uint32_t));
  scratch.ghosts = plan.add(ghosts * sizeof(uint32_t));
  scratch.bytes = plan.bytes();
  return scratch;
}

Lists lists_in(const Scratch& scratch, std::byte* memory) {
  Lists lists;
  lists.clock = reinterpret_cast<GatherClock*>(memory + scratch.clock);
  lists.heads = reinterpret_cast<HeadWork*>(memory + scratch.heads);
  lists.counters = reinterpret_cast<layout::RetrieveCounters**>(memory + scratch.counters);
  lists.copies = reinterpret_cast<Copy*>(memory + scratch.copies);
  lists.victims = reinterpret_cast<uint32_t*>(memory + scratch.victims);
  lists.pages = reinterpret_cast<uint32_t*>(memory + scratch.pages);
  lists.ghosts = reinterpret_cast<uint32_t*>(memory + scratch.ghosts);
  return lists;
}

}  // namespace

void CudaKvOps::enqueue_retrieve(std::span<const RetrieveItem> items,
                                 const TieredPoolRef& pool,
                                 StreamRef stream_ref) {
  check_pages(pool.fast.geometry);
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || !stream.begin()) return;
  const uint32_t kv_heads = pool.fast.geometry.kv_heads;
  const Scratch scratch = plan_scratch(items, kv_heads);
  auto* const memory = static_cast<std::byte*>(stream.scratch(scratch.bytes));
  if (memory == nullptr) return;
  const Lists lists = lists_in(scratch, memory);
  launch_packs(std::span<const TableItem>(scratch.items), [&](const ItemPack<TableItem>& pack,
                                                              uint32_t count, size_t first) {
    retrieve_tables_kernel<<<dim3(kv_heads, count), kHeadThreads, 0, stream.handle()>>>(
        pack, pool, lists, static_cast<uint32_t>(first), stream.fault());
    stream.end("retrieve's tables");
  });
  const auto heads = static_cast<uint32_t>(items.size() * kv_heads);
  retrieve_gather_kernel<<<kGatherBlocks + heads, kHeadThreads, kStageBytes, stream.handle()>>>(
      lists, pool.fast, static_cast<uint32_t>(items.size()), kv_heads);
  stream.end("retrieve's gather");
}

}  // namespace spin::backend::cuda
