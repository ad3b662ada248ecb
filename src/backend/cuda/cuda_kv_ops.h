// SPDX-License-Identifier: Apache-2.0
// KvOps on a GPU: pages move by kernels alone, host pages are read and written through the bus.
// tail.cu (append, seal, repack), retrieve.cu, place.cu, resize.cu, list_attention.cu, merge.cu.
// Thread: as KvOps.
#pragma once

#include "backend/kv_ops.h"

namespace spin::backend::cuda {

class CudaKvOps final : public KvOps {
 public:
  CudaKvOps(int ordinal, MemoryResource& fast) : ordinal_(ordinal), fast_(fast) {}

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
  const int ordinal_;
  MemoryResource& fast_;
};

}  // namespace spin::backend::cuda
