// SPDX-License-Identifier: Apache-2.0
// What kernels count of how pages are used again, so that the host can tell how many fetches a
// smaller or a larger cache would have had (kv/gain_curve.h).
//
// A wanted page has a distance: the number of cached pages, itself included, that were used since
// its last use. A cache of LRU order holds it if and only if the cache has that many entries.
//   resident pages   by their stamps, each head once in 16 steps (its turn by its number)
//   missing pages    by their place in a list of the pages that the head gave up last (ghosts),
//                    newest first, which 1 head in 16 keeps, in every step in which it misses
// Costs nothing in a step that is not the head's turn and has no misses.
//
// Thread: as layout/residency.h. All sums are integers: they do not depend on threads.
#pragma once

#include <cstdint>

#include "layout/head_pages.h"
#include "layout/host_device.h"
#include "layout/residency.h"

namespace spin::layout {

inline constexpr uint32_t kReuseSampling = 16;
// Bin i < 17: in a lease with a buffer of i/2 x mandatory, not in a smaller one; bin 17: beyond.
inline constexpr uint32_t kReuseSizes = 17;
inline constexpr uint32_t kReuseBins = kReuseSizes + 1;
// What a list remembers beyond the mandatory pages, as a multiple of them: the largest size.
inline constexpr uint32_t kGhostRatio = (kReuseSizes - 1) / 2;

struct ReuseCounters {
  uint64_t turns = 0;                // (head, step) pairs in which hits and misses were counted
  uint64_t hits[kReuseBins] = {};    // in cache entries, by distance
  uint64_t misses = 0;               // in the same steps
  uint64_t ghosts[kReuseBins] = {};  // misses of sampled heads, all steps, by distance
};

// What the Retrieve of one layer counts into. Heads are numbered through the layers of a sequence
// that have a cache.
struct ReuseProbe {
  ReuseCounters* counters = nullptr;  // [kv_heads]; null: nothing is counted
  uint32_t* ghosts = nullptr;         // [sampled heads of the sequence, ghost_pages]
  uint32_t ghost_pages = 0;
  uint32_t first_head = 0;  // number of the layer's head 0
  uint32_t mandatory = 0;   // entries of the smallest lease
};

// One of each run of 16 heads is sampled, at a place that moves by 5 from run to run, so that it is
// not always the same head of a layer.
SPIN_HOST_DEVICE constexpr bool is_sampled_head(uint64_t head) {
  return head % kReuseSampling == head / kReuseSampling * 5 % kReuseSampling;
}

// Sampled heads among the first `heads`.
SPIN_HOST_DEVICE constexpr uint64_t sampled_heads(uint64_t heads) {
  const uint64_t runs = heads / kReuseSampling;
  return runs + (heads % kReuseSampling > runs * 5 % kReuseSampling ? 1 : 0);
}

// List of head `h` of the layer; null: it keeps none.
SPIN_HOST_DEVICE inline uint32_t* ghosts_of(const ReuseProbe& probe, uint32_t h) {
  const uint64_t head = uint64_t{probe.first_head} + h;
  if (probe.ghost_pages == 0 || !is_sampled_head(head)) return nullptr;
  return probe.ghosts + sampled_heads(head) * probe.ghost_pages;
}

// Epochs wrap at a multiple of 16.
SPIN_HOST_DEVICE constexpr bool is_turn(uint64_t head, uint8_t epoch) {
  return (head + epoch) % kReuseSampling == 0;
}

// Smallest size that holds a page of that distance, for a head with `base` cache entries in its
// smallest lease.
SPIN_HOST_DEVICE inline uint32_t reuse_bin(uint64_t distance, uint64_t base, uint64_t mandatory) {
  if (distance <= base) return 0;
  const uint64_t bin = (2 * (distance - base) + mandatory - 1) / mandatory;
  return bin < kReuseSizes ? static_cast<uint32_t>(bin) : kReuseSizes;
}

SPIN_HOST_DEVICE inline uint64_t least_cache(const HeadPages& head, uint32_t mandatory) {
  return mandatory > head.pinned_entries ? mandatory - head.pinned_entries : 0;
}

// Before the wanted pages are stamped. Pages of one age have no order: those used again are taken
// as spread evenly among them.
SPIN_HOST_DEVICE inline void count_turn(const HeadPages& head,
                                        const uint32_t* wanted,
                                        uint32_t count,
                                        uint8_t epoch,
                                        uint32_t mandatory,
                                        ReuseCounters& counters) {
  const AgeCounts ages = count_ages(head, epoch);
  uint32_t hits[kAgeBuckets] = {};
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t entry = find_entry(head, wanted[i]);
    if (entry == kNoEntry) {
      ++counters.misses;
    } else if (entry >= head.pinned_entries) {
      ++hits[age_bucket(age_of(epoch, head.stamps[entry]))];
    }
  }
  const uint64_t base = least_cache(head, mandatory);
  uint64_t newer = 0;
  for (uint32_t bucket = 0; bucket < kAgeBuckets; ++bucket) {
    const uint64_t pages = ages.counts[bucket];
    for (uint64_t j = 0; j < hits[bucket]; ++j) {
      const uint64_t place = pages * (2 * j + 1) / (2 * uint64_t{hits[bucket]});
      ++counters.hits[reuse_bin(newer + place + 1, base, mandatory)];
    }
    newer += pages;
  }
  ++counters.turns;
}

