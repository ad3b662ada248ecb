// SPDX-License-Identifier: Apache-2.0
#include "kv/table_bytes.h"

#include <algorithm>
#include <bit>

#include "base/checked_math.h"
#include "layout/residency.h"
#include "layout/reuse.h"

namespace spin::kv {

uint32_t extent_pages_for(uint64_t pages_per_head) {
  constexpr uint64_t kLeast = 32;
  constexpr uint64_t kMost = 256;
  constexpr uint64_t kExtents = 128;
  return static_cast<uint32_t>(
      std::clamp(std::bit_ceil(base::ceil_div(pages_per_head, kExtents)), kLeast, kMost));
}

GhostLists ghost_lists(const layout::KvGeometry& geometry, const SequenceShape& shape) {
  const uint64_t mandatory = shape.mandatory_pages(shape.dense_layers);
  if (shape.dense_layers >= geometry.layers || mandatory >= shape.max_page_ids) return {};
  const uint64_t heads = uint64_t{geometry.layers - shape.dense_layers} * geometry.kv_heads;
  return {layout::sampled_heads(heads),
          static_cast<uint32_t>(std::min(layout::kGhostRatio * mandatory, shape.max_page_ids))};
}

TableBytes table_bytes(const layout::KvGeometry& geometry,
                       const SequenceShape& shape,
                       uint64_t lease_pages,
                       uint32_t extent_pages,
                       bool has_host) {
  TableBytes bytes;
  for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
    const bool flat = layer < shape.dense_layers || lease_pages >= shape.max_page_ids;
    const uint64_t entries = flat ? shape.max_page_ids : lease_pages;
    bytes.heads += sizeof(layout::HeadPages);
    bytes.leases += entries * sizeof(uint32_t);
    if (!flat) {
      bytes.leases += entries * sizeof(uint32_t);
      bytes.look_up += layout::residency_table_size(entries) * sizeof(uint32_t);
      bytes.stamps += entries;
    }
    if (has_host) {
      bytes.directory +=
          base::ceil_div<uint64_t>(shape.max_page_ids, extent_pages) * sizeof(uint64_t);
    }
  }
  bytes.heads *= geometry.kv_heads;
  bytes.leases *= geometry.kv_heads;
  bytes.look_up *= geometry.kv_heads;
  bytes.stamps *= geometry.kv_heads;
  bytes.directory *= geometry.kv_heads;
  if (has_host) {
    bytes.ghosts = ghost_lists(geometry, shape).bytes();
    bytes.tail_slots =
        uint64_t{geometry.layers} * geometry.kv_heads * shape.tail_pages * sizeof(uint32_t);
  }
  return bytes;
}

}  // namespace spin::kv
