// SPDX-License-Identifier: Apache-2.0
// What kernels do with the tables of one head in the tiered form (layout/head_pages.h): look-up,
// ages, and the bulk choice of victims by bucketed LRU. No allocation, no sort, no order but that
// of entries, so that host and device forms give equal results.
//
// Cost: look-up O(1), victims O(cache entries) whatever their number.
// Thread: functions of one head's arrays; whoever owns the head in this phase may call them.
#pragma once

#include <cstdint>

#include "layout/head_pages.h"
#include "layout/host_device.h"

namespace spin::layout {

inline constexpr uint32_t kNoEntry = 0xFFFF'FFFF;

// Table size for a lease: load at most 0.5, any number, so that a table is no larger than that.
SPIN_HOST_DEVICE constexpr uint64_t residency_table_size(uint64_t lease_pages) {
  return lease_pages < 1 ? 2 : 2 * lease_pages;
}

// ---- The table. `pages` of an entry changes only between erase and insert.

SPIN_HOST_DEVICE inline uint32_t table_home(const HeadPages& head, uint32_t page) {
  const uint32_t hash = page * 0x9E37'79B1u;  // 2^32 / golden ratio
  // The hash as a fraction of 2^32, times the size: no division, any size.
  return static_cast<uint32_t>((uint64_t{hash} * head.table_size) >> 32);
}

SPIN_HOST_DEVICE inline uint32_t next_place(const HeadPages& head, uint32_t at) {
  return at + 1 == head.table_size ? 0 : at + 1;
}

// Entry that holds `page`, or kNoEntry.
SPIN_HOST_DEVICE inline uint32_t find_entry(const HeadPages& head, uint32_t page) {
  for (uint32_t at = table_home(head, page);; at = next_place(head, at)) {
    const uint32_t value = head.table[at];
    if (value == 0) return kNoEntry;
    if (head.pages[value - 1] == page) return value - 1;
  }
}

// Requires: pages[entry] is set and not in the table.
SPIN_HOST_DEVICE inline void insert_entry(HeadPages& head, uint32_t entry) {
  uint32_t at = table_home(head, head.pages[entry]);
  while (head.table[at] != 0) at = next_place(head, at);
  head.table[at] = entry + 1;
}

// Requires: pages[entry] is in the table. Later members of its run move up, so that no tombstones
// are needed.
SPIN_HOST_DEVICE inline void erase_entry(HeadPages& head, uint32_t entry) {
  // Places from `from` forward to `to`.
  const auto distance = [&head](uint32_t from, uint32_t to) {
    return to >= from ? to - from : to + head.table_size - from;
  };
  uint32_t hole = table_home(head, head.pages[entry]);
  while (head.table[hole] != entry + 1) hole = next_place(head, hole);
  for (uint32_t at = next_place(head, hole); head.table[at] != 0; at = next_place(head, at)) {
    const uint32_t home = table_home(head, head.pages[head.table[at] - 1]);
    // It may move into the hole unless its home lies behind the hole.
    if (distance(home, at) < distance(hole, at)) continue;
    head.table[hole] = head.table[at];
    hole = at;
  }
  head.table[hole] = 0;
}

// Entry `entry` holds `page` (kNoPage: nothing) from now on. Requires: no other entry holds it.
SPIN_HOST_DEVICE inline void set_entry(HeadPages& head, uint32_t entry, uint32_t page) {
  if (head.pages[entry] == page) return;
  if (head.pages[entry] != kNoPage) erase_entry(head, entry);
  head.pages[entry] = page;
  if (page != kNoPage) insert_entry(head, entry);
}

// All entries are empty, as of `epoch`. Slots stay.
SPIN_HOST_DEVICE inline void clear_residency(HeadPages& head, uint8_t epoch) {
  for (uint32_t i = 0; i < head.table_size; ++i) head.table[i] = 0;
  for (uint32_t i = 0; i < head.lease_pages; ++i) {
    head.pages[i] = kNoPage;
    head.stamps[i] = static_cast<uint8_t>(epoch - 1);
  }
  head.swept_epoch = epoch;
}

// ---- Time.

SPIN_HOST_DEVICE inline uint32_t age_of(uint8_t epoch, uint8_t stamp) {
  return static_cast<uint8_t>(epoch - stamp);
}

SPIN_HOST_DEVICE inline uint32_t age_bucket(uint32_t age) {
  return age < kAgeBuckets ? age : kAgeBuckets - 1;
}

// A page that came without being used in this step: new, yet this step may evict it.
SPIN_HOST_DEVICE inline uint8_t unused_stamp(uint8_t epoch) {
  return static_cast<uint8_t>(epoch - 1);
}

// Rewrites stamps of age 64 and more to age 63. With half of kSweepEpochs between sweeps, ages
// stay below 256 as long as calls are at most kSweepEpochs apart: 63 + 63 + 128 = 254.
SPIN_HOST_DEVICE inline void sweep_if_due(HeadPages& head, uint8_t epoch) {
  if (age_of(epoch, head.swept_epoch) < kSweepEpochs / 2) return;
  for (uint32_t i = 0; i < head.lease_pages; ++i) {
    if (age_of(epoch, head.stamps[i]) >= kAgeBuckets) {
      head.stamps[i] = static_cast<uint8_t>(epoch - (kAgeBuckets - 1));
    }
  }
  head.swept_epoch = epoch;
}

// ---- Victims: empty entries first, then the oldest bucket; within a bucket by entry.

// Bucket of empty entries, beyond the oldest.
inline constexpr uint32_t kEmptyBucket = kAgeBuckets;

// Cache entries per bucket; those of this epoch (age 0) are nobody's victims and are left out.
struct AgeCounts {
  uint32_t counts[kEmptyBucket + 1] = {};
};

// Bucket of a cache entry; 0 for one that was used in this epoch.
SPIN_HOST_DEVICE inline uint32_t entry_bucket(const HeadPages& head,
                                              uint32_t entry,
                                              uint8_t epoch) {
  if (head.pages[entry] == kNoPage) return kEmptyBucket;
  return age_bucket(age_of(epoch, head.stamps[entry]));
}

SPIN_HOST_DEVICE inline AgeCounts count_ages(const HeadPages& head, uint8_t epoch) {
  AgeCounts ages;
  for (uint32_t i = head.pinned_entries; i < head.lease_pages; ++i) {
    ++ages.counts[entry_bucket(head, i, epoch)];
  }
  ages.counts[0] = 0;
  return ages;
}

// All entries of buckets above `bucket` are victims, and the first `quota` of `bucket`.
struct VictimCut {
  uint32_t bucket = kEmptyBucket;
  uint32_t quota = 0;
  uint32_t total = 0;  // victims in all: as many as wanted, or all there are
};

SPIN_HOST_DEVICE inline VictimCut cut_off(const AgeCounts& ages, uint32_t wanted) {
  VictimCut cut;
  for (uint32_t bucket = kEmptyBucket; bucket > 0 && cut.total < wanted; --bucket) {
    const uint32_t missing = wanted - cut.total;
    cut.bucket = bucket;
    cut.quota = ages.counts[bucket] < missing ? ages.counts[bucket] : missing;
    cut.total += cut.quota;
  }
  return cut;
}

// Writes up to `wanted` victims to `victims` in the order of entries and returns their number;
// fewer only when the cache has no more entries that were not used in this epoch.
SPIN_HOST_DEVICE inline uint32_t choose_victims(const HeadPages& head,
                                                uint8_t epoch,
                                                uint32_t wanted,
                                                uint32_t* victims) {
  const VictimCut cut = cut_off(count_ages(head, epoch), wanted);
  uint32_t quota = cut.quota;
  uint32_t count = 0;
  for (uint32_t i = head.pinned_entries; count < cut.total; ++i) {
    const uint32_t bucket = entry_bucket(head, i, epoch);
    if (bucket < cut.bucket) continue;
    if (bucket == cut.bucket) {
      if (quota == 0) continue;
      --quota;
    }
    victims[count++] = i;
  }
  return count;
}

// ---- The tail.

// Entry of the page that holds token `token` of the tail.
SPIN_HOST_DEVICE inline uint32_t tail_entry(const HeadPages& head,
                                            const Tail& tail,
                                            uint32_t page) {
  return head.is_flat() ? tail.first_page + page
                        : tail.first_entry + (tail.first_page + page) % tail.ring;
}

}  // namespace spin::layout
