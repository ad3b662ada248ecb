// SPDX-License-Identifier: Apache-2.0
// Base of algorithms over token ranges (sparse/range_partition.h): zones, sealing, memory of the
// index, ranking and lists. What is left to an algorithm is how a partition is summarised and how
// summaries are scored. Thread: as SparseAlgorithm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "backend/sparse_ops.h"
#include "sparse/outlier_zone.h"
#include "sparse/range_partition.h"
#include "sparse/registry.h"
#include "sparse/sparse_algorithm.h"

namespace spin::sparse {

// Index of one sequence. All of it is one buffer: what the algorithm keeps, then scratch of Select
// that one layer uses after the other.
class RangeIndex final : public SequenceIndex {
 public:
  std::byte* summaries() const { return memory_.as<std::byte>(); }
  uint64_t most_partitions() const { return most_partitions_; }
  // Whole partitions that the prompt left outside the tail; 0 before it is finished.
  uint32_t prompt_partitions() const { return prompt_partitions_; }

 private:
  friend class RangeAlgorithm;
  backend::Buffer memory_;
  uint64_t most_partitions_ = 0;
  uint32_t prompt_partitions_ = 0;
  uint32_t id_stride_ = 0;
  float* scores_ = nullptr;     // [kv_heads, most_partitions]
  uint32_t* ids_ = nullptr;     // [kv_heads, id_stride]
  uint32_t* counts_ = nullptr;  // [kv_heads]
};

// Where the scores of one row's partitions [first, first + count) go.
struct RangeScores {
  RangeIndex* index = nullptr;
  uint64_t row = 0;
  uint32_t first = 0;
  uint32_t count = 0;
  float* scores = nullptr;  // [kv_heads, score_stride]
  uint64_t score_stride = 0;
  uint64_t position = 0;  // of the row's token
};

// Which of the ranked partitions are taken.
struct RankLimits {
  uint32_t most = 0;
  float least_score = -3.0e38f;
};

class RangeAlgorithm : public SparseAlgorithm {
 public:
  const Descriptor& descriptor() const override { return descriptor_; }
  SequenceNeeds needs(uint64_t max_tokens) const override;
  Result<std::unique_ptr<SequenceIndex>> create_index(uint64_t max_tokens,
                                                      backend::MemoryResource& fast) const override;
  uint64_t prompt_tail_first(uint64_t tokens) const override {
    return partition_.prompt_tail_first(tokens);
  }
  PromptPartition enqueue_finish_prompt(SequenceIndex& index,
                                        uint32_t layer,
                                        const layout::PagedTokens& prompt,
                                        backend::StreamRef stream) const override;
  SealPlan plan_seal(const SequenceIndex& index,
                     uint32_t layer,
                     const layout::Tail& tail) const override;
  const layout::PageMap* enqueue_seal(const SealItem& item,
                                      uint32_t layer,
                                      backend::StreamRef stream) const override;
  void enqueue_select(backend::TensorRef q,
                      std::span<const SelectItem> items,
                      uint32_t layer,
                      backend::StreamRef stream) const override;

 protected:
  // `descriptor`: all but minimum_tokens, which follows from the zones and the budget.
  // pinned_partitions: partitions per head that on_prompt() pins at most.
  RangeAlgorithm(const AlgorithmContext& context,
                 Descriptor descriptor,
                 const RangePartition& partition,
                 const TokenBudget& budget,
                 uint32_t pinned_partitions = 0);

  // Bytes that the algorithm keeps for so many partitions, over all layers that are not dense.
  virtual uint64_t summary_bytes(uint64_t most_partitions) const = 0;
  // Partitions [first, first + count) of `tokens` become partitions [first_id, ...) of the index.
  virtual void enqueue_summaries(RangeIndex& index,
                                 uint32_t layer,
                                 const layout::PagedTokens& tokens,
                                 uint32_t first,
                                 uint32_t count,
                                 uint32_t first_id,
                                 backend::StreamRef stream) const = 0;
  virtual void enqueue_scores(backend::TensorRef q,
                              std::span<const RangeScores> rows,
                              uint32_t layer,
                              backend::StreamRef stream) const = 0;
  virtual RankLimits rank_limits(uint64_t context_tokens) const {
    return {.most = partition_.budget_partitions(budget_, context_tokens)};
  }
  // After all summaries of a prompt of `partitions` partitions outside the tail are queued.
  virtual void enqueue_pins(RangeIndex& /*index*/,
                            uint32_t /*layer*/,
                            const layout::PagedTokens& /*prompt*/,
                            uint32_t /*partitions*/,
                            backend::StreamRef /*stream*/) const {}
  // Pages pinned by enqueue_pins(); counts == nullptr: none.
  virtual layout::PageList pinned(const RangeIndex& /*index*/, uint32_t /*layer*/) const {
    return {};
  }

  const ModelShape& shape() const { return shape_; }
  const RangePartition& partition() const { return partition_; }
  const TokenBudget& budget() const { return budget_; }
  uint32_t pinned_partitions() const { return pinned_partitions_; }
  backend::SparseOps& ops() const { return ops_; }
  bool is_dense(uint32_t layer) const { return layer < descriptor_.dense_layers; }
  // Layers with an index, and which of them `layer` is. Requires: it is not dense.
  uint64_t indexed_layers() const;
  uint64_t indexed_layer(uint32_t layer) const { return layer - descriptor_.dense_layers; }
  static SelectScratch scratch(const RangeIndex& index) {
    return {index.scores_, index.most_partitions_, index.ids_, index.counts_, index.id_stride_};
  }
  // Summaries of one vector per partition: array number `array` of the index's arrays
  // [indexed layers, kv_heads, most_partitions * vectors, head_dim] of the KV type.
  uint64_t vector_array_bytes(uint64_t most_partitions, uint32_t vectors = 1) const;
  backend::HeadVectors vector_array(const RangeIndex& index,
                                    uint32_t layer,
                                    uint32_t array,
                                    uint32_t vectors = 1) const;

 private:
  struct Memory;
  Memory lay_out(uint64_t max_tokens) const;

  ModelShape shape_;
  Descriptor descriptor_;
  RangePartition partition_;
  TokenBudget budget_;
  uint32_t pinned_partitions_;
  backend::SparseOps& ops_;
};

// Options that every range algorithm takes, read in this order: sinks, local.
struct ZoneOptions {
  uint32_t sink_tokens = 0;
  uint64_t local_tokens = 0;
};
ZoneOptions read_zones(OptionReader& options, const ZoneOptions& fallback);
// aggregate=max|sum over the query heads of a group; max unless told.
backend::Aggregation read_aggregation(OptionReader& options);

// Errors: kUnsupported if the shape is not one that summaries can be made of.
Status check_shape(std::string_view algorithm, const ModelShape& shape);

}  // namespace spin::sparse
