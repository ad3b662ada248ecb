// SPDX-License-Identifier: Apache-2.0
// KvOps of the CPU backend. Thread: thread-safe; the work runs on the stream's thread and the pool.
#pragma once

#include <span>

#include "backend/cpu/kernels.h"
#include "backend/cpu/workspace.h"
#include "backend/kv_ops.h"
#include "base/thread_pool.h"

namespace spin::backend::cpu {

class CpuKvOps final : public KvOps {
 public:
  // Scratch goes to `host_memory`. Lifetime: pool and memory outlive this and everything enqueued.
  CpuKvOps(const KernelSet& kernels, base::ThreadPool& pool, MemoryResource& host_memory)
      : kernels_(kernels), pool_(pool), workspace_(host_memory) {}

  void enqueue_tail_append(TensorRef k,
                           TensorRef v,
                           std::span<const TailAppendItem> items,
                           const TieredPoolRef& pool,
                           StreamRef stream) override;
  void enqueue_retrieve(std::span<const RetrieveItem> items,
                        const TieredPoolRef& pool,
                        StreamRef stream) override;
  void enqueue_seal(std::span<const SealItem> items,
                    const TieredPoolRef& pool,
                    StreamRef stream) override;
  void enqueue_place(const PlaceItem& item, const TieredPoolRef& pool, StreamRef stream) override;
  void enqueue_repack_tail(const RepackTailItem& item,
                           const TieredPoolRef& pool,
                           StreamRef stream) override;
  void enqueue_resize(const ResizeItem& item, const TieredPoolRef& pool, StreamRef stream) override;
  void enqueue_list_attention(TensorRef q,
                              std::span<const ListAttentionItem> items,
                              const KvPoolRef& pool,
                              float scale,
                              TensorRef out,
                              StreamRef stream) override;
  void enqueue_merge(std::span<const MergeItem> items,
                     int64_t q_heads,
                     int64_t head_dim,
                     TensorRef out,
                     StreamRef stream) override;

 private:
  const KernelSet kernels_;
  base::ThreadPool& pool_;
  WorkspacePool workspace_;
};

}  // namespace spin::backend::cpu
