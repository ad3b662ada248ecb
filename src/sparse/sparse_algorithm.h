// SPDX-License-Identifier: Apache-2.0
// What a sparse-attention algorithm is: Index (organise tokens into partitions and summarise each),
// Select (name the critical partitions of a query) and, if it must, a part of Attention. Where the
// pages lie and how they move is not its business: it reads tokens through views, and names pages.
//
// The pipeline (sparse/pipeline.h) calls, per sequence and layer:
//
//   prompt:  enqueue_prompt_chunk()*  enqueue_finish_prompt()
//   step:    enqueue_append()  plan_seal()  [enqueue_seal()]  enqueue_select()
//            [enqueue_reconstruct()]  attention over the list  [enqueue_estimate()]
//
// An algorithm is one file pair in this folder, one line in registry.cc, one page in
// docs/algorithms/ and one row in bench/. Index reads keys and values out of pages, as they are
// stored (after RoPE, rounded to the KV type), so that a summary does not depend on when it is
// made. The algorithm keeps no state of a sequence; a SequenceIndex does.
//
// Thread: engine thread; functions named enqueue_ only queue work on the stream. Lifetime: the
// device's ops and side weights outlive the algorithm, the algorithm outlives its indexes, an index
// outlives the work queued for it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "backend/device.h"
#include "backend/kv_ops.h"
#include "backend/sparse_ops.h"
#include "backend/tensor.h"
#include "layout/head_pages.h"
#include "layout/paged_tokens.h"
#include "spin/status.h"

namespace spin::sparse {

// The model as algorithms see it.
struct ModelShape {
  layout::KvGeometry geometry;  // layers, kv_heads, head_dim, page_tokens, dtype
  uint32_t q_heads = 0;
  float scale = 1.0f;        // on q . k
  backend::RopeParams rope;  // its arrays outlive the algorithm
  uint32_t group() const { return q_heads / geometry.kv_heads; }
};

// Fixed for the life of an algorithm.
struct Descriptor {
  std::string name;      // as in the registry
  std::string settings;  // all options with their resolved values, "budget=128,bits=2"
  // Below so many tokens of context a sequence is dense, and the statistics say so.
  uint64_t minimum_tokens = 0;
  // Index built from a whole prompt equals one built token by token, bit for bit.
  bool prefix_stable = true;
  // What Retrieve brings; with kValuesOnly enqueue_reconstruct() makes the keys of fetched pages.
  layout::Planes planes = layout::Planes::kKeysAndValues;
  // Adds an estimate of what is not attended (enqueue_estimate()).
  bool estimates = false;
  // The first so many layers attend to everything.
  uint32_t dense_layers = 0;
};

// What a sequence of at most `max_tokens` takes, in pages of one KV head of one layer.
struct SequenceNeeds {
  uint32_t sink_pages = 0;      // zone at the start: pages [0, sink_pages)
  uint32_t zone_pages = 0;      // other pinned pages (outliers), chosen at the end of the prompt
  uint32_t tail_pages = 0;      // most pages of the tail: local window, unsealed, open page
  uint32_t selected_pages = 0;  // most pages that one step selects beside those
  uint64_t page_ids = 0;        // bound of all page ids
  uint64_t index_bytes = 0;     // fast memory of its index, over all layers
};

// The index of one sequence: summaries of all layers, in fast memory.
class SequenceIndex {
 public:
  virtual ~SequenceIndex() = default;
};

// How a prompt's tokens between sinks and tail are dealt out to pages, and which pages are pinned.
// Lifetime: until the next call for the same index.
struct PromptPartition {
  const layout::PageMap* map = nullptr;  // null: token order
  uint32_t first_mapped_page = 0;
  uint32_t mapped_page_ids = 0;  // ids that the map may use; the tail's ids follow them
  layout::PageList pinned;       // counts == nullptr: none
};

// What leaves the tail after an append. Decided on the host, from counts alone.
struct SealPlan {
  uint32_t pages = 0;          // so many whole pages, in token order
  uint32_t repack_tokens = 0;  // or: so many tokens, dealt out anew (clusters)
};

struct AppendItem {
  SequenceIndex* index = nullptr;
  layout::PagedTokens tail;  // the tail's tokens, the new ones included
  uint64_t first_token = 0;  // position of tail token 0
  uint32_t new_tokens = 0;
};

struct SealItem {
  SequenceIndex* index = nullptr;
  layout::PagedTokens tail;    // before they leave
  uint64_t first_token = 0;    // position of tail token 0
  uint32_t tokens = 0;         // its first `tokens` leave
  uint32_t first_page_id = 0;  // of the ids that they get (their own when in token order)
};

// One row of queries of one sequence. The algorithm fills `list` with everything that the row
// attends to exactly: zones, selected partitions, tail (SparseOps::enqueue_build_lists).
struct SelectItem {
  SequenceIndex* index = nullptr;
  uint64_t row = 0;               // of q
  uint64_t context_tokens = 0;    // the row's own token included
  uint32_t tail_first_page = 0;   // id
  uint64_t tail_first_token = 0;  // its position
  layout::PageList list;          // out
  uint64_t* attended = nullptr;   // added to: [kv_heads] tokens on the list
  uint64_t* selected = nullptr;   // added to: [kv_heads] partitions selected
  // Added to: [kv_heads] partitions that the budget bought but whose pages did not fit the bound of
  // selected pages; they are estimated instead. Null: not wanted.
  uint64_t* overflows = nullptr;
};

struct EstimateItem {
  SequenceIndex* index = nullptr;
  uint64_t row = 0;
  layout::PageList list;          // attended exactly
  float* part = nullptr;          // out [q_heads, head_dim]
  float* log_sum_exp = nullptr;   // out [q_heads]
  uint64_t tail_first_token = 0;  // its position
};

// Keys of pages that came without them. Entries fetched[i] of the list lie in slots[...] now.
struct ReconstructItem {
  SequenceIndex* index = nullptr;
  layout::PageList list;
  const uint32_t* slots = nullptr;           // [kv_heads, list.stride]
  const uint32_t* fetched = nullptr;         // [kv_heads, list.stride]
  const uint32_t* fetched_counts = nullptr;  // [kv_heads]
};

class SparseAlgorithm {
 public:
  virtual ~SparseAlgorithm() = default;

