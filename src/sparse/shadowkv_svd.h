// SPDX-License-Identifier: Apache-2.0
// ShadowKV in full (arXiv 2410.21465): as shadowkv, but a prompt's keys are kept as low-rank
// factors, only values are fetched and keys are rebuilt (docs/algorithms/shadowkv-svd.md).
// Thread: as SparseAlgorithm.
#pragma once

#include <memory>

#include "sparse/registry.h"

namespace spin::sparse {

// Options: those of shadowkv, then rank (factors over all KV heads; kv_heads * head_dim are all).
Result<std::unique_ptr<SparseAlgorithm>> create_shadowkv_svd(const SparseSpec& spec,
                                                             const AlgorithmContext& context);

}  // namespace spin::sparse
