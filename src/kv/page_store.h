// SPDX-License-Identifier: Apache-2.0
// The KV pages of all sequences in two tiers: a pool of slots in fast memory (kv/page_pool.h), a
// pool of extents on the host (kv/host_pool.h), and the mover that copies between them outside
// steps (kv/page_mover.h). Tiers are a list in docs and counters, so that a third can follow.
//
// Classes of a fast slot, each slot in exactly one, precedence from left to right; their sum is the
// pool (audited at drained points):
//
//   in_transfer > pinned > filling > device_only > cached > free
//
//   in_transfer  a copy of the mover reads or writes it
//   pinned       holds a zone or a tail page of a running sequence
//   filling      holds the open page
//   device_only  holds a sealed page that no lower tier has: a reservation, not cache
//   cached       leased and empty, or its page is valid on the host
//   free         leased to nobody
//
// Thread: engine thread; counts() may be called from any thread at drained points only.
// Lifetime: the device outlives the store, the store its sequences.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "backend/device.h"
#include "backend/kv_ops.h"
#include "backend/memory_decorators.h"
#include "kv/host_pool.h"
#include "kv/page_mover.h"
#include "kv/page_pool.h"
#include "kv/sequence_kv.h"
#include "layout/kv_geometry.h"
#include "spin/status.h"

namespace spin::kv {

class TieredSequence;

struct PageStoreOptions {
  layout::KvGeometry geometry;
  uint64_t fast_pages = 0;
  uint64_t host_bytes = 0;     // 0: no host tier; everything stays in fast memory
  uint32_t extent_pages = 32;  // kv::extent_pages_for()
  // Share of the fast slots in use from which sealed pages are written to the host ahead of need.
  double write_through_at = 0.7;
  bool poison = kPoisonByDefault;
};

struct ClassCounts {
  uint64_t in_transfer = 0;
  uint64_t pinned = 0;
  uint64_t filling = 0;
  uint64_t device_only = 0;
  uint64_t cached = 0;
  uint64_t free = 0;
  uint64_t total = 0;
};

class PageStore {
 public:
  // Errors: kInvalidArgument, kResourceExhausted (either tier, the mover's stream).
  static Result<std::unique_ptr<PageStore>> create(backend::Device& device,
                                                   const PageStoreOptions& options);
  ~PageStore();
  PageStore(const PageStore&) = delete;
  PageStore& operator=(const PageStore&) = delete;

  const layout::KvGeometry& geometry() const { return options_.geometry; }
  backend::TieredPoolRef ref() const;
  PagePool& fast() { return *fast_; }
  const PagePool& fast() const { return *fast_; }
  HostPool* host() { return host_.get(); }  // null without a host tier
  const HostPool* host() const { return host_.get(); }
  PageMover& mover() { return *mover_; }
  backend::Device& device() { return device_; }
  // Fast memory for look-up tables: counted, so that its use can be told from the pool's.
  backend::CountingMemoryResource& table_memory() { return table_memory_; }
  // For the host's copies of tables, at drained points; idle otherwise.
  backend::Stream& table_stream() { return *table_stream_; }

  // Whether sealed pages of resident sequences should be written to the host now.
  bool wants_write_through(bool request_waits) const;

  // Dense sequences may share the fast pool: their sealed pages are device_only, the rest of what
  // they reserved is filling.
  // Requires: a drained point (no step in flight for `live` and `dense`).
  ClassCounts classes(std::span<const TieredSequence* const> live,
                      std::span<const SequenceKv* const> dense = {}) const;
  // Both pools, the page equation, and that slots and extents in use are exactly those of `live`
  // and `dense`, each held once. Errors: kInternal.
  Status audit(std::span<const TieredSequence* const> live,
               std::span<const SequenceKv* const> dense = {}) const;

 private:
  friend class TieredSequence;
  PageStore(backend::Device& device, const PageStoreOptions& options);
  // Numbers for `heads` owners of host pages; never given out again.
  uint64_t take_owners(uint64_t heads);

  backend::Device& device_;
  PageStoreOptions options_;
  backend::CountingMemoryResource table_memory_;
  uint64_t next_owner_ = 1;
  std::unique_ptr<backend::Stream> table_stream_;
  std::unique_ptr<PagePool> fast_;
  std::unique_ptr<HostPool> host_;
  std::unique_ptr<PageMover> mover_;
};

}  // namespace spin::kv
