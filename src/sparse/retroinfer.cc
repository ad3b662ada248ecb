// SPDX-License-Identifier: Apache-2.0
#include "sparse/retroinfer.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "base/checked_math.h"

namespace spin::sparse {
namespace {

using base::ceil_div;

// The share of clusters that the published code retrieves, as a share of the context.
constexpr double kDefaultBudgetShare = 0.018;
constexpr uint32_t kMostTokens = uint32_t{1} << 31;
// Retrieved clusters may be twice as large as the mean, and each leaves a page partly filled.
constexpr uint32_t kPageRoom = 2;
// Room for so many clusters of the mean size however small the budget: the sizes of few clusters
// differ more than those of many.
constexpr uint32_t kLeastRoomClusters = 32;

uint64_t rounded_ratio(uint64_t a, uint64_t b) { return (2 * a + b) / (2 * b); }

uint64_t align_up(uint64_t value, uint64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

}  // namespace

ClusterPlan::ClusterPlan(const Settings& settings) : settings_(settings) {
  SPIN_CHECK(settings.layers > 0 && settings.page_tokens > 0 && settings.cluster_tokens > 0);
  SPIN_CHECK(settings.update_tokens >= settings.cluster_tokens);
  sink_pages_ = ceil_div(kSinkTokens, settings.page_tokens);
  settings_.update_tokens =
      static_cast<uint32_t>(align_up(settings.update_tokens, settings.page_tokens));
  stagger_ = std::min(settings.layers, settings_.update_tokens);
}

uint32_t ClusterPlan::update_clusters() const {
  return static_cast<uint32_t>(rounded_ratio(settings_.update_tokens, settings_.cluster_tokens));
}

uint64_t ClusterPlan::minimum_tokens() const {
  return align_up(sink_tokens() + kLocalTokens + settings_.update_tokens, settings_.page_tokens);
}

uint64_t ClusterPlan::prompt_tail_first(uint64_t tokens) const {
  if (tokens < sink_tokens()) return 0;
  if (tokens < minimum_tokens()) return sink_tokens();
  return (tokens - kLocalTokens) / settings_.page_tokens * settings_.page_tokens;
}

uint64_t ClusterPlan::prompt_clustered(uint64_t tokens) const {
  const uint64_t tail_first = prompt_tail_first(tokens);
  return tail_first > sink_tokens() ? tail_first - sink_tokens() : 0;
}

uint32_t ClusterPlan::prompt_segments(uint64_t tokens) const {
  return static_cast<uint32_t>(std::max<uint64_t>(1, rounded_ratio(tokens, kSegmentTokens)));
}

uint32_t ClusterPlan::prompt_clusters(uint64_t tokens) const {
  const uint64_t clustered = prompt_clustered(tokens);
  if (clustered == 0) return 0;
  const uint64_t unit = std::lcm<uint64_t>(8, prompt_segments(tokens));
  const uint64_t units = rounded_ratio(clustered, settings_.cluster_tokens * unit);
  return static_cast<uint32_t>(std::max<uint64_t>(1, units) * unit);
}

uint64_t ClusterPlan::update_at(uint32_t layer) const {
  return uint64_t{kLocalTokens} + settings_.update_tokens + layer % stagger_;
}

uint32_t ClusterPlan::tail_pages(uint64_t max_tokens) const {
  // After a prompt a tail has up to a page more than the local window; both lie below this.
  const uint64_t most = std::min(max_tokens, update_at(stagger_ - 1));
  return static_cast<uint32_t>(ceil_div<uint64_t>(most, settings_.page_tokens) + 1);
}

bool ClusterPlan::clusters_as(const ClusterPlan& other) const {
  return settings_.layers == other.settings_.layers &&
         settings_.page_tokens == other.settings_.page_tokens &&
         settings_.cluster_tokens == other.settings_.cluster_tokens &&
         settings_.update_tokens == other.settings_.update_tokens;
}

bool ClusterPlan::covers(uint64_t context_tokens) const {
  return settings_.budget.resolve(context_tokens) >= context_tokens;
}

uint64_t ClusterPlan::covered(uint64_t max_tokens) const {
  if (covers(max_tokens)) return max_tokens;
  return std::min(max_tokens, settings_.budget.tokens);
}

uint32_t ClusterPlan::retrieved_clusters(uint64_t context_tokens) const {
  if (covers(context_tokens)) return kMostTokens;
  const uint64_t clusters =
      rounded_ratio(settings_.budget.resolve(context_tokens), settings_.cluster_tokens);
  return static_cast<uint32_t>(std::clamp<uint64_t>(clusters, 1, kMostTokens));
}

uint32_t ClusterPlan::estimated_clusters(uint32_t clusters) const {
  return static_cast<uint32_t>(std::lround(settings_.estimated_share * clusters));
}

uint32_t ClusterPlan::retrieved_pages(uint64_t context_tokens) const {
  if (covers(context_tokens)) return kMostTokens;
  const uint64_t page = settings_.page_tokens;
  const uint64_t each = ceil_div<uint64_t>(kPageRoom * settings_.cluster_tokens, page) + 1;
  const uint64_t least = kLeastRoomClusters * ceil_div<uint64_t>(settings_.cluster_tokens, page);
  return static_cast<uint32_t>(
      std::clamp<uint64_t>(retrieved_clusters(context_tokens) * each, least, kMostTokens));
}

uint64_t ClusterPlan::most_clustered(uint64_t max_tokens) const {
  // A prompt shorter than the sinks is all tail, and then has none.
  return max_tokens < update_at(0) ? 0 : max_tokens - kLocalTokens;
}

uint64_t ClusterPlan::most_clusters(uint64_t max_tokens) const {
  const uint64_t tokens = most_clustered(max_tokens);
  if (tokens == 0) return 0;
  // A prompt's clusters are rounded to a unit of at most 8 a segment, an update's to one.
  const uint64_t rounding =
      uint64_t{8} * prompt_segments(max_tokens) + tokens / settings_.update_tokens;
  return ceil_div<uint64_t>(tokens, settings_.cluster_tokens) + rounding;
}

uint64_t ClusterPlan::most_pages(uint64_t tokens, uint64_t clusters) const {
  return backend::most_cluster_pages(tokens, clusters, settings_.page_tokens);
}

uint64_t ClusterPlan::most_cluster_pages(uint64_t max_tokens) const {
  return most_pages(most_clustered(max_tokens), most_clusters(max_tokens));
}

uint64_t ClusterPlan::most_retrieved_clusters(uint64_t max_tokens) const {
  const uint64_t all = most_clusters(max_tokens);
  if (covers(max_tokens)) return all;
  return std::min(
      all, std::max<uint64_t>(retrieved_clusters(max_tokens), most_clusters(covered(max_tokens))));
}

uint64_t ClusterPlan::most_retrieved_pages(uint64_t max_tokens) const {
  const uint64_t all = most_cluster_pages(max_tokens);
  if (covers(max_tokens)) return all;
  return std::min(all, std::max<uint64_t>(retrieved_pages(max_tokens),
                                          most_cluster_pages(covered(max_tokens))));
}

uint64_t ClusterPlan::most_page_ids(uint64_t max_tokens) const {
  const uint64_t through_tail = ceil_div<uint64_t>(max_tokens, settings_.page_tokens) + 1;
  return sink_pages_ + most_cluster_pages(max_tokens) + through_tail;
}

namespace {

// Where the arrays of an index lie in its memory: summaries of every layer, then what a layer's
// selection and map need, used by one layer after the other.
struct Places {
  uint64_t layer_bytes = 0;
  uint64_t centroids = 0;    // of a layer: [kv_heads, clusters, head_dim]
  uint64_t value_sums = 0;   // the same
  uint64_t sizes = 0;        // [kv_heads, clusters]
  uint64_t first_pages = 0;  // [kv_heads, clusters]
  uint64_t page_counts = 0;  // [kv_heads]; per layer, because it is read when all are placed

