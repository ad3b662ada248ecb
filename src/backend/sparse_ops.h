// SPDX-License-Identifier: Apache-2.0
// Operations of the Index and Select parts of sparse attention that more than one algorithm can
// use: summaries of ranges, scores, ranking, lists of pages, estimation. An algorithm that needs
// another primitive adds it here, with its formula, a CPU implementation and a conformance row.
//
// As in backend/kv_ops.h: an operation takes one item per sequence, kernels work per (item, KV
// head); what items point to stays alive until the operation has run, items are copied.
// Stream: the last parameter. Errors: sticky on the stream.
// Numerics: sums in float, in an order that depends on the item's own sizes alone. A summary of
// tokens has the same bits whether it was made from a whole prompt or token by token.
#pragma once

#include <cstdint>
#include <span>

#include "backend/cluster_items.h"
#include "backend/device.h"
#include "backend/gate_items.h"
#include "backend/head_vectors.h"
#include "backend/lowrank_items.h"
#include "backend/ops.h"
#include "backend/sketch_ops.h"
#include "backend/tensor.h"
#include "layout/dtype.h"
#include "layout/head_pages.h"
#include "layout/paged_tokens.h"

namespace spin::backend {

// Partition j of a range algorithm: tokens [j * partition_tokens, (j + 1) * partition_tokens).
struct PoolKeysItem {
  layout::PagedTokens tokens;
  uint32_t partition_tokens = 0;
  uint32_t first = 0;  // partitions [first, first + count) of `tokens`, all complete
  uint32_t count = 0;
  uint32_t out_first = 0;  // partition `first` is written to vector out_first, and so on
  HeadVectors mean;        // outputs; data == nullptr: not wanted
  HeadVectors min;
  HeadVectors max;
};

// How far a partition's keys stray from their mean m: score = - min over its tokens k of cos(m, k),
// where a vector of length 0 has cosine 0. Ranked, the first are the outliers.
struct ScoreStraysItem {
  layout::PagedTokens tokens;
  uint32_t partition_tokens = 0;
  uint32_t first = 0;  // partitions [first, first + count) of `tokens`, all complete
  uint32_t count = 0;
  HeadVectors mean;         // of partition j: vector j
  float* scores = nullptr;  // out [kv_heads, score_stride]; entry j belongs to partition first + j
  uint64_t score_stride = 0;
};

// sizes[h, j] = value for j in [first, first + count), then 0 for the partitions listed.
struct FillSizesItem {
  uint32_t* sizes = nullptr;  // out [kv_heads, size_stride]
  uint64_t size_stride = 0;
  uint32_t first = 0;
  uint32_t count = 0;
  uint32_t value = 0;
  const uint32_t* ids = nullptr;  // [kv_heads, id_stride], within the range; null: none
  const uint32_t* counts = nullptr;
  uint32_t id_stride = 0;
};

// How the scores of a group's query heads become one score.
enum class Aggregation : uint8_t {
  kSoftmaxMax,  // max over g of (s_g - lse_g)
  kSoftmaxSum,  // ln of the sum over g of e^(s_g - lse_g)
};

// What all score operations share. lse_g runs over all partitions that are scored.
struct ScoreItem {
  uint64_t row = 0;    // of q
  uint32_t first = 0;  // partitions [first, first + count) are scored
  uint32_t count = 0;
  // Partitions of size 0 are not scored; null: all are. [kv_heads, size_stride], indexed from 0.
  const uint32_t* sizes = nullptr;
  uint64_t size_stride = 0;
  // Out [kv_heads, score_stride]: natural logarithms; entry j belongs to partition first + j;
  // -infinity where not scored.
  float* scores = nullptr;
  uint64_t score_stride = 0;
};

struct ScoreMeansItem : ScoreItem {
  HeadVectors keys;  // s = scale * q . key
  // Partition j has keys [j * n, (j + 1) * n); its s_g is the largest of theirs, lse_g runs over
  // all keys of the partitions that are scored.
  uint32_t keys_per_partition = 1;
};

struct ScoreBoxesItem : ScoreItem {
  HeadVectors min;  // s = scale * sum over d of max(q_d min_d, q_d max_d)
  HeadVectors max;
};

struct RankItem {
  const float* scores = nullptr;  // [kv_heads, score_stride]
  uint64_t score_stride = 0;
  uint32_t first = 0;  // added to the ids
  uint32_t count = 0;
  // The best `most` partitions with score >= least_score (and never one of -infinity), ties to the
  // lower id. Out ids [kv_heads, id_stride], id_stride >= min(most, count); out counts [kv_heads].
  uint32_t most = 0;
  float least_score = -3.0e38f;
  bool ranked = false;  // best first; otherwise ascending ids
  uint32_t* ids = nullptr;
  uint32_t* counts = nullptr;
  uint32_t id_stride = 0;
  uint64_t* selected = nullptr;  // added to: [kv_heads] numbers of ids; null: not wanted
};

// The list of pages that a row attends to: sinks, pinned pages, the pages of selected partitions,
// the tail; ascending, each page once.
struct BuildListItem {
  uint32_t sink_pages = 0;  // ids [0, sink_pages), all full
  layout::PageList pinned;  // counts == nullptr: none; ascending
  // Selected partitions; in any order. counts == nullptr: none.
  const uint32_t* ids = nullptr;  // [kv_heads, id_stride]
  const uint32_t* counts = nullptr;
  uint32_t id_stride = 0;
  // Ranges: partition j has pages [j * pages_per_partition, (j + 1) * pages_per_partition), full.
  uint32_t pages_per_partition = 0;
  // Clusters (pages_per_partition == 0): the pages from first_pages[h * cluster_stride + j] on hold
  // sizes[h * cluster_stride + j] tokens.
  const uint32_t* first_pages = nullptr;
  const uint32_t* sizes = nullptr;
  uint64_t cluster_stride = 0;
  // The tail: pages [tail_first_page, ...) with tail_tokens tokens.
  uint32_t tail_first_page = 0;
  uint64_t tail_tokens = 0;
  layout::PageList list;  // out
  // Added to: [kv_heads] tokens on the list; null: not wanted. A list that its stride cannot hold
  // fails the stream (kInternal), it is never cut.
  uint64_t* attended = nullptr;
};

// Attention to partitions that stand for their tokens (RetroInfer's estimation zone): keys are
// centroids c, values sums of values vs, sizes n:
//   part = sum_j e^(s_j) vs_j / den,  den = sum_j n_j e^(s_j),  lse = ln den,  s = scale * q . c.
struct EstimateItem {
  uint64_t row = 0;
  HeadVectors keys;
  HeadVectors value_sums;
  const uint32_t* sizes = nullptr;  // [kv_heads, size_stride]
  uint64_t size_stride = 0;
  // Partitions ids[h * id_stride + skip[h] ...] up to counts[h].
  const uint32_t* ids = nullptr;
  const uint32_t* counts = nullptr;  // [kv_heads]
  uint32_t id_stride = 0;
  uint32_t skip = 0;             // leading ids that are attended exactly
  float* part = nullptr;         // out [q_heads, head_dim]
  float* log_sum_exp = nullptr;  // out [q_heads]; -infinity and a part of zeros if there is none
};

class SparseOps {
 public:
  virtual ~SparseOps() = default;

