// SPDX-License-Identifier: Apache-2.0
// Not part of a step: a block per head does it all. Nothing is copied but pages that come from the
// host into a flat form: slots change hands. Lists are never stored: what a lease leaves free comes
// out of FreeSlots in order, as many at a time as there are threads.
#include "backend/cuda/cuda_kv_ops.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/head_tables.cuh"
#include "backend/cuda/kernel_support.cuh"
#include "backend/cuda/page_copy.cuh"

namespace spin::backend::cuda {
namespace {

using layout::HeadPages;
using layout::kNoEntry;
using layout::kNoPage;
using layout::kNoSlot;

// Entries of `before` that the marks below have bits for: a head of 2 million tokens in pages of 8.
constexpr uint32_t kMostEntries = 1 << 18;
constexpr uint32_t kMarkWords = kMostEntries / 32;
constexpr uint32_t kMarkBytes = 2 * kMarkWords * sizeof(uint32_t);
constexpr uint32_t kQueue = 2 * kHeadThreads;

struct ResizeRoom {
  RankRoom ranks;
  VictimRoom victims;  // its buckets are those of ages, plus 1
  uint32_t queue[kQueue];
  const std::byte* from[kHeadThreads];
  uint32_t to[kHeadThreads];
};

// What a block works on.
struct HeadResize {
  const ResizeItem& item;
  const TieredPoolRef& pool;
  const HeadPages before;
  const HeadPages after;
  const uint32_t h;
  // Bits of entries of `before`, in shared memory.
  uint32_t* const kept;     // `after` has their slots
  uint32_t* const dropped;  // pages that leave; before that is known: that may go to the cache
  ResizeRoom& room;
};

__device__ bool is_marked(const uint32_t* marks, uint32_t entry) {
  return (marks[entry / 32] >> (entry % 32) & 1) != 0;
}

__device__ void mark(uint32_t* marks, uint32_t entry) {
  atomicOr(&marks[entry / 32], 1u << (entry % 32));
}

// The marks of the warp's 32 entries, of which this thread's is one.
__device__ void set_marks(uint32_t* marks, uint32_t entry, bool is_set) {
  const uint32_t word = __ballot_sync(kFullMask, is_set);
  if (lane_index() == 0) marks[entry / 32] = word;
}

// Bucket of an entry's age, plus 1; flat ones have no age.
__device__ uint32_t bucket_of(const HeadResize& call, uint32_t entry) {
  if (call.before.is_flat()) return 1;
  return 1 + layout::age_bucket(layout::age_of(call.item.epoch, call.before.stamps[entry]));
}

// ---- Slots that nothing was kept in: empty ones, new ones, those of dropped pages from the oldest
// on. All threads call the members.

class FreeSlots {
 public:
  __device__ explicit FreeSlots(const HeadResize& call) : call_(call) {}

  // The next slots for the threads that want one, in the threads' order; kNoSlot if none is left.
  __device__ uint32_t take(bool wants) {
    ResizeRoom& room = call_.room;
    uint32_t total = 0;
    const uint32_t rank = block_rank(wants, room.ranks, total);
    while (count_ < total && stage_ != kEnd) refill();
    const uint32_t slot = wants && rank < count_ ? room.queue[(next_ + rank) % kQueue] : kNoSlot;
    __syncthreads();
    const uint32_t taken = min(total, count_);
    next_ += taken;
    count_ -= taken;
    return slot;
  }

 private:
  static constexpr uint32_t kUnused = 0;  // then from 1 on: new ones, dropped ones by bucket
  static constexpr uint32_t kExtra = 1;
  static constexpr uint32_t kDropped = 2;
  static constexpr uint32_t kEnd = kDropped + layout::kEmptyBucket;

  __device__ uint32_t stage_size() const {
    return stage_ == kExtra ? call_.item.extra_count : call_.before.lease_pages;
  }

  // Position i of the stage; kNoSlot: nothing.
  __device__ uint32_t candidate(uint32_t i) const {
    const HeadPages& before = call_.before;
    if (stage_ == kUnused) {
      return is_marked(call_.kept, i) || is_marked(call_.dropped, i) ? kNoSlot : before.slots[i];
    }
    if (stage_ == kExtra) {
      return call_.item.extra[uint64_t{call_.h} * call_.item.extra_count + i];
    }
    const bool is_turn = is_marked(call_.dropped, i) &&
                         bucket_of(call_, i) == layout::kEmptyBucket - (stage_ - kDropped);
    return is_turn ? before.slots[i] : kNoSlot;
  }

