// SPDX-License-Identifier: Apache-2.0
// How much of the machine's memory becomes KV cache, and how long a context may be then. Decided
// before any weight is read; refusals say what is needed, what there is and what is reserved.
// Thread: pure functions.
#pragma once

#include <cstdint>

#include "layout/kv_geometry.h"
#include "spin/options.h"
#include "spin/status.h"

namespace spin::engine {

struct BudgetQuestion {
  layout::KvGeometry geometry;
  uint64_t model_positions = 0;  // longest context that the model was made for
  uint64_t memory_bytes = 0;     // of the machine or control group
  uint64_t weight_bytes = 0;
  uint64_t reserve_bytes = 0;  // workspace, logits, staging, the process itself
  uint32_t extent_pages = 32;  // of the host tier
};

struct KvBudget {
  uint64_t pages = 0;  // whole columns: a multiple of layers * kv_heads
  uint64_t bytes = 0;
  uint64_t capacity_tokens = 0;
  uint64_t max_model_len = 0;  // <= the larger one of the tiers' capacities
  // Sparse requests only.
  uint64_t host_bytes = 0;
  uint64_t host_capacity_tokens = 0;
  uint64_t index_bytes = 0;  // for summaries and tables
};

// Share of what the weights, the reserve and both tiers leave that summaries and tables may take.
inline constexpr double kIndexShare = 0.75;

// Share of what the weights and the reserve leave that the default takes for KV.
inline constexpr double kDefaultKvShare = 0.6;

// Errors: kResourceExhausted (need, have, reserve), kInvalidArgument with param().
Result<KvBudget> plan_kv_budget(const BudgetQuestion& question, const EngineOptions& options);

}  // namespace spin::engine
