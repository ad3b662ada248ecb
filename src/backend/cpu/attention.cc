// SPDX-License-Identifier: Apache-2.0
// A task is (sequence, KV head, tile of query tokens), and for few query tokens over a long context
// also (one split of the keys). How work is cut changes who computes a row, never its bits: see
// attention_kernels.cc.
#include "backend/cpu/attention.h"

#include <algorithm>
#include <vector>

#include "base/checked_math.h"

namespace spin::backend::cpu {
namespace {

using base::ceil_div;

constexpr int64_t kTileRows = 192;      // keys and values of a block are unpacked once per tile
constexpr int64_t kSplitRows = 16;      // at most so many rows are worth a state per split
constexpr int64_t kTasksPerThread = 4;  // as for matrix products
constexpr int64_t kSmallestTileTokens = 16;

// Tasks [first, last) leave one state each, to be merged in that order; a single task finishes by
// itself.
struct Tile {
  const layout::SequenceSlice* slice = nullptr;
  int64_t head = 0;         // KV head
  int64_t first_token = 0;  // within the slice
  int64_t tokens = 0;
  int64_t splits = 0;  // of its keys
  bool split = false;  // one task per split
  int64_t first_state = 0;
};

struct Task {
  const Tile* tile = nullptr;
  int64_t first_split = 0;
  int64_t last_split = 0;
  int64_t state = -1;  // index among the kept states; -1: finish at once
};

class Attention {
 public:
  Attention(const AttentionCall& call, const KernelSet& kernels, base::ThreadPool& pool)
      : call_(call),
        kernels_(kernels),
        pool_(pool),
        head_dim_(call.pool.geometry.head_dim),
        kv_heads_(call.pool.geometry.kv_heads),
        group_(call.q.cols / head_dim_ / kv_heads_) {}

  Status run(WorkspacePool& workspace) {
    make_tiles();
    make_tasks();
    const auto align = [](int64_t floats) { return ceil_div<int64_t>(floats, 16) * 16; };
    state_floats_ = align(attention_state_floats(most_rows_, head_dim_));
    kept_floats_ = align(attention_state_floats(kSplitRows, head_dim_));
    slot_floats_ = state_floats_ + align(attention_scratch_floats(most_rows_, head_dim_));
    const int64_t floats = slot_floats_ * pool_.threads() + kept_floats_ * states_;
    SPIN_ASSIGN_OR_RETURN(auto lease, workspace.take(static_cast<size_t>(floats) * sizeof(float)));
    memory_ = reinterpret_cast<float*>(lease.data());
    kept_ = memory_ + slot_floats_ * pool_.threads();
    pool_.parallel_for(tasks_.size(),
                       [this](size_t i, uint32_t slot) { run_task(tasks_[i], slot); });
    if (states_ > 0) {
      pool_.parallel_for(tiles_.size(), [this](size_t i, uint32_t) { merge(tiles_[i]); });
    }
    return ok_status();
  }

 private:
  // Large tiles reuse a block of keys more; small ones spread better over the threads.
  int64_t tile_tokens() const {
    int64_t tokens = 0;
    for (const layout::SequenceSlice& slice : call_.slices) {
      tokens += static_cast<int64_t>(slice.query_tokens);
    }
    const int64_t largest = std::max<int64_t>(1, kTileRows / group_);
    const int64_t spread = ceil_div(tokens * kv_heads_, kTasksPerThread * pool_.threads());
    return std::clamp(spread, std::min(kSmallestTileTokens, largest), largest);
  }

  void make_tiles() {
    const int64_t tile_size = tile_tokens();
    for (const layout::SequenceSlice& slice : call_.slices) {
      const auto tokens = static_cast<int64_t>(slice.query_tokens);
      const int64_t count = ceil_div(tokens, tile_size);
      // The last tokens see most keys: they go first, so that the end is even.
      for (int64_t i = count - 1; i >= 0; --i) {
        for (int64_t head = 0; head < kv_heads_; ++head) {
          Tile tile;
          tile.slice = &slice;
          tile.head = head;
          tile.first_token = i * tile_size;
          tile.tokens = std::min(tile_size, tokens - tile.first_token);
          tile.splits = ceil_div(first_token_sees(tile) + tile.tokens - 1, kSplitTokens);
          tile.split = tile.splits > 1 && tile.tokens * group_ <= kSplitRows;
          tiles_.push_back(tile);
        }
      }
    }
  }