  uint64_t scores = 0;            // [kv_heads, clusters]
  uint64_t ids = 0;               // [kv_heads, ids stride]
  uint64_t counts = 0;            // [kv_heads]
  uint64_t exact = 0;             // [kv_heads, exact stride]
  uint64_t exact_counts = 0;      // [kv_heads]
  uint64_t estimated = 0;         // [kv_heads, ids stride]
  uint64_t estimated_counts = 0;  // [kv_heads]
  uint64_t page_starts = 0;       // [kv_heads, page stride]
  uint64_t token_ids = 0;         // [kv_heads, token stride]
  uint64_t bytes = 0;             // of everything

  uint32_t clusters = 0;
  uint32_t id_stride = 0;
  uint32_t exact_stride = 0;
  uint32_t page_stride = 0;
  uint64_t token_stride = 0;
};

// Requires: max_tokens <= kMostTokens, so that no size overflows 64 bits.
Places places_of(const ModelShape& shape, const ClusterPlan& plan, uint64_t max_tokens) {
  Places at;
  at.clusters = static_cast<uint32_t>(plan.most_clusters(max_tokens));
  at.exact_stride = static_cast<uint32_t>(plan.most_retrieved_clusters(max_tokens));
  at.id_stride = static_cast<uint32_t>(std::min<uint64_t>(
      uint64_t{at.exact_stride} + plan.estimated_clusters(at.clusters), at.clusters));
  at.page_stride = static_cast<uint32_t>(plan.most_cluster_pages(max_tokens)) + 1;
  at.token_stride = plan.most_clustered(max_tokens);
  const uint64_t heads = shape.geometry.kv_heads;
  uint64_t used = 0;
  const auto add = [&](uint64_t count, uint64_t bytes) {
    const uint64_t begin = used;
    used += align_up(heads * count * bytes, 64);
    return begin;
  };
  at.centroids = add(at.clusters, shape.geometry.row_bytes());
  at.value_sums = add(at.clusters, shape.geometry.row_bytes());
  at.sizes = add(at.clusters, sizeof(uint32_t));
  at.first_pages = add(at.clusters, sizeof(uint32_t));
  at.page_counts = add(1, sizeof(uint32_t));
  at.layer_bytes = used;
  used *= shape.geometry.layers;
  at.scores = add(at.clusters, sizeof(float));
  at.ids = add(at.id_stride, sizeof(uint32_t));
  at.counts = add(1, sizeof(uint32_t));
  at.exact = add(at.exact_stride, sizeof(uint32_t));
  at.exact_counts = add(1, sizeof(uint32_t));
  at.estimated = add(at.id_stride, sizeof(uint32_t));
  at.estimated_counts = add(1, sizeof(uint32_t));
  at.page_starts = add(at.page_stride, sizeof(uint32_t));
  at.token_ids = add(at.token_stride, sizeof(uint32_t));
  at.bytes = used;
  return at;
}

class RetroIndex final : public SequenceIndex {
 public:
  RetroIndex(const ModelShape& shape, const Places& at, backend::Buffer memory)
      : shape_(shape),
        at_(at),
        memory_(std::move(memory)),
        clusters_(shape.geometry.layers, 0),
        maps_(shape.geometry.layers) {
    for (uint32_t layer = 0; layer < shape.geometry.layers; ++layer) {
      layout::PageMap& map = maps_[layer];
      map.counts = of_layer<uint32_t>(layer, at.page_counts);
      map.starts = array<uint32_t>(at.page_starts);
      map.token_ids = array<uint32_t>(at.token_ids);
      map.page_stride = at.page_stride;
      map.token_stride = at.token_stride;
    }
  }

