// SPDX-License-Identifier: Apache-2.0
// Learned gates (SeerAttention-R): what the gate operations of backend/sparse_ops.h take.
// Thread: plain data. Lifetime: weights and inv_freq outlive the operations.
#pragma once

#include <array>
#include <cstdint>

#include "backend/head_vectors.h"
#include "backend/ops.h"
#include "layout/paged_tokens.h"

namespace spin::backend {

enum class Pooling : uint8_t { kMax, kMin, kMean };

// The gate of one layer. Keys and queries are turned back by `model_rope`; gate vectors are turned
// by `gate_rope` (inv_freq empty: not at all).
struct GateWeights {
  const float* key = nullptr;         // [kv_heads, poolings * head_dim, width]
  const float* key_norm = nullptr;    // [width]; null: none
  const float* query = nullptr;       // [kv_heads, group, head_dim, width]
  const float* query_norm = nullptr;  // [width]; null: none
  float epsilon = 1e-6f;              // of the norms
  uint32_t width = 0;                 // a multiple of 16, at most 1024
  uint32_t poolings = 0;              // of `order`
  std::array<Pooling, 3> order{};     // as the rows of `key` have them
  RopeParams model_rope;
  RopeParams gate_rope;
};

// Block j of `tokens` holds tokens [j * block_tokens, (j + 1) * block_tokens):
//   y = concat over `order` of pool(k_t before RoPE) . key[h],  out = rope(norm(y))
// at position  first_position + j * block_tokens + position_offset.
struct GateKeysItem {
  layout::PagedTokens tokens;
  uint64_t first_position = 0;  // of token 0
  uint32_t block_tokens = 0;
  uint32_t first = 0;  // blocks [first, first + count), all complete
  uint32_t count = 0;
  uint32_t out_first = 0;  // block `first` is written to vector out_first, and so on
  uint32_t position_offset = 0;
  HeadVectors out;
};

// z = rope(norm(sum over g of q_g before RoPE . query[h, g])) at `position`;
// scores[j] = ln softmax of  z . keys[first + j] / sqrt(width)  over vectors [0, first + count).
struct GateScoreItem {
  uint64_t row = 0;  // of q
  uint64_t position = 0;
  uint32_t first = 0;  // vectors [first, first + count) are scored
  uint32_t count = 0;
  HeadVectors keys;
  float* scores = nullptr;  // out [kv_heads, score_stride]
  uint64_t score_stride = 0;
};

}  // namespace spin::backend