  // Looks at the next positions of the stage, one per thread.
  __device__ void refill() {
    ResizeRoom& room = call_.room;
    const uint32_t i = position_ + threadIdx.x;
    const uint32_t slot = i < stage_size() ? candidate(i) : kNoSlot;
    uint32_t total = 0;
    const uint32_t rank = block_rank(slot != kNoSlot, room.ranks, total);
    if (slot != kNoSlot) room.queue[(next_ + count_ + rank) % kQueue] = slot;
    __syncthreads();
    count_ += total;
    position_ += kHeadThreads;
    if (position_ < stage_size()) return;
    position_ = 0;
    ++stage_;
    // Ages that nothing has are passed over; those younger than the cut were not dropped.
    while (stage_ >= kDropped && stage_ < kEnd) {
      const uint32_t bucket = layout::kEmptyBucket - (stage_ - kDropped);
      if (room.victims.total == 0 || bucket < room.victims.bucket) {
        stage_ = kEnd;
      } else if (room.victims.counts[bucket] > 0) {
        return;
      } else {
        ++stage_;
      }
    }
  }

  const HeadResize& call_;
  uint32_t stage_ = kUnused;
  uint32_t position_ = 0;
  uint32_t next_ = 0;  // of the queue
  uint32_t count_ = 0;
};

// Gives each hole among entries [first, end) of `after` the next free slot; whether there were
// enough, for each thread's entries.
__device__ bool fill_holes(const HeadResize& call, uint32_t first, uint32_t end, FreeSlots& free) {
  bool complete = true;
  for (; first < end; first += kHeadThreads) {
    const uint32_t entry = first + threadIdx.x;
    const bool wants = entry < end && call.after.slots[entry] == kNoSlot;
    const uint32_t slot = free.take(wants);
    if (wants) call.after.slots[entry] = slot;
    complete = complete && !(wants && slot == kNoSlot);
  }
  return complete;
}

// ---- To a tiered form.

// Entry `from` of `before` becomes entry `to`. The table comes later.
__device__ void keep(const HeadResize& call, uint32_t from, uint32_t to) {
  const HeadPages& before = call.before;
  const uint32_t page = before.is_flat() ? from : before.pages[from];
  call.after.slots[to] = before.slots[from];
  mark(call.kept, from);
  if (page == kNoPage) return;
  call.after.pages[to] = page;
  if (before.is_flat()) return;  // stays unused_stamp()
  const uint32_t age = layout::age_bucket(layout::age_of(call.item.epoch, before.stamps[from]));
  call.after.stamps[to] = static_cast<uint8_t>(call.item.epoch - age);
}

// Zones and tail; false where there is no such entry.
__device__ bool keep_pinned(const HeadResize& call, uint32_t tail_pages) {
  const ResizeItem& item = call.item;
  const bool by_page = call.before.is_flat() && item.zone_pages != nullptr;
  bool fits = true;
  for (uint32_t i = threadIdx.x; i < item.zone_entries; i += kHeadThreads) {
    const uint32_t from = by_page ? item.zone_pages[uint64_t{call.h} * item.zone_entries + i] : i;
    if (from >= call.before.lease_pages || call.before.slots[from] == kNoSlot) continue;
    fits = fits && i < call.after.lease_pages;
    if (i < call.after.lease_pages) keep(call, from, i);
  }
  for (uint32_t t = threadIdx.x; t < tail_pages; t += kHeadThreads) {
    const uint32_t from = layout::tail_entry(call.before, item.tail_before, t);
    const uint32_t to = layout::tail_entry(call.after, item.tail_after, t);
    const bool is_there = from < call.before.lease_pages && to < call.after.lease_pages;
    fits = fits && is_there;
    if (is_there) keep(call, from, to);
  }
  __syncthreads();
  return fits;
}

// Whether an entry holds a page that may go to the cache.
__device__ bool may_be_cached(const HeadResize& call, uint32_t entry) {
  if (is_marked(call.kept, entry)) return false;
  if (!call.before.is_flat()) {
    return entry >= call.before.pinned_entries && call.before.pages[entry] != kNoPage;
  }
  return call.before.slots[entry] != kNoSlot &&
         host_holds(host_page(call.after, call.pool.host, entry), call.after, entry);
}

// Marks those in call.dropped, counts them by age and returns their number.
__device__ uint32_t mark_candidates(const HeadResize& call) {
  ResizeRoom& room = call.room;
  block_clear_ages(room.victims);
  uint32_t candidates = 0;
  for (uint32_t first = 0; first < call.before.lease_pages; first += kHeadThreads) {
    const uint32_t entry = first + threadIdx.x;
    const bool is_one = entry < call.before.lease_pages && may_be_cached(call, entry);
    set_marks(call.dropped, entry, is_one);
    if (is_one) atomicAdd(&room.victims.counts[bucket_of(call, entry)], 1u);
    uint32_t total = 0;
    (void)block_rank(is_one, room.ranks, total);
    candidates += total;
  }
  __syncthreads();
  return candidates;
}

// The newest candidates go to the cache in the order of their entries; the others, chosen as
// victims are (the oldest bucket first, within a bucket the first entry; flat pages by id), stay
// marked as dropped. Returns the number of cached ones.
__device__ uint32_t keep_cache(const HeadResize& call) {
  ResizeRoom& room = call.room;
  const uint32_t candidates = mark_candidates(call);
  const uint32_t entries = call.after.lease_pages - call.after.pinned_entries;
  block_cut_off(candidates > entries ? candidates - entries : 0, room.victims);
  const uint32_t cut = room.victims.bucket;
  const uint32_t quota = room.victims.quota;
  uint32_t seen = 0;  // so far: candidates, older ones than the cut's, the cut's
  uint32_t older = 0;
  uint32_t equal = 0;
  for (uint32_t first = 0; first < call.before.lease_pages; first += kHeadThreads) {
    const uint32_t entry = first + threadIdx.x;
    const bool is_one = entry < call.before.lease_pages && is_marked(call.dropped, entry);
    const uint32_t bucket = is_one ? bucket_of(call, entry) : 0;
    uint32_t total = 0;
    const uint32_t rank = block_rank(
        (is_one ? 1u : 0u) + (bucket > cut ? 1u << 10 : 0u) + (bucket == cut ? 1u << 20 : 0u),
        room.ranks, total);
    const uint32_t my_equal = equal + (rank >> 20);
    const uint32_t gone = older + (rank >> 10 & 0x3FF) + min(my_equal, quota);
    const bool leaves = is_one && (bucket > cut || (bucket == cut && my_equal < quota));
    if (is_one && !leaves) {
      keep(call, entry, call.after.pinned_entries + seen + (rank & 0x3FF) - gone);
    }
    set_marks(call.dropped, entry, leaves);
    seen += total & 0x3FF;
    older += total >> 10 & 0x3FF;
    equal += total >> 20;
  }
  __syncthreads();
  return seen - room.victims.total;
}

// Whether all is well.
__device__ bool resize_to_tiered(const HeadResize& call, uint32_t page_tokens, FreeSlots& free) {
  const HeadPages& after = call.after;
  for (uint32_t i = threadIdx.x; i < after.lease_pages; i += kHeadThreads) {
    after.slots[i] = kNoSlot;
    after.pages[i] = kNoPage;
    after.stamps[i] = layout::unused_stamp(call.item.epoch);
  }
  __syncthreads();
  const uint32_t zones = call.item.zone_entries;
  const uint32_t tail_pages = call.item.tail_before.tokens / page_tokens +
                              (call.item.tail_before.tokens % page_tokens != 0 ? 1 : 0);
  const bool fits = keep_pinned(call, tail_pages);
  const uint32_t cached = keep_cache(call);
  const bool complete = fill_holes(call, 0, after.lease_pages, free);
  block_build_table(after, zones + tail_pages + cached, [&](uint32_t key) {
    uint32_t entry = key;
    if (key >= zones + tail_pages) {
      entry = after.pinned_entries + (key - zones - tail_pages);
    } else if (key >= zones) {
      entry = layout::tail_entry(after, call.item.tail_after, key - zones);
    }
    return entry < after.lease_pages ? entry : kNoEntry;
  });
  if (threadIdx.x == 0) call.item.after[call.h].swept_epoch = call.item.epoch;
  return fits && complete;
}

// ---- To a flat form.

__device__ void keep_by_id(const HeadResize& call) {
  const HeadPages& before = call.before;
  for (uint32_t id = threadIdx.x; id < call.after.lease_pages; id += kHeadThreads) {
    const uint32_t from = before.is_flat() ? id : layout::find_entry(before, id);
    const bool is_there =
        from != kNoEntry && from < before.lease_pages && before.slots[from] != kNoSlot;
    call.after.slots[id] = is_there ? before.slots[from] : kNoSlot;
    if (is_there) mark(call.kept, from);
  }
  __syncthreads();
}

// Pages that the host holds get the first slots and are fetched, as many at a time as there are
// threads, a warp per page.
__device__ void fetch_pages(const HeadResize& call, FreeSlots& free) {
  ResizeRoom& room = call.room;
  const HeadPages& after = call.after;
  // The head by whose extents the host is asked.
  HeadPages owner = call.before;
  if (after.extents != nullptr) {
    owner.extents = after.extents;
    owner.extent_count = after.extent_count;
    owner.owner = after.owner;
  }
  for (uint32_t first = 0; first < after.lease_pages; first += kHeadThreads) {
    const uint32_t id = first + threadIdx.x;
    HostPage from;
    if (id < after.lease_pages && after.slots[id] == kNoSlot) {
      from = host_page(owner, call.pool.host, id);
    }
    const bool wants = host_holds(from, owner, id);
    const uint32_t slot = free.take(wants);
    uint32_t total = 0;
    const uint32_t rank = block_rank(slot != kNoSlot, room.ranks, total);
    if (slot != kNoSlot) {
      after.slots[id] = slot;
      room.from[rank] = from.bytes;
      room.to[rank] = slot;
    }
    __syncthreads();
    for (uint32_t i = warp_index(); i < total; i += kHeadWarps) {
      warp_copy(slot_address(call.pool.fast, room.to[i]), room.from[i],
                call.pool.fast.geometry.page_bytes());
    }
    __syncthreads();
  }
}

__device__ void resize_to_flat(const HeadResize& call, FreeSlots& free) {
  keep_by_id(call);
  fetch_pages(call, free);
  const uint32_t behind_tail = min(call.item.tail_after.first_page, call.after.lease_pages);
  (void)fill_holes(call, behind_tail, call.after.lease_pages, free);
  (void)fill_holes(call, 0, behind_tail, free);
}

// Block h: head h. Bytes: some passes over the arrays of both leases (13 bytes an entry); from flat
// to tiered a tag over the bus for each entry, to flat one for each page that is not resident, and
// the pages that are fetched.
__global__ void __launch_bounds__(kHeadThreads)
    resize_kernel(const __grid_constant__ ResizeItem item,
                  const __grid_constant__ TieredPoolRef pool,
                  uint32_t* fault) {
  extern __shared__ uint32_t marks[];  // kept, dropped
  __shared__ ResizeRoom room;
  const uint32_t h = blockIdx.x;
  const HeadResize call{item, pool,  item.before[h],     item.after[h],
                        h,    marks, marks + kMarkWords, room};
  if (call.before.lease_pages > kMostEntries) {
    if (threadIdx.x == 0) report_fault(fault, KernelFault::kTooManyPages);
    return;
  }
  for (uint32_t i = threadIdx.x; i * 32 < call.before.lease_pages; i += kHeadThreads) {
    call.kept[i] = 0;
    call.dropped[i] = 0;
  }
  if (threadIdx.x == 0) room.victims.total = 0;  // nothing is dropped for a flat form
  __syncthreads();
  FreeSlots free(call);
  bool is_well = true;
  if (call.after.is_flat()) {
    resize_to_flat(call, free);
  } else {
    is_well = resize_to_tiered(call, pool.fast.geometry.page_tokens, free);
  }
  uint32_t* const released = item.released + uint64_t{h} * item.released_count;
  for (uint32_t first = 0; first < item.released_count; first += kHeadThreads) {
    const bool wants = first + threadIdx.x < item.released_count;
    const uint32_t slot = free.take(wants);
    if (wants) released[first + threadIdx.x] = slot;
  }
  // A slot that is left over would be lost.
  if (free.take(threadIdx.x == 0) != kNoSlot) is_well = false;
  if (!is_well) report_fault(fault, KernelFault::kTooManyPages);
}

}  // namespace

void CudaKvOps::enqueue_resize(const ResizeItem& item,
                               const TieredPoolRef& pool,
                               StreamRef stream_ref) {
  check_pages(pool.fast.geometry);
  CudaStream& stream = cuda_stream(stream_ref);
  if (!stream.begin()) return;
  stream.fail(cuda_status(
      cudaFuncSetAttribute(resize_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMarkBytes),
      "prepare a resize"));
  resize_kernel<<<pool.fast.geometry.kv_heads, kHeadThreads, kMarkBytes, stream.handle()>>>(
      item, pool, stream.fault());
  stream.end("resize");
}

}  // namespace spin::backend::cuda
