// SPDX-License-Identifier: Apache-2.0
// The algorithms by name. One line per algorithm in registry.cc; tests add toys of their own.
// Thread: the list is immutable after start (add_algorithm() belongs to start-up and tests).
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "backend/device.h"
#include "backend/side_weights.h"
#include "sparse/sparse_algorithm.h"
#include "sparse/sparse_spec.h"
#include "spin/status.h"

namespace spin::sparse {

struct AlgorithmContext {
  backend::Device* device = nullptr;
  ModelShape shape;
  // Opens weights that belong to an algorithm (seer's gates); null: there are none.
  backend::SideWeightSource* side_weights = nullptr;
};

using AlgorithmFactory = Result<std::unique_ptr<SparseAlgorithm>> (*)(
    const SparseSpec& spec, const AlgorithmContext& context);

struct RegisteredAlgorithm {
  std::string_view name;
  std::string_view summary;  // one line for --help
  AlgorithmFactory create = nullptr;
};

// In order of registration; "dense" is not among them: it is the absence of an algorithm.
std::span<const RegisteredAlgorithm> algorithms();
void add_algorithm(const RegisteredAlgorithm& algorithm);

// Errors: kInvalidArgument (unknown name: the message lists the known ones; bad options),
// kUnsupported (a model shape it cannot serve), those of side weights.
Result<std::unique_ptr<SparseAlgorithm>> create_algorithm(const SparseSpec& spec,
                                                          const AlgorithmContext& context);

}  // namespace spin::sparse
