// SPDX-License-Identifier: Apache-2.0
// The one definition of how a KV page lies in memory (docs/kv_layout.md).
//
//   page = P tokens of one KV head of one layer
//   bytes: [ K plane: [P, head_dim] ][ V plane: [P, head_dim] ], row-major, no padding
//
// Keys are stored after RoPE. A page's place in a pool is its slot; slot s starts at byte
// s * page_bytes() of the pool. Thread: immutable value.
#pragma once

#include <cstdint>

#include "layout/dtype.h"

namespace spin::layout {

struct KvGeometry {
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t page_tokens = 8;
  DType dtype = DType::kF32;

  constexpr uint64_t row_bytes() const { return uint64_t{head_dim} * dtype_bytes(dtype); }
  constexpr uint64_t plane_bytes() const { return page_tokens * row_bytes(); }
  constexpr uint64_t page_bytes() const { return 2 * plane_bytes(); }
  // Bytes of K and V that one token takes over all layers and KV heads.
  constexpr uint64_t token_bytes() const { return 2 * row_bytes() * layers * kv_heads; }
  // Pages that one KV head of one layer needs for `tokens`.
  constexpr uint64_t pages_per_head(uint64_t tokens) const {
    return tokens / page_tokens + (tokens % page_tokens != 0 ? 1 : 0);
  }
  // Pages that a sequence of `tokens` needs over all layers and KV heads.
  constexpr uint64_t pages_for(uint64_t tokens) const {
    return pages_per_head(tokens) * layers * kv_heads;
  }

  friend bool operator==(const KvGeometry&, const KvGeometry&) = default;
};

}  // namespace spin::layout
