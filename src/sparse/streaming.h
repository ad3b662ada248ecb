// SPDX-License-Identifier: Apache-2.0
// StreamingLLM's pattern: the first tokens and a window of the newest ones, nothing else. The lower
// end of every comparison (docs/algorithms/streaming.md). Thread: as SparseAlgorithm.
#pragma once

#include <memory>

#include "sparse/registry.h"

namespace spin::sparse {

Result<std::unique_ptr<SparseAlgorithm>> create_streaming(const SparseSpec& spec,
                                                          const AlgorithmContext& context);

}  // namespace spin::sparse
