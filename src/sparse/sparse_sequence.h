// SPDX-License-Identifier: Apache-2.0
// One sequence under one algorithm: its pages in both tiers, its index, and what was counted.
// Thread: engine thread. Lifetime: store and algorithm outlive it; no queued work uses it when it
// is destroyed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/device.h"
#include "kv/page_store.h"
#include "kv/tiered_sequence.h"
#include "layout/head_pages.h"
#include "layout/paged_tokens.h"
#include "sparse/sparse_algorithm.h"
#include "spin/status.h"

namespace spin::sparse {

// Sums over all steps, layers and KV heads.
struct SparseCounters {
  uint64_t steps = 0;
  uint64_t selections = 0;  // (step, layer, KV head) triples in which Select ran
  // Triples that attended to everything: dense layers, contexts below the algorithm's minimum.
  uint64_t dense = 0;
  uint64_t attended_tokens = 0;  // on the lists of both kinds
  uint64_t selected_partitions = 0;
  uint64_t overflows = 0;  // partitions that were estimated because their pages did not fit
  layout::RetrieveCounters retrieve;
  uint64_t sealed_pages = 0;
  uint64_t repacks = 0;
};

// Shape of a sequence's pages for an algorithm and a length.
kv::SequenceShape sequence_shape(const SparseAlgorithm& algorithm,
                                 const ModelShape& model,
                                 uint64_t max_tokens);

class SparseSequence {
 public:
  // Errors: kResourceExhausted (slots, host extents, index memory); nothing is kept then.
  static Result<std::unique_ptr<SparseSequence>> open(
      kv::PageStore& store,
      std::shared_ptr<const SparseAlgorithm> algorithm,
      const ModelShape& model,
      uint64_t max_tokens,
      uint64_t lease_pages);
  ~SparseSequence();

  const SparseAlgorithm& algorithm() const { return *algorithm_; }
  kv::TieredSequence& kv() { return *kv_; }
  const kv::TieredSequence& kv() const { return *kv_; }
  SequenceIndex& index() { return *index_; }

  // Prompt, layer by layer: chunks as they are written to `prompt`, then the whole. Placing runs on
  // the same stream; `prompt` may be overwritten once the stream has passed it.
  void enqueue_prompt_chunk(uint32_t layer,
                            const layout::PagedTokens& prompt,
                            uint64_t first,
                            uint64_t count,
                            backend::StreamRef stream);
  void enqueue_finish_prompt_layer(uint32_t layer,
                                   const layout::PagedTokens& prompt,
                                   backend::StreamRef stream);
  // In place of both, for a layer that was just finished for `from`, a sequence as long: copies its
  // index if that is one for this algorithm, too, and places the prompt. Returns false, and does
  // nothing, if it is not.
  bool enqueue_copy_prompt_layer(const SparseSequence& from,
                                 uint32_t layer,
                                 const layout::PagedTokens& prompt,
                                 backend::StreamRef stream);
  // All layers' work has run.
  void commit_prompt(uint64_t tokens);

  // One decode step of one token; the pipeline queues its layers in between.
  void begin_step();
  // The step's work has run. Errors: kCorrupt when a host page was not what it should be: this
  // sequence is lost, others are not.
  Status commit_step();
  void drop_step();

  const SparseCounters& counters() const { return counters_; }
  // What the last layer queued attended to and where it lay; for audits, once its work has run.
  const layout::PageList& list() const { return list_; }
  const uint32_t* list_slots() const { return slots_; }

 private:
  friend class Pipeline;
  SparseSequence() = default;
  Status allocate_buffers();
  void enqueue_place(uint32_t layer,
                     const layout::PagedTokens& prompt,
                     const PromptPartition& partition,
                     backend::StreamRef stream);

  kv::PageStore* store_ = nullptr;
  std::shared_ptr<const SparseAlgorithm> algorithm_;
  ModelShape model_;
  std::unique_ptr<kv::TieredSequence> kv_;
  std::unique_ptr<SequenceIndex> index_;
  // Selection buffers, used by one layer after the other, in fast memory; what kernels count, in
  // host memory.
  backend::Buffer buffers_;
  backend::Buffer counts_;
  layout::PageList list_;
  uint32_t* slots_ = nullptr;           // [kv_heads, list stride]
  uint32_t* fetched_ = nullptr;         // [kv_heads, list stride]; null without reconstruction
  uint32_t* fetched_counts_ = nullptr;  // [kv_heads]
  float* log_sum_exp_ = nullptr;        // [q_heads]
  float* part_ = nullptr;               // [q_heads, head_dim]
  float* part_log_sum_exp_ = nullptr;   // [q_heads]
  uint64_t* attended_ = nullptr;        // [kv_heads] since the step began
  uint64_t* selected_ = nullptr;        // [kv_heads]
  uint64_t* overflows_ = nullptr;       // [kv_heads]
  SparseCounters step_;                 // of the step in flight
  SparseCounters counters_;
  uint32_t trace_id_ = 0;  // its name in a selection trace; 0: none yet
};

}  // namespace spin::sparse
