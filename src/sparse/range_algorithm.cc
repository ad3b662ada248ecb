// SPDX-License-Identifier: Apache-2.0
#include "sparse/range_algorithm.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "base/checked_math.h"

namespace spin::sparse {
namespace {

constexpr uint64_t kAlignment = 64;  // of the parts of an index
constexpr uint64_t kMaxTokens = uint64_t{1} << 31;

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

// Offsets of the parts of an index in its buffer.
struct RangeAlgorithm::Memory {
  uint64_t most_partitions = 0;
  uint32_t id_stride = 0;
  uint64_t scores = 0;
  uint64_t ids = 0;
  uint64_t counts = 0;
  uint64_t bytes = 0;
};

RangeAlgorithm::RangeAlgorithm(const AlgorithmContext& context,
                               Descriptor descriptor,
                               const RangePartition& partition,
                               const TokenBudget& budget,
                               uint32_t pinned_partitions)
    : shape_(context.shape),
      descriptor_(std::move(descriptor)),
      partition_(partition),
      budget_(budget),
      pinned_partitions_(pinned_partitions),
      ops_(context.device->sparse_ops()) {
  // Below zones and budget every token would be attended anyway.
  descriptor_.minimum_tokens = partition_.zone_tokens() +
                               std::max<uint64_t>(budget.tokens, partition_.partition_tokens()) +
                               uint64_t{pinned_partitions} * partition_.partition_tokens();
}

RangeAlgorithm::Memory RangeAlgorithm::lay_out(uint64_t max_tokens) const {
  SPIN_CHECK(max_tokens <= kMaxTokens);
  const uint64_t heads = shape_.geometry.kv_heads;
  Memory memory;
  memory.most_partitions = std::max<uint64_t>(1, partition_.partitions(max_tokens));
  memory.id_stride = std::max<uint32_t>(
      {1, partition_.most_selected(budget_, max_tokens), pinned_partitions_,
       std::min(rank_limits(max_tokens).most, static_cast<uint32_t>(memory.most_partitions))});
  memory.scores = aligned(summary_bytes(memory.most_partitions));
  memory.ids = memory.scores + aligned(heads * memory.most_partitions * sizeof(float));
  memory.counts = memory.ids + aligned(heads * memory.id_stride * sizeof(uint32_t));
  memory.bytes = memory.counts + aligned(heads * sizeof(uint32_t));
  return memory;
}

SequenceNeeds RangeAlgorithm::needs(uint64_t max_tokens) const {
  const uint32_t pages = partition_.partition_pages();
  const uint32_t most = rank_limits(max_tokens).most;
  const uint64_t tail_first = max_tokens > partition_.zone_tokens()
                                  ? partition_.prompt_tail_first(max_tokens)
                                  : partition_.sink_tokens();
  SequenceNeeds needs;
  needs.sink_pages = partition_.sink_pages();
  needs.zone_pages = pinned_partitions_ * pages;
  needs.tail_pages = partition_.tail_pages();
  needs.selected_pages = std::min(most, partition_.ranked(tail_first)) * pages;
  needs.page_ids = shape_.geometry.pages_per_head(max_tokens);
  needs.index_bytes = lay_out(max_tokens).bytes;
  return needs;
}

Result<std::unique_ptr<SequenceIndex>> RangeAlgorithm::create_index(
    uint64_t max_tokens, backend::MemoryResource& fast) const {
  const Memory memory = lay_out(max_tokens);
  auto index = std::make_unique<RangeIndex>();
  SPIN_ASSIGN_OR_RETURN(index->memory_, backend::Buffer::allocate(fast, memory.bytes, kAlignment));
  std::byte* base = index->memory_.as<std::byte>();
  index->most_partitions_ = memory.most_partitions;
  index->id_stride_ = memory.id_stride;
  index->scores_ = reinterpret_cast<float*>(base + memory.scores);
  index->ids_ = reinterpret_cast<uint32_t*>(base + memory.ids);
  index->counts_ = reinterpret_cast<uint32_t*>(base + memory.counts);
  return std::unique_ptr<SequenceIndex>(std::move(index));
}

PromptPartition RangeAlgorithm::enqueue_finish_prompt(SequenceIndex& index,
                                                      uint32_t layer,
                                                      const layout::PagedTokens& prompt,
                                                      backend::StreamRef stream) const {
  if (is_dense(layer)) return {};
  auto& mine = static_cast<RangeIndex&>(index);
  const auto partitions =
      static_cast<uint32_t>(partition_.partitions(prompt_tail_first(prompt.tokens)));
  mine.prompt_partitions_ = partitions;
  if (partitions > 0) enqueue_summaries(mine, layer, prompt, 0, partitions, 0, stream);
  enqueue_pins(mine, layer, prompt, partitions, stream);
  PromptPartition result;
  result.pinned = pinned(mine, layer);
  return result;
}

SealPlan RangeAlgorithm::plan_seal(const SequenceIndex& /*index*/,
                                   uint32_t /*layer*/,
                                   const layout::Tail& tail) const {
  return partition_.plan_seal(tail);
}

const layout::PageMap* RangeAlgorithm::enqueue_seal(const SealItem& item,
                                                    uint32_t layer,
                                                    backend::StreamRef stream) const {
  SPIN_CHECK(item.tokens % partition_.partition_tokens() == 0);
  if (is_dense(layer)) return nullptr;
  auto& index = static_cast<RangeIndex&>(*item.index);
  enqueue_summaries(index, layer, item.tail, 0, item.tokens / partition_.partition_tokens(),
                    static_cast<uint32_t>(partition_.partitions(item.first_token)), stream);
  return nullptr;
}

void RangeAlgorithm::enqueue_select(backend::TensorRef q,
                                    std::span<const SelectItem> items,
                                    uint32_t layer,
                                    backend::StreamRef stream) const {
  std::vector<RangeScores> scores;
  std::vector<backend::RankItem> ranks;
  std::vector<backend::BuildListItem> lists;
  for (const SelectItem& item : items) {
    auto& index = static_cast<RangeIndex&>(*item.index);
    backend::BuildListItem list;
    list.pages_per_partition = partition_.partition_pages();
    list.tail_first_page = item.tail_first_page;
    list.tail_tokens = item.context_tokens - item.tail_first_token;
    list.list = item.list;
    list.attended = item.attended;
    if (is_dense(layer)) {
      list.sink_pages = item.tail_first_page;  // everything before the tail
    } else {
      const RankLimits limits = rank_limits(item.context_tokens);
      list.sink_pages = partition_.sink_pages();
      list.pinned = pinned(index, layer);
      list.ids = index.ids_;
      list.counts = index.counts_;
      list.id_stride = index.id_stride_;
      scores.push_back({&index, item.row, partition_.first_ranked(),
                        partition_.ranked(item.tail_first_token), index.scores_,
                        index.most_partitions_, item.context_tokens - 1});
      backend::RankItem rank;
      rank.scores = index.scores_;
      rank.score_stride = index.most_partitions_;
      rank.first = partition_.first_ranked();
      rank.count = scores.back().count;
      rank.most = limits.most;
      rank.least_score = limits.least_score;
      rank.ids = index.ids_;
      rank.counts = index.counts_;
      rank.id_stride = index.id_stride_;
      rank.selected = item.selected;
      ranks.push_back(rank);
    }
    lists.push_back(list);
  }
  if (!scores.empty()) {
    enqueue_scores(q, scores, layer, stream);
    ops_.enqueue_rank(ranks, shape_.geometry.kv_heads, stream);
  }
  ops_.enqueue_build_lists(lists, shape_.geometry, stream);
}

uint64_t RangeAlgorithm::indexed_layers() const {
  const uint32_t layers = shape_.geometry.layers;
  return layers - std::min(layers, descriptor_.dense_layers);
}

uint64_t RangeAlgorithm::vector_array_bytes(uint64_t most_partitions, uint32_t vectors) const {
  return aligned(indexed_layers() * shape_.geometry.kv_heads * most_partitions * vectors *
                 shape_.geometry.row_bytes());
}

backend::HeadVectors RangeAlgorithm::vector_array(const RangeIndex& index,
                                                  uint32_t layer,
                                                  uint32_t array,
                                                  uint32_t vectors) const {
  const layout::KvGeometry& geometry = shape_.geometry;
  backend::HeadVectors out;
  out.dtype = geometry.dtype;
  out.width = geometry.head_dim;
  out.head_stride = index.most_partitions() * vectors * geometry.head_dim;
  out.data = index.summaries() + array * vector_array_bytes(index.most_partitions(), vectors) +
             indexed_layer(layer) * geometry.kv_heads * out.head_stride *
                 layout::dtype_bytes(geometry.dtype);
  return out;
}

ZoneOptions read_zones(OptionReader& options, const ZoneOptions& fallback) {
  constexpr uint64_t kMostTokens = uint64_t{1} << 20;
  ZoneOptions zones;
  zones.sink_tokens =
      static_cast<uint32_t>(options.integer("sinks", fallback.sink_tokens, 0, kMostTokens));
  zones.local_tokens = options.integer("local", fallback.local_tokens, 0, kMostTokens);
  return zones;
}

backend::Aggregation read_aggregation(OptionReader& options) {
  constexpr std::string_view kNames[] = {"max", "sum"};
  return options.choice("aggregate", "max", kNames) == "max" ? backend::Aggregation::kSoftmaxMax
                                                             : backend::Aggregation::kSoftmaxSum;
}

Status check_shape(std::string_view algorithm, const ModelShape& shape) {
  const layout::KvGeometry& g = shape.geometry;
  if (g.head_dim == 0 || g.head_dim % 8 != 0 || g.head_dim > 1024) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{}: head_dim must be a multiple of 8 up to 1024, found {}",
                              algorithm, g.head_dim));
  }
  return ok_status();
}

}  // namespace spin::sparse
