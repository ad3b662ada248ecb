// SPDX-License-Identifier: Apache-2.0
// Ranks partitions by the exact scores of all their keys, of which it keeps a copy: what a
// selection of this size can reach at best. For tests and measurements (docs/algorithms/oracle.md).
// Thread: as SparseAlgorithm.
#pragma once

#include <memory>

#include "sparse/registry.h"

namespace spin::sparse {

Result<std::unique_ptr<SparseAlgorithm>> create_oracle(const SparseSpec& spec,
                                                       const AlgorithmContext& context);

}  // namespace spin::sparse
