// SPDX-License-Identifier: Apache-2.0
// SparseOps on a GPU. summaries.cu (pool, strays, sizes), score.cu (means, boxes), rank.cu,
// lists.cu (build, split), estimate.cu, sketch_encode.cu, sketch_score.cu, sketch_estimate.cu,
// gates.cu, lowrank.cu, lowrank_factor.cu, cluster.cu, cluster_pages.cu. Thread: as SparseOps.
#pragma once

#include "backend/sparse_ops.h"

namespace spin::backend::cuda {

class CudaSparseOps final : public SparseOps {
 public:
  CudaSparseOps(int ordinal, MemoryResource& fast) : ordinal_(ordinal), fast_(fast) {}

  void enqueue_pool_keys(std::span<const PoolKeysItem> items, StreamRef stream) override;
  void enqueue_score_strays(std::span<const ScoreStraysItem> items, StreamRef stream) override;
  void enqueue_fill_sizes(std::span<const FillSizesItem> items,
                          uint32_t kv_heads,
                          StreamRef stream) override;
  void enqueue_score_means(TensorRef q,
                           std::span<const ScoreMeansItem> items,
                           const layout::KvGeometry& geometry,
                           float scale,
                           Aggregation aggregation,
                           StreamRef stream) override;
  void enqueue_score_boxes(TensorRef q,
                           std::span<const ScoreBoxesItem> items,
                           const layout::KvGeometry& geometry,
                           float scale,
                           Aggregation aggregation,
                           StreamRef stream) override;
  void enqueue_rank(std::span<const RankItem> items, uint32_t kv_heads, StreamRef stream) override;
  void enqueue_build_lists(std::span<const BuildListItem> items,
                           const layout::KvGeometry& geometry,
                           StreamRef stream) override;
  void enqueue_estimate(TensorRef q,
                        std::span<const EstimateItem> items,
                        const layout::KvGeometry& geometry,
                        float scale,
                        StreamRef stream) override;
  void enqueue_sketch_mean(std::span<const SketchMeanItem> items, StreamRef stream) override;
  void enqueue_encode_sketch(std::span<const EncodeSketchItem> items, StreamRef stream) override;
  void enqueue_score_sketch(TensorRef q,
                            std::span<const ScoreSketchItem> items,
                            const layout::KvGeometry& geometry,
                            float scale,
                            StreamRef stream) override;
  void enqueue_estimate_sketch(TensorRef q,
                               std::span<const EstimateSketchItem> items,
                               const layout::KvGeometry& geometry,
                               float scale,
                               StreamRef stream) override;
  void enqueue_gate_keys(std::span<const GateKeysItem> items,
                         const GateWeights& weights,
                         StreamRef stream) override;
  void enqueue_gate_scores(TensorRef q,
                           std::span<const GateScoreItem> items,
                           const GateWeights& weights,
                           const layout::KvGeometry& geometry,
                           StreamRef stream) override;
  void enqueue_factor_keys(const FactorKeysItem& item,
                           const RopeParams& rope,
                           StreamRef stream) override;
  void enqueue_rebuild_tokens(const RebuildTokensItem& item,
                              const RopeParams& rope,
                              StreamRef stream) override;
  void enqueue_rebuild_pages(std::span<const RebuildPagesItem> items,
                             const KvPoolRef& pool,
                             const RopeParams& rope,
                             StreamRef stream) override;
  void enqueue_cluster(std::span<const ClusterItem> items, StreamRef stream) override;
  void enqueue_split_ranked(std::span<const SplitRankedItem> items,
                            const layout::KvGeometry& geometry,
                            StreamRef stream) override;

 private:
  const int ordinal_;
  MemoryResource& fast_;
};

}  // namespace spin::backend::cuda
