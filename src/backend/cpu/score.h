// SPDX-License-Identifier: Apache-2.0
// Cuts the scoring of partitions into tasks for the thread pool. Thread: runs on a stream's thread
// and the pool's workers.
#pragma once

#include <span>

#include "backend/cpu/kernels.h"
#include "backend/cpu/workspace.h"
#include "backend/sparse_ops.h"
#include "base/thread_pool.h"

namespace spin::backend::cpu {

// One item of either kind; keys: means (or the keys themselves) or the lower corners of boxes.
struct ScoreUnit {
  ScoreItem item;
  HeadVectors keys;
  HeadVectors upper;  // data == nullptr: no boxes
  uint32_t keys_per_partition = 1;
};

struct ScoreCall {
  TensorRef q;  // f32 [rows, q_heads * head_dim]
  std::span<const ScoreUnit> units;
  layout::KvGeometry geometry;
  float scale = 1.0f;
  Aggregation aggregation = Aggregation::kSoftmaxMax;
};

// Errors: kResourceExhausted if there is no scratch memory.
Status run_scores(const ScoreCall& call,
                  const KernelSet& kernels,
                  base::ThreadPool& pool,
                  WorkspacePool& workspace);

}  // namespace spin::backend::cpu
