// SPDX-License-Identifier: Apache-2.0
// Cuts large chunks of another resource into blocks, for memory that is slow to get and to give
// back (a GPU's, pinned memory: both stop the device). Best fit, neighbours join when freed; a
// block of more than half a chunk is passed through. One empty chunk is kept. Thread: thread-safe.
// Lifetime: `upstream` outlives it; all blocks are returned before it goes.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "backend/device.h"
#include "base/mutex.h"

namespace spin::backend {

class ChunkedMemoryResource final : public MemoryResource {
 public:
  // Blocks begin and end at multiples of this, so that no two share a line of any cache.
  static constexpr size_t kGranule = 256;

  // Requires: chunk_bytes is a positive multiple of kGranule.
  ChunkedMemoryResource(MemoryResource& upstream, size_t chunk_bytes);
  ~ChunkedMemoryResource() override;

  // Errors: those of `upstream`.
  Result<void*> allocate(size_t bytes, size_t alignment) override;
  void deallocate(void* pointer, size_t bytes, size_t alignment) override;
  // As asked for, without rounding.
  uint64_t bytes_in_use() const override;
  // Taken from upstream.
  uint64_t bytes_held() const;

 private:
  using Address = uintptr_t;

  bool is_passed_through(size_t bytes, size_t alignment) const;
  Status add_chunk() SPIN_REQUIRES(mutex_);
  void add_free(Address address, size_t bytes) SPIN_REQUIRES(mutex_);
  void remove_free(Address address, size_t bytes) SPIN_REQUIRES(mutex_);
  // The start of the chunk that holds `address`.
  Address chunk_of(Address address) const SPIN_REQUIRES(mutex_);

  MemoryResource& upstream_;
  const size_t chunk_bytes_;
  mutable base::Mutex mutex_;
  std::set<Address> chunks_ SPIN_GUARDED_BY(mutex_);
  std::map<Address, size_t> free_ SPIN_GUARDED_BY(mutex_);  // address -> bytes
  std::set<std::pair<size_t, Address>> by_size_ SPIN_GUARDED_BY(mutex_);
  uint64_t in_use_ SPIN_GUARDED_BY(mutex_) = 0;
  uint64_t passed_through_ SPIN_GUARDED_BY(mutex_) = 0;
};

}  // namespace spin::backend