  const Places& at() const { return at_; }
  template <typename T>
  T* array(uint64_t offset) const {
    return reinterpret_cast<T*>(memory_.as<std::byte>() + offset);
  }
  template <typename T>
  T* of_layer(uint32_t layer, uint64_t offset) const {
    return array<T>(layer * at_.layer_bytes + offset);
  }
  backend::HeadVectors vectors(uint32_t layer, uint64_t offset) const {
    const layout::KvGeometry& g = shape_.geometry;
    return {of_layer<void>(layer, offset), g.dtype, g.head_dim,
            uint64_t{at_.clusters} * g.head_dim};
  }
  const layout::PageMap& map(uint32_t layer) const { return maps_[layer]; }

  // Clusters of a layer, empty ones included; queued work may still be making them.
  uint32_t clusters(uint32_t layer) const { return clusters_[layer]; }
  void add_clusters(uint32_t layer, uint32_t count) {
    clusters_[layer] += count;
    SPIN_CHECK(clusters_[layer] <= at_.clusters);
  }

 private:
  ModelShape shape_;
  Places at_;
  backend::Buffer memory_;
  std::vector<uint32_t> clusters_;     // [layers]
  std::vector<layout::PageMap> maps_;  // [layers]
};

class RetroInfer final : public SparseAlgorithm {
 public:
  RetroInfer(const ModelShape& shape,
             backend::SparseOps& ops,
             const ClusterPlan& plan,
             uint32_t iterations,
             const std::string& settings)
      : shape_(shape), ops_(ops), plan_(plan), iterations_(iterations) {
    descriptor_.name = "retroinfer";
    descriptor_.settings = settings;
    descriptor_.minimum_tokens = plan.minimum_tokens();
    descriptor_.prefix_stable = false;
    // Also with estimate=0: clusters beyond the page limit are estimated, never dropped.
    descriptor_.estimates = true;
  }

