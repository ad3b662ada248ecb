// SPDX-License-Identifier: Apache-2.0
#include "engine/memory_budget.h"

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/checked_math.h"
#include "layout/head_pages.h"

namespace spin::engine {
namespace {

constexpr uint64_t kMaxPages = std::numeric_limits<uint32_t>::max() - 1;

std::string mib(uint64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

// Bytes of `sequences` contexts whose heads take `pages` each, or the most that there can be.
uint64_t kv_need(const layout::KvGeometry& geometry, uint64_t pages, uint64_t sequences) {
  const uint64_t columns = uint64_t{geometry.layers} * geometry.kv_heads;
  const auto need = base::checked_product({{pages, columns, geometry.page_bytes(), sequences}});
  return need.value_or(std::numeric_limits<uint64_t>::max());
}

// What the tiers of one memory may take, and how a refusal speaks of it.
struct Room {
  std::string_view memory;  // its name
  uint64_t bytes = 0;
  uint64_t weight_bytes = 0;
  uint64_t reserve_bytes = 0;
  std::string share;  // what `bytes` is a share of; "" if it is all

  uint64_t left() const {
    const uint64_t taken = weight_bytes + reserve_bytes;
    return bytes - std::min(bytes, taken);
  }
  std::string to_string() const {
    const std::string weights =
        weight_bytes == 0 ? "" : fmt::format(", weights {}", mib(weight_bytes));
    return fmt::format("({} {}{}{}, reserve {})", memory, mib(bytes), share, weights,
                       mib(reserve_bytes));
  }
};

// Of the fast tier.
Room fast_room(const BudgetQuestion& question, const EngineOptions& options) {
  Room room{"memory", question.memory_bytes, question.weight_bytes, question.reserve_bytes, ""};
  if (question.unified_memory) {
    room.reserve_bytes += question.host_reserve_bytes;
    return room;
  }
  const double share = options.gpu_memory_utilization.value_or(kDefaultGpuMemoryUtilization);
  room.memory = "fast memory";
  room.bytes = static_cast<uint64_t>(share * static_cast<double>(question.memory_bytes));
  room.share =
      fmt::format(" by gpu_memory_utilization {} of {}", share, mib(question.memory_bytes));
  return room;
}

// Of the host tier, where it does not lie in the fast one's memory.
Room host_room(const BudgetQuestion& question) {
  return {"host memory", question.host_memory_bytes, 0, question.host_reserve_bytes, ""};
}

Status too_small(const layout::KvGeometry& geometry,
                 const Room& room,
                 uint64_t kv_bytes,
                 uint64_t tokens) {
  const uint64_t need = kv_need(geometry, geometry.pages_per_head(tokens), 1);
  return Status(StatusCode::kResourceExhausted,
                fmt::format("one context of {} tokens needs {} of KV cache, but there are {} {}",
                            tokens, mib(need), mib(kv_bytes), room.to_string()),
                "max_model_len");
}

Status model_does_not_fit(const Room& room) {
  return Status(StatusCode::kResourceExhausted,
                fmt::format("the model does not fit: need {} for weights and {} in reserve, have "
                            "{} of {}{}",
                            mib(room.weight_bytes), mib(room.reserve_bytes), mib(room.bytes),
                            room.memory, room.share));
}

Status does_not_fit(const char* option, uint64_t need, uint64_t have, const Room& room) {
  return Status(
      StatusCode::kResourceExhausted,
      fmt::format("{}: need {}, have {} {}", option, mib(need), mib(have), room.to_string()),
      option);
}

// `left`: of `room`, beside what else lies in it.
Result<uint64_t> choose_bytes(const BudgetQuestion& question,
                              const EngineOptions& options,
                              const Room& room,
                              uint64_t left,
                              uint64_t model_len) {
  if (options.kv_cache_memory_bytes == 0) {
    const auto share = static_cast<uint64_t>(kDefaultKvShare * static_cast<double>(left));
    const uint64_t pages =
        std::max(question.geometry.pages_per_head(model_len), question.sparse_pages_per_head);
    return std::min(share, kv_need(question.geometry, pages, options.max_num_seqs));
  }
  if (options.kv_cache_memory_bytes > left) {
    return does_not_fit("kv_cache_memory_bytes", options.kv_cache_memory_bytes, left, room);
  }
  return options.kv_cache_memory_bytes;
}

Status add_host_tier(const BudgetQuestion& question,
                     const EngineOptions& options,
                     const Room& room,
                     KvBudget& budget) {
  const layout::HostExtentLayout extent{question.extent_pages, question.geometry.page_bytes()};
  const uint64_t columns = uint64_t{question.geometry.layers} * question.geometry.kv_heads;
  if (options.host_memory_bytes > room.left()) {
    return does_not_fit("host_memory_bytes", options.host_memory_bytes, room.left(), room);
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
  const Room fast = fast_room(question, options);
  uint64_t left = fast.left();
  if (left == 0) return model_does_not_fit(fast);
  if (!options.sparse.empty()) {
    const Room host = question.unified_memory ? fast : host_room(question);
    SPIN_RETURN_IF_ERROR(add_host_tier(question, options, host, budget));
    if (question.unified_memory) left -= budget.host_bytes;
  }
  SPIN_ASSIGN_OR_RETURN(const uint64_t bytes, choose_bytes(question, options, fast, left, wanted));
  const layout::KvGeometry& geometry = question.geometry;
  const uint64_t columns = uint64_t{geometry.layers} * geometry.kv_heads;
  const uint64_t per_head =
      std::min(bytes / geometry.page_bytes(), kMaxPages) / columns;  // pages of each head
  const bool given = options.kv_cache_memory_bytes != 0;
  if (per_head == 0 && (given || budget.host_bytes > 0)) {
    // Whoever set a size hears of that; else the host tier has left too little.
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("{} are left for the KV cache in fast memory, and a page for each of "
                              "{} heads takes {}",
                              mib(bytes), columns, mib(columns * geometry.page_bytes())),
                  given ? "kv_cache_memory_bytes" : "host_memory_bytes");
  }
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
  if (budget.max_model_len < least) return too_small(geometry, fast, budget.bytes, least);
  return budget;
}

bool fits_share(const MemoryBytes& bytes,
                double share,
                const backend::DeviceProperties& properties) {
  const auto fits = [share](uint64_t taken, uint64_t memory) {
    return static_cast<double>(taken) <= share * static_cast<double>(memory);
  };
  if (properties.unified_memory) return fits(bytes.fast + bytes.host, properties.memory_bytes);
  return fits(bytes.fast, properties.memory_bytes) &&
         fits(bytes.host, properties.host_memory_bytes);
}

}  // namespace spin::engine
