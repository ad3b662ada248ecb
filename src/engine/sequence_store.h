// SPDX-License-Identifier: Apache-2.0
// The sequences that a runner has open, dense and sparse, in one page store, and what they are
// given of it: admission says what each needs at least; whatever else there is goes to the leases
// of sparse sequences and is taken back, between steps, before a request has to wait for it.
//
// A sparse sequence opens resident when all its pages fit into free slots. Otherwise it leases what
// kv::plan_leases() gives it, and the others give up what they lease beyond that.
//
// Thread: engine thread only, except need(), total(), pages_in_use() and add_stats().
// Lifetime: the page store outlives it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backend/device.h"
#include "base/mutex.h"
#include "engine/handle_table.h"
#include "engine/memory_need.h"
#include "engine/model_runner.h"
#include "kv/lease_planner.h"
#include "kv/page_store.h"
#include "kv/sequence_kv.h"
#include "sparse/sparse_algorithm.h"
#include "sparse/sparse_sequence.h"
#include "spin/stats.h"
#include "spin/status.h"

namespace spin::engine {

struct OpenSequence {
  // One of the two.
  std::optional<kv::SequenceKv> dense;
  std::unique_ptr<sparse::SparseSequence> sparse;
  SequenceNeed need;
  uint64_t prompt_tokens = 0;
  bool prompt_committed = false;  // of a sparse one
  uint64_t sealed_pages = 0;      // already counted as offloaded or not
  // Why it can only be closed; found between steps.
  Status fault;

  uint64_t committed_tokens() const {
    return dense ? dense->committed_tokens() : sparse->kv().committed_tokens();
  }
};

struct SequenceStoreOptions {
  sparse::ModelShape shape;
  uint64_t index_bytes = 0;            // for summaries and tables of all sequences
  std::optional<double> buffer_ratio;  // none: by gain
};

class SequenceStore {
 public:
  SequenceStore(kv::PageStore& store, const SequenceStoreOptions& options);

  SequenceNeed need(const SequenceRequest& request) const;
  MemoryNeed total() const;
  MemoryNeed free() const;
  uint64_t pages_in_use() const { return pages_in_use_.load(std::memory_order_relaxed); }

  // Errors: kResourceExhausted. Requires: no step is in flight.
  Result<SequenceHandle> open(const SequenceRequest& request, backend::StreamRef stream);
  // Requires: no step is in flight. Does not fail and allocates nothing.
  void close(SequenceHandle handle);
  // Lifetime: until close(), or the next open().
  OpenSequence& at(SequenceHandle handle) { return sequences_.at(handle); }

  // As ModelRunner's. Requires: no step is in flight.
  uint64_t suspend_pages(SequenceHandle handle);
  Status suspend(SequenceHandle handle, backend::StreamRef stream);
  MemoryNeed resume_need(SequenceHandle handle);
  Status resume(SequenceHandle handle, uint64_t promised_pages, backend::StreamRef stream);

  // The work of the prompt, of a step of a sparse sequence, has run.
  void commit_prompt(OpenSequence& sequence);
  // Errors: kInternal; the sequence is lost, others are not.
  Status commit_step(OpenSequence& sequence);

  // After a step: writes ahead to the host, gives free slots to leases, publishes the statistics.
  // `requests_wait`: somebody waits for memory.
  void tend(bool requests_wait, backend::StreamRef stream);

  // Requires: no step is in flight. Errors: kInternal.
  Status audit() const;
  void add_stats(EngineStats& stats) const;

 private:
  uint64_t least_lease(const kv::SequenceShape& shape) const;
  // Slots of a sequence whose heads lease `lease` pages.
  uint64_t slots(const kv::SequenceShape& shape, uint64_t lease) const;
  uint64_t dense_layer_slots(const kv::SequenceShape& shape) const;
  // Slots that it could give up.
  uint64_t spare_slots(const OpenSequence& sequence) const;
  bool can_resize(const OpenSequence& sequence) const;
  // Makes room for a sequence of `shape` and returns the lease that it can have. `may_tier`: less
  // than all its pages will do. `promised`: slots that must be left for others.
  uint64_t make_room(const kv::SequenceShape& shape,
                     bool may_tier,
                     uint64_t promised,
                     backend::StreamRef stream);

  Result<SequenceHandle> open_dense(const SequenceRequest& request,
                                    const SequenceNeed& need,
                                    backend::StreamRef stream);
  Result<SequenceHandle> open_sparse(const SequenceRequest& request,
                                     const SequenceNeed& need,
                                     backend::StreamRef stream);
  SequenceHandle insert(OpenSequence sequence);

  struct LeasePlan {
    std::vector<OpenSequence*> sequences;
    std::vector<uint64_t> leases;  // of `sequences`, then that of the new one if there is one
  };
  // `taken`: slots that must stay free beside; `opening`: the shape of a sequence to come, or null.
  LeasePlan plan(uint64_t taken, const kv::SequenceShape* opening);
  kv::LeaseRequest lease_request(const kv::SequenceShape& shape, uint64_t current) const;
  // Shrinks before it grows.
  void apply(const LeasePlan& plan, bool grow, backend::StreamRef stream);
  void resize(OpenSequence& sequence, uint64_t lease, backend::StreamRef stream);
  void write_ahead(bool requests_wait, backend::StreamRef stream);
  // Allocates nothing.
  void publish();

  kv::PageStore& store_;
  const SequenceStoreOptions options_;
  kv::LeasePolicy policy_;
  HandleTable<OpenSequence> sequences_;
  uint64_t index_bytes_in_use_ = 0;
  uint32_t steps_since_plan_ = 0;
  bool slots_came_free_ = false;
  std::atomic<uint64_t> pages_in_use_{0};

  SparseStats closed_;  // counters of sequences that are no more, and of this class
  mutable base::Mutex stats_mutex_;
  SparseStats published_ SPIN_GUARDED_BY(stats_mutex_);
  std::array<TierStats, 2> tiers_ SPIN_GUARDED_BY(stats_mutex_);  // fast, host
};

}  // namespace spin::engine