  const Descriptor& descriptor() const override { return descriptor_; }

  SequenceNeeds needs(uint64_t max_tokens) const override {
    const uint64_t tokens = std::min<uint64_t>(max_tokens, kMostTokens);
    SequenceNeeds needs;
    needs.sink_pages = plan_.sink_pages();
    needs.tail_pages = plan_.tail_pages(tokens);
    needs.selected_pages = static_cast<uint32_t>(plan_.most_retrieved_pages(tokens));
    needs.page_ids = plan_.most_page_ids(tokens);
    needs.index_bytes = places_of(shape_, plan_, tokens).bytes;
    return needs;
  }

  Result<std::unique_ptr<SequenceIndex>> create_index(
      uint64_t max_tokens, backend::MemoryResource& fast) const override {
    if (max_tokens > kMostTokens) {
      return Status(
          StatusCode::kResourceExhausted,
          fmt::format("retroinfer: at most {} tokens, asked for {}", kMostTokens, max_tokens));
    }
    const Places at = places_of(shape_, plan_, max_tokens);
    SPIN_ASSIGN_OR_RETURN(auto memory, backend::Buffer::allocate(fast, at.bytes));
    return std::unique_ptr<SequenceIndex>(
        std::make_unique<RetroIndex>(shape_, at, std::move(memory)));
  }

  uint64_t prompt_tail_first(uint64_t tokens) const override {
    return plan_.prompt_tail_first(tokens);
  }

  PromptPartition enqueue_finish_prompt(SequenceIndex& base_index,
                                        uint32_t layer,
                                        const layout::PagedTokens& prompt,
                                        backend::StreamRef stream) const override {
    auto& index = static_cast<RetroIndex&>(base_index);
    const uint64_t tokens = plan_.prompt_clustered(prompt.tokens);
    if (tokens == 0) return {};
    const uint32_t clusters = plan_.prompt_clusters(prompt.tokens);
    backend::ClusterItem item = cluster_item(index, layer, prompt);
    item.first_token = plan_.sink_tokens();
    item.tokens = static_cast<uint32_t>(tokens);
    item.clusters = clusters;
    item.segments = plan_.prompt_segments(prompt.tokens);
    item.first_page_id = plan_.sink_pages();
    index.add_clusters(layer, clusters);
    ops_.enqueue_cluster({&item, 1}, stream);
    return prompt_partition(index, layer, tokens);
  }

