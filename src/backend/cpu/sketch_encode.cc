// SPDX-License-Identifier: Apache-2.0
// Makes sketches: means, rotation, codes, scales. A token's sketch depends on its row and its mean
// alone. Thread: runs on the stream's thread and the pool's workers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "backend/cpu/cpu_sparse_ops.h"
#include "backend/cpu/sketch_math.h"
#include "base/bf16.h"
#include "base/check.h"

namespace spin::backend::cpu {
namespace {

using layout::DType;

constexpr uint64_t kEncodeTokens = 512;    // per task
constexpr float kLargestScale = 65504.0f;  // of fp16

void load_row(const std::byte* row, DType dtype, int64_t count, float* to) {
  if (dtype == DType::kF32) {
    std::memcpy(to, row, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const auto* from = reinterpret_cast<const base::Bf16*>(row);
  for (int64_t i = 0; i < count; ++i) to[i] = base::to_float(from[i]);
}

const std::byte* row_of(const layout::PagedTokens& tokens,
                        Plane plane,
                        uint32_t head,
                        uint64_t token) {
  return plane == Plane::kKeys ? tokens.key(head, token) : tokens.value(head, token);
}

// Boundaries between neighbouring levels, in units of the rms: code = number of them below.
struct Boundaries {
  float at[15];
  int count = 0;
};

Boundaries boundaries_of(uint32_t bits) {
  const SketchLevels levels = sketch_levels(bits);
  Boundaries result;
  result.count = (1 << bits) - 1;
  for (int i = 0; i < result.count; ++i) {
    const int sum = levels.shifted[static_cast<size_t>(i)] +
                    levels.shifted[static_cast<size_t>(i) + 1] - 2 * levels.offset;
    result.at[i] = 0.5f * levels.unit * static_cast<float>(sum);
  }
  return result;
}

// Writes the sketch of y (rotated, without the mean) as token `token` of a head.
void encode(const float* y,
            int64_t head_dim,
            const SketchArray& out,
            uint32_t head,
            uint64_t token,
            const Boundaries& boundaries) {
  const uint32_t bits = out.bits;
  const SketchLevels levels = sketch_levels(bits);
  const uint32_t words = sketch_words(static_cast<uint32_t>(head_dim), bits);
  float squares = 0.0f;
  for (int64_t i = 0; i < head_dim; ++i) squares += y[i] * y[i];
  const float rms = std::sqrt(squares / static_cast<float>(head_dim));
  const bool usable = rms > 0.0f && std::isfinite(rms);
  const float inverse = usable ? 1.0f / rms : 0.0f;
  uint32_t* to =
      out.head_codes(head, words) + token / kSketchBlockTokens * words * kSketchBlockTokens;
  const uint64_t lane = token % kSketchBlockTokens;
  float product = 0.0f;
  float norm = 0.0f;
  const uint32_t per_word = 32 / bits;
  for (uint32_t w = 0; w < words; ++w) {
    uint32_t word = 0;
    for (uint32_t i = 0; i < per_word; ++i) {
      const int64_t d = int64_t{w} * per_word + i;
      if (d >= head_dim) break;
      const float u = usable ? y[d] * inverse : 0.0f;
      uint32_t code = 0;
      for (int k = 0; k < boundaries.count; ++k) code += u >= boundaries.at[k] ? 1 : 0;
      word |= code << (i * bits);
      const auto level = static_cast<float>(levels.shifted[code] - levels.offset);
      product += u * level;
      norm += level * level;
    }
    to[w * kSketchBlockTokens + lane] = word;
  }
  const float scale = usable ? rms * (product / norm) : 0.0f;
  out.head_scales(head)[token] = base::to_fp16(std::min(scale, kLargestScale));
}

void add_to_mean(const SketchMeanItem& item, uint32_t head) {
  const layout::KvGeometry& geometry = item.tokens.geometry;
  const int64_t dim = geometry.head_dim;
  std::vector<float> row(static_cast<size_t>(dim));
  float* mean = item.mean + head * dim;
  if (item.begin) std::fill_n(mean, dim, 0.0f);
  for (uint64_t t = item.first; t < item.first + item.count; ++t) {
    load_row(row_of(item.tokens, item.plane, head, t), geometry.dtype, dim, row.data());
    for (int64_t i = 0; i < dim; ++i) mean[i] += row[static_cast<size_t>(i)];
  }
  if (item.factor == 0.0f) return;
  for (int64_t i = 0; i < dim; ++i) mean[i] *= item.factor;
}

// Tokens [begin, end) of the output. `begin` is the first one or begins a block.
void encode_range(const EncodeSketchItem& item, uint32_t head, uint64_t begin, uint64_t end) {
  const layout::KvGeometry& geometry = item.tokens.geometry;
  const int64_t dim = geometry.head_dim;
  const uint32_t words = sketch_words(geometry.head_dim, item.out.bits);
  const Boundaries boundaries = boundaries_of(item.out.bits);
  std::vector<float> y(static_cast<size_t>(dim));
  for (uint64_t t = begin; t < end; ++t) {
    if (t % kSketchBlockTokens == 0) {
      std::memset(item.out.head_codes(head, words) + t * words, 0,
                  size_t{words} * kSketchBlockTokens * sizeof(uint32_t));
      std::fill_n(item.out.head_scales(head) + t, kSketchBlockTokens, base::Fp16{});
    }
    const uint64_t from = item.first + (t - item.out_first);
    load_row(row_of(item.tokens, item.plane, head, from), geometry.dtype, dim, y.data());
    const float* mean = mean_of(item.out, geometry, head, t >= item.out.split);
    for (int64_t i = 0; i < dim; ++i) y[static_cast<size_t>(i)] -= mean[i];
    rotate(y.data(), dim);
    encode(y.data(), dim, item.out, head, t, boundaries);
  }
}

struct EncodeTask {
  const EncodeSketchItem* item = nullptr;
  uint32_t head = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

Status run_encode(const std::vector<EncodeSketchItem>& items, base::ThreadPool& pool) {
  std::vector<EncodeTask> tasks;
  for (const EncodeSketchItem& item : items) {
    for (uint32_t head = 0; head < item.tokens.geometry.kv_heads; ++head) {
      const uint64_t end = item.out_first + item.count;
      for (uint64_t t = item.out_first; t < end;) {
        const uint64_t next = std::min(end, (t / kEncodeTokens + 1) * kEncodeTokens);
        tasks.push_back({&item, head, t, next});
        t = next;
      }
    }
  }
  pool.parallel_for(tasks.size(), [&](size_t i, uint32_t) {
    encode_range(*tasks[i].item, tasks[i].head, tasks[i].begin, tasks[i].end);
  });
  return ok_status();
}

}  // namespace

void CpuSparseOps::enqueue_sketch_mean(std::span<const SketchMeanItem> items, StreamRef stream) {
  std::vector<SketchMeanItem> copy(items.begin(), items.end());
  for (const SketchMeanItem& item : copy) {
    SPIN_CHECK(item.first + item.count <= item.tokens.tokens);
  }
  stream.enqueue_task([this, copy = std::move(copy)] {
    for (const SketchMeanItem& item : copy) {
      pool_.parallel_for(item.tokens.geometry.kv_heads, [&](size_t head, uint32_t) {
        add_to_mean(item, static_cast<uint32_t>(head));
      });
    }
    return ok_status();
  });
}

void CpuSparseOps::enqueue_encode_sketch(std::span<const EncodeSketchItem> items,
                                         StreamRef stream) {
  std::vector<EncodeSketchItem> copy(items.begin(), items.end());
  for (const EncodeSketchItem& item : copy) {
    check_sketches(item.out, item.out_first + item.count);
    SPIN_CHECK(item.first + item.count <= item.tokens.tokens);
  }
  stream.enqueue_task([this, copy = std::move(copy)] { return run_encode(copy, pool_); });
}

}  // namespace spin::backend::cpu
