// SPDX-License-Identifier: Apache-2.0
#include "sparse/seer.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "sparse/range_algorithm.h"
#include "sparse/seer_gates.h"

namespace spin::sparse {
namespace {

// Spin's configuration of this algorithm: 2K tokens, whatever the context.
constexpr uint64_t kDefaultBudgetTokens = 2048;
// Of threshold mode; the published thresholds attend to about so many tokens.
constexpr uint64_t kDefaultCapTokens = 4096;

struct SeerSettings {
  RangePartition partition;
  TokenBudget budget;    // in threshold mode the cap
  double threshold = 0;  // on the softmax over blocks; 0: the best blocks that the budget holds
  // A block completed while decoding is turned by its last position, as the published code does
  // (prompt blocks are not), instead of by its first.
  bool last_position = false;
};

class Seer final : public RangeAlgorithm {
 public:
  Seer(const AlgorithmContext& context,
       Descriptor descriptor,
       const SeerSettings& settings,
       GateTensors gates)
      : RangeAlgorithm(context, std::move(descriptor), settings.partition, settings.budget),
        settings_(settings),
        gates_(std::move(gates)) {}

 private:
  uint64_t layer_elements(uint64_t most_partitions) const {
    return uint64_t{shape().geometry.kv_heads} * most_partitions * gates_.width();
  }

  uint64_t summary_bytes(uint64_t most_partitions) const override {
    return indexed_layers() * layer_elements(most_partitions) *
           layout::dtype_bytes(shape().geometry.dtype);
  }

  // Gate vectors of one layer: [kv_heads, most_partitions, width] of the KV type.
  backend::HeadVectors vectors(const RangeIndex& index, uint32_t layer) const {
    const layout::DType dtype = shape().geometry.dtype;
    const uint64_t at = indexed_layer(layer) * layer_elements(index.most_partitions());
    return {index.summaries() + at * layout::dtype_bytes(dtype), dtype, gates_.width(),
            index.most_partitions() * gates_.width()};
  }

  void enqueue_summaries(RangeIndex& index,
                         uint32_t layer,
                         const layout::PagedTokens& tokens,
                         uint32_t first,
                         uint32_t count,
                         uint32_t first_id,
                         backend::StreamRef stream) const override {
    // A tail never begins at position 0: sinks come before it.
    const bool sealed = first_id != first;
    backend::GateKeysItem item;
    item.tokens = tokens;
    item.block_tokens = partition().partition_tokens();
    item.first_position = uint64_t{first_id - first} * item.block_tokens;
    item.first = first;
    item.count = count;
    item.out_first = first_id;
    item.position_offset = settings_.last_position && sealed ? item.block_tokens - 1 : 0;
    item.out = vectors(index, layer);
    ops().enqueue_gate_keys({&item, 1}, gates_.layer(layer), stream);
  }

  // The softmax of threshold mode runs over all sealed blocks, the first one too.
  void enqueue_scores(backend::TensorRef q,
                      std::span<const RangeScores> rows,
                      uint32_t layer,
                      backend::StreamRef stream) const override {
    std::vector<backend::GateScoreItem> items;
    for (const RangeScores& row : rows) {
      backend::GateScoreItem item;
      item.row = row.row;
      item.position = row.position;
      item.first = row.first;
      item.count = row.count;
      item.keys = vectors(*row.index, layer);
      item.scores = row.scores;
      item.score_stride = row.score_stride;
      items.push_back(item);
    }
    ops().enqueue_gate_scores(q, items, gates_.layer(layer), shape().geometry, stream);
  }

  RankLimits rank_limits(uint64_t context_tokens) const override {
    RankLimits limits = RangeAlgorithm::rank_limits(context_tokens);
    if (settings_.threshold > 0) {
      limits.least_score = static_cast<float>(std::log(settings_.threshold));
    }
    return limits;
  }

  const SeerSettings settings_;
  const GateTensors gates_;
};

// Where the gates lie: beside the model unless the user says otherwise.
std::string gates_location(const std::string& option, uint64_t block) {
  if (option != "auto") return option;
  return fmt::format("{}gates-b{}", backend::kBesideModel, block);
}

// Keys are turned back: their rotation must be the model's.
Status check_rope(const ModelShape& shape) {
  if (shape.rope.inv_freq.size() == shape.geometry.head_dim / 2) return ok_status();
  return Status(StatusCode::kUnsupported,
                fmt::format("seer: expected a rotation of all {} dimensions of a head, found {}",
                            shape.geometry.head_dim, 2 * shape.rope.inv_freq.size()));
}

}  // namespace

Result<std::unique_ptr<SparseAlgorithm>> create_seer(const SparseSpec& spec,
                                                     const AlgorithmContext& context) {
  const ModelShape& shape = context.shape;
  SPIN_RETURN_IF_ERROR(check_shape(spec.name, shape));
  SPIN_RETURN_IF_ERROR(check_rope(shape));
  constexpr std::string_view kBlocks[] = {"32", "64"};
  constexpr std::string_view kPositions[] = {"first", "last"};
  OptionReader options(spec);
  const uint64_t block = options.choice("block", "32", kBlocks) == "64" ? 64 : 32;
  const std::string location = gates_location(options.text("gates", "auto"), block);

  SeerSettings settings;
  RangeSettings range;
  range.page_tokens = shape.geometry.page_tokens;
  range.partition_tokens = static_cast<uint32_t>(block);
  range.sink_tokens = 1;
  range.local_tokens = options.integer("local", block, 1, 1 << 20);
  settings.partition = RangePartition(range);
  settings.last_position = options.choice("position", "first", kPositions) == "last";
  settings.threshold = options.number("threshold", 0, 0, 1);
  // Only one of the two means something: the other is refused as unknown.
  settings.budget = settings.threshold > 0 ? options.budget("cap", {kDefaultCapTokens, 0})
                                           : options.budget("budget", {kDefaultBudgetTokens, 0});
  if (context.side_weights == nullptr) {
    return Status(StatusCode::kNotFound, "seer: there are no gates for this model");
  }
  auto source = context.side_weights->open(location);
  if (!source.ok()) return source.status().with_context("seer: gates");
  auto config = read_gate_config(**source, shape.geometry.head_dim);
  if (!config.ok()) return config.status().with_context("seer");
  if (const Status same = check_gate_block(**source, block); !same.ok()) {
    return same.with_context("seer");
  }
  const uint64_t dense_layers =
      options.integer("dense_layers", std::min(config->start_layer, shape.geometry.layers), 0,
                      shape.geometry.layers);
  SPIN_RETURN_IF_ERROR(options.finish());
  auto gates = GateTensors::load(**source, *config, shape, static_cast<uint32_t>(dense_layers),
                                 *context.device);
  if (!gates.ok()) return gates.status().with_context("seer");

  Descriptor descriptor;
  descriptor.name = spec.name;
  descriptor.settings = options.resolved();
  descriptor.prefix_stable = !settings.last_position;
  descriptor.dense_layers = static_cast<uint32_t>(dense_layers);
  return std::unique_ptr<SparseAlgorithm>(
      std::make_unique<Seer>(context, std::move(descriptor), settings, std::move(*gates)));
}

}  // namespace spin::sparse