  std::optional<PromptPartition> enqueue_copy_prompt(const SparseAlgorithm& other,
                                                     const SequenceIndex& base_from,
                                                     SequenceIndex& base_to,
                                                     uint32_t layer,
                                                     const layout::PagedTokens& prompt,
                                                     backend::StreamRef stream) const override {
    const auto* retro = dynamic_cast<const RetroInfer*>(&other);
    if (retro == nullptr || retro->iterations_ != iterations_ || !plan_.clusters_as(retro->plan_)) {
      return std::nullopt;
    }
    const auto& from = static_cast<const RetroIndex&>(base_from);
    auto& to = static_cast<RetroIndex&>(base_to);
    const uint64_t tokens = plan_.prompt_clustered(prompt.tokens);
    if (tokens == 0) return PromptPartition();
    const Places& source = from.at();
    const Places& at = to.at();
    SPIN_CHECK(at.layer_bytes == source.layer_bytes && at.page_stride == source.page_stride &&
               at.token_stride == source.token_stride);
    const uint64_t heads = shape_.geometry.kv_heads;
    stream.enqueue_copy(to.of_layer<void>(layer, 0), from.of_layer<void>(layer, 0), at.layer_bytes);
    stream.enqueue_copy(to.array<void>(at.page_starts), from.array<void>(source.page_starts),
                        heads * at.page_stride * sizeof(uint32_t));
    stream.enqueue_copy(to.array<void>(at.token_ids), from.array<void>(source.token_ids),
                        heads * at.token_stride * sizeof(uint32_t));
    to.add_clusters(layer, from.clusters(layer));
    return prompt_partition(to, layer, tokens);
  }

  SealPlan plan_seal(const SequenceIndex& /*index*/,
                     uint32_t layer,
                     const layout::Tail& tail) const override {
    SealPlan plan;
    if (tail.tokens >= plan_.update_at(layer)) plan.repack_tokens = plan_.update_tokens();
    return plan;
  }

  const layout::PageMap* enqueue_seal(const SealItem& seal,
                                      uint32_t layer,
                                      backend::StreamRef stream) const override {
    auto& index = static_cast<RetroIndex&>(*seal.index);
    SPIN_CHECK(seal.tokens == plan_.update_tokens());
    backend::ClusterItem item = cluster_item(index, layer, seal.tail);
    item.tokens = seal.tokens;
    item.clusters = plan_.update_clusters();
    item.first_page_id = seal.first_page_id;
    index.add_clusters(layer, item.clusters);
    ops_.enqueue_cluster({&item, 1}, stream);
    return &index.map(layer);
  }

  uint32_t repacked_page_ids(uint32_t tokens) const override {
    return static_cast<uint32_t>(plan_.most_pages(tokens, plan_.update_clusters()));
  }

  void enqueue_select(backend::TensorRef q,
                      std::span<const SelectItem> items,
                      uint32_t layer,
                      backend::StreamRef stream) const override {
    std::vector<backend::ScoreMeansItem> scores;
    std::vector<backend::RankItem> ranks;
    std::vector<backend::SplitRankedItem> splits;
    std::vector<backend::BuildListItem> lists;
    for (const SelectItem& item : items) {
      const auto& index = static_cast<const RetroIndex&>(*item.index);
      if (index.clusters(layer) > 0) scores.push_back(score_item(index, layer, item));
      ranks.push_back(rank_item(index, layer, item));
      splits.push_back(split_item(index, layer, item));
      lists.push_back(list_item(index, layer, item));
    }
    if (!scores.empty()) {
      ops_.enqueue_score_means(q, scores, shape_.geometry, shape_.scale,
                               backend::Aggregation::kSoftmaxSum, stream);
    }
    ops_.enqueue_rank(ranks, shape_.geometry.kv_heads, stream);
    ops_.enqueue_split_ranked(splits, shape_.geometry, stream);
    ops_.enqueue_build_lists(lists, shape_.geometry, stream);
  }

