// SPDX-License-Identifier: Apache-2.0
// Low-rank factors of keys (ShadowKV): what the factor operations of backend/sparse_ops.h take.
// Thread: plain data. Lifetime: memory and inv_freq outlive the operations.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/head_vectors.h"
#include "backend/ops.h"
#include "layout/head_pages.h"
#include "layout/paged_tokens.h"

namespace spin::backend {

// The keys of one (sequence, layer) before RoPE, over all KV heads, as
//   k[t, h, d] ~ sum over i of token[t, i] * head[h, i, d].
struct KeyFactors {
  void* token = nullptr;  // [tokens, rank]
  void* head = nullptr;   // [kv_heads, rank, head_dim]
  layout::DType dtype = layout::DType::kF32;
  uint32_t rank = 0;  // at most kv_heads * head_dim
};

// head = Q^T and token = A Q, rounded to the factors' type, where A [tokens, kv_heads * head_dim]
// are the keys turned back and Q [kv_heads * head_dim, rank] is an orthonormal basis of the range
// of (A^T A)^power W, W a fixed pseudo-random matrix: A Q Q^T is nearly the best approximation of A
// of that rank, and A itself at full rank.
struct FactorKeysItem {
  layout::PagedTokens tokens;  // all heads; token t has position t
  KeyFactors factors;          // out
  uint32_t power = 4;
};

// The rebuilt key of a token is  round(rope(sum over i of token[t, i] * head[h, i, :])): the same
// bits in both operations below.

// Writes them over the keys of pages [first_page, end_page) of every head, but for those of `kept`.
struct RebuildTokensItem {
  std::byte* base = nullptr;   // of tokens.base, to be written
  layout::PagedTokens tokens;  // page p has id p and begins at position p * page_tokens
  uint32_t first_page = 0;
  uint32_t end_page = 0;  // all full
  layout::PageList kept;  // ascending; counts == nullptr: none
  KeyFactors factors;
};

// Writes them to the pages of a list that came without keys: entries fetched[i] with an id below
// end_page.
struct RebuildPagesItem {
  layout::PageList list;
  const uint32_t* slots = nullptr;           // [kv_heads, list.stride]
  const uint32_t* fetched = nullptr;         // [kv_heads, list.stride]
  const uint32_t* fetched_counts = nullptr;  // [kv_heads]
  uint32_t end_page = 0;
  KeyFactors factors;
};

}  // namespace spin::backend
