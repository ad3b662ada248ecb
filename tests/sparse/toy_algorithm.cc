// SPDX-License-Identifier: Apache-2.0
#include "tests/sparse/toy_algorithm.h"

#include <utility>
#include <vector>

#include "sparse/range_partition.h"

namespace spin::testing {
namespace {

using sparse::SequenceIndex;

// What Select reads about a sequence. This algorithm has no summaries; it only needs a place for
// the ids that it selects, the same for all KV heads and one layer after the other.
struct StridedIndex : SequenceIndex {
  backend::Buffer memory;
  uint32_t* ids = nullptr;     // [kv_heads, id_stride]
  uint32_t* counts = nullptr;  // [kv_heads]
  uint32_t id_stride = 0;
};

class StridedPages final : public sparse::SparseAlgorithm {
 public:
  StridedPages(const sparse::AlgorithmContext& context, uint32_t stride, uint32_t recent)
      : device_(*context.device),
        geometry_(context.shape.geometry),
        partition_({.page_tokens = geometry_.page_tokens,
                    .partition_tokens = geometry_.page_tokens,
                    .sink_tokens = geometry_.page_tokens,
                    .local_tokens = recent}),
        stride_(stride) {
    descriptor_.name = "strided";
    descriptor_.settings = "stride=" + std::to_string(stride) + ",recent=" + std::to_string(recent);
    descriptor_.minimum_tokens = partition_.zone_tokens();
  }

  const sparse::Descriptor& descriptor() const override { return descriptor_; }

  sparse::SequenceNeeds needs(uint64_t max_tokens) const override {
    sparse::SequenceNeeds needs;
    needs.sink_pages = partition_.sink_pages();
    needs.tail_pages = partition_.tail_pages();
    needs.selected_pages = most_selected(max_tokens);
    needs.page_ids = geometry_.pages_per_head(max_tokens);
    needs.index_bytes = geometry_.kv_heads * (uint64_t{needs.selected_pages} + 1) * 4;
    return needs;
  }

  Result<std::unique_ptr<SequenceIndex>> create_index(
      uint64_t max_tokens, backend::MemoryResource& fast) const override {
    auto index = std::make_unique<StridedIndex>();
    index->id_stride = most_selected(max_tokens);
    SPIN_ASSIGN_OR_RETURN(index->memory,
                          backend::Buffer::allocate(fast, needs(max_tokens).index_bytes));
    index->ids = index->memory.as<uint32_t>();
    index->counts = index->ids + uint64_t{geometry_.kv_heads} * index->id_stride;
    return std::unique_ptr<SequenceIndex>(std::move(index));
  }

  // Index: which tokens stay in the tail; the rest keeps its order.
  uint64_t prompt_tail_first(uint64_t tokens) const override {
    return partition_.prompt_tail_first(tokens);
  }
  sparse::PromptPartition enqueue_finish_prompt(SequenceIndex& /*index*/,
                                                uint32_t /*layer*/,
                                                const layout::PagedTokens& /*prompt*/,
                                                backend::StreamRef /*stream*/) const override {
    return {};
  }
  sparse::SealPlan plan_seal(const SequenceIndex& /*index*/,
                             uint32_t /*layer*/,
                             const layout::Tail& tail) const override {
    return partition_.plan_seal(tail);
  }
  const layout::PageMap* enqueue_seal(const sparse::SealItem& /*item*/,
                                      uint32_t /*layer*/,
                                      backend::StreamRef /*stream*/) const override {
    return nullptr;
  }

  // Select: name pages, and have the list made of zones and them. All in stream order.
  void enqueue_select(backend::TensorRef /*q*/,
                      std::span<const sparse::SelectItem> items,
                      uint32_t /*layer*/,
                      backend::StreamRef stream) const override {
    std::vector<backend::BuildListItem> lists;
    for (const sparse::SelectItem& item : items) {
      auto& index = static_cast<StridedIndex&>(*item.index);
      stream.enqueue_host([this, item, &index] { choose(item, index); });
      backend::BuildListItem list;
      list.sink_pages = partition_.sink_pages();
      list.ids = index.ids;
      list.counts = index.counts;
      list.id_stride = index.id_stride;
      list.pages_per_partition = partition_.partition_pages();
      list.tail_first_page = item.tail_first_page;
      list.tail_tokens = item.context_tokens - item.tail_first_token;
      list.list = item.list;
      list.attended = item.attended;
      lists.push_back(list);
    }
    device_.sparse_ops().enqueue_build_lists(lists, geometry_, stream);
  }

 private:
  uint32_t most_selected(uint64_t max_tokens) const {
    return static_cast<uint32_t>(geometry_.pages_per_head(max_tokens) / stride_ + 1);
  }

  void choose(const sparse::SelectItem& item, StridedIndex& index) const {
    const uint32_t first = partition_.first_ranked();
    const uint32_t end = first + partition_.ranked(item.tail_first_token);
    const auto offset = static_cast<uint32_t>(item.context_tokens % stride_);
    for (uint32_t head = 0; head < geometry_.kv_heads; ++head) {
      uint32_t count = 0;
      for (uint32_t page = first + offset; page < end; page += stride_) {
        index.ids[head * index.id_stride + count++] = page;
      }
      index.counts[head] = count;
      item.selected[head] += count;
    }
  }

  backend::Device& device_;
  layout::KvGeometry geometry_;
  sparse::RangePartition partition_;
  uint32_t stride_;
  sparse::Descriptor descriptor_;
};

}  // namespace

Result<std::unique_ptr<sparse::SparseAlgorithm>> create_strided_pages(
    const sparse::SparseSpec& spec, const sparse::AlgorithmContext& context) {
  sparse::OptionReader options(spec);
  const uint64_t stride = options.integer("stride", 4, 1, 64);
  const uint64_t recent = options.integer("recent", 32, 1, 4096);
  SPIN_RETURN_IF_ERROR(options.finish());
  return std::unique_ptr<sparse::SparseAlgorithm>(std::make_unique<StridedPages>(
      context, static_cast<uint32_t>(stride), static_cast<uint32_t>(recent)));
}

}  // namespace spin::testing