  void enqueue_estimate(backend::TensorRef q,
                        std::span<const EstimateItem> items,
                        uint32_t layer,
                        backend::StreamRef stream) const override {
    std::vector<backend::EstimateItem> estimates;
    for (const EstimateItem& item : items) {
      const auto& index = static_cast<const RetroIndex&>(*item.index);
      const Places& at = index.at();
      backend::EstimateItem estimate;
      estimate.row = item.row;
      estimate.keys = index.vectors(layer, at.centroids);
      estimate.value_sums = index.vectors(layer, at.value_sums);
      estimate.sizes = index.of_layer<uint32_t>(layer, at.sizes);
      estimate.size_stride = at.clusters;
      estimate.ids = index.array<uint32_t>(at.estimated);
      estimate.counts = index.array<uint32_t>(at.estimated_counts);
      estimate.id_stride = at.id_stride;
      estimate.part = item.part;
      estimate.log_sum_exp = item.log_sum_exp;
      estimates.push_back(estimate);
    }
    ops_.enqueue_estimate(q, estimates, shape_.geometry, shape_.scale, stream);
  }

 private:
  PromptPartition prompt_partition(const RetroIndex& index, uint32_t layer, uint64_t tokens) const {
    PromptPartition partition;
    partition.map = &index.map(layer);
    partition.first_mapped_page = plan_.sink_pages();
    partition.mapped_page_ids =
        static_cast<uint32_t>(plan_.most_pages(tokens, index.clusters(layer)));
    return partition;
  }

  // What clustering the tokens of `source` writes, behind the clusters that there are.
  backend::ClusterItem cluster_item(const RetroIndex& index,
                                    uint32_t layer,
                                    const layout::PagedTokens& source) const {
    const Places& at = index.at();
    backend::ClusterItem item;
    item.source = source;
    item.iterations = iterations_;
    item.out_first = index.clusters(layer);
    item.centroids = index.vectors(layer, at.centroids);
    item.value_sums = index.vectors(layer, at.value_sums);
    item.sizes = index.of_layer<uint32_t>(layer, at.sizes);
    item.first_pages = index.of_layer<uint32_t>(layer, at.first_pages);
    item.cluster_stride = at.clusters;
    item.page_counts = index.of_layer<uint32_t>(layer, at.page_counts);
    item.page_starts = index.array<uint32_t>(at.page_starts);
    item.token_ids = index.array<uint32_t>(at.token_ids);
    item.page_stride = at.page_stride;
    item.token_stride = at.token_stride;
    return item;
  }

  backend::ScoreMeansItem score_item(const RetroIndex& index,
                                     uint32_t layer,
                                     const SelectItem& select) const {
    const Places& at = index.at();
    backend::ScoreMeansItem item;
    item.row = select.row;
    item.count = index.clusters(layer);
    item.sizes = index.of_layer<uint32_t>(layer, at.sizes);
    item.size_stride = at.clusters;
    item.scores = index.array<float>(at.scores);
    item.score_stride = at.clusters;
    item.keys = index.vectors(layer, at.centroids);
    return item;
  }

