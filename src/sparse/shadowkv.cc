// SPDX-License-Identifier: Apache-2.0
#include "sparse/shadowkv.h"

#include <utility>
#include <vector>

namespace spin::sparse {
ShadowKv::ShadowKv(const AlgorithmContext& context,
                   Descriptor descriptor,
                   const ShadowKvSettings& settings)
    : RangeAlgorithm(
          context, std::move(descriptor), settings.partition, settings.budget, settings.outliers),
      aggregation_(settings.aggregation) {}

uint64_t ShadowKv::summary_bytes(uint64_t most_partitions) const {
  return vector_array_bytes(most_partitions) + OutlierZone::bytes(outlier_shape(), most_partitions);
}

OutlierShape ShadowKv::outlier_shape() const {
  return {shape().geometry, indexed_layers(), partition().partition_pages(), pinned_partitions()};
}

OutlierZone ShadowKv::outliers(const RangeIndex& index) const {
  return {outlier_shape(), index.most_partitions(),
          index.summaries() + vector_array_bytes(index.most_partitions())};
}

void ShadowKv::enqueue_summaries(RangeIndex& index,
                                 uint32_t layer,
                                 const layout::PagedTokens& tokens,
                                 uint32_t first,
                                 uint32_t count,
                                 uint32_t first_id,
                                 backend::StreamRef stream) const {
  backend::PoolKeysItem item;
  item.tokens = tokens;
  item.partition_tokens = partition().partition_tokens();
  item.first = first;
  item.count = count;
  item.out_first = first_id;
  item.mean = vector_array(index, layer, 0);
  ops().enqueue_pool_keys({&item, 1}, stream);
}

void ShadowKv::enqueue_pins(RangeIndex& index,
                            uint32_t layer,
                            const layout::PagedTokens& prompt,
                            uint32_t partitions,
                            backend::StreamRef stream) const {
  const uint32_t first = partition().first_ranked();
  outliers(index).enqueue_choose(ops(), indexed_layer(layer), prompt, vector_array(index, layer, 0),
                                 first, partitions > first ? partitions - first : 0, scratch(index),
                                 stream);
}

layout::PageList ShadowKv::pinned(const RangeIndex& index, uint32_t layer) const {
  return outliers(index).pinned(indexed_layer(layer));
}

void ShadowKv::enqueue_scores(backend::TensorRef q,
                              std::span<const RangeScores> rows,
                              uint32_t layer,
                              backend::StreamRef stream) const {
  std::vector<backend::ScoreMeansItem> items;
  for (const RangeScores& row : rows) {
    backend::ScoreMeansItem item;
    item.row = row.row;
    item.first = row.first;
    item.count = row.count;
    item.sizes = outliers(*row.index).sizes(indexed_layer(layer));
    item.size_stride = row.index->most_partitions();
    item.scores = row.scores;
    item.score_stride = row.score_stride;
    item.keys = vector_array(*row.index, layer, 0);
    items.push_back(item);
  }
  ops().enqueue_score_means(q, items, shape().geometry, shape().scale, aggregation_, stream);
}

ShadowKvSettings read_shadowkv_options(OptionReader& options, const ModelShape& shape) {
  ShadowKvSettings out;
  out.budget = options.budget("budget", {0, 0.0156});
  RangeSettings range;
  range.page_tokens = shape.geometry.page_tokens;
  range.partition_tokens = static_cast<uint32_t>(options.integer("block", 8, 1, 1024));
  const ZoneOptions zones = read_zones(options, {4, 32});
  range.sink_tokens = zones.sink_tokens;
  range.local_tokens = zones.local_tokens;
  out.partition = RangePartition(range);
  out.outliers = static_cast<uint32_t>(options.integer("outliers", 48, 0, 1 << 16));
  out.aggregation = read_aggregation(options);
  return out;
}

Result<std::unique_ptr<SparseAlgorithm>> create_shadowkv(const SparseSpec& spec,
                                                         const AlgorithmContext& context) {
  SPIN_RETURN_IF_ERROR(check_shape(spec.name, context.shape));
  OptionReader options(spec);
  const ShadowKvSettings settings = read_shadowkv_options(options, context.shape);
  SPIN_RETURN_IF_ERROR(options.finish());
  Descriptor descriptor;
  descriptor.name = spec.name;
  descriptor.settings = options.resolved();
  descriptor.prefix_stable = settings.outliers == 0;  // they are chosen from the whole prompt
  return std::unique_ptr<SparseAlgorithm>(
      std::make_unique<ShadowKv>(context, std::move(descriptor), settings));
}

}  // namespace spin::sparse