  virtual void enqueue_pool_keys(std::span<const PoolKeysItem> items, StreamRef stream) = 0;

  virtual void enqueue_score_strays(std::span<const ScoreStraysItem> items, StreamRef stream) = 0;

  virtual void enqueue_fill_sizes(std::span<const FillSizesItem> items,
                                  uint32_t kv_heads,
                                  StreamRef stream) = 0;

  // q: f32 [rows, q_heads * head_dim].
  virtual void enqueue_score_means(TensorRef q,
                                   std::span<const ScoreMeansItem> items,
                                   const layout::KvGeometry& geometry,
                                   float scale,
                                   Aggregation aggregation,
                                   StreamRef stream) = 0;
  virtual void enqueue_score_boxes(TensorRef q,
                                   std::span<const ScoreBoxesItem> items,
                                   const layout::KvGeometry& geometry,
                                   float scale,
                                   Aggregation aggregation,
                                   StreamRef stream) = 0;

  virtual void enqueue_rank(std::span<const RankItem> items,
                            uint32_t kv_heads,
                            StreamRef stream) = 0;

  virtual void enqueue_build_lists(std::span<const BuildListItem> items,
                                   const layout::KvGeometry& geometry,
                                   StreamRef stream) = 0;

  virtual void enqueue_estimate(TensorRef q,
                                std::span<const EstimateItem> items,
                                const layout::KvGeometry& geometry,
                                float scale,
                                StreamRef stream) = 0;

  // Sketches (backend/sketch_ops.h). head_dim and page_tokens come from `geometry`.
  virtual void enqueue_sketch_mean(std::span<const SketchMeanItem> items, StreamRef stream) = 0;
  virtual void enqueue_encode_sketch(std::span<const EncodeSketchItem> items, StreamRef stream) = 0;
  virtual void enqueue_score_sketch(TensorRef q,
                                    std::span<const ScoreSketchItem> items,
                                    const layout::KvGeometry& geometry,
                                    float scale,
                                    StreamRef stream) = 0;
  virtual void enqueue_estimate_sketch(TensorRef q,
                                       std::span<const EstimateSketchItem> items,
                                       const layout::KvGeometry& geometry,
                                       float scale,
                                       StreamRef stream) = 0;

  // Learned gates: summaries of blocks and their scores, one list per KV head.
  // q: f32 [rows, q_heads * head_dim], after RoPE.
  virtual void enqueue_gate_keys(std::span<const GateKeysItem> items,
                                 const GateWeights& weights,
                                 StreamRef stream) = 0;
  virtual void enqueue_gate_scores(TensorRef q,
                                   std::span<const GateScoreItem> items,
                                   const GateWeights& weights,
                                   const layout::KvGeometry& geometry,
                                   StreamRef stream) = 0;

  // Low-rank keys: factors of a prompt's, and keys made of them.
  virtual void enqueue_factor_keys(const FactorKeysItem& item,
                                   const RopeParams& rope,
                                   StreamRef stream) = 0;
  virtual void enqueue_rebuild_tokens(const RebuildTokensItem& item,
                                      const RopeParams& rope,
                                      StreamRef stream) = 0;
  virtual void enqueue_rebuild_pages(std::span<const RebuildPagesItem> items,
                                     const KvPoolRef& pool,
                                     const RopeParams& rope,
                                     StreamRef stream) = 0;

  // Clusters (backend/cluster_items.h).
  virtual void enqueue_cluster(std::span<const ClusterItem> items, StreamRef stream) = 0;
  virtual void enqueue_split_ranked(std::span<const SplitRankedItem> items,
                                    const layout::KvGeometry& geometry,
                                    StreamRef stream) = 0;
};

}  // namespace spin::backend