  backend::RankItem rank_item(const RetroIndex& index,
                              uint32_t layer,
                              const SelectItem& select) const {
    const Places& at = index.at();
    const uint32_t clusters = index.clusters(layer);
    const uint64_t wanted = uint64_t{plan_.retrieved_clusters(select.context_tokens)} +
                            plan_.estimated_clusters(clusters);
    backend::RankItem item;
    item.scores = index.array<float>(at.scores);
    item.score_stride = at.clusters;
    item.count = clusters;
    item.most = static_cast<uint32_t>(std::min<uint64_t>(wanted, clusters));
    item.ranked = true;
    item.ids = index.array<uint32_t>(at.ids);
    item.counts = index.array<uint32_t>(at.counts);
    item.id_stride = at.id_stride;
    return item;
  }

  backend::SplitRankedItem split_item(const RetroIndex& index,
                                      uint32_t layer,
                                      const SelectItem& select) const {
    const Places& at = index.at();
    backend::SplitRankedItem item;
    item.ids = index.array<uint32_t>(at.ids);
    item.counts = index.array<uint32_t>(at.counts);
    item.id_stride = at.id_stride;
    item.sizes = index.of_layer<uint32_t>(layer, at.sizes);
    item.size_stride = at.clusters;
    item.most = std::min(plan_.retrieved_clusters(select.context_tokens), index.clusters(layer));
    item.page_limit = plan_.retrieved_pages(select.context_tokens);
    item.exact = index.array<uint32_t>(at.exact);
    item.exact_counts = index.array<uint32_t>(at.exact_counts);
    item.exact_stride = at.exact_stride;
    item.estimated = index.array<uint32_t>(at.estimated);
    item.estimated_counts = index.array<uint32_t>(at.estimated_counts);
    item.exact_total = select.selected;
    item.overflows = select.overflows;
    return item;
  }

  backend::BuildListItem list_item(const RetroIndex& index,
                                   uint32_t layer,
                                   const SelectItem& select) const {
    const Places& at = index.at();
    backend::BuildListItem item;
    item.sink_pages = std::min(plan_.sink_pages(), select.tail_first_page);
    item.ids = index.array<uint32_t>(at.exact);
    item.counts = index.array<uint32_t>(at.exact_counts);
    item.id_stride = at.exact_stride;
    item.first_pages = index.of_layer<uint32_t>(layer, at.first_pages);
    item.sizes = index.of_layer<uint32_t>(layer, at.sizes);
    item.cluster_stride = at.clusters;
    item.tail_first_page = select.tail_first_page;
    item.tail_tokens = select.context_tokens - select.tail_first_token;
    item.list = select.list;
    item.attended = select.attended;
    return item;
  }

  const ModelShape shape_;
  backend::SparseOps& ops_;
  const ClusterPlan plan_;
  const uint32_t iterations_;
  Descriptor descriptor_;
};

}  // namespace

Result<std::unique_ptr<SparseAlgorithm>> create_retroinfer(const SparseSpec& spec,
                                                           const AlgorithmContext& context) {
  OptionReader options(spec);
  ClusterPlan::Settings settings;
  settings.layers = context.shape.geometry.layers;
  settings.page_tokens = context.shape.geometry.page_tokens;
  settings.budget = options.budget("budget", {.tokens = 0, .share = kDefaultBudgetShare});
  settings.estimated_share = options.number("estimate", 0.232, 0, 1);
  settings.cluster_tokens = static_cast<uint32_t>(options.integer("cluster", 16, 1, 1024));
  settings.update_tokens = static_cast<uint32_t>(
      options.integer("update", std::max<uint64_t>(1024, settings.cluster_tokens),
                      settings.cluster_tokens, 1 << 20));
  const auto iterations = static_cast<uint32_t>(options.integer("iterations", 9, 0, 100));
  SPIN_RETURN_IF_ERROR(options.finish());
  const ClusterPlan plan(settings);
  return std::unique_ptr<SparseAlgorithm>(std::make_unique<RetroInfer>(
      context.shape, context.device->sparse_ops(), plan, iterations, options.resolved()));
}

}  // namespace spin::sparse