  virtual const Descriptor& descriptor() const = 0;
  virtual SequenceNeeds needs(uint64_t max_tokens) const = 0;
  // Errors: kResourceExhausted.
  virtual Result<std::unique_ptr<SequenceIndex>> create_index(
      uint64_t max_tokens, backend::MemoryResource& fast) const = 0;

  // Position of the first token of the tail after a prompt of `tokens`; begins a page.
  virtual uint64_t prompt_tail_first(uint64_t tokens) const = 0;

  // Index. Tokens [first, first + count) of the prompt have been written; those before, too.
  virtual void enqueue_prompt_chunk(SequenceIndex& /*index*/,
                                    uint32_t /*layer*/,
                                    const layout::PagedTokens& /*prompt*/,
                                    uint64_t /*first*/,
                                    uint64_t /*count*/,
                                    backend::StreamRef /*stream*/) const {}
  // The whole prompt has been written, and nobody else reads it before it is placed: an algorithm
  // that rebuilds keys puts the rebuilt ones into `prompt`, so that a page has the same keys
  // whether it was ever fetched or not.
  virtual PromptPartition enqueue_finish_prompt(SequenceIndex& index,
                                                uint32_t layer,
                                                const layout::PagedTokens& prompt,
                                                backend::StreamRef stream) const = 0;
  // Settings that differ only in what they select make the same index of a prompt. If `from`, an
  // index of `other`, is one for this algorithm, too, copies what it holds of the layer, in place
  // of enqueue_prompt_chunk() and enqueue_finish_prompt(), and returns the partition, which reads
  // `to`. Called right after the layer was finished for `from`, on the same stream; `to` was made
  // for as many tokens as `from`. Returns nothing, and does nothing, if they are not alike.
  virtual std::optional<PromptPartition> enqueue_copy_prompt(const SparseAlgorithm& /*other*/,
                                                             const SequenceIndex& /*from*/,
                                                             SequenceIndex& /*to*/,
                                                             uint32_t /*layer*/,
                                                             const layout::PagedTokens& /*prompt*/,
                                                             backend::StreamRef /*stream*/) const {
    return std::nullopt;
  }
  virtual void enqueue_append(std::span<const AppendItem> /*items*/,
                              uint32_t /*layer*/,
                              backend::StreamRef /*stream*/) const {}
  // `tail` holds the tokens of the step at hand. Pure; the same for all layers or staggered.
  virtual SealPlan plan_seal(const SequenceIndex& index,
                             uint32_t layer,
                             const layout::Tail& tail) const = 0;
  // Returns the map of a repacked tail; null when the plan was in token order.
  virtual const layout::PageMap* enqueue_seal(const SealItem& item,
                                              uint32_t layer,
                                              backend::StreamRef stream) const = 0;
  // Most page ids that repacking `tokens` tokens can take.
  virtual uint32_t repacked_page_ids(uint32_t /*tokens*/) const { return 0; }

  // Select. q: f32 [rows, q_heads * head_dim], after RoPE.
  virtual void enqueue_select(backend::TensorRef q,
                              std::span<const SelectItem> items,
                              uint32_t layer,
                              backend::StreamRef stream) const = 0;

  // With kValuesOnly: pages with lower ids are fetched without keys, the others whole.
  virtual uint32_t keyless_end(const SequenceIndex& /*index*/) const { return layout::kNoPage; }

  // Attention parts; called only where the descriptor says so.
  virtual void enqueue_reconstruct(std::span<const ReconstructItem> /*items*/,
                                   uint32_t /*layer*/,
                                   const backend::TieredPoolRef& /*pool*/,
                                   backend::StreamRef /*stream*/) const {}
  virtual void enqueue_estimate(backend::TensorRef /*q*/,
                                std::span<const EstimateItem> /*items*/,
                                uint32_t /*layer*/,
                                backend::StreamRef /*stream*/) const {}
};

}  // namespace spin::sparse
