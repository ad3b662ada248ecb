// SPDX-License-Identifier: Apache-2.0
// The part of the backends' conformance suite about learned gates (backend/gate_items.h).
// Instantiated like OpsConformance (ops_conformance.h).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/gate_items.h"
#include "tests/backend/attention_conformance.h"

namespace spin::testing {

struct GateShape {
  AttentionShape attention;
  uint32_t width = 64;
  uint32_t block_tokens = 16;
  std::vector<backend::Pooling> order = {backend::Pooling::kMax, backend::Pooling::kMin,
                                         backend::Pooling::kMean};
  bool use_norm = true;
  bool use_rope = true;
  float factor = 1.0f;  // the model's attention factor

  std::string text() const {
    return attention.text() + ", width " + std::to_string(width) + ", blocks of " +
           std::to_string(block_tokens) + (use_norm ? "" : ", no norm") +
           (use_rope ? "" : ", no rope");
  }
};

// Weights on the host and on the device.
struct Gate {
  Matrix key;    // [kv_heads * poolings * head_dim, width]
  Matrix query;  // [kv_heads * group * head_dim, width]
  Matrix key_norm;
  Matrix query_norm;
  std::vector<float> model_freq;
  std::vector<float> gate_freq;
  std::array<backend::Buffer, 4> buffers;
  backend::GateWeights weights;
};

class GateConformance : public AttentionConformance {
 protected:
  Gate make_gate(const GateShape& shape);
  // Fills in spans into `gate`: to be called when it is in its place.
  static void bind(Gate& gate, const GateShape& shape);
  layout::PagedTokens view(size_t sequence, uint64_t tokens);

  // Blocks [first, first + count) of `tokens`: [kv_heads * count, width].
  Matrix run_keys(const Gate& gate,
                  const GateShape& shape,
                  const layout::PagedTokens& tokens,
                  uint64_t first_position,
                  uint32_t first,
                  uint32_t count,
                  uint32_t offset);
  BoundedMatrix expected_keys(const Gate& gate,
                              const GateShape& shape,
                              uint64_t first_position,
                              uint32_t first,
                              uint32_t count,
                              uint32_t offset);

  // Scores of vectors 1 .. count of `keys` ([kv_heads * (count + 2), width]): [kv_heads, count].
  Matrix run_scores(const Gate& gate,
                    const GateShape& shape,
                    const Matrix& keys,
                    uint32_t count,
                    uint64_t position);
  BoundedMatrix expected_scores(const Gate& gate,
                                const GateShape& shape,
                                const Matrix& keys,
                                uint32_t count,
                                uint64_t position);
};

}  // namespace spin::testing
