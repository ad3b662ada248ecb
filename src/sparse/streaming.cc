// SPDX-License-Identifier: Apache-2.0
// The window is the tail; what is sealed is never looked at again. There is no index.
#include "sparse/streaming.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/checked_math.h"

namespace spin::sparse {
namespace {

class NoIndex final : public SequenceIndex {};

class Streaming final : public SparseAlgorithm {
 public:
  Streaming(const AlgorithmContext& context,
            Descriptor descriptor,
            const TokenBudget& budget,
            uint32_t sink_tokens)
      : geometry_(context.shape.geometry),
        ops_(context.device->sparse_ops()),
        descriptor_(std::move(descriptor)),
        budget_(budget),
        sink_pages_(base::ceil_div(sink_tokens, geometry_.page_tokens)) {
    // Up to sinks and window everything is attended.
    descriptor_.minimum_tokens =
        this->sink_tokens() + std::max<uint64_t>(budget.tokens, geometry_.page_tokens);
  }

  const Descriptor& descriptor() const override { return descriptor_; }

  SequenceNeeds needs(uint64_t max_tokens) const override {
    SequenceNeeds needs;
    needs.sink_pages = sink_pages_;
    needs.page_ids = geometry_.pages_per_head(max_tokens);
    // The window and the page that is about to leave it.
    const uint64_t window = std::min(budget_.resolve(max_tokens), max_tokens);
    needs.tail_pages = static_cast<uint32_t>(geometry_.pages_per_head(window) + 1);
    return needs;
  }

  Result<std::unique_ptr<SequenceIndex>> create_index(
      uint64_t /*max_tokens*/, backend::MemoryResource& /*fast*/) const override {
    return std::unique_ptr<SequenceIndex>(std::make_unique<NoIndex>());
  }

  // Never decreases with the context: a share grows by less than a token per token.
  uint64_t prompt_tail_first(uint64_t tokens) const override {
    SPIN_CHECK(tokens >= sink_tokens());
    const uint64_t before = tokens - std::min(tokens, budget_.resolve(tokens));
    return std::max(sink_tokens(), before / geometry_.page_tokens * geometry_.page_tokens);
  }

  PromptPartition enqueue_finish_prompt(SequenceIndex& /*index*/,
                                        uint32_t /*layer*/,
                                        const layout::PagedTokens& /*prompt*/,
                                        backend::StreamRef /*stream*/) const override {
    return {};
  }

  SealPlan plan_seal(const SequenceIndex& /*index*/,
                     uint32_t /*layer*/,
                     const layout::Tail& tail) const override {
    const uint64_t first = uint64_t{tail.first_page} * geometry_.page_tokens;
    const uint64_t wanted = prompt_tail_first(first + tail.tokens);
    if (wanted <= first) return {};
    return {.pages = static_cast<uint32_t>((wanted - first) / geometry_.page_tokens),
            .repack_tokens = 0};
  }

  const layout::PageMap* enqueue_seal(const SealItem& /*item*/,
                                      uint32_t /*layer*/,
                                      backend::StreamRef /*stream*/) const override {
    return nullptr;
  }

  void enqueue_select(backend::TensorRef /*q*/,
                      std::span<const SelectItem> items,
                      uint32_t /*layer*/,
                      backend::StreamRef stream) const override {
    std::vector<backend::BuildListItem> lists;
    for (const SelectItem& item : items) {
      backend::BuildListItem list;
      list.sink_pages = sink_pages_;
      list.tail_first_page = item.tail_first_page;
      list.tail_tokens = item.context_tokens - item.tail_first_token;
      list.list = item.list;
      list.attended = item.attended;
      lists.push_back(list);
    }
    ops_.enqueue_build_lists(lists, geometry_, stream);
  }

 private:
  uint64_t sink_tokens() const { return uint64_t{sink_pages_} * geometry_.page_tokens; }

  const layout::KvGeometry geometry_;
  backend::SparseOps& ops_;
  Descriptor descriptor_;
  const TokenBudget budget_;
  const uint32_t sink_pages_;
};

}  // namespace

Result<std::unique_ptr<SparseAlgorithm>> create_streaming(const SparseSpec& spec,
                                                          const AlgorithmContext& context) {
  OptionReader options(spec);
  const TokenBudget budget = options.budget("budget", {1024, 0});
  const auto sinks = static_cast<uint32_t>(options.integer("sinks", 4, 0, 1 << 20));
  SPIN_RETURN_IF_ERROR(options.finish());
  Descriptor descriptor;
  descriptor.name = spec.name;
  descriptor.settings = options.resolved();
  return std::unique_ptr<SparseAlgorithm>(
      std::make_unique<Streaming>(context, std::move(descriptor), budget, sinks));
}

}  // namespace spin::sparse
