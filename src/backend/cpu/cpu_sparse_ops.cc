// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_sparse_ops.h"

namespace spin::backend::cpu {

void CpuSparseOps::enqueue_pool_keys(std::span<const PoolKeysItem> /*items*/, StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuSparseOps::enqueue_score_means(TensorRef /*q*/,
                                       std::span<const ScoreMeansItem> /*items*/,
                                       const layout::KvGeometry& /*geometry*/,
                                       float /*scale*/,
                                       Aggregation /*aggregation*/,
                                       StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuSparseOps::enqueue_score_boxes(TensorRef /*q*/,
                                       std::span<const ScoreBoxesItem> /*items*/,
                                       const layout::KvGeometry& /*geometry*/,
                                       float /*scale*/,
                                       Aggregation /*aggregation*/,
                                       StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuSparseOps::enqueue_rank(std::span<const RankItem> /*items*/,
                                uint32_t /*kv_heads*/,
                                StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuSparseOps::enqueue_build_lists(std::span<const BuildListItem> /*items*/,
                                       const layout::KvGeometry& /*geometry*/,
                                       StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuSparseOps::enqueue_estimate(TensorRef /*q*/,
                                    std::span<const EstimateItem> /*items*/,
                                    const layout::KvGeometry& /*geometry*/,
                                    float /*scale*/,
                                    StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

}  // namespace spin::backend::cpu
