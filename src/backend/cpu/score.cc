// SPDX-License-Identifier: Apache-2.0
// Three passes over (item, KV head) pairs: scores of every query head with the largest and the sum
// of every tile; the logarithm of all sums, tiles in ascending order; one score per partition.
// Tiles have a fixed size, so that neither threads nor neighbours change a bit. Pairs are taken in
// waves that bound the scratch memory.
#include "backend/cpu/score.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/checked_math.h"

namespace spin::backend::cpu {
namespace {

using base::ceil_div;

constexpr int64_t kTileKeys = 512;
constexpr int64_t kWaveFloats = int64_t{4} << 20;  // of scores kept at once, about
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// One (item, KV head).
struct Pair {
  const ScoreUnit* unit = nullptr;
  uint32_t head = 0;
  int64_t tile_partitions = 0;
  int64_t tiles = 0;
  float* q = nullptr;       // [group, padded_dim]
  float* scores = nullptr;  // [group, count]
  float* max = nullptr;     // [group, tiles]
  float* sum = nullptr;     // [group, tiles]
  float* lse = nullptr;     // [group]
};

struct Tile {
  const Pair* pair = nullptr;
  int64_t index = 0;
};

class Scores {
 public:
  Scores(const ScoreCall& call, const KernelSet& kernels, base::ThreadPool& pool)
      : call_(call),
        kernels_(kernels),
        pool_(pool),
        head_dim_(call.geometry.head_dim),
        padded_(score_padded_dim(call.geometry.head_dim)),
        group_(call.q.cols / head_dim_ / call.geometry.kv_heads) {}

  Status run(WorkspacePool& workspace) {
    std::vector<Pair> wave;
    int64_t floats = 0;
    for (const ScoreUnit& unit : call_.units) {
      if (unit.item.count == 0) continue;
      for (uint32_t head = 0; head < call_.geometry.kv_heads; ++head) {
        wave.push_back(make_pair(unit, head));
        floats += pair_floats(wave.back());
        if (floats < kWaveFloats) continue;
        SPIN_RETURN_IF_ERROR(run_wave(wave, workspace));
        wave.clear();
        floats = 0;
      }
    }
    return run_wave(wave, workspace);
  }

 private:
  static Pair make_pair(const ScoreUnit& unit, uint32_t head) {
    Pair pair;
    pair.unit = &unit;
    pair.head = head;
    pair.tile_partitions = std::max<int64_t>(1, kTileKeys / unit.keys_per_partition);
    pair.tiles = ceil_div<int64_t>(unit.item.count, pair.tile_partitions);
    return pair;
  }

  int64_t pair_floats(const Pair& pair) const {
    return group_ * (padded_ + pair.unit->item.count + 2 * pair.tiles + 1);
  }

  // Scores of one tile's keys when a partition has several.
  static int64_t tile_keys(const Pair& pair) {
    return pair.unit->keys_per_partition == 1
               ? 0
               : pair.tile_partitions * int64_t{pair.unit->keys_per_partition};
  }

  Status run_wave(std::vector<Pair>& wave, WorkspacePool& workspace) {
    int64_t floats = 0;
    int64_t most_keys = 0;
    for (const Pair& pair : wave) {
      floats += pair_floats(pair);
      most_keys = std::max(most_keys, tile_keys(pair));
    }
    const int64_t slot_floats = group_ * most_keys;
    SPIN_ASSIGN_OR_RETURN(
        auto lease, workspace.take(static_cast<size_t>(floats + slot_floats * pool_.threads()) *
                                   sizeof(float)));
    float* memory = reinterpret_cast<float*>(lease.data());
    float* scratch = memory + floats;
    std::vector<Tile> tiles;
    for (Pair& pair : wave) {
      memory = place(pair, memory);
      for (int64_t i = 0; i < pair.tiles; ++i) tiles.push_back({&pair, i});
    }
    pool_.parallel_for(tiles.size(), [&](size_t i, uint32_t slot) {
      score_tile(tiles[i], scratch + slot_floats * slot);
    });
    for (const Pair& pair : wave) combine(pair);
    pool_.parallel_for(tiles.size(), [&](size_t i, uint32_t) { aggregate_tile(tiles[i]); });
    return ok_status();
  }

  float* place(Pair& pair, float* memory) const {
    const auto take = [&memory](int64_t floats) {
      float* at = memory;
      memory += floats;
      return at;
    };
    pair.q = take(group_ * padded_);
    pair.scores = take(group_ * pair.unit->item.count);
    pair.max = take(group_ * pair.tiles);
    pair.sum = take(group_ * pair.tiles);
    pair.lse = take(group_);
    const float* from = static_cast<const float*>(call_.q.data) +
                        static_cast<int64_t>(pair.unit->item.row) * call_.q.row_stride +
                        int64_t{pair.head} * group_ * head_dim_;
    std::fill_n(pair.q, group_ * padded_, 0.0f);
    for (int64_t g = 0; g < group_; ++g) {
      for (int64_t i = 0; i < head_dim_; ++i) {
        pair.q[g * padded_ + i] = from[g * head_dim_ + i] * call_.scale;
      }
    }
    return memory;
  }

