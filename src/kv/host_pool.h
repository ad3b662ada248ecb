// SPDX-License-Identifier: Apache-2.0
// The host tier: one arena cut into extents of S pages and their tags (layout::HostExtentLayout).
// An extent belongs to one (sequence, layer, KV head) and holds consecutive page ids.
//
//          reserve(n)                 take()                release()
//   free ------------> reserved ------------> in use -----------------> free
//                          ^                                  |
//                          +------------- unreserve() <-------+ (what a reservation did not need)
//
// Reservation is by number, at admission: take() under a reservation cannot fail. Pages of an
// extent's earlier lives are told by their tags: an owner's number is never used again.
// Thread: external synchronisation (engine thread). Lifetime: outlives all that holds its extents;
// no queued work touches an extent when it is released (PageMover and the step's end see to it).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/device.h"
#include "kv/page_pool.h"
#include "layout/head_pages.h"
#include "layout/kv_geometry.h"
#include "spin/status.h"

namespace spin::kv {

struct HostCounts {
  uint64_t free = 0;      // neither in use nor reserved
  uint64_t reserved = 0;  // promised, not yet taken
  uint64_t in_use = 0;
  uint64_t total = 0;
};

class HostPool {
 public:
  // Errors: kInvalidArgument (no extent fits in `bytes`, sizes that overflow), those of `memory`.
  static Result<std::unique_ptr<HostPool>> create(backend::MemoryResource& memory,
                                                  const layout::KvGeometry& geometry,
                                                  uint32_t extent_pages,
                                                  uint64_t bytes,
                                                  bool poison = kPoisonByDefault);

  const layout::HostExtentLayout& layout() const { return layout_; }
  const HostCounts& counts() const { return counts_; }
  uint64_t size_bytes() const { return arena_.size_bytes(); }

  [[nodiscard]] bool reserve(uint64_t extents);
  void unreserve(uint64_t extents);
  // Address of an extent whose tags are cleared. Requires: a reservation.
  uint64_t take();
  void release(uint64_t extent);
  // Whether `extent` is the address of an extent in use.
  bool is_in_use(uint64_t extent) const;

  Status audit() const;

 private:
  HostPool(const layout::HostExtentLayout& layout,
           backend::Buffer arena,
           uint64_t total,
           bool poison);
  uint64_t address(uint32_t index) const;

  layout::HostExtentLayout layout_;
  bool poison_ = false;
  backend::Buffer arena_;
  std::vector<uint8_t> in_use_;      // [total]
  std::vector<uint32_t> free_list_;  // last in, first out
  HostCounts counts_;
};

}  // namespace spin::kv
