// SPDX-License-Identifier: Apache-2.0
// Dense sequences that a runner has open, each with its pages of one pool.
// Thread: engine thread only, except pages_in_use(). Lifetime: the pool outlives the table.
#pragma once

#include <atomic>
#include <cstdint>

#include "engine/handle_table.h"
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
  kv::SequenceKv& at(SequenceHandle handle) { return sequences_.at(handle); }

  // Thread: any.
  uint64_t pages_in_use() const { return pages_in_use_.load(std::memory_order_relaxed); }

  // Errors: those of kv::audit.
  Status audit() const;

 private:
  void publish() { pages_in_use_.store(pool_.counts().in_use(), std::memory_order_relaxed); }

  kv::PagePool& pool_;
  HandleTable<kv::SequenceKv> sequences_;
  std::atomic<uint64_t> pages_in_use_{0};
};

}  // namespace spin::engine
