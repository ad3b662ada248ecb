// SPDX-License-Identifier: Apache-2.0
// How much of the device's memory becomes KV cache, and how long a context may be then. Decided
// before any weight is read; refusals say what is needed, what there is and what is reserved.
//
// In unified memory weights, reserves and both tiers share one memory. With separate memories the
// fast tier lies in the share of fast memory that gpu_memory_utilization allows, beside weights,
// reserve and index; the host tier in host memory, beside its own reserve.
// Thread: pure functions.
#pragma once

#include <cstdint>

#include "backend/device.h"
#include "layout/kv_geometry.h"
#include "spin/options.h"
#include "spin/status.h"

namespace spin::engine {

struct BudgetQuestion {
  layout::KvGeometry geometry;
  uint64_t model_positions = 0;  // longest context that the model was made for
  bool unified_memory = true;
  uint64_t memory_bytes = 0;       // fast memory; unified: of the machine or control group
  uint64_t host_memory_bytes = 0;  // of the machine or control group; unified: not read
  uint64_t weight_bytes = 0;
  uint64_t reserve_bytes = 0;       // in fast memory: workspace, logits, staging
  uint64_t host_reserve_bytes = 0;  // in host memory: the process itself, inputs and logits again
  uint32_t extent_pages = 32;       // of the host tier
  // Most pages that one head of a sequence of the whole length reserves under any sparse
  // algorithm of the start; 0: none. More than dense attention's where pages are clusters.
  uint64_t sparse_pages_per_head = 0;
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

// Requires: check_engine_options(options) was ok. Errors: kResourceExhausted (need, have, reserve,
// and which memory), kInvalidArgument with param().
Result<KvBudget> plan_kv_budget(const BudgetQuestion& question, const EngineOptions& options);

struct MemoryBytes {
  uint64_t fast = 0;
  uint64_t host = 0;
};

// Whether both kinds fit into `share` of the device's memory: each into its own, or together where
// memory is unified.
bool fits_share(const MemoryBytes& bytes,
                double share,
                const backend::DeviceProperties& properties);

}  // namespace spin::engine
