// SPDX-License-Identifier: Apache-2.0
// The rules of layout/residency.h and layout/reuse.h by a block of kHeadThreads threads that works
// on one head: the same results, in the same order, as the plain functions give on one thread.
// All threads of the block call each function, with equal arguments. Unless it says otherwise a
// function ends with its results visible to the whole block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/kernel_support.cuh"
#include "backend/cuda/page_copy.cuh"
#include "layout/head_pages.h"
#include "layout/residency.h"
#include "layout/reuse.h"

namespace spin::backend::cuda {

inline constexpr unsigned kHeadThreads = 512;
inline constexpr unsigned kHeadWarps = kHeadThreads / kWarp;

// Lays out what kernels of one operation hand to each other.
class ScratchPlan {
 public:
  // Offset of a part, a multiple of 256.
  uint64_t add(uint64_t bytes) {
    const uint64_t at = bytes_;
    bytes_ += (bytes + 255) / 256 * 256;
    return at;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  uint64_t bytes_ = 0;
};

// ---- Order of threads.

struct RankRoom {
  uint32_t sums[kHeadWarps];
};

__device__ inline uint32_t warp_inclusive_sum(uint32_t value) {
  for (unsigned step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(kFullMask, value, step);
    if (lane_index() >= step) value += other;
  }
  return value;
}

// Sum of `value` over the threads before this one; `total` is that of all.
__device__ inline uint32_t block_rank(uint32_t value, RankRoom& room, uint32_t& total) {
  const uint32_t sum = warp_inclusive_sum(value);
  if (lane_index() == kWarp - 1) room.sums[warp_index()] = sum;
  __syncthreads();
  const uint32_t warps =
      warp_inclusive_sum(lane_index() < kHeadWarps ? room.sums[lane_index()] : 0);
  total = __shfl_sync(kFullMask, warps, kHeadWarps - 1);
  const uint32_t through = __shfl_sync(kFullMask, warps, warp_index());
  const uint32_t own = __shfl_sync(kFullMask, sum, kWarp - 1);
  __syncthreads();  // the room is free again
  return through - own + sum - value;
}

// ---- Ages and victims.

struct VictimRoom {
  uint32_t counts[layout::kEmptyBucket + 1];
  // As layout::VictimCut.
  uint32_t bucket;
  uint32_t quota;
  uint32_t total;
};

// `stored`: where `head` was copied from.
__device__ inline void block_sweep_if_due(const layout::HeadPages& head,
                                          layout::HeadPages* stored,
                                          uint8_t epoch) {
  if (layout::age_of(epoch, head.swept_epoch) < layout::kSweepEpochs / 2) return;
  for (uint32_t i = threadIdx.x; i < head.lease_pages; i += kHeadThreads) {
    if (layout::age_of(epoch, head.stamps[i]) >= layout::kAgeBuckets) {
      head.stamps[i] = static_cast<uint8_t>(epoch - (layout::kAgeBuckets - 1));
    }
  }
  __syncthreads();  // all threads have read the old epoch
  if (threadIdx.x == 0) stored->swept_epoch = epoch;
}

__device__ inline void block_clear_ages(VictimRoom& room) {
  for (uint32_t b = threadIdx.x; b <= layout::kEmptyBucket; b += kHeadThreads) room.counts[b] = 0;
  __syncthreads();
}

// As layout::count_ages(), into room.counts.
__device__ inline void block_count_ages(const layout::HeadPages& head,
                                        uint8_t epoch,
                                        VictimRoom& room) {
  block_clear_ages(room);
  for (uint32_t i = head.pinned_entries + threadIdx.x; i < head.lease_pages; i += kHeadThreads) {
    const uint32_t bucket = layout::entry_bucket(head, i, epoch);
    if (bucket > 0) atomicAdd(&room.counts[bucket], 1u);
  }
  __syncthreads();
}

// As layout::cut_off(), of room.counts. Two buckets per lane, the oldest in the first.
__device__ inline void block_cut_off(uint32_t wanted, VictimRoom& room) {
  static_assert(layout::kEmptyBucket == 2 * kWarp);
  if (warp_index() == 0) {
    const uint32_t older = layout::kEmptyBucket - 2 * lane_index();
    const uint32_t count = room.counts[older];
    const uint32_t through = warp_inclusive_sum(count + room.counts[older - 1]);
    const uint32_t middle = through - room.counts[older - 1];
    const uint32_t before = middle - count;
    const uint32_t all = __shfl_sync(kFullMask, through, kWarp - 1);
    if (lane_index() == 0) {
      room.bucket = wanted > all ? 1 : layout::kEmptyBucket;
      room.quota = wanted > all ? room.counts[1] : 0;
      room.total = min(wanted, all);
    }
    __syncwarp();
    if (before < wanted && wanted <= middle) {
      room.bucket = older;
      room.quota = wanted - before;
    } else if (middle < wanted && wanted <= through) {
      room.bucket = older - 1;
      room.quota = wanted - middle;
    }
  }
  __syncthreads();
}

// As layout::choose_victims().
__device__ inline uint32_t block_choose_victims(const layout::HeadPages& head,
                                                uint8_t epoch,
                                                uint32_t wanted,
                                                uint32_t* victims,
                                                VictimRoom& room,
                                                RankRoom& ranks) {
  constexpr uint32_t kEach = 4;  // entries of a thread, adjacent
  block_count_ages(head, epoch, room);
  block_cut_off(wanted, room);
  const uint32_t cut = room.bucket;
  const uint32_t quota = room.quota;
  uint32_t older = 0;  // so far: entries of older buckets, and of the cut
  uint32_t equal = 0;
  for (uint32_t first = head.pinned_entries;
       first < head.lease_pages && older + min(equal, quota) < room.total;
       first += kHeadThreads * kEach) {
    uint32_t buckets[kEach];
    uint32_t packed = 0;
#pragma unroll
    for (uint32_t k = 0; k < kEach; ++k) {
      const uint32_t entry = first + threadIdx.x * kEach + k;
      buckets[k] = entry < head.lease_pages ? layout::entry_bucket(head, entry, epoch) : 0;
      packed += (buckets[k] > cut ? 1u : 0u) + (buckets[k] == cut ? 1u << 16 : 0u);
    }
    uint32_t total = 0;
    const uint32_t rank = block_rank(packed, ranks, total);
    uint32_t my_older = older + (rank & 0xFFFF);
    uint32_t my_equal = equal + (rank >> 16);
#pragma unroll
    for (uint32_t k = 0; k < kEach; ++k) {
      const uint32_t at = my_older + min(my_equal, quota);
      const bool is_victim = buckets[k] > cut || (buckets[k] == cut && my_equal < quota);
      if (is_victim) victims[at] = first + threadIdx.x * kEach + k;
      my_older += buckets[k] > cut ? 1 : 0;
      my_equal += buckets[k] == cut ? 1 : 0;
    }
    older += total & 0xFFFF;
    equal += total >> 16;
  }
  __syncthreads();
  return room.total;
}

// ---- Reuse.

struct ReuseRoom {
  uint32_t hits[layout::kAgeBuckets];  // by the age of the entry
  uint32_t bins[layout::kReuseBins];
};

__device__ inline void block_clear_hits(ReuseRoom& room) {
  if (threadIdx.x < layout::kAgeBuckets) room.hits[threadIdx.x] = 0;
  __syncthreads();
}

__device__ inline void block_clear_bins(ReuseRoom& room) {
  if (threadIdx.x < layout::kReuseBins) room.bins[threadIdx.x] = 0;
  __syncthreads();
}

// As layout::count_turn(), from the ages before the step and the hits among them. A warp per
// bucket. Changes counters, which nobody in the block may read.
__device__ inline void block_count_turn(const layout::HeadPages& head,
                                        uint32_t misses,
                                        uint32_t mandatory,
                                        const VictimRoom& ages,
                                        ReuseRoom& room,
                                        layout::ReuseCounters& counters) {
  block_clear_bins(room);
  const uint64_t base = layout::least_cache(head, mandatory);
  for (uint32_t bucket = warp_index(); bucket < layout::kAgeBuckets; bucket += kHeadWarps) {
    const uint64_t hits = room.hits[bucket];
    if (hits == 0) continue;
    uint32_t newer = 0;
    for (uint32_t b = lane_index(); b < bucket; b += kWarp) newer += ages.counts[b];
    newer = __reduce_add_sync(kFullMask, newer);
    const uint64_t pages = ages.counts[bucket];
    for (uint64_t j = lane_index(); j < hits; j += kWarp) {
      const uint64_t place = pages * (2 * j + 1) / (2 * hits);
      atomicAdd(&room.bins[layout::reuse_bin(newer + place + 1, base, mandatory)], 1u);
    }
  }
  __syncthreads();
  const uint32_t bin = threadIdx.x;
  if (bin < layout::kReuseBins && room.bins[bin] > 0) counters.hits[bin] += room.bins[bin];
  if (threadIdx.x == kWarp) {
    ++counters.turns;
    counters.misses += misses;
  }
}

// As layout::count_ghosts(), after block_choose_victims() counted the ages. A warp per missing
// page: what one finds in the list does not depend on the others. Counters: as above.
__device__ inline void block_count_ghosts(const layout::HeadPages& head,
                                          const uint32_t* wanted,
                                          const uint32_t* missing,
                                          uint32_t misses,
                                          const layout::ReuseProbe& probe,
                                          uint32_t* ghosts,
                                          const VictimRoom& ages,
                                          ReuseRoom& room,
                                          layout::ReuseCounters& counters) {
  block_clear_bins(room);
  const uint64_t base = layout::least_cache(head, probe.mandatory);
  const uint64_t resident =
      head.lease_pages - head.pinned_entries - ages.counts[layout::kEmptyBucket];
  for (uint32_t m = warp_index(); m < misses; m += kHeadWarps) {
    const uint32_t page = wanted[missing[m]];
    uint32_t bin = layout::kReuseSizes;
    for (uint32_t first = 0; first < probe.ghost_pages; first += kWarp) {
      const uint32_t at = first + lane_index();
      const uint32_t ghost = at < probe.ghost_pages ? ghosts[at] : layout::kNoPage;
      const uint32_t ends = __ballot_sync(kFullMask, ghost == page || ghost == layout::kNoPage);
      if (ends == 0) continue;
      const uint32_t lane = static_cast<uint32_t>(__ffs(static_cast<int>(ends))) - 1;
      if (__shfl_sync(kFullMask, ghost, lane) != page) break;
      bin = layout::reuse_bin(resident + first + lane + 1, base, probe.mandatory);
      if (lane_index() == lane) ghosts[at] = layout::kRisenGhost;
      break;
    }
    if (lane_index() == 0) atomicAdd(&room.bins[bin], 1u);
  }
  __syncthreads();
  const uint32_t bin = threadIdx.x;
  if (bin < layout::kReuseBins && room.bins[bin] > 0) counters.ghosts[bin] += room.bins[bin];
}

// Words of room that block_give_up() needs for the first `heads` heads of the probe's layer, which
// is also where the room of head `heads` begins.
__host__ __device__ inline uint64_t ghost_words(const layout::ReuseProbe& probe, uint32_t heads) {
  const uint64_t lists = layout::sampled_heads(uint64_t{probe.first_head} + heads) -
                         layout::sampled_heads(probe.first_head);
  return lists * probe.ghost_pages;
}

// As layout::give_up(). `room`: [capacity] words of fast memory.
__device__ inline void block_give_up(const layout::HeadPages& head,
                                     const uint32_t* victims,
                                     uint32_t count,
                                     uint32_t* ghosts,
                                     uint32_t capacity,
                                     uint32_t* room,
                                     RankRoom& ranks) {
  // What stays, in order; `end`: all that were there.
  uint32_t live = 0;
  uint32_t end = 0;
  for (uint32_t first = 0; first < capacity && end == first; first += kHeadThreads) {
    const uint32_t at = first + threadIdx.x;
    const uint32_t ghost = at < capacity ? ghosts[at] : layout::kNoPage;
    const bool is_there = ghost != layout::kNoPage;
    const bool is_live = is_there && ghost != layout::kRisenGhost;
    uint32_t total = 0;
    const uint32_t rank =
        block_rank((is_live ? 1u : 0u) + (is_there ? 1u << 16 : 0u), ranks, total);
    if (is_live) room[live + (rank & 0xFFFF)] = ghost;
    live += total & 0xFFFF;
    end += total >> 16;
  }
  uint32_t full = 0;
  for (uint32_t first = 0; first < count; first += kHeadThreads) {
    const uint32_t i = first + threadIdx.x;
    uint32_t total = 0;
    (void)block_rank(i < count && head.pages[victims[i]] != layout::kNoPage, ranks, total);
    full += total;
  }
  __syncthreads();
  const uint32_t added = min(full, capacity);
  const uint32_t kept = min(live, capacity - added);
  for (uint32_t i = threadIdx.x; i < kept; i += kHeadThreads) ghosts[added + i] = room[i];
  for (uint32_t i = added + kept + threadIdx.x; i < end; i += kHeadThreads) {
    ghosts[i] = layout::kNoPage;
  }
  uint32_t next = 0;
  for (uint32_t first = 0; first < count && next < added; first += kHeadThreads) {
    const uint32_t i = first + threadIdx.x;
    const uint32_t page = i < count ? head.pages[victims[i]] : layout::kNoPage;
    uint32_t total = 0;
    const uint32_t rank = block_rank(page != layout::kNoPage, ranks, total);
    if (page != layout::kNoPage && next + rank < added) ghosts[next + rank] = page;
    next += total;
  }
  __syncthreads();
}

// ---- Tables.

// Dynamic shared memory of a block that changes a table entry by entry; below the 48 KiB that need
// no permission, with room for what else is shared. Leases of more than 3,925 pages are changed
// where they lie.
inline constexpr uint32_t kStageBytes = 46 << 10;

// The head with its table and pages in shared memory: what changes them is one thread's chain of
// dependent look-ups. unstage_tables() writes them back.
__device__ inline layout::HeadPages stage_tables(const layout::HeadPages& head, uint32_t* room) {
  const uint64_t words = uint64_t{head.table_size} + head.lease_pages;
  if (words * sizeof(uint32_t) > kStageBytes) return head;
  layout::HeadPages staged = head;
  staged.table = room;
  staged.pages = room + head.table_size;
  for (uint32_t i = threadIdx.x; i < head.table_size; i += kHeadThreads) {
    staged.table[i] = head.table[i];
  }
  for (uint32_t i = threadIdx.x; i < head.lease_pages; i += kHeadThreads) {
    staged.pages[i] = head.pages[i];
  }
  __syncthreads();
  return staged;
}

__device__ inline void unstage_tables(const layout::HeadPages& staged,
                                      const layout::HeadPages& head) {
  __syncthreads();
  if (staged.table == head.table) return;
  for (uint32_t i = threadIdx.x; i < head.table_size; i += kHeadThreads) {
    head.table[i] = staged.table[i];
  }
  for (uint32_t i = threadIdx.x; i < head.lease_pages; i += kHeadThreads) {
    head.pages[i] = staged.pages[i];
  }
  __syncthreads();
}

// The table as layout::insert_entry() makes it from nothing for entry_of(0), entry_of(1), ..
// (kNoEntry, or an entry without a page: passed over). In linear probing the first comer keeps a
// place; here a later one that came first in time gives way and looks on from there, which ends in
// the same table (all places prefer keys in one order, so there is one stable outcome).
template <typename EntryOf>
__device__ void block_build_table(const layout::HeadPages& head,
                                  uint32_t keys,
                                  const EntryOf& entry_of) {
  constexpr uint32_t kVacant = 0xFFFF'FFFF;
  keys = min(keys, head.lease_pages);  // more never find a place
  for (uint32_t i = threadIdx.x; i < head.table_size; i += kHeadThreads) head.table[i] = kVacant;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < keys; i += kHeadThreads) {
    const uint32_t entry = entry_of(i);
    if (entry == layout::kNoEntry || head.pages[entry] == layout::kNoPage) continue;
    uint32_t key = i;
    uint32_t at = layout::table_home(head, head.pages[entry]);
    for (;;) {
      const uint32_t found = atomicMin(&head.table[at], key);
      if (found == kVacant) break;
      key = max(found, key);
      at = layout::next_place(head, at);
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < head.table_size; i += kHeadThreads) {
    const uint32_t key = __ldcg(&head.table[i]);
    head.table[i] = key == kVacant ? 0 : entry_of(key) + 1;
  }
  __syncthreads();
}

}  // namespace spin::backend::cuda
