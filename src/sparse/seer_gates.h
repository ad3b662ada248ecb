// SPDX-License-Identifier: Apache-2.0
// The gates of SeerAttention-R as they are published, read through backend::SideWeights: which kind
// they are, and their tensors. Thread: engine start-up; immutable afterwards.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "backend/device.h"
#include "backend/gate_items.h"
#include "backend/side_weights.h"
#include "sparse/sparse_algorithm.h"
#include "spin/status.h"

namespace spin::sparse {

// How the queries of a group become one vector.
enum class QueryPooling : uint8_t {
  kProjected,      // "Qproj": a projection per query head, summed
  kMeanProjected,  // "Qavgproj": their mean, projected
  kMean,           // "Qavg": their mean
};

// The entries seerattn_* of the gates' config.json; what is absent has the published default.
struct GateConfig {
  uint32_t width = 0;  // seerattn_gate_hidden_size; as wide as a head
  uint32_t poolings = 3;
  std::array<backend::Pooling, 3> order{backend::Pooling::kMax, backend::Pooling::kMin,
                                        backend::Pooling::kMean};  // seerattn_k_seq_pooling_type
  QueryPooling query = QueryPooling::kProjected;                   // seerattn_q_head_pooling_type
  bool use_norm = true;                                            // seerattn_use_qk_norm
  bool use_rope = true;                                            // seerattn_use_rope
  uint32_t start_layer = 0;                                        // seerattn_start_layer
};

// Errors: kInvalidArgument, kUnsupported, naming the entry.
Result<GateConfig> read_gate_config(const backend::SideWeights& source, uint32_t head_dim);

// Gates rank blocks of the size that they were trained for. Errors: kInvalidArgument with both
// sizes, if the configuration names another one.
Status check_gate_block(const backend::SideWeights& source, uint64_t block_tokens);

class GateTensors {
 public:
  // Reads the gates of layers [first_layer, shape.geometry.layers).
  // Errors: kNotFound and kInvalidArgument naming the tensor, kUnsupported (a width whose RoPE
  // cannot be had from the model's), kResourceExhausted.
  static Result<GateTensors> load(const backend::SideWeights& source,
                                  const GateConfig& config,
                                  const ModelShape& shape,
                                  uint32_t first_layer,
                                  backend::Device& device);

  uint32_t width() const { return config_.width; }
  // Requires: layer >= first_layer. Lifetime: that of this object.
  backend::GateWeights layer(uint32_t layer) const;

 private:
  GateConfig config_;
  backend::RopeParams model_rope_;
  std::vector<float> gate_inv_freq_;  // [width / 2]
  uint32_t first_layer_ = 0;
  uint64_t key_floats_ = 0;
  uint64_t query_floats_ = 0;
  std::vector<backend::Buffer> layers_;  // key, query, key norm, query norm
};

}  // namespace spin::sparse
