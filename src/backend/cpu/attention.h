// SPDX-License-Identifier: Apache-2.0
// Cuts attention over pages into tasks for the thread pool. Thread: runs on a stream's thread and
// the pool's workers.
#pragma once

#include <span>

#include "backend/cpu/kernels.h"
#include "backend/cpu/workspace.h"
#include "backend/ops.h"
#include "base/thread_pool.h"

namespace spin::backend::cpu {

struct AttentionCall {
  TensorRef q;    // f32 [tokens, q_heads * head_dim]
  TensorRef out;  // as q
  std::span<const layout::SequenceSlice> slices;
  KvPoolRef pool;
  float scale = 1.0f;
};

// Errors: kResourceExhausted if there is no scratch memory.
Status run_attention(const AttentionCall& call,
                     const KernelSet& kernels,
                     base::ThreadPool& pool,
                     WorkspacePool& workspace);

}  // namespace spin::backend::cpu
