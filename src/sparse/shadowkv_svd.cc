// SPDX-License-Identifier: Apache-2.0
// A page has the same keys in every tier: at the end of the prompt the keys of all pages that may
// leave fast memory are replaced by the rebuilt ones before the pages are placed. Sinks, outliers
// and the tail keep theirs; so do pages of generated tokens, which are fetched whole.
#include "sparse/shadowkv_svd.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "sparse/shadowkv.h"

namespace spin::sparse {
namespace {

constexpr uint64_t kDefaultRank = 160;
constexpr uint64_t kLargestRank = 4096;

uint64_t aligned(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

class ShadowKvSvd final : public ShadowKv {
 public:
  ShadowKvSvd(const AlgorithmContext& context,
              Descriptor descriptor,
              const ShadowKvSettings& settings,
              uint32_t rank)
      : ShadowKv(context, std::move(descriptor), settings), rank_(rank) {}

  PromptPartition enqueue_finish_prompt(SequenceIndex& index,
                                        uint32_t layer,
                                        const layout::PagedTokens& prompt,
                                        backend::StreamRef stream) const override {
    // Landmarks and outliers are those of the keys as they were.
    const PromptPartition result = ShadowKv::enqueue_finish_prompt(index, layer, prompt, stream);
    const auto& mine = static_cast<const RangeIndex&>(index);
    if (keyless_end(index) <= partition().sink_pages()) return result;
    layout::PagedTokens sealed = prompt;
    sealed.tokens = uint64_t{mine.prompt_partitions()} * partition().partition_tokens();
    backend::FactorKeysItem factor;
    factor.tokens = sealed;
    factor.factors = factors(mine, layer);
    ops().enqueue_factor_keys(factor, shape().rope, stream);
    backend::RebuildTokensItem rebuild;
    rebuild.base = const_cast<std::byte*>(prompt.base);  // ours until it is placed
    rebuild.tokens = sealed;
    rebuild.first_page = partition().sink_pages();
    rebuild.end_page = keyless_end(index);
    rebuild.kept = result.pinned;
    rebuild.factors = factor.factors;
    ops().enqueue_rebuild_tokens(rebuild, shape().rope, stream);
    return result;
  }

  uint32_t keyless_end(const SequenceIndex& index) const override {
    return static_cast<const RangeIndex&>(index).prompt_partitions() *
           partition().partition_pages();
  }

  void enqueue_reconstruct(std::span<const ReconstructItem> items,
                           uint32_t layer,
                           const backend::TieredPoolRef& pool,
                           backend::StreamRef stream) const override {
    std::vector<backend::RebuildPagesItem> rebuilds;
    for (const ReconstructItem& item : items) {
      rebuilds.push_back({item.list, item.slots, item.fetched, item.fetched_counts,
                          keyless_end(*item.index),
                          factors(static_cast<const RangeIndex&>(*item.index), layer)});
    }
    ops().enqueue_rebuild_pages(rebuilds, pool.fast, shape().rope, stream);
  }

 private:
  // Factors of one layer: [most_partitions * partition_tokens, rank], then [kv_heads, rank,
  // head_dim]; all layers behind what ShadowKv keeps.
  uint64_t token_bytes(uint64_t most_partitions) const {
    return aligned(most_partitions * partition().partition_tokens() * rank_ *
                   layout::dtype_bytes(shape().geometry.dtype));
  }
  uint64_t head_bytes() const {
    return aligned(uint64_t{shape().geometry.kv_heads} * rank_ * shape().geometry.row_bytes());
  }

  uint64_t summary_bytes(uint64_t most_partitions) const override {
    return aligned(ShadowKv::summary_bytes(most_partitions)) +
           indexed_layers() * (token_bytes(most_partitions) + head_bytes());
  }

  backend::KeyFactors factors(const RangeIndex& index, uint32_t layer) const {
    const uint64_t most = index.most_partitions();
    std::byte* at = index.summaries() + aligned(ShadowKv::summary_bytes(most)) +
                    indexed_layer(layer) * (token_bytes(most) + head_bytes());
    return {at, at + token_bytes(most), shape().geometry.dtype, rank_};
  }

  const uint32_t rank_;
};

}  // namespace

Result<std::unique_ptr<SparseAlgorithm>> create_shadowkv_svd(const SparseSpec& spec,
                                                             const AlgorithmContext& context) {
  const ModelShape& shape = context.shape;
  SPIN_RETURN_IF_ERROR(check_shape(spec.name, shape));
  if (shape.rope.inv_freq.size() * 2 != shape.geometry.head_dim) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{}: expected a rotation of all {} dimensions of a head, found {}",
                              spec.name, shape.geometry.head_dim, 2 * shape.rope.inv_freq.size()));
  }
  OptionReader options(spec);
  const ShadowKvSettings settings = read_shadowkv_options(options, shape);
  const std::string shared = options.resolved();
  // More factors than a token has key elements are of no use.
  const uint64_t width = uint64_t{shape.geometry.kv_heads} * shape.geometry.head_dim;
  const uint64_t asked = options.integer("rank", std::min(kDefaultRank, width), 1, kLargestRank);
  const auto rank = static_cast<uint32_t>(std::min(asked, width));
  SPIN_RETURN_IF_ERROR(options.finish());
  Descriptor descriptor;
  descriptor.name = spec.name;
  descriptor.settings = fmt::format("{},rank={}", shared, rank);
  descriptor.prefix_stable = false;  // factors and outliers are of the whole prompt
  descriptor.planes = layout::Planes::kValuesOnly;
  return std::unique_ptr<SparseAlgorithm>(
      std::make_unique<ShadowKvSvd>(context, std::move(descriptor), settings, rank));
}

}  // namespace spin::sparse
