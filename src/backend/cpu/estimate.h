// SPDX-License-Identifier: Apache-2.0
// Attention to partitions that stand for their tokens (backend/sparse_ops.h, EstimateItem).
// Thread: runs on a stream's thread and the pool's workers.
#pragma once

#include <span>

#include "backend/cpu/kernels.h"
#include "backend/cpu/workspace.h"
#include "backend/sparse_ops.h"
#include "base/thread_pool.h"

namespace spin::backend::cpu {

struct EstimateCall {
  TensorRef q;  // f32 [rows, q_heads * head_dim]
  std::span<const EstimateItem> items;
  layout::KvGeometry geometry;
  float scale = 1.0f;
};

// Errors: kResourceExhausted if there is no scratch memory.
Status run_estimate(const EstimateCall& call,
                    const KernelSet& kernels,
                    base::ThreadPool& pool,
                    WorkspacePool& workspace);

}  // namespace spin::backend::cpu
