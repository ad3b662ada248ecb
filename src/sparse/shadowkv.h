// SPDX-License-Identifier: Apache-2.0
// ShadowKV (arXiv 2410.21465) as served engines run it: the mean of 8 keys stands for them, chunks
// whose mean does not are pinned; K and V are fetched (docs/algorithms/shadowkv.md).
// Thread: as SparseAlgorithm.
#pragma once

#include <memory>

#include "sparse/registry.h"

namespace spin::sparse {

Result<std::unique_ptr<SparseAlgorithm>> create_shadowkv(const SparseSpec& spec,
                                                         const AlgorithmContext& context);

}  // namespace spin::sparse
