// SPDX-License-Identifier: Apache-2.0
// Items of the operations on clusters of tokens (backend/sparse_ops.h). Thread: plain data.
#pragma once

#include <cstdint>

#include "backend/head_vectors.h"
#include "layout/paged_tokens.h"

namespace spin::backend {

// Groups the tokens [first_token, first_token + tokens) of `source` by their keys, by segmented
// spherical k-means per KV head (RetroInfer's index):
//
//   x_t = k_t - mu, mu the mean of these keys; c_i = x at floor((2 i + 1) tokens / (2 clusters))
//   `iterations` times, in `segments` runs of floor(tokens / segments) tokens, each with
//   clusters / segments of the c:  a_t = argmax_i x_t . c_i,  c_i = mean of its members / its norm
//   (a zero mean stays zero, a c_i without members stays as it is)
//   once, all tokens against all c:  a_t = argmax_i x_t . c_i
//
// and says which pages the clusters take: tokens of a cluster in ascending order, clusters in
// ascending order, no page with tokens of two clusters. Ties, and products that are not numbers, go
// to the lowest i; every token is in exactly one cluster, a cluster may be empty.
// Cost: 2 head_dim tokens clusters (iterations / segments + 1) float operations per KV head.
struct ClusterItem {
  layout::PagedTokens source;
  uint64_t first_token = 0;
  uint32_t tokens = 0;
  uint32_t clusters = 0;  // a multiple of segments, >= 1; may exceed tokens
  uint32_t segments = 1;
  uint32_t iterations = 9;
  // Outputs: cluster i of this item is vector, or entry, out_first + i of its head.
  uint32_t out_first = 0;
  HeadVectors centroids;            // mean of the keys; mu where a cluster is empty
  HeadVectors value_sums;           // summed in float
  uint32_t* sizes = nullptr;        // [kv_heads, cluster_stride] tokens
  uint32_t* first_pages = nullptr;  // [kv_heads, cluster_stride] page ids, from first_page_id on
  uint64_t cluster_stride = 0;
  uint32_t first_page_id = 0;
  // Outputs: as in layout::PageMap (layout/head_pages.h), token ids counted from the source's token
  // 0.
  uint32_t* page_counts = nullptr;  // [kv_heads]
  uint32_t* page_starts = nullptr;  // [kv_heads, page_stride], page_stride > most pages
  uint32_t* token_ids = nullptr;    // [kv_heads, token_stride]
  uint32_t page_stride = 0;
  uint64_t token_stride = 0;
};

// Most pages that `tokens` tokens in `clusters` clusters take.
constexpr uint64_t most_cluster_pages(uint64_t tokens, uint64_t clusters, uint64_t page_tokens) {
  const uint64_t used = clusters < tokens ? clusters : tokens;
  return (tokens + used * (page_tokens - 1)) / page_tokens;
}

// Deals a ranked list of clusters out to what is attended exactly and what is estimated: the first
// `most` ids are taken exactly, except those whose pages do not fit `page_limit` beside the pages
// of the ids before them; these and all others are estimated. Both lists stay in ranked order.
struct SplitRankedItem {
  const uint32_t* ids = nullptr;     // [kv_heads, id_stride], best first
  const uint32_t* counts = nullptr;  // [kv_heads]
  uint32_t id_stride = 0;
  const uint32_t* sizes = nullptr;  // [kv_heads, size_stride] tokens of each cluster
  uint64_t size_stride = 0;
  uint32_t most = 0;
  uint32_t page_limit = 0;
  uint32_t* exact = nullptr;         // out [kv_heads, exact_stride], exact_stride >= most
  uint32_t* exact_counts = nullptr;  // out [kv_heads]
  uint32_t exact_stride = 0;
  uint32_t* estimated = nullptr;         // out [kv_heads, id_stride]
  uint32_t* estimated_counts = nullptr;  // out [kv_heads]
  uint64_t* exact_total = nullptr;       // added to: [kv_heads] exact ones; null: not wanted
  uint64_t* overflows = nullptr;  // added to: [kv_heads] those that did not fit; null: not wanted
};

}  // namespace spin::backend
