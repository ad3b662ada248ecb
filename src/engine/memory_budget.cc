// SPDX-License-Identifier: Apache-2.0
#include "engine/memory_budget.h"

#include <algorithm>
#include <limits>
#include <string>

#include <fmt/format.h>

#include "base/checked_math.h"
#include "layout/head_pages.h"

namespace spin::engine {
namespace {

constexpr uint64_t kMaxPages = std::numeric_limits<uint32_t>::max() - 1;

std::string mib(uint64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

// Bytes that `sequences` contexts of `tokens` take, or the most that there can be.
uint64_t kv_need(const layout::KvGeometry& geometry, uint64_t tokens, uint64_t sequences) {
  const uint64_t columns = uint64_t{geometry.layers} * geometry.kv_heads;
  const auto need = base::checked_product(
      {{geometry.pages_per_head(tokens), columns, geometry.page_bytes(), sequences}});
  return need.value_or(std::numeric_limits<uint64_t>::max());
}

Status too_small(const BudgetQuestion& question, uint64_t kv_bytes, uint64_t tokens) {
  const uint64_t need = kv_need(question.geometry, tokens, 1);
  return Status(StatusCode::kResourceExhausted,
                fmt::format("one context of {} tokens needs {} of KV cache, but there are {} "
                            "(memory {}, weights {}, reserve {})",
                            tokens, mib(need), mib(kv_bytes), mib(question.memory_bytes),
                            mib(question.weight_bytes), mib(question.reserve_bytes)),
                "max_model_len");
}

// Bytes that neither weights nor the reserve take.
Result<uint64_t> bytes_left(const BudgetQuestion& question) {
  const uint64_t taken = question.weight_bytes + question.reserve_bytes;
  if (taken >= question.memory_bytes) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("the model does not fit: need {} for weights and {} in reserve, have "
                              "{} of memory",
                              mib(question.weight_bytes), mib(question.reserve_bytes),
                              mib(question.memory_bytes)));
  }
  return question.memory_bytes - taken;
}

Result<uint64_t> choose_bytes(const BudgetQuestion& question,
                              const EngineOptions& options,
                              uint64_t left,
                              uint64_t model_len) {
  if (options.kv_cache_memory_bytes == 0) {
    const auto share = static_cast<uint64_t>(kDefaultKvShare * static_cast<double>(left));
    return std::min(share, kv_need(question.geometry, model_len, options.max_num_seqs));
  }
  if (options.kv_cache_memory_bytes > left) {
    return Status(
        StatusCode::kResourceExhausted,
        fmt::format("kv_cache_memory_bytes: need {}, have {} (memory {}, weights {}, "
                    "reserve {})",
                    mib(options.kv_cache_memory_bytes), mib(left), mib(question.memory_bytes),
                    mib(question.weight_bytes), mib(question.reserve_bytes)),
        "kv_cache_memory_bytes");
  }
  return options.kv_cache_memory_bytes;
}

// The host tier lies in the same memory.
Status add_host_tier(const BudgetQuestion& question,
                     const EngineOptions& options,
                     uint64_t left,
                     KvBudget& budget) {
  const layout::HostExtentLayout extent{question.extent_pages, question.geometry.page_bytes()};
  const uint64_t columns = uint64_t{question.geometry.layers} * question.geometry.kv_heads;
  if (options.host_memory_bytes > left) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("host_memory_bytes: need {}, have {} (memory {}, weights {}, "
                              "reserve {})",
                              mib(options.host_memory_bytes), mib(left), mib(question.memory_bytes),
                              mib(question.weight_bytes), mib(question.reserve_bytes)),
                  "host_memory_bytes");
  }
  budget.host_bytes = options.host_memory_bytes;
  const uint64_t extents_per_head = budget.host_bytes / extent.bytes() / columns;
  budget.host_capacity_tokens =
      extents_per_head * question.extent_pages * question.geometry.page_tokens;
  if (budget.host_bytes > 0 && extents_per_head == 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("host_memory_bytes must be 0 or at least {}: one extent of {} pages "
                              "for each of {} heads",
                              columns * extent.bytes(), question.extent_pages, columns),
                  "host_memory_bytes");
  }
  return ok_status();
}

}  // namespace

Result<KvBudget> plan_kv_budget(const BudgetQuestion& question, const EngineOptions& options) {
  if (options.max_model_len > question.model_positions) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("max_model_len is {}, but the model was made for at most {} tokens",
                              options.max_model_len, question.model_positions),
                  "max_model_len");
  }
  if (options.max_model_len == 1) {
    return Status(StatusCode::kInvalidArgument,
                  "max_model_len must be at least 2: one token of prompt and one of output",
                  "max_model_len");
  }
  const uint64_t wanted =
      options.max_model_len != 0 ? options.max_model_len : question.model_positions;
  KvBudget budget;
  SPIN_ASSIGN_OR_RETURN(uint64_t left, bytes_left(question));
  if (!options.sparse.empty()) {
    SPIN_RETURN_IF_ERROR(add_host_tier(question, options, left, budget));
    left -= budget.host_bytes;
  }
  SPIN_ASSIGN_OR_RETURN(const uint64_t bytes, choose_bytes(question, options, left, wanted));
  const layout::KvGeometry& geometry = question.geometry;
  const uint64_t columns = uint64_t{geometry.layers} * geometry.kv_heads;
  const uint64_t per_head =
      std::min(bytes / geometry.page_bytes(), kMaxPages) / columns;  // pages of each head
  budget.pages = per_head * columns;
  budget.bytes = budget.pages * geometry.page_bytes();
  budget.capacity_tokens = per_head * geometry.page_tokens;
  if (!options.sparse.empty()) {
    budget.index_bytes =
        static_cast<uint64_t>(kIndexShare * static_cast<double>(left - budget.bytes));
  }
  budget.max_model_len =
      std::min(wanted, std::max(budget.capacity_tokens, budget.host_capacity_tokens));
  const uint64_t least = options.max_model_len != 0 ? options.max_model_len : 2;
  if (budget.max_model_len < least) return too_small(question, budget.bytes, least);
  return budget;
}

}  // namespace spin::engine
