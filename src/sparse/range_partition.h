// SPDX-License-Identifier: Apache-2.0
// Token ranges as partitions: what all algorithms whose partition is a run of whole pages share.
//
//   [ sinks | partition, partition, ... | tail: local window, unsealed tokens ]
//
// Partition j holds tokens [j * U, (j + 1) * U), U a multiple of the page size P: pages
// [j * U / P, (j + 1) * U / P), ids as token / P. Sinks and tail begin and end with whole
// partitions, so that every token is in exactly one zone or one ranked partition:
// ranked are the partitions from first_ranked() up to the tail. Neither sinks nor tail count as
// budget.
//
// The tail's first U tokens are sealed as soon as the local window fits behind them.
// Thread: immutable value.
#pragma once

#include <cstdint>

#include "layout/head_pages.h"
#include "sparse/sparse_algorithm.h"
#include "sparse/sparse_spec.h"

namespace spin::sparse {

struct RangeSettings {
  uint32_t page_tokens = 8;
  uint32_t partition_tokens = 8;  // rounded up to whole pages
  uint32_t sink_tokens = 0;       // rounded up to whole partitions
  // Newest tokens that always stay in the tail; rounded up to whole pages.
  uint64_t local_tokens = 0;
};

class RangePartition {
 public:
  RangePartition() = default;
  // Requires: page_tokens and partition_tokens are not 0.
  explicit RangePartition(const RangeSettings& settings);

  uint32_t partition_tokens() const { return partition_tokens_; }
  uint32_t partition_pages() const { return partition_pages_; }
  uint32_t sink_pages() const { return first_ranked_ * partition_pages_; }
  uint64_t sink_tokens() const { return uint64_t{first_ranked_} * partition_tokens_; }
  uint64_t local_tokens() const { return local_tokens_; }
  uint32_t first_ranked() const { return first_ranked_; }

  // Shortest prompt whose zones are complete. Shorter ones are served without the algorithm.
  uint64_t zone_tokens() const { return sink_tokens() + local_tokens_; }
  // Position of the tail's first token after a prompt. Requires: tokens >= zone_tokens().
  uint64_t prompt_tail_first(uint64_t tokens) const;
  // Whole partitions that leave a tail.
  SealPlan plan_seal(const layout::Tail& tail) const;
  // Most pages of a tail.
  uint32_t tail_pages() const;

  // Whole partitions in the first `tokens` tokens.
  uint64_t partitions(uint64_t tokens) const { return tokens / partition_tokens_; }
  // Partitions ranked while the tail begins at `tail_first_token`.
  uint32_t ranked(uint64_t tail_first_token) const;
  // Partitions that a budget buys: never more tokens than the budget, but at least one partition.
  uint32_t budget_partitions(const TokenBudget& budget, uint64_t context_tokens) const;
  // The budget as above, and never more than can be ranked in a context of so many tokens.
  uint32_t most_selected(const TokenBudget& budget, uint64_t context_tokens) const;

 private:
  uint32_t page_tokens_ = 1;
  uint32_t partition_tokens_ = 1;
  uint32_t partition_pages_ = 1;
  uint32_t first_ranked_ = 0;
  uint64_t local_tokens_ = 0;
};

}  // namespace spin::sparse
