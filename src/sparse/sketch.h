// SPDX-License-Identifier: Apache-2.0
// Sketches of a few bits per dimension of every key rank pages by their best token; optionally
// sketches of values estimate everything that is not attended (docs/algorithms/sketch.md).
// Thread: as SparseAlgorithm.
#pragma once

#include <memory>

#include "sparse/registry.h"

namespace spin::sparse {

// Options: budget, sinks, local, bits=1|2|4, values=0|2, offset.
Result<std::unique_ptr<SparseAlgorithm>> create_sketch(const SparseSpec& spec,
                                                       const AlgorithmContext& context);

}  // namespace spin::sparse
