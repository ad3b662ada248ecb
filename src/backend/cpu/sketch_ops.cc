// SPDX-License-Identifier: Apache-2.0
// How scores and estimates by sketches are cut into tasks for the thread pool. Tiles lie at fixed
// positions of the item, so that no sum depends on the number of threads. Thread: runs on the
// stream's thread and the pool's workers.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/cpu/cpu_sparse_ops.h"
#include "backend/cpu/sketch_kernels.h"
#include "backend/cpu/sketch_math.h"
#include "base/check.h"
#include "base/checked_math.h"

namespace spin::backend::cpu {
namespace {

using base::ceil_div;
using layout::DType;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int64_t kTileTokens = 1024;         // scores
constexpr int64_t kEstimateTileTokens = 512;  // a sum of values per tile

// What the query heads of one (row, KV head) become before they meet the codes.
struct PreparedQuery {
  uint32_t* pairs = nullptr;
  int32_t* corrections = nullptr;
  float* factors = nullptr;
  float* biases = nullptr;  // [2, group], by mean
  int64_t steps = 0;        // pairs per query head
  int64_t group = 0;

  SketchQuery part(int64_t first, bool second) const {
    return {pairs + steps * first, corrections + first, factors + first,
            biases + (second ? group : 0) + first, std::min(kSketchGroup, group - first)};
  }
};

int64_t prepared_words(int64_t head_dim, uint32_t bits, int64_t group) {
  const int64_t steps = int64_t{sketch_words(static_cast<uint32_t>(head_dim), bits)} * 16 / bits;
  return ceil_div<int64_t>(group * (steps + 4), 16) * 16;
}

PreparedQuery prepared_at(uint32_t* memory, int64_t head_dim, uint32_t bits, int64_t group) {
  PreparedQuery q;
  q.steps = int64_t{sketch_words(static_cast<uint32_t>(head_dim), bits)} * 16 / bits;
  q.group = group;
  q.pairs = memory;
  q.corrections = reinterpret_cast<int32_t*>(q.pairs + group * q.steps);
  q.factors = reinterpret_cast<float*>(q.corrections + group);
  q.biases = q.factors + group;
  return q;
}

float dot(const float* a, const float* b, int64_t count) {
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// Query head g of the group; all but its biases.
void prepare_head(const float* q,
                  int64_t head_dim,
                  uint32_t bits,
                  float scale,
                  int64_t g,
                  const PreparedQuery& out) {
  std::vector<float> y(q, q + head_dim);
  rotate(y.data(), head_dim);
  float largest = 0.0f;
  bool finite = true;
  for (const float value : y) {
    largest = std::max(largest, std::fabs(value));
    finite = finite && std::isfinite(value);
  }
  const float step = finite && largest > 0.0f ? largest / 127.0f : 0.0f;
  const int64_t dims = out.steps * 2;
  std::vector<int32_t> rounded(static_cast<size_t>(dims), 0);
  int32_t sum = 0;
  for (int64_t i = 0; i < head_dim && step > 0.0f; ++i) {
    const float value = std::nearbyint(y[static_cast<size_t>(i)] / step);
    rounded[static_cast<size_t>(i)] = static_cast<int32_t>(std::clamp(value, -127.0f, 127.0f));
    sum += rounded[static_cast<size_t>(i)];
  }
  const int64_t half = 16 / bits;
  const int64_t part = std::min(kSketchGroup, out.group - g / kSketchGroup * kSketchGroup);
  uint32_t* pairs = out.pairs + out.steps * (g / kSketchGroup * kSketchGroup) + g % kSketchGroup;
  for (int64_t s = 0; s < out.steps; ++s) {
    const auto first = static_cast<size_t>(s / half * 2 * half + s % half);
    pairs[s * part] = (static_cast<uint32_t>(rounded[first]) & 0xFFFFu) |
                      (static_cast<uint32_t>(rounded[first + static_cast<size_t>(half)]) << 16);
  }
  out.corrections[g] = sketch_levels(bits).offset * sum;
  out.factors[g] = scale * step;
}

// Blocks of `array` that hold tokens [begin, end) of a head.
SketchBlocks blocks_of(
    const SketchArray& array, uint32_t head, uint32_t words, int64_t begin, int64_t end) {
  const int64_t first = begin / kSketchBlockTokens;
  SketchBlocks blocks;
  blocks.codes = array.head_codes(head, words) + first * words * kSketchBlockTokens;
  blocks.scales = array.head_scales(head) + first * kSketchBlockTokens;
  blocks.blocks = ceil_div<int64_t>(end, kSketchBlockTokens) - first;
  blocks.words = words;
  blocks.bits = array.bits;
  return blocks;
}

// One (item, KV head) of a score or an estimate and where its parts lie in the workspace, in
// floats.
struct HeadWork {
  size_t item = 0;
  uint32_t head = 0;
  int64_t tiles = 0;
  int64_t query = 0;
  int64_t stats = 0;  // [tiles, group, 2]: largest score, sum of exponentials
  int64_t parts = 0;  // scores: [group, pages] page maxima; estimates: [tiles, group, dims] sums
};

struct TileTask {
  const HeadWork* work = nullptr;
  int64_t tile = 0;
};

std::vector<TileTask> tile_tasks(const std::vector<HeadWork>& works) {
  std::vector<TileTask> tasks;
  for (const HeadWork& work : works) {
    for (int64_t tile = 0; tile < work.tiles; ++tile) tasks.push_back({&work, tile});
  }
  return tasks;
}

struct SketchCall {
  TensorRef q;
  layout::KvGeometry geometry;
  float scale = 1.0f;

  int64_t dim() const { return geometry.head_dim; }
  int64_t group() const { return q.cols / geometry.head_dim / geometry.kv_heads; }
  const float* query(uint64_t row, uint32_t head, int64_t g) const {
    return static_cast<const float*>(q.data) + static_cast<int64_t>(row) * q.row_stride +
           (int64_t{head} * group() + g) * dim();
  }
  uint32_t words(uint32_t bits) const { return sketch_words(geometry.head_dim, bits); }

  void prepare(const SketchArray& keys, uint64_t row, uint32_t head, float* memory) const {
    const PreparedQuery out =
        prepared_at(reinterpret_cast<uint32_t*>(memory), dim(), keys.bits, group());
    for (int64_t g = 0; g < group(); ++g) {
      const float* from = query(row, head, g);
      prepare_head(from, dim(), keys.bits, scale, g, out);
      for (const bool second : {false, true}) {
        out.biases[(second ? group() : 0) + g] =
            scale * dot(from, mean_of(keys, geometry, head, second), dim());
      }
    }
  }
  // Scores of all tokens of the blocks that hold [begin, end): [group, stride].
  void score(const SketchKernels& kernels,
             const SketchArray& keys,
             uint32_t head,
             int64_t begin,
             int64_t end,
             int64_t stride,
             float* prepared,
             float* scores) const {
    const PreparedQuery query_parts =
        prepared_at(reinterpret_cast<uint32_t*>(prepared), dim(), keys.bits, group());
    const auto split = std::clamp(static_cast<int64_t>(keys.split), begin, end);
    const int64_t origin = begin / kSketchBlockTokens * kSketchBlockTokens;
    for (const bool second : {false, true}) {
      const int64_t from = second ? split : begin;
      const int64_t to = second ? end : split;
      if (from == to) continue;
      const SketchBlocks blocks = blocks_of(keys, head, words(keys.bits), from, to);
      float* out = scores + (from / kSketchBlockTokens * kSketchBlockTokens - origin);
      for (int64_t g = 0; g < group(); g += kSketchGroup) {
        kernels.score(blocks, query_parts.part(g, second), out + g * stride, stride);
      }
    }
  }
};

// ln of the sum over tiles of what their stats stand for; `most` becomes the largest score.
float log_sum(const float* stats, int64_t tiles, int64_t group, int64_t g, float* most) {
  float max = kMinusInfinity;
  for (int64_t t = 0; t < tiles; ++t) max = std::max(max, stats[(t * group + g) * 2]);
  *most = max;
  if (max == kMinusInfinity) return max;
  float sum = 0.0f;
  for (int64_t t = 0; t < tiles; ++t) {
    const float* stat = stats + (t * group + g) * 2;
    if (stat[1] > 0.0f) sum += stat[1] * std::exp(stat[0] - max);
  }
  return max + std::log(sum);
}

class ScoreRun {
 public:
  ScoreRun(const SketchCall& call, const std::vector<ScoreSketchItem>& items)
      : call_(call),
        items_(items),
        pages_per_tile_(std::max<int64_t>(1, kTileTokens / call.geometry.page_tokens)) {}

  Status run(const SketchKernels& kernels, base::ThreadPool& pool, WorkspacePool& workspace) {
    const int64_t group = call_.group();
    int64_t floats = 0;
    for (size_t i = 0; i < items_.size(); ++i) {
      if (items_[i].count == 0) continue;
      for (uint32_t head = 0; head < call_.geometry.kv_heads; ++head) {
        HeadWork work{i, head, ceil_div<int64_t>(items_[i].count, pages_per_tile_), 0, 0, 0};
        work.query = floats;
        work.stats = work.query + prepared_words(call_.dim(), items_[i].keys.bits, group);
        work.parts = work.stats + work.tiles * group * 2;
        floats = ceil_div<int64_t>(work.parts + group * items_[i].count, 16) * 16;
        works_.push_back(work);
      }
    }
    const int64_t stride =
        pages_per_tile_ * call_.geometry.page_tokens + 2 * int64_t{kSketchBlockTokens};
    const int64_t slot_floats = group * stride;
    SPIN_ASSIGN_OR_RETURN(
        auto lease,
        workspace.take(static_cast<size_t>(floats + slot_floats * pool.threads()) * sizeof(float)));
    memory_ = reinterpret_cast<float*>(lease.data());
    float* scratch = memory_ + floats;
    pool.parallel_for(works_.size(), [&](size_t i, uint32_t) {
      const ScoreSketchItem& item = items_[works_[i].item];
      call_.prepare(item.keys, item.row, works_[i].head, memory_ + works_[i].query);
    });
    const std::vector<TileTask> tasks = tile_tasks(works_);
    pool.parallel_for(tasks.size(), [&](size_t i, uint32_t slot) {
      run_tile(*tasks[i].work, tasks[i].tile, kernels, scratch + slot * slot_floats);
    });
    pool.parallel_for(works_.size(), [&](size_t i, uint32_t) { combine(works_[i]); });
    return ok_status();
  }

 private:
  void run_tile(const HeadWork& work, int64_t tile, const SketchKernels& kernels, float* scratch) {
    const ScoreSketchItem& item = items_[work.item];
    const int64_t page_tokens = call_.geometry.page_tokens;
    const int64_t first = tile * pages_per_tile_;  // page, from the item's first on
    const int64_t pages = std::min(pages_per_tile_, item.count - first);
    const int64_t begin = (item.first + first) * page_tokens;
    const int64_t stride = pages_per_tile_ * page_tokens + 2 * int64_t{kSketchBlockTokens};
    call_.score(kernels, item.keys, work.head, begin, begin + pages * page_tokens, stride,
                memory_ + work.query, scratch);
    for (int64_t g = 0; g < call_.group(); ++g) {
      float* stat = memory_ + work.stats + (tile * call_.group() + g) * 2;
      kernels.page_maxima(scratch + g * stride + begin % kSketchBlockTokens, pages, page_tokens,
                          memory_ + work.parts + g * item.count + first, stat, stat + 1);
    }
  }

  void combine(const HeadWork& work) {
    const ScoreSketchItem& item = items_[work.item];
    float* out = item.scores + work.head * item.score_stride;
    for (int64_t g = 0; g < call_.group(); ++g) {
      float most = 0.0f;
      const float lse = log_sum(memory_ + work.stats, work.tiles, call_.group(), g, &most);
      const float* maxima = memory_ + work.parts + g * item.count;
      for (uint32_t p = 0; p < item.count; ++p) {
        const float score = maxima[p] - lse;
        out[p] = g == 0 ? score : std::max(out[p], score);
      }
    }
  }

  const SketchCall& call_;
  const std::vector<ScoreSketchItem>& items_;
  const int64_t pages_per_tile_;
  std::vector<HeadWork> works_;
  float* memory_ = nullptr;
};

class EstimateRun {
 public:
  EstimateRun(const SketchCall& call, const std::vector<EstimateSketchItem>& items)
      : call_(call), items_(items), dims_(int64_t{call.words(2)} * 16) {}

  Status run(const SketchKernels& kernels, base::ThreadPool& pool, WorkspacePool& workspace) {
    const int64_t group = call_.group();
    int64_t floats = 0;
    for (size_t i = 0; i < items_.size(); ++i) {
      const int64_t tiles = first_tiles(items_[i]) + second_tiles(items_[i]);
      for (uint32_t head = 0; head < call_.geometry.kv_heads; ++head) {
        HeadWork work{i, head, tiles, floats, 0, 0};
        work.stats = work.query + prepared_words(call_.dim(), items_[i].keys.bits, group);
        work.parts = work.stats + tiles * group * 2;
        floats = ceil_div<int64_t>(work.parts + tiles * group * dims_, 16) * 16;
        works_.push_back(work);
      }
    }
    const int64_t slot_floats = group * kEstimateTileTokens;
    SPIN_ASSIGN_OR_RETURN(
        auto lease,
        workspace.take(static_cast<size_t>(floats + slot_floats * pool.threads()) * sizeof(float)));
    memory_ = reinterpret_cast<float*>(lease.data());
    float* scratch = memory_ + floats;
    pool.parallel_for(works_.size(), [&](size_t i, uint32_t) {
      const EstimateSketchItem& item = items_[works_[i].item];
      call_.prepare(item.keys, item.row, works_[i].head, memory_ + works_[i].query);
    });
    const std::vector<TileTask> tasks = tile_tasks(works_);
    pool.parallel_for(tasks.size(), [&](size_t i, uint32_t slot) {
      run_tile(*tasks[i].work, tasks[i].tile, kernels, scratch + slot * slot_floats);
    });
    pool.parallel_for(works_.size(), [&](size_t i, uint32_t) { combine(works_[i]); });
    return ok_status();
  }

 private:
  // No tile has tokens on both sides of the split.
  static int64_t split_of(const EstimateSketchItem& item) {
    return static_cast<int64_t>(std::min(item.keys.split, item.tokens));
  }
  static int64_t first_tiles(const EstimateSketchItem& item) {
    return ceil_div(split_of(item), kEstimateTileTokens);
  }
  static int64_t second_tiles(const EstimateSketchItem& item) {
    return ceil_div(static_cast<int64_t>(item.tokens) - split_of(item), kEstimateTileTokens);
  }

  // Scores of tokens that are attended exactly, or are not there, become -infinity.
  void mask(const EstimateSketchItem& item,
            uint32_t head,
            int64_t begin,
            int64_t end,
            int64_t stride,
            float* scores) const {
    const int64_t page_tokens = call_.geometry.page_tokens;
    const uint32_t* pages = item.list.pages + head * item.list.stride;
    const uint32_t* last = pages + item.list.counts[head];
    const auto clear = [&](int64_t from, int64_t to) {
      for (int64_t g = 0; g < call_.group(); ++g) {
        std::fill(scores + g * stride + from, scores + g * stride + to, kMinusInfinity);
      }
    };
    const uint32_t* page = std::lower_bound(pages, last, begin / page_tokens);
    for (; page != last && *page * page_tokens < end; ++page) {
      const int64_t from = std::max(begin, int64_t{*page} * page_tokens);
      const int64_t to = std::min(end, (int64_t{*page} + 1) * page_tokens);
      clear(from - begin, to - begin);
    }
    clear(end - begin, stride);
  }

  void run_tile(const HeadWork& work, int64_t tile, const SketchKernels& kernels, float* scratch) {
    const EstimateSketchItem& item = items_[work.item];
    const int64_t group = call_.group();
    const int64_t skipped = first_tiles(item);
    const bool second = tile >= skipped;
    const int64_t begin =
        (second ? split_of(item) : 0) + (second ? tile - skipped : tile) * kEstimateTileTokens;
    const int64_t end = std::min(begin + kEstimateTileTokens,
                                 second ? static_cast<int64_t>(item.tokens) : split_of(item));
    const SketchBlocks values = blocks_of(item.values, work.head, call_.words(2), begin, end);
    const int64_t stride = values.blocks * kSketchBlockTokens;
    call_.score(kernels, item.keys, work.head, begin, end, stride, memory_ + work.query, scratch);
    mask(item, work.head, begin, end, stride, scratch);
    for (int64_t g = 0; g < group; ++g) {
      float* stat = memory_ + work.stats + (tile * group + g) * 2;
      kernels.weigh(values, scratch + g * stride, stat, stat + 1);
    }
    kernels.accumulate(values, scratch, stride, group, memory_ + work.parts + tile * group * dims_);
  }

  void combine(const HeadWork& work) {
    const EstimateSketchItem& item = items_[work.item];
    const int64_t group = call_.group();
    const int64_t dim = call_.dim();
    for (int64_t g = 0; g < group; ++g) {
      const int64_t q_head = int64_t{work.head} * group + g;
      float* part = item.part + q_head * dim;
      std::fill_n(part, dim, 0.0f);
      float most = 0.0f;
      const float lse = log_sum(memory_ + work.stats, work.tiles, group, g, &most);
      item.log_sum_exp[q_head] = lse;
      if (lse == kMinusInfinity) continue;
      float mass[2] = {0.0f, 0.0f};  // of the tokens with each mean
      for (int64_t t = 0; t < work.tiles; ++t) {
        const float* stat = memory_ + work.stats + (t * group + g) * 2;
        const float weight = std::exp(stat[0] - lse);
        mass[t >= first_tiles(item) ? 1 : 0] += weight * stat[1];
        const float* sums = memory_ + work.parts + (t * group + g) * dims_;
        for (int64_t i = 0; i < dim; ++i) part[i] += weight * sums[i];
      }
      rotate(part, dim);
      for (const bool second : {false, true}) {
        const float share = mass[second ? 1 : 0];
        if (share == 0.0f) continue;  // that mean may not be there yet
        const float* mean = mean_of(item.values, call_.geometry, work.head, second);
        for (int64_t i = 0; i < dim; ++i) part[i] += share * mean[i];
      }
    }
  }

  const SketchCall& call_;
  const std::vector<EstimateSketchItem>& items_;
  const int64_t dims_;
  std::vector<HeadWork> works_;
  float* memory_ = nullptr;
};

SketchCall sketch_call(TensorRef q, const layout::KvGeometry& geometry, float scale) {
  SPIN_CHECK(q.dtype == DType::kF32 && geometry.page_tokens > 0);
  SPIN_CHECK(q.cols > 0 && q.cols % (int64_t{geometry.head_dim} * geometry.kv_heads) == 0);
  return {q, geometry, scale};
}

}  // namespace

void CpuSparseOps::enqueue_score_sketch(TensorRef q,
                                        std::span<const ScoreSketchItem> items,
                                        const layout::KvGeometry& geometry,
                                        float scale,
                                        StreamRef stream) {
  const SketchCall call = sketch_call(q, geometry, scale);
  std::vector<ScoreSketchItem> copy(items.begin(), items.end());
  for (const ScoreSketchItem& item : copy) {
    check_sketches(item.keys, (uint64_t{item.first} + item.count) * geometry.page_tokens);
    SPIN_CHECK(item.row < static_cast<uint64_t>(q.rows) && item.count <= item.score_stride);
  }
  stream.enqueue_task([this, call, copy = std::move(copy)] {
    return ScoreRun(call, copy).run(kernels_.sketch, pool_, workspace_);
  });
}

void CpuSparseOps::enqueue_estimate_sketch(TensorRef q,
                                           std::span<const EstimateSketchItem> items,
                                           const layout::KvGeometry& geometry,
                                           float scale,
                                           StreamRef stream) {
  const SketchCall call = sketch_call(q, geometry, scale);
  std::vector<EstimateSketchItem> copy(items.begin(), items.end());
  for (const EstimateSketchItem& item : copy) {
    check_sketches(item.keys, item.tokens);
    check_sketches(item.values, item.tokens);
    SPIN_CHECK(item.keys.split == item.values.split);
    SPIN_CHECK(item.values.bits == 2 && item.row < static_cast<uint64_t>(q.rows));
  }
  stream.enqueue_task([this, call, copy = std::move(copy)] {
    return EstimateRun(call, copy).run(kernels_.sketch, pool_, workspace_);
  });
}

}  // namespace spin::backend::cpu
