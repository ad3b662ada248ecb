// SPDX-License-Identifier: Apache-2.0
// What admission counts: memory of the tiers, in the units in which it is given out.
// Thread: plain data.
#pragma once

#include <cstdint>

namespace spin::engine {

// Of one sequence, or of all that there is.
struct MemoryNeed {
  uint64_t pages = 0;         // slots of the fast tier
  uint64_t host_extents = 0;  // of the host tier
  uint64_t index_bytes = 0;   // summaries and tables in fast memory, beside the pages

  bool fits(const MemoryNeed& room) const {
    return pages <= room.pages && host_extents <= room.host_extents &&
           index_bytes <= room.index_bytes;
  }
  MemoryNeed& operator-=(const MemoryNeed& other) {
    pages -= other.pages;
    host_extents -= other.host_extents;
    index_bytes -= other.index_bytes;
    return *this;
  }
};

}  // namespace spin::engine
