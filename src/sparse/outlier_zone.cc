// SPDX-License-Identifier: Apache-2.0
#include "sparse/outlier_zone.h"

namespace spin::sparse {
namespace {

uint64_t aligned(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

// Offsets: sizes, pages, valid tokens, numbers of pages; each over all layers.
struct OutlierZone::Layout {
  uint64_t pages = 0;
  uint64_t tokens = 0;
  uint64_t counts = 0;
  uint64_t bytes = 0;
};

OutlierZone::Layout OutlierZone::lay_out(const OutlierShape& shape, uint64_t most_partitions) {
  if (shape.most == 0) return {};
  const uint64_t rows = shape.layers * shape.geometry.kv_heads;
  const uint64_t listed = rows * shape.most * shape.partition_pages;
  Layout layout;
  layout.pages = aligned(rows * most_partitions * sizeof(uint32_t));
  layout.tokens = layout.pages + aligned(listed * sizeof(uint32_t));
  layout.counts = layout.tokens + aligned(listed);
  layout.bytes = layout.counts + aligned(rows * sizeof(uint32_t));
  return layout;
}

OutlierZone::OutlierZone(const OutlierShape& shape, uint64_t most_partitions, std::byte* memory)
    : shape_(shape), most_partitions_(most_partitions), memory_(memory) {}

uint64_t OutlierZone::bytes(const OutlierShape& shape, uint64_t most_partitions) {
  return lay_out(shape, most_partitions).bytes;
}

uint32_t* OutlierZone::sizes(uint64_t layer) const {
  if (shape_.most == 0) return nullptr;
  return reinterpret_cast<uint32_t*>(memory_) + layer * shape_.geometry.kv_heads * most_partitions_;
}

layout::PageList OutlierZone::pinned(uint64_t layer) const {
  layout::PageList list;
  if (shape_.most == 0) return list;
  const Layout layout = lay_out(shape_, most_partitions_);
  const uint64_t row = layer * shape_.geometry.kv_heads;
  list.stride = shape_.most * shape_.partition_pages;
  list.pages = reinterpret_cast<uint32_t*>(memory_ + layout.pages) + row * list.stride;
  list.tokens = reinterpret_cast<uint8_t*>(memory_ + layout.tokens) + row * list.stride;
  list.counts = reinterpret_cast<uint32_t*>(memory_ + layout.counts) + row;
  return list;
}

void OutlierZone::enqueue_choose(backend::SparseOps& ops,
                                 uint64_t layer,
                                 const layout::PagedTokens& prompt,
                                 const backend::HeadVectors& means,
                                 uint32_t first,
                                 uint32_t count,
                                 const SelectScratch& scratch,
                                 backend::StreamRef stream) const {
  if (shape_.most == 0) return;
  const uint32_t heads = shape_.geometry.kv_heads;
  const uint32_t partition_tokens = shape_.partition_pages * shape_.geometry.page_tokens;
  backend::ScoreStraysItem strays;
  strays.tokens = prompt;
  strays.partition_tokens = partition_tokens;
  strays.first = first;
  strays.count = count;
  strays.mean = means;
  strays.scores = scratch.scores;
  strays.score_stride = scratch.score_stride;
  ops.enqueue_score_strays({&strays, 1}, stream);

  backend::RankItem rank;
  rank.scores = scratch.scores;
  rank.score_stride = scratch.score_stride;
  rank.first = first;
  rank.count = count;
  rank.most = shape_.most;
  rank.ids = scratch.ids;
  rank.counts = scratch.counts;
  rank.id_stride = scratch.id_stride;
  ops.enqueue_rank({&rank, 1}, heads, stream);

  // Partitions of generated tokens are ranked like all others: their sizes are there already.
  backend::FillSizesItem fill;
  fill.sizes = sizes(layer);
  fill.size_stride = most_partitions_;
  fill.count = static_cast<uint32_t>(most_partitions_);
  fill.value = partition_tokens;
  fill.ids = scratch.ids;
  fill.counts = scratch.counts;
  fill.id_stride = scratch.id_stride;
  ops.enqueue_fill_sizes({&fill, 1}, heads, stream);

  backend::BuildListItem list;
  list.ids = scratch.ids;
  list.counts = scratch.counts;
  list.id_stride = scratch.id_stride;
  list.pages_per_partition = shape_.partition_pages;
  list.list = pinned(layer);
  ops.enqueue_build_lists({&list, 1}, shape_.geometry, stream);
}

}  // namespace spin::sparse
