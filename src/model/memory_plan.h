// SPDX-License-Identifier: Apache-2.0
// How many bytes a model takes, before anything is allocated. Thread: pure functions.
#pragma once

#include <cstdint>

#include "layout/dtype.h"
#include "layout/kv_geometry.h"
#include "model/model_config.h"

namespace spin::model {

// Parameters of the model; a tied embedding counts once.
uint64_t parameter_count(const ModelConfig& config);

// Of `parameter_count`, those in matrices (the rest are norms and biases, always f32 in memory).
uint64_t matrix_parameter_count(const ModelConfig& config);

// Weights in memory with matrices of type `dtype`. A backend may pad rows; this is without padding.
uint64_t weight_bytes(const ModelConfig& config, layout::DType dtype);

// KV cache of one sequence of `tokens`, in whole pages.
uint64_t kv_bytes(const layout::KvGeometry& geometry, uint64_t tokens);

struct MemoryPlan {
  uint64_t weight_bytes = 0;
  uint64_t kv_bytes_per_token = 0;
  uint64_t kv_bytes = 0;         // for the context asked about
  uint64_t workspace_bytes = 0;  // activations of one step
  uint64_t logit_bytes = 0;      // one row of logits
  uint64_t total_bytes() const { return weight_bytes + kv_bytes + workspace_bytes + logit_bytes; }
};

struct MemoryQuestion {
  layout::DType dtype = layout::DType::kF32;
  layout::DType kv_dtype = layout::DType::kF32;
  uint32_t page_tokens = 8;
  uint64_t context_tokens = 0;
  int64_t rows_per_step = 512;
};

// One sequence of context_tokens. Requires: the ranges of model_limits.h.
MemoryPlan plan_memory(const ModelConfig& config, const MemoryQuestion& question);

}  // namespace spin::model
