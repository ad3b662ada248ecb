// SPDX-License-Identifier: Apache-2.0
// A unit is (item, KV head); its list's tokens are packed in order and cut into splits of
// kSplitTokens, one task each. A split's keys are named to the kernel by address, so that it does
// the same sums as over the pages of a whole sequence.
#include "backend/cpu/list_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/cpu/kv_pages.h"
#include "base/checked_math.h"

namespace spin::backend::cpu {
namespace {

using base::ceil_div;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Unit {
  const ListAttentionItem* item = nullptr;
  int64_t head = 0;
  int64_t tokens = 0;  // on its list
  int64_t splits = 0;
  int64_t first_state = -1;  // of its kept states; -1: its only task finishes by itself
};

struct Task {
  uint32_t unit = 0;
  uint32_t split = 0;
  uint32_t page = 0;  // position in the list of the page with the split's first token
  uint32_t skip = 0;  // tokens of that page that belong to the split before
};

class ListAttention {
 public:
  ListAttention(const ListAttentionCall& call, const KernelSet& kernels, base::ThreadPool& pool)
      : call_(call),
        kernels_(kernels),
        pool_(pool),
        head_dim_(call.pool.geometry.head_dim),
        kv_heads_(call.pool.geometry.kv_heads),
        group_(call.q.cols / head_dim_ / kv_heads_) {}

  Status run(WorkspacePool& workspace) {
    make_tasks();
    const auto align = [](int64_t floats) { return ceil_div<int64_t>(floats, 16) * 16; };
    state_floats_ = align(attention_state_floats(group_, head_dim_));
    thread_floats_ = state_floats_ + align(attention_scratch_floats(group_, head_dim_));
    const int64_t floats = thread_floats_ * pool_.threads() + state_floats_ * states_;
    SPIN_ASSIGN_OR_RETURN(auto lease, workspace.take(static_cast<size_t>(floats) * sizeof(float)));
    memory_ = reinterpret_cast<float*>(lease.data());
    kept_ = memory_ + thread_floats_ * pool_.threads();
    pool_.parallel_for(tasks_.size(),
                       [this](size_t i, uint32_t thread) { run_task(tasks_[i], thread); });
    for (const Unit& unit : units_) {
      if (unit.splits == 0) clear(unit);
      if (unit.first_state >= 0) merge(unit);
    }
    return ok_status();
  }

 private:
  void make_tasks() {
    units_.reserve(call_.items.size() * static_cast<size_t>(kv_heads_));
    for (const ListAttentionItem& item : call_.items) {
      for (int64_t head = 0; head < kv_heads_; ++head) add_unit(item, head);
    }
  }

  void add_unit(const ListAttentionItem& item, int64_t head) {
    Unit unit;
    unit.item = &item;
    unit.head = head;
    const uint64_t first = static_cast<uint64_t>(head) * item.pages.stride;
    const uint8_t* tokens = item.pages.tokens + first;
    const uint32_t* slots = item.slots + first;
    for (uint32_t i = 0; i < item.pages.counts[head]; ++i) {
      if (slots[i] == layout::kNoSlot) continue;
      const int64_t border = unit.splits * kSplitTokens;  // where the next split begins
      if (unit.tokens + tokens[i] > border) {
        tasks_.push_back({static_cast<uint32_t>(units_.size()), static_cast<uint32_t>(unit.splits),
                          i, static_cast<uint32_t>(border - unit.tokens)});
        ++unit.splits;
      }
      unit.tokens += tokens[i];
    }
    if (unit.splits > 1) {
      unit.first_state = states_;
      states_ += unit.splits;
    }
    units_.push_back(unit);
  }

  // Addresses of the keys of a task's split.
  void find_keys(const Task& task, int64_t count, const char** rows) const {
    const Unit& unit = units_[task.unit];
    const uint64_t row_bytes = call_.pool.geometry.row_bytes();
    const uint64_t first = static_cast<uint64_t>(unit.head) * unit.item->pages.stride;
    const uint8_t* tokens = unit.item->pages.tokens + first;
    const uint32_t* slots = unit.item->slots + first;
    uint32_t skip = task.skip;
    int64_t found = 0;
    for (uint32_t i = task.page; found < count; ++i) {
      if (slots[i] == layout::kNoSlot) continue;
      const char* row =
          reinterpret_cast<const char*>(slot_address(call_.pool, slots[i])) + skip * row_bytes;
      const int64_t end = std::min<int64_t>(count, found + tokens[i] - skip);
      for (; found < end; ++found, row += row_bytes) rows[found] = row;
      skip = 0;
    }
  }

