// SPDX-License-Identifier: Apache-2.0
// The part of the backends' conformance suite about clusters of tokens (backend/cluster_items.h).
// Instantiated like OpsConformance (ops_conformance.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/sparse_ops.h"
#include "tests/backend/ops_conformance.h"

namespace spin::testing {

struct ClusterShape {
  uint32_t kv_heads = 1;
  uint32_t head_dim = 64;
  uint32_t page_tokens = 8;
  layout::DType dtype = layout::DType::kF32;
  uint32_t first_token = 0;
  uint32_t tokens = 0;
  uint32_t clusters = 0;
  uint32_t segments = 1;
  uint32_t iterations = 9;
  uint32_t out_first = 0;
  uint32_t first_page_id = 0;

  std::string text() const;
};

// What the operation wrote.
struct ClusterResult {
  std::vector<float> centroids;       // [kv_heads, out_first + clusters, head_dim]
  std::vector<float> value_sums;      // the same
  std::vector<uint32_t> sizes;        // [kv_heads, out_first + clusters]
  std::vector<uint32_t> first_pages;  // the same
  std::vector<uint32_t> page_counts;  // [kv_heads]
  std::vector<uint32_t> page_starts;  // [kv_heads, page_stride]
  std::vector<uint32_t> token_ids;    // [kv_heads, tokens]
  uint32_t page_stride = 0;

  friend bool operator==(const ClusterResult&, const ClusterResult&) = default;
};

// Clusters keys and values [first_token + tokens, kv_heads * head_dim], laid out in scattered pages
// of `shape`, on `device`. Centroids and value sums are stored as the keys are.
ClusterResult run_cluster(backend::Device& device,
                          backend::Stream& stream,
                          const ClusterShape& shape,
                          const Matrix& keys,
                          const Matrix& values);

// The cluster of every token of one head, from the page map and sizes; fails the test unless each
// token is in exactly one, in ascending order, and pages are laid out as they should be.
std::vector<uint32_t> clusters_of_tokens(const ClusterShape& shape,
                                         const ClusterResult& result,
                                         uint32_t head);

class ClusterConformance : public OpsConformance {};

}  // namespace spin::testing
