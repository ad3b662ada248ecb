// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_kv_ops.h"

namespace spin::backend::cpu {

void CpuKvOps::enqueue_tail_append(TensorRef /*k*/,
                                   TensorRef /*v*/,
                                   std::span<const TailAppendItem> /*items*/,
                                   const TieredPoolRef& /*pool*/,
                                   StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuKvOps::enqueue_retrieve(std::span<const RetrieveItem> /*items*/,
                                const TieredPoolRef& /*pool*/,
                                StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuKvOps::enqueue_seal(std::span<const SealItem> /*items*/,
                            const TieredPoolRef& /*pool*/,
                            StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuKvOps::enqueue_place(const PlaceItem& /*item*/,
                             const TieredPoolRef& /*pool*/,
                             StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuKvOps::enqueue_repack_tail(const RepackTailItem& /*item*/,
                                   const TieredPoolRef& /*pool*/,
                                   StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuKvOps::enqueue_resize(const ResizeItem& /*item*/,
                              const TieredPoolRef& /*pool*/,
                              StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuKvOps::enqueue_list_attention(TensorRef /*q*/,
                                      std::span<const ListAttentionItem> /*items*/,
                                      const KvPoolRef& /*pool*/,
                                      float /*scale*/,
                                      TensorRef /*out*/,
                                      StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuKvOps::enqueue_merge(std::span<const MergeItem> /*items*/,
                             int64_t /*q_heads*/,
                             int64_t /*head_dim*/,
                             TensorRef /*out*/,
                             StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

}  // namespace spin::backend::cpu