// ---- Ghosts: ids, newest first, kNoPage behind the last.

// A ghost that is resident again; gone for good at the next give_up().
inline constexpr uint32_t kRisenGhost = kNoPage - 1;

SPIN_HOST_DEVICE inline void clear_ghosts(uint32_t* ghosts, uint32_t capacity) {
  for (uint32_t i = 0; i < capacity; ++i) ghosts[i] = kNoPage;
}

// Before the cache changes: the missing pages' distances (positions missing[0 .. misses) of
// `wanted`); they stop being ghosts.
SPIN_HOST_DEVICE inline void count_ghosts(const HeadPages& head,
                                          const uint32_t* wanted,
                                          const uint32_t* missing,
                                          uint32_t misses,
                                          const ReuseProbe& probe,
                                          uint32_t* ghosts,
                                          ReuseCounters& counters) {
  uint64_t resident = 0;
  for (uint32_t i = head.pinned_entries; i < head.lease_pages; ++i) {
    resident += head.pages[i] != kNoPage ? 1 : 0;
  }
  const uint64_t base = least_cache(head, probe.mandatory);
  for (uint32_t m = 0; m < misses; ++m) {
    const uint32_t page = wanted[missing[m]];
    uint32_t at = 0;
    while (at < probe.ghost_pages && ghosts[at] != page && ghosts[at] != kNoPage) ++at;
    if (at == probe.ghost_pages || ghosts[at] != page) {
      ++counters.ghosts[kReuseSizes];
      continue;
    }
    ghosts[at] = kRisenGhost;
    ++counters.ghosts[reuse_bin(resident + at + 1, base, probe.mandatory)];
  }
}

// Room for `count` new ghosts at the front, which the caller writes (at most `capacity`, which is
// returned if it is less); ghosts that are resident again go.
SPIN_HOST_DEVICE inline uint32_t make_ghost_room(uint32_t* ghosts,
                                                 uint32_t capacity,
                                                 uint32_t count) {
  const uint32_t added = count < capacity ? count : capacity;
  uint32_t live = 0;
  uint32_t end = 0;
  for (; end < capacity && ghosts[end] != kNoPage; ++end) {
    if (ghosts[end] != kRisenGhost) ghosts[live++] = ghosts[end];
  }
  const uint32_t kept = live < capacity - added ? live : capacity - added;
  for (uint32_t i = kept; i > 0; --i) ghosts[i - 1 + added] = ghosts[i - 1];
  for (uint32_t i = added + kept; i < end; ++i) ghosts[i] = kNoPage;
  return added;
}

// The pages of entries victims[0 .. count) are about to be given up.
SPIN_HOST_DEVICE inline void give_up(const HeadPages& head,
                                     const uint32_t* victims,
                                     uint32_t count,
                                     uint32_t* ghosts,
                                     uint32_t capacity) {
  uint32_t full = 0;
  for (uint32_t i = 0; i < count; ++i) full += head.pages[victims[i]] != kNoPage ? 1 : 0;
  const uint32_t added = make_ghost_room(ghosts, capacity, full);
  uint32_t next = 0;
  for (uint32_t i = 0; i < count && next < added; ++i) {
    if (head.pages[victims[i]] != kNoPage) ghosts[next++] = head.pages[victims[i]];
  }
}

// A lease was resized from `before` to `after` (both tiered): cached pages that `after` lacks are
// ghosts, the youngest of them in front.
SPIN_HOST_DEVICE inline void give_up_dropped(const HeadPages& before,
                                             const HeadPages& after,
                                             uint8_t epoch,
                                             uint32_t* ghosts,
                                             uint32_t capacity) {
  const auto is_dropped = [&](uint32_t entry) {
    return before.pages[entry] != kNoPage && find_entry(after, before.pages[entry]) == kNoEntry;
  };
  uint32_t dropped = 0;
  for (uint32_t i = before.pinned_entries; i < before.lease_pages; ++i) {
    dropped += is_dropped(i) ? 1 : 0;
  }
  if (dropped == 0) return;
  const uint32_t added = make_ghost_room(ghosts, capacity, dropped);
  uint32_t next = 0;
  for (uint32_t bucket = 0; bucket < kAgeBuckets && next < added; ++bucket) {
    for (uint32_t i = before.pinned_entries; i < before.lease_pages && next < added; ++i) {
      if (age_bucket(age_of(epoch, before.stamps[i])) == bucket && is_dropped(i)) {
        ghosts[next++] = before.pages[i];
      }
    }
  }
}

}  // namespace spin::layout
