// SPDX-License-Identifier: Apache-2.0
#include "sparse/range_partition.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/checked_math.h"

namespace spin::sparse {

RangePartition::RangePartition(const RangeSettings& settings) : page_tokens_(settings.page_tokens) {
  SPIN_CHECK(settings.page_tokens > 0 && settings.partition_tokens > 0);
  partition_pages_ = base::ceil_div(settings.partition_tokens, page_tokens_);
  partition_tokens_ = partition_pages_ * page_tokens_;
  first_ranked_ = base::ceil_div(settings.sink_tokens, partition_tokens_);
  local_tokens_ = base::ceil_div<uint64_t>(settings.local_tokens, page_tokens_) * page_tokens_;
}

uint64_t RangePartition::prompt_tail_first(uint64_t tokens) const {
  SPIN_CHECK(tokens >= zone_tokens());
  return (tokens - local_tokens_) / partition_tokens_ * partition_tokens_;
}

SealPlan RangePartition::plan_seal(const layout::Tail& tail) const {
  if (tail.tokens <= local_tokens_) return {};
  const uint64_t partitions = (tail.tokens - local_tokens_) / partition_tokens_;
  return {.pages = static_cast<uint32_t>(partitions) * partition_pages_, .repack_tokens = 0};
}

uint32_t RangePartition::tail_pages() const {
  // In the step in which a partition becomes complete it is still there.
  return static_cast<uint32_t>(local_tokens_ / page_tokens_) + partition_pages_;
}

uint32_t RangePartition::ranked(uint64_t tail_first_token) const {
  const uint64_t end = partitions(tail_first_token);
  SPIN_CHECK(end <= std::numeric_limits<uint32_t>::max());
  return end > first_ranked_ ? static_cast<uint32_t>(end) - first_ranked_ : 0;
}

uint32_t RangePartition::budget_partitions(const TokenBudget& budget,
                                           uint64_t context_tokens) const {
  const uint64_t count = budget.resolve(context_tokens) / partition_tokens_;
  return static_cast<uint32_t>(
      std::clamp<uint64_t>(count, 1, std::numeric_limits<uint32_t>::max()));
}

uint32_t RangePartition::most_selected(const TokenBudget& budget, uint64_t context_tokens) const {
  const uint64_t tail_first =
      context_tokens > zone_tokens() ? prompt_tail_first(context_tokens) : sink_tokens();
  return std::min(budget_partitions(budget, context_tokens), ranked(tail_first));
}

}  // namespace spin::sparse
