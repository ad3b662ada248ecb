// SPDX-License-Identifier: Apache-2.0
// The sequences that a runner has open, each with its pages of one pool.
// Thread: engine thread only, except pages_in_use(). Lifetime: the pool outlives the table.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/step_batch.h"
#include "kv/page_pool.h"
#include "kv/sequence_kv.h"
#include "spin/status.h"

namespace spin::engine {

class SequenceTable {
 public:
  explicit SequenceTable(kv::PagePool& pool) : pool_(pool) {}

  // Errors: kResourceExhausted.
  Result<SequenceHandle> open(uint64_t max_tokens);
  // Requires: a current handle.
  void close(SequenceHandle handle);
  // Requires: a current handle. Lifetime: until close(), or the next open().
  kv::SequenceKv& at(SequenceHandle handle);

  // Thread: any.
  uint64_t pages_in_use() const { return pages_in_use_.load(std::memory_order_relaxed); }

  // Errors: those of kv::audit.
  Status audit() const;

 private:
  struct Slot {
    uint32_t generation = 0;
    std::optional<kv::SequenceKv> sequence;
  };
  Slot& checked(SequenceHandle handle);
  void publish() { pages_in_use_.store(pool_.counts().in_use(), std::memory_order_relaxed); }

  kv::PagePool& pool_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;  // its capacity is at least slots_.size(): close() cannot fail
  std::atomic<uint64_t> pages_in_use_{0};
};

}  // namespace spin::engine
