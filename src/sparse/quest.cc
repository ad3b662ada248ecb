// SPDX-License-Identifier: Apache-2.0
#include "sparse/quest.h"

#include <vector>

#include "sparse/range_algorithm.h"

namespace spin::sparse {
namespace {

class Quest final : public RangeAlgorithm {
 public:
  Quest(const AlgorithmContext& context,
        Descriptor descriptor,
        const RangePartition& partition,
        const TokenBudget& budget,
        backend::Aggregation aggregation)
      : RangeAlgorithm(context, std::move(descriptor), partition, budget),
        aggregation_(aggregation) {}

 private:
  uint64_t summary_bytes(uint64_t most_partitions) const override {
    return 2 * vector_array_bytes(most_partitions);
  }

  void enqueue_summaries(RangeIndex& index,
                         uint32_t layer,
                         const layout::PagedTokens& tokens,
                         uint32_t first,
                         uint32_t count,
                         uint32_t first_id,
                         backend::StreamRef stream) const override {
    backend::PoolKeysItem item;
    item.tokens = tokens;
    item.partition_tokens = partition().partition_tokens();
    item.first = first;
    item.count = count;
    item.out_first = first_id;
    item.min = vector_array(index, layer, 0);
    item.max = vector_array(index, layer, 1);
    ops().enqueue_pool_keys({&item, 1}, stream);
  }

  void enqueue_scores(backend::TensorRef q,
                      std::span<const RangeScores> rows,
                      uint32_t layer,
                      backend::StreamRef stream) const override {
    std::vector<backend::ScoreBoxesItem> items;
    for (const RangeScores& row : rows) {
      backend::ScoreBoxesItem item;
      item.row = row.row;
      item.first = row.first;
      item.count = row.count;
      item.scores = row.scores;
      item.score_stride = row.score_stride;
      item.min = vector_array(*row.index, layer, 0);
      item.max = vector_array(*row.index, layer, 1);
      items.push_back(item);
    }
    ops().enqueue_score_boxes(q, items, shape().geometry, shape().scale, aggregation_, stream);
  }

  const backend::Aggregation aggregation_;
};

}  // namespace

Result<std::unique_ptr<SparseAlgorithm>> create_quest(const SparseSpec& spec,
                                                      const AlgorithmContext& context) {
  SPIN_RETURN_IF_ERROR(check_shape(spec.name, context.shape));
  OptionReader options(spec);
  const TokenBudget budget = options.budget("budget", {1024, 0});
  RangeSettings settings;
  settings.page_tokens = context.shape.geometry.page_tokens;
  settings.partition_tokens = static_cast<uint32_t>(options.integer("block", 16, 1, 1024));
  const ZoneOptions zones = read_zones(options, {4, 64});
  settings.sink_tokens = zones.sink_tokens;
  settings.local_tokens = zones.local_tokens;
  Descriptor descriptor;
  descriptor.name = spec.name;
  descriptor.dense_layers =
      static_cast<uint32_t>(options.integer("dense_layers", 2, 0, context.shape.geometry.layers));
  const backend::Aggregation aggregation = read_aggregation(options);
  SPIN_RETURN_IF_ERROR(options.finish());
  descriptor.settings = options.resolved();
  return std::unique_ptr<SparseAlgorithm>(std::make_unique<Quest>(
      context, std::move(descriptor), RangePartition(settings), budget, aggregation));
}

}  // namespace spin::sparse
