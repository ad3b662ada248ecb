// SPDX-License-Identifier: Apache-2.0
#include "sparse/oracle.h"

#include <utility>
#include <vector>

#include "sparse/range_algorithm.h"

namespace spin::sparse {
namespace {

class Oracle final : public RangeAlgorithm {
 public:
  Oracle(const AlgorithmContext& context,
         Descriptor descriptor,
         const RangePartition& partition,
         const TokenBudget& budget,
         backend::Aggregation aggregation)
      : RangeAlgorithm(context, std::move(descriptor), partition, budget),
        aggregation_(aggregation) {}

 private:
  uint32_t block() const { return partition().partition_tokens(); }

  uint64_t summary_bytes(uint64_t most_partitions) const override {
    return vector_array_bytes(most_partitions, block());
  }

  // The mean of one key is that key.
  void enqueue_summaries(RangeIndex& index,
                         uint32_t layer,
                         const layout::PagedTokens& tokens,
                         uint32_t first,
                         uint32_t count,
                         uint32_t first_id,
                         backend::StreamRef stream) const override {
    backend::PoolKeysItem item;
    item.tokens = tokens;
    item.partition_tokens = 1;
    item.first = first * block();
    item.count = count * block();
    item.out_first = first_id * block();
    item.mean = vector_array(index, layer, 0, block());
    ops().enqueue_pool_keys({&item, 1}, stream);
  }

  void enqueue_scores(backend::TensorRef q,
                      std::span<const RangeScores> rows,
                      uint32_t layer,
                      backend::StreamRef stream) const override {
    std::vector<backend::ScoreMeansItem> items;
    for (const RangeScores& row : rows) {
      backend::ScoreMeansItem item;
      item.row = row.row;
      item.first = row.first;
      item.count = row.count;
      item.scores = row.scores;
      item.score_stride = row.score_stride;
      item.keys = vector_array(*row.index, layer, 0, block());
      item.keys_per_partition = block();
      items.push_back(item);
    }
    ops().enqueue_score_means(q, items, shape().geometry, shape().scale, aggregation_, stream);
  }

  const backend::Aggregation aggregation_;
};

}  // namespace

Result<std::unique_ptr<SparseAlgorithm>> create_oracle(const SparseSpec& spec,
                                                       const AlgorithmContext& context) {
  SPIN_RETURN_IF_ERROR(check_shape(spec.name, context.shape));
  OptionReader options(spec);
  const TokenBudget budget = options.budget("budget", {128, 0});
  RangeSettings settings;
  settings.page_tokens = context.shape.geometry.page_tokens;
  settings.partition_tokens = static_cast<uint32_t>(options.integer("block", 8, 1, 1024));
  const ZoneOptions zones = read_zones(options, {4, 64});
  settings.sink_tokens = zones.sink_tokens;
  settings.local_tokens = zones.local_tokens;
  const backend::Aggregation aggregation = read_aggregation(options);
  SPIN_RETURN_IF_ERROR(options.finish());
  Descriptor descriptor;
  descriptor.name = spec.name;
  descriptor.settings = options.resolved();
  return std::unique_ptr<SparseAlgorithm>(std::make_unique<Oracle>(
      context, std::move(descriptor), RangePartition(settings), budget, aggregation));
}

}  // namespace spin::sparse