  void make_tasks() {
    for (Tile& tile : tiles_) {
      most_rows_ = std::max(most_rows_, tile.tokens * group_);
      if (!tile.split) {
        tasks_.push_back({&tile, 0, tile.splits, -1});
        continue;
      }
      tile.first_state = states_;
      for (int64_t s = 0; s < tile.splits; ++s) tasks_.push_back({&tile, s, s + 1, states_++});
    }
  }

  static int64_t first_token_sees(const Tile& tile) {
    return static_cast<int64_t>(tile.slice->context_tokens - tile.slice->query_tokens) +
           tile.first_token + 1;
  }

  int64_t first_column(const Tile& tile) const { return tile.head * group_ * head_dim_; }
  int64_t first_row(const Tile& tile) const {
    return static_cast<int64_t>(tile.slice->first_row) + tile.first_token;
  }

  AttentionState kept_state(int64_t index, int64_t rows) const {
    return attention_state_at(kept_ + index * kept_floats_, rows, head_dim_);
  }

  void run_task(const Task& task, uint32_t slot) {
    const Tile& tile = *task.tile;
    const layout::KvGeometry& geometry = call_.pool.geometry;
    const int64_t rows = tile.tokens * group_;
    AttentionTask t;
    t.q = static_cast<const float*>(call_.q.data) + first_row(tile) * call_.q.row_stride +
          first_column(tile);
    t.q_stride = call_.q.row_stride;
    t.tokens = tile.tokens;
    t.group = group_;
    t.head_dim = head_dim_;
    t.scale = call_.scale;
    t.first_token_sees = first_token_sees(tile);
    t.pool = static_cast<const char*>(call_.pool.base);
    t.slots = tile.slice->slots + static_cast<uint64_t>(tile.head) * tile.slice->slot_stride;
    t.page_tokens = geometry.page_tokens;
    t.page_bytes = geometry.page_bytes();
    t.plane_bytes = geometry.plane_bytes();
    t.row_bytes = geometry.row_bytes();
    t.dtype = geometry.dtype;
    t.first_split = task.first_split;
    t.last_split = task.last_split;
    float* mine = memory_ + slot_floats_ * slot;
    const AttentionState state =
        task.state >= 0 ? kept_state(task.state, rows) : attention_state_at(mine, rows, head_dim_);
    kernels_.attend(t, state, mine + state_floats_);
    if (task.state < 0) finish(tile, state);
  }

  void merge(const Tile& tile) {
    if (!tile.split) return;
    const int64_t rows = tile.tokens * group_;
    const AttentionState into = kept_state(tile.first_state, rows);
    for (int64_t s = 1; s < tile.splits; ++s) {
      kernels_.merge_states(into, kept_state(tile.first_state + s, rows), rows, head_dim_);
    }
    finish(tile, into);
  }

  void finish(const Tile& tile, AttentionState state) {
    float* out = static_cast<float*>(call_.out.data) + first_row(tile) * call_.out.row_stride +
                 first_column(tile);
    kernels_.finish(state, tile.tokens, group_, head_dim_, out, call_.out.row_stride);
  }

  const AttentionCall& call_;
  const KernelSet& kernels_;
  base::ThreadPool& pool_;
  const int64_t head_dim_;
  const int64_t kv_heads_;
  const int64_t group_;
  std::vector<Tile> tiles_;
  std::vector<Task> tasks_;
  int64_t most_rows_ = 0;
  int64_t states_ = 0;        // kept states
  int64_t state_floats_ = 0;  // of a tile's state
  int64_t kept_floats_ = 0;   // of a kept state
  int64_t slot_floats_ = 0;   // of one thread's memory
  float* memory_ = nullptr;
  float* kept_ = nullptr;
};

}  // namespace

Status run_attention(const AttentionCall& call,
                     const KernelSet& kernels,
                     base::ThreadPool& pool,
                     WorkspacePool& workspace) {
  return Attention(call, kernels, pool).run(workspace);
}

}  // namespace spin::backend::cpu
