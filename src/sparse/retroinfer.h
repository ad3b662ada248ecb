// SPDX-License-Identifier: Apache-2.0
// RetroInfer: clusters of tokens with like keys (docs/algorithms/retroinfer.md). The clusters whose
// centroids score best are attended exactly, the next ones through centroid, value sum and size,
// and the rest not at all.
//
//   [ sinks | clustered tokens: pages of clusters | tail: unclustered tokens, local window ]
//
// Newest tokens stay in the tail until `update` of them lie behind the local window; these become
// clusters of their own. Layers do that in different steps. Thread: engine thread.
#pragma once

#include <cstdint>
#include <memory>

#include "sparse/registry.h"
#include "sparse/sparse_algorithm.h"
#include "sparse/sparse_spec.h"
#include "spin/status.h"

namespace spin::sparse {

// Counts of clusters and pages that follow from counts of tokens alone.
class ClusterPlan {
 public:
  static constexpr uint32_t kSinkTokens = 4;
  static constexpr uint32_t kLocalTokens = 64;
  static constexpr uint64_t kSegmentTokens = 8192;

  struct Settings {
    uint32_t layers = 1;
    uint32_t page_tokens = 8;
    uint32_t cluster_tokens = 16;  // mean size
    uint32_t update_tokens = 1024;
    double estimated_share = 0.232;  // of the clusters
    TokenBudget budget;
  };
  ClusterPlan() = default;
  // Requires: no zeros; cluster_tokens <= update_tokens.
  explicit ClusterPlan(const Settings& settings);

  uint32_t sink_pages() const { return sink_pages_; }
  uint64_t sink_tokens() const { return uint64_t{sink_pages_} * settings_.page_tokens; }
  uint32_t update_tokens() const { return settings_.update_tokens; }  // whole pages
  uint32_t update_clusters() const;
  // Shorter prompts are not clustered: all that follows the sinks is the tail.
  uint64_t minimum_tokens() const;
  uint64_t prompt_tail_first(uint64_t tokens) const;
  // Tokens of a prompt that are clustered.
  uint64_t prompt_clustered(uint64_t tokens) const;
  uint32_t prompt_segments(uint64_t tokens) const;
  uint32_t prompt_clusters(uint64_t tokens) const;

  // Tail tokens with which layer `layer` clusters the first update_tokens() of them.
  uint64_t update_at(uint32_t layer) const;
  uint32_t tail_pages(uint64_t max_tokens) const;

  // Clusters retrieved in a context of so many tokens, and those estimated of `clusters`. A budget
  // that covers the context retrieves all, whatever their number and size.
  uint32_t retrieved_clusters(uint64_t context_tokens) const;
  uint32_t estimated_clusters(uint32_t clusters) const;
  // Most pages of the retrieved clusters; what does not fit is estimated.
  uint32_t retrieved_pages(uint64_t context_tokens) const;

  // Bounds over all ways in which a sequence of max_tokens can split into prompt and output.
  uint64_t most_clustered(uint64_t max_tokens) const;
  uint64_t most_clusters(uint64_t max_tokens) const;
  uint64_t most_pages(uint64_t tokens, uint64_t clusters) const;
  uint64_t most_cluster_pages(uint64_t max_tokens) const;
  // Over all contexts of at most max_tokens.
  uint64_t most_retrieved_clusters(uint64_t max_tokens) const;
  uint64_t most_retrieved_pages(uint64_t max_tokens) const;
  // One id for every page of tokens on their way through the tail, and those of clusters.
  uint64_t most_page_ids(uint64_t max_tokens) const;
  // Whether both deal the tokens of every prompt out alike.
  bool clusters_as(const ClusterPlan& other) const;

 private:
  bool covers(uint64_t context_tokens) const;
  // Longest context of at most max_tokens that the budget covers.
  uint64_t covered(uint64_t max_tokens) const;

  Settings settings_;
  uint32_t sink_pages_ = 0;
  uint32_t stagger_ = 1;  // layers update in so many different steps
};

// Options: budget, estimate, cluster, update, iterations.
// Errors: kInvalidArgument (options).
Result<std::unique_ptr<SparseAlgorithm>> create_retroinfer(const SparseSpec& spec,
                                                           const AlgorithmContext& context);

}  // namespace spin::sparse
