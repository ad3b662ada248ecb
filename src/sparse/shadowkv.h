// SPDX-License-Identifier: Apache-2.0
// ShadowKV (arXiv 2410.21465) as served engines run it: the mean of 8 keys stands for them, chunks
// whose mean does not are pinned; K and V are fetched (docs/algorithms/shadowkv.md).
// Thread: as SparseAlgorithm.
#pragma once

#include <memory>

#include "sparse/outlier_zone.h"
#include "sparse/range_algorithm.h"
#include "sparse/registry.h"

namespace spin::sparse {

struct ShadowKvSettings {
  RangePartition partition;
  TokenBudget budget;
  uint32_t outliers = 0;  // partitions per KV head
  backend::Aggregation aggregation = backend::Aggregation::kSoftmaxMax;
};

// Options, read in this order: budget, block, sinks, local, outliers, aggregate.
ShadowKvSettings read_shadowkv_options(OptionReader& options, const ModelShape& shape);

class ShadowKv : public RangeAlgorithm {
 public:
  ShadowKv(const AlgorithmContext& context,
           Descriptor descriptor,
           const ShadowKvSettings& settings);

 protected:
  // The index: landmarks, then the outlier zone.
  uint64_t summary_bytes(uint64_t most_partitions) const override;
  layout::PageList pinned(const RangeIndex& index, uint32_t layer) const override;

 private:
  OutlierShape outlier_shape() const;
  OutlierZone outliers(const RangeIndex& index) const;
  void enqueue_summaries(RangeIndex& index,
                         uint32_t layer,
                         const layout::PagedTokens& tokens,
                         uint32_t first,
                         uint32_t count,
                         uint32_t first_id,
                         backend::StreamRef stream) const override;
  void enqueue_pins(RangeIndex& index,
                    uint32_t layer,
                    const layout::PagedTokens& prompt,
                    uint32_t partitions,
                    backend::StreamRef stream) const override;
  void enqueue_scores(backend::TensorRef q,
                      std::span<const RangeScores> rows,
                      uint32_t layer,
                      backend::StreamRef stream) const override;

  const backend::Aggregation aggregation_;
};

Result<std::unique_ptr<SparseAlgorithm>> create_shadowkv(const SparseSpec& spec,
                                                         const AlgorithmContext& context);

}  // namespace spin::sparse
