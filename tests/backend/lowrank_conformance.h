// SPDX-License-Identifier: Apache-2.0
// The part of the backends' conformance suite about low-rank keys (backend/lowrank_items.h).
// Instantiated like OpsConformance (ops_conformance.h).
#pragma once

#include <cstdint>
#include <vector>

#include "backend/lowrank_items.h"
#include "tests/backend/attention_conformance.h"

namespace spin::testing {

class LowRankConformance : public AttentionConformance {
 protected:
  struct Factors {
    backend::Buffer token;
    backend::Buffer head;
    backend::KeyFactors ref;
  };

  // Sequence 0 with these keys before RoPE ([tokens, kv_heads * head_dim]); values are random.
  void make_keys(const AttentionShape& shape, const Matrix& keys);
  layout::PagedTokens view(uint64_t tokens);
  Factors factor(uint64_t tokens, uint32_t rank, uint32_t power = 4);
  void rebuild_tokens(const Factors& factors,
                      uint64_t tokens,
                      uint32_t first_page,
                      uint32_t end_page,
                      const std::vector<std::vector<uint32_t>>& kept = {});
  // Bytes of the pool.
  std::vector<unsigned char> pool();
  // Keys of sequence 0 as they are stored: [tokens, kv_heads * head_dim].
  Matrix stored_keys(const std::vector<unsigned char>& bytes, int64_t tokens);

  std::vector<float> inv_freq_;
  float factor_ = 1.0f;  // the model's attention factor
  backend::RopeParams rope() const { return {inv_freq_, factor_}; }
};

}  // namespace spin::testing
