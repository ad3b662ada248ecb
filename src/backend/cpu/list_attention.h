// SPDX-License-Identifier: Apache-2.0
// Attention of single rows over lists of pages, on the kernels of paged attention.
// Thread: runs on a stream's thread and the pool's workers.
#pragma once

#include <span>

#include "backend/cpu/kernels.h"
#include "backend/cpu/workspace.h"
#include "backend/kv_ops.h"
#include "base/thread_pool.h"

namespace spin::backend::cpu {

struct ListAttentionCall {
  TensorRef q;    // f32 [rows, q_heads * head_dim]
  TensorRef out;  // as q
  std::span<const ListAttentionItem> items;
  KvPoolRef pool;
  float scale = 1.0f;
};

// Errors: kResourceExhausted if there is no scratch memory.
Status run_list_attention(const ListAttentionCall& call,
                          const KernelSet& kernels,
                          base::ThreadPool& pool,
                          WorkspacePool& workspace);

// Adds one part to one row; see KvOps::enqueue_merge. out: [q_heads, head_dim].
void merge_part(const MergeItem& item, int64_t q_heads, int64_t head_dim, float* out);

}  // namespace spin::backend::cpu