  void run_task(const Task& task, uint32_t thread) const {
    const Unit& unit = units_[task.unit];
    const layout::KvGeometry& geometry = call_.pool.geometry;
    const char* rows[kSplitTokens];
    find_keys(task, std::min(kSplitTokens, unit.tokens - task.split * kSplitTokens), rows);
    AttentionTask t;
    t.q = static_cast<const float*>(call_.q.data) + offset(unit, call_.q);
    t.q_stride = call_.q.row_stride;
    t.tokens = 1;
    t.group = group_;
    t.head_dim = head_dim_;
    t.scale = call_.scale;
    t.first_token_sees = unit.tokens;
    t.rows = rows;
    t.plane_bytes = geometry.plane_bytes();
    t.dtype = geometry.dtype;
    t.first_split = task.split;
    t.last_split = task.split + 1;
    float* mine = memory_ + thread_floats_ * thread;
    const AttentionState state = unit.first_state >= 0
                                     ? kept_state(unit.first_state + task.split)
                                     : attention_state_at(mine, group_, head_dim_);
    kernels_.attend(t, state, mine + state_floats_);
    if (unit.first_state < 0) finish(unit, state);
  }

  void merge(const Unit& unit) const {
    const AttentionState into = kept_state(unit.first_state);
    for (int64_t s = 1; s < unit.splits; ++s) {
      kernels_.merge_states(into, kept_state(unit.first_state + s), group_, head_dim_);
    }
    finish(unit, into);
  }

  void finish(const Unit& unit, AttentionState state) const {
    kernels_.finish(state, 1, group_, head_dim_, out_of(unit), call_.out.row_stride);
    if (unit.item->log_sum_exp == nullptr) return;
    float* lse = unit.item->log_sum_exp + unit.head * group_;
    for (int64_t i = 0; i < group_; ++i) {
      const double log2 = state.max[i] + std::log2(static_cast<double>(state.total[i]));
      lse[i] = static_cast<float>(log2 * 0.69314718055994530942);
    }
  }

  void clear(const Unit& unit) const {
    std::fill_n(out_of(unit), group_ * head_dim_, 0.0f);
    if (unit.item->log_sum_exp == nullptr) return;
    std::fill_n(unit.item->log_sum_exp + unit.head * group_, group_, kMinusInfinity);
  }

  // Where the unit's heads begin in q or out.
  int64_t offset(const Unit& unit, const TensorRef& tensor) const {
    return static_cast<int64_t>(unit.item->row) * tensor.row_stride +
           unit.head * group_ * head_dim_;
  }
  float* out_of(const Unit& unit) const {
    return static_cast<float*>(call_.out.data) + offset(unit, call_.out);
  }
  AttentionState kept_state(int64_t index) const {
    return attention_state_at(kept_ + index * state_floats_, group_, head_dim_);
  }

  const ListAttentionCall& call_;
  const KernelSet& kernels_;
  base::ThreadPool& pool_;
  const int64_t head_dim_;
  const int64_t kv_heads_;
  const int64_t group_;
  std::vector<Unit> units_;
  std::vector<Task> tasks_;
  int64_t states_ = 0;         // kept states
  int64_t state_floats_ = 0;   // of one state
  int64_t thread_floats_ = 0;  // of one thread's memory
  float* memory_ = nullptr;
  float* kept_ = nullptr;
};

}  // namespace

Status run_list_attention(const ListAttentionCall& call,
                          const KernelSet& kernels,
                          base::ThreadPool& pool,
                          WorkspacePool& workspace) {
  return ListAttention(call, kernels, pool).run(workspace);
}

void merge_part(const MergeItem& item, int64_t q_heads, int64_t head_dim, float* out) {
  for (int64_t h = 0; h < q_heads; ++h) {
    const double ours = item.log_sum_exp[h];
    const double theirs = item.part_log_sum_exp[h];
    if (theirs == -std::numeric_limits<double>::infinity()) continue;  // an empty part
    // 1 / (1 + e^x) needs no maximum taken off; e^x of an infinite x is right, too.
    const auto keep = static_cast<float>(1.0 / (1.0 + std::exp(theirs - ours)));
    const auto take = static_cast<float>(1.0 / (1.0 + std::exp(ours - theirs)));
    float* to = out + h * head_dim;
    const float* part = item.part + h * head_dim;
    for (int64_t i = 0; i < head_dim; ++i) to[i] = keep * to[i] + take * part[i];
  }
}

}  // namespace spin::backend::cpu