  static const char* vectors_at(const HeadVectors& vectors, uint32_t head, uint64_t index) {
    const uint64_t offset = head * vectors.head_stride + index * vectors.width;
    return static_cast<const char*>(vectors.data) + offset * layout::dtype_bytes(vectors.dtype);
  }

  void score_tile(const Tile& tile, float* scratch) const {
    const Pair& pair = *tile.pair;
    const ScoreUnit& unit = *pair.unit;
    const int64_t first = tile.index * pair.tile_partitions;
    const int64_t partitions =
        std::min<int64_t>(pair.tile_partitions, int64_t{unit.item.count} - first);
    const int64_t per = unit.keys_per_partition;
    const uint64_t first_key =
        (uint64_t{unit.item.first} + static_cast<uint64_t>(first)) * static_cast<uint64_t>(per);
    float* rows = pair.scores + first;
    ScoreTask task;
    task.q = pair.q;
    task.group = group_;
    task.width = head_dim_;
    task.keys = vectors_at(unit.keys, pair.head, first_key);
    task.dtype = unit.keys.dtype;
    task.count = partitions * per;
    task.out = per == 1 ? rows : scratch;
    task.out_stride = per == 1 ? int64_t{unit.item.count} : task.count;
    if (unit.upper.data != nullptr) {
      task.upper = vectors_at(unit.upper, pair.head, first_key);
      kernels_.score_boxes(task);
    } else {
      kernels_.score_keys(task);
    }
    mask(pair, first, partitions, per, task);
    for (int64_t g = 0; g < group_; ++g) {
      const float* scores = task.out + g * task.out_stride;
      kernels_.softmax_part(scores, task.count, pair.max + g * pair.tiles + tile.index,
                            pair.sum + g * pair.tiles + tile.index);
      if (per == 1) continue;
      float* to = rows + g * int64_t{unit.item.count};
      for (int64_t j = 0; j < partitions; ++j) {
        to[j] = *std::max_element(scores + j * per, scores + (j + 1) * per);
      }
    }
  }

  // Partitions of size 0 score -infinity.
  void mask(const Pair& pair,
            int64_t first,
            int64_t partitions,
            int64_t per,
            const ScoreTask& task) const {
    const ScoreItem& item = pair.unit->item;
    if (item.sizes == nullptr) return;
    const uint32_t* sizes = item.sizes + pair.head * item.size_stride + item.first + first;
    for (int64_t j = 0; j < partitions; ++j) {
      if (sizes[j] != 0) continue;
      for (int64_t g = 0; g < group_; ++g) {
        std::fill_n(task.out + g * task.out_stride + j * per, per, kMinusInfinity);
      }
    }
  }

  void combine(const Pair& pair) const {
    for (int64_t g = 0; g < group_; ++g) {
      const float* max = pair.max + g * pair.tiles;
      const float* sum = pair.sum + g * pair.tiles;
      const float most = *std::max_element(max, max + pair.tiles);
      float total = 0;
      for (int64_t i = 0; i < pair.tiles; ++i) {
        if (sum[i] != 0) total += sum[i] * std::exp(max[i] - most);
      }
      // Nothing scored: 0 keeps -infinity minus it defined.
      pair.lse[g] = most == kMinusInfinity ? 0.0f : most + std::log(total);
    }
  }

  void aggregate_tile(const Tile& tile) const {
    const Pair& pair = *tile.pair;
    const ScoreItem& item = pair.unit->item;
    const int64_t first = tile.index * pair.tile_partitions;
    const int64_t n = std::min<int64_t>(pair.tile_partitions, int64_t{item.count} - first);
    float* to = item.scores + pair.head * item.score_stride + first;
    kernels_.aggregate_scores(pair.scores + first, item.count, group_, pair.lse,
                              call_.aggregation == Aggregation::kSoftmaxSum, n, to);
  }

  const ScoreCall& call_;
  const KernelSet& kernels_;
  base::ThreadPool& pool_;
  const int64_t head_dim_;
  const int64_t padded_;
  const int64_t group_;
};

}  // namespace

Status run_scores(const ScoreCall& call,
                  const KernelSet& kernels,
                  base::ThreadPool& pool,
                  WorkspacePool& workspace) {
  return Scores(call, kernels, pool).run(workspace);
}

}  // namespace spin::backend::cpu
