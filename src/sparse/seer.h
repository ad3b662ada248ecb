// SPDX-License-Identifier: Apache-2.0
// SeerAttention-R: gates learned for the model score blocks of 32 or 64 tokens
// (docs/algorithms/seer.md). The gate of a KV head pools a block's keys, as they were before RoPE,
// to one vector, and its group's queries to another; their product ranks the block.
// Thread: engine thread.
#pragma once

#include <memory>

#include "sparse/registry.h"
#include "sparse/sparse_algorithm.h"
#include "sparse/sparse_spec.h"
#include "spin/status.h"

namespace spin::sparse {

// Options: block, gates, local, dense_layers, position, and either budget or threshold with cap.
// Errors: kInvalidArgument (options, shapes of tensors), kNotFound (no gates, a missing tensor),
// kUnsupported (gates of another kind, a head that has no RoPE pairs).
Result<std::unique_ptr<SparseAlgorithm>> create_seer(const SparseSpec& spec,
                                                     const AlgorithmContext& context);

}  // namespace spin::sparse
