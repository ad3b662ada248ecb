// SPDX-License-Identifier: Apache-2.0
// The sparse algorithms that an engine was started with, and the instances of them that requests
// ask for with other options.
// Thread: thread-safe. Lifetime: the device and the model's RoPE arrays outlive the set and every
// instance handed out.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/side_weights.h"
#include "base/mutex.h"
#include "sparse/registry.h"
#include "sparse/sparse_algorithm.h"
#include "sparse/sparse_spec.h"
#include "spin/status.h"

namespace spin::engine {

using AlgorithmRef = std::shared_ptr<const sparse::SparseAlgorithm>;  // null: dense

// Passes on to another source and remembers what was opened. Once frozen it opens only that again,
// and what lies beside the model: locations are named when the engine is started, never by a
// request. Thread: thread-safe.
class StartedSideWeights final : public backend::SideWeightSource {
 public:
  explicit StartedSideWeights(backend::SideWeightSource* source) : source_(source) {}
  Result<std::unique_ptr<backend::SideWeights>> open(std::string_view location) override;
  void freeze();

 private:
  backend::SideWeightSource* const source_;  // null: there are none
  base::Mutex mutex_;
  bool frozen_ SPIN_GUARDED_BY(mutex_) = false;
  std::vector<std::string> opened_ SPIN_GUARDED_BY(mutex_);
};

class AlgorithmSet {
 public:
  // `specs` as EngineOptions::sparse. Lifetime: the context's source outlives the set. Errors:
  // those of parse_sparse_spec and create_algorithm, with param() "sparse".
  static Result<std::unique_ptr<AlgorithmSet>> create(std::span<const std::string> specs,
                                                      const sparse::AlgorithmContext& context);

  // What a request gets that names nothing.
  const AlgorithmRef& default_algorithm() const { return default_; }

  // What a request asks for, as GenerateRequest::sparse: an algorithm that the engine was started
  // with, whose options are the start's unless the request names them.
  // Errors, with param() "sparse": kInvalidArgument; kResourceExhausted: too many different
  // settings are in use.
  Result<AlgorithmRef> resolve(const std::optional<std::string>& spec);

  // "NAME:key=value,...", resolved, in the order of the start.
  std::vector<std::string> describe() const;
  // Those of the start that are not dense.
  std::vector<AlgorithmRef> started() const;

 private:
  struct Started {
    sparse::SparseSpec spec;
    AlgorithmRef algorithm;  // null: dense
  };
  // An instance that a request made.
  struct Made {
    std::string key;
    AlgorithmRef algorithm;
  };

  explicit AlgorithmSet(const sparse::AlgorithmContext& context);
  const Started* find(const std::string& name) const;
  std::string known_names() const;

  StartedSideWeights side_weights_;
  sparse::AlgorithmContext context_;
  std::vector<Started> started_;
  AlgorithmRef default_;
  base::Mutex mutex_;
  std::vector<Made> made_ SPIN_GUARDED_BY(mutex_);  // least recently used first
  // Of everything that requests made and that is still alive.
  std::vector<std::weak_ptr<const sparse::SparseAlgorithm>> live_ SPIN_GUARDED_BY(mutex_);
};

}  // namespace spin::engine
