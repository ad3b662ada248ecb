// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_sparse_ops.h"

namespace spin::backend::cpu {

void CpuSparseOps::enqueue_factor_keys(const FactorKeysItem& /*item*/,
                                       const RopeParams& /*rope*/,
                                       StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuSparseOps::enqueue_rebuild_tokens(const RebuildTokensItem& /*item*/,
                                          const RopeParams& /*rope*/,
                                          StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

void CpuSparseOps::enqueue_rebuild_pages(std::span<const RebuildPagesItem> /*items*/,
                                         const KvPoolRef& /*pool*/,
                                         const RopeParams& /*rope*/,
                                         StreamRef stream) {
  stream.enqueue_task([] { return Status(StatusCode::kUnsupported, "not there yet"); });
}

}  // namespace spin::backend::cpu
