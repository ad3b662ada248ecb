// SPDX-License-Identifier: Apache-2.0
// What the kernels of clustering (cluster.cu, cluster_pages.cu) share. Thread: plain data.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "backend/cluster_items.h"

namespace spin::backend::cuda {

// Arrays of one item in scratch.
struct ClusterScratch {
  float* mean_parts = nullptr;  // [kv_heads, parts, head_dim] sums
  float* mean = nullptr;        // [kv_heads, head_dim] mu
  float* centroids = nullptr;   // [kv_heads, clusters, head_dim] c, without mu
  uint32_t* nearest = nullptr;  // [kv_heads, tokens] a
  uint32_t* counts = nullptr;   // [kv_heads, clusters] tokens of the last assignment
  uint32_t* begins = nullptr;   // [kv_heads, clusters] their first place in token_ids
};

// From counts: the item's sizes, first_pages, page_counts and page_starts, and begins.
void launch_deal_pages(const ClusterItem& item, const ClusterScratch& scratch, cudaStream_t stream);

}  // namespace spin::backend::cuda
