// SPDX-License-Identifier: Apache-2.0
// Quest (arXiv 2406.10774): a box around the keys of each partition bounds every product with a
// query from above; the partitions with the greatest bounds are attended
// (docs/algorithms/quest.md). Thread: as SparseAlgorithm.
#pragma once

#include <memory>

#include "sparse/registry.h"

namespace spin::sparse {

Result<std::unique_ptr<SparseAlgorithm>> create_quest(const SparseSpec& spec,
                                                      const AlgorithmContext& context);

}  // namespace spin::sparse
