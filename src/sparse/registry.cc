// SPDX-License-Identifier: Apache-2.0
// The list of algorithms: one line each. Thread: see the header.
#include "sparse/registry.h"

#include <string>
#include <vector>

#include <fmt/format.h>

#include "sparse/oracle.h"
#include "sparse/quest.h"
#include "sparse/retroinfer.h"
#include "sparse/seer.h"
#include "sparse/shadowkv.h"
#include "sparse/shadowkv_svd.h"
#include "sparse/sketch.h"
#include "sparse/streaming.h"

namespace spin::sparse {
namespace {

std::vector<RegisteredAlgorithm>& list() {
  static std::vector<RegisteredAlgorithm> algorithms = {
      {"streaming", "the first tokens and a window of the newest ones", create_streaming},
      {"quest", "boxes around the keys of 16 tokens bound their scores", create_quest},
      {"shadowkv", "means of 8 keys as landmarks, outliers stay resident", create_shadowkv},
      {"seer", "gates learned for the model score blocks of 32 or 64 tokens", create_seer},
      {"shadowkv-svd", "as shadowkv, but keys are rebuilt from factors and values fetched",
       create_shadowkv_svd},
      {"oracle", "exact scores from a copy of all keys, for comparison", create_oracle},
      {"retroinfer", "clusters of like keys, the best retrieved, the next estimated",
       create_retroinfer},
      {"sketch", "sketches of 1, 2 or 4 bits of every key rank pages", create_sketch},
  };
  return algorithms;
}

}  // namespace

std::span<const RegisteredAlgorithm> algorithms() { return list(); }

void add_algorithm(const RegisteredAlgorithm& algorithm) { list().push_back(algorithm); }

Result<std::unique_ptr<SparseAlgorithm>> create_algorithm(const SparseSpec& spec,
                                                          const AlgorithmContext& context) {
  std::string known = "dense";
  for (const RegisteredAlgorithm& algorithm : algorithms()) {
    if (algorithm.name == spec.name) return algorithm.create(spec, context);
    known += fmt::format(", {}", algorithm.name);
  }
  return Status(StatusCode::kInvalidArgument,
                fmt::format("there is no sparse algorithm {}; there are {}", spec.name, known));
}

}  // namespace spin::sparse
