// SPDX-License-Identifier: Apache-2.0
// Bytes of the tables that a sequence keeps in fast memory (layout/head_pages.h), for allocation
// and for planning. Thread: pure functions.
#pragma once

#include <cstdint>

#include "kv/tiered_sequence.h"
#include "layout/head_pages.h"
#include "layout/kv_geometry.h"

namespace spin::kv {

struct TableBytes {
  uint64_t heads = 0;       // layout::HeadPages
  uint64_t leases = 0;      // slots and page ids of entries
  uint64_t look_up = 0;     // open-addressing tables
  uint64_t stamps = 0;      // LRU
  uint64_t directory = 0;   // extents
  uint64_t ghosts = 0;      // pages that sampled heads gave up (layout/reuse.h)
  uint64_t tail_slots = 0;  // where the tails' pages lie
  uint64_t total() const {
    return heads + leases + look_up + stamps + directory + ghosts + tail_slots;
  }
};

// Pages of a host extent for contexts of up to `pages_per_head` pages: a power of two from 32 to
// 256, near 1/128 of them, so that a directory stays short and a half-used last extent costs
// little.
uint32_t extent_pages_for(uint64_t pages_per_head);

// Sampled heads, and the pages that each remembers; 0 where a head never gives up any.
struct GhostLists {
  uint64_t heads = 0;
  uint32_t pages = 0;
  uint64_t bytes() const { return heads * pages * sizeof(uint32_t); }
};
GhostLists ghost_lists(const layout::KvGeometry& geometry, const SequenceShape& shape);

// Of a sequence of `shape` whose heads lease `lease_pages` (all pages where that covers them, and
// in dense layers); with a directory, ghosts and tail slots when `has_host`.
TableBytes table_bytes(const layout::KvGeometry& geometry,
                       const SequenceShape& shape,
                       uint64_t lease_pages,
                       uint32_t extent_pages,
                       bool has_host);

}  // namespace spin::kv
