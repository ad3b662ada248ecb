// SPDX-License-Identifier: Apache-2.0
// Partitions whose mean says little about their keys: those with the least cosine between the mean
// and a key. They are pinned at the end of the prompt, attended in every step and not ranked.
// Where an index keeps that: sizes of all partitions (0 for outliers) and the pages of the
// outliers, per layer. Thread: as SparseAlgorithm.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/sparse_ops.h"
#include "layout/head_pages.h"
#include "layout/kv_geometry.h"
#include "layout/paged_tokens.h"

namespace spin::sparse {

struct OutlierShape {
  layout::KvGeometry geometry;
  uint64_t layers = 0;  // with an index
  uint32_t partition_pages = 1;
  uint32_t most = 0;  // outliers per KV head; 0: there are none and nothing is kept
};

// Buffers of a selection: one layer after the other may use them.
struct SelectScratch {
  float* scores = nullptr;     // [kv_heads, score_stride]
  uint64_t score_stride = 0;   // >= partitions
  uint32_t* ids = nullptr;     // [kv_heads, id_stride]
  uint32_t* counts = nullptr;  // [kv_heads]
  uint32_t id_stride = 0;      // >= most
};

class OutlierZone {
 public:
  // `memory`: bytes(shape, most_partitions), aligned to 64; null while only sizes are asked.
  OutlierZone(const OutlierShape& shape, uint64_t most_partitions, std::byte* memory);
  static uint64_t bytes(const OutlierShape& shape, uint64_t most_partitions);

  // [kv_heads, most_partitions]; null without outliers.
  uint32_t* sizes(uint64_t layer) const;
  // counts == nullptr: none.
  layout::PageList pinned(uint64_t layer) const;

  // Chooses among partitions [first, first + count) of the prompt, whose means are there.
  void enqueue_choose(backend::SparseOps& ops,
                      uint64_t layer,
                      const layout::PagedTokens& prompt,
                      const backend::HeadVectors& means,
                      uint32_t first,
                      uint32_t count,
                      const SelectScratch& scratch,
                      backend::StreamRef stream) const;

 private:
  struct Layout;
  static Layout lay_out(const OutlierShape& shape, uint64_t most_partitions);

  const OutlierShape shape_;
  const uint64_t most_partitions_;
  std::byte* const memory_;
};

}  // namespace spin::sparse
