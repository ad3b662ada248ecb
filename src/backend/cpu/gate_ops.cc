// SPDX-License-Identifier: Apache-2.0
// Learned gates on the CPU. A block's gate vector and a row's scores are pure functions of their
// own inputs: every product is one chain over ascending inputs, so that neither chunking nor
// threads change a bit. Thread: the stream's thread and the pool's workers.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/cpu/cpu_sparse_ops.h"
#include "backend/cpu/packed_matrix.h"
#include "backend/cpu/rope_inverse.h"
#include "base/check.h"

namespace spin::backend::cpu {
namespace {

constexpr int64_t kMaxGateWidth = 1024;

void check_weights(const GateWeights& w, int64_t head_dim) {
  SPIN_CHECK(w.width > 0 && w.width % kPanelUnit == 0 && w.width <= kMaxGateWidth);
  SPIN_CHECK(w.poolings >= 1 && w.poolings <= w.order.size());
  SPIN_CHECK(w.key != nullptr && w.query != nullptr);
  SPIN_CHECK(head_dim > 0 && head_dim <= kLargestRopeDim && head_dim % 2 == 0);
  SPIN_CHECK(w.model_rope.inv_freq.size() == static_cast<size_t>(head_dim / 2));
  SPIN_CHECK(w.gate_rope.inv_freq.empty() || w.gate_rope.inv_freq.size() == w.width / 2);
}

// out[j] = sum_i x[i] * w[i, j]; w: [inputs, width].
void project(const KernelSet& kernels,
             const float* x,
             int64_t inputs,
             const float* w,
             int64_t width,
             float* out) {
  for (int64_t j = 0; j < width; j += kPanelCols) {
    kernels.matmul_f32.multiply(x, 1, w + j, width, std::min(kPanelCols, width - j), inputs, false,
                                out + j, width, nullptr);
  }
}

// Norm and rotation of a gate vector, in place.
void finish_vector(const KernelSet& kernels,
                   const GateWeights& w,
                   const float* norm,
                   uint64_t position,
                   float* z) {
  if (norm != nullptr) kernels.rms_norm(z, norm, w.width, w.epsilon, z);
  if (w.gate_rope.inv_freq.empty()) return;
  float cos[kMaxGateWidth / 2];
  float sin[kMaxGateWidth / 2];
  const int64_t half = w.width / 2;
  kernels.rope_table(static_cast<uint32_t>(position), w.gate_rope.inv_freq.data(), half,
                     w.gate_rope.attention_factor, cos, sin);
  kernels.rope_head(z, cos, sin, half);
}

// Pooled keys of one block: [kv_heads, poolings, head_dim].
void pool_block(const KernelSet& kernels,
                const GateKeysItem& item,
                const GateWeights& w,
                uint32_t block,
                float* pooled) {
  const layout::KvGeometry& g = item.tokens.geometry;
  const int64_t dim = g.head_dim;
  float cos[kLargestRopeDim / 2];
  float sin[kLargestRopeDim / 2];
  float key[kLargestRopeDim];
  for (uint32_t t = 0; t < item.block_tokens; ++t) {
    const uint64_t token = uint64_t{block} * item.block_tokens + t;
    inverse_rope_table(kernels, static_cast<uint32_t>(item.first_position + token), w.model_rope,
                       cos, sin);
    for (uint32_t head = 0; head < g.kv_heads; ++head) {
      load_floats(item.tokens.key(head, token), g.dtype, dim, key);
      kernels.rope_head(key, cos, sin, dim / 2);
      for (uint32_t p = 0; p < w.poolings; ++p) {
        float* into = pooled + (uint64_t{head} * w.poolings + p) * g.head_dim;
        for (int64_t d = 0; d < dim; ++d) {
          if (t == 0) {
            into[d] = key[d];
          } else if (w.order[p] == Pooling::kMax) {
            into[d] = std::max(into[d], key[d]);
          } else if (w.order[p] == Pooling::kMin) {
            into[d] = std::min(into[d], key[d]);
          } else {
            into[d] += key[d];
          }
        }
      }
    }
  }
  const float share = 1.0f / static_cast<float>(item.block_tokens);
  for (uint32_t p = 0; p < w.poolings; ++p) {
    if (w.order[p] != Pooling::kMean) continue;
    for (uint32_t head = 0; head < g.kv_heads; ++head) {
      float* into = pooled + (uint64_t{head} * w.poolings + p) * g.head_dim;
      for (int64_t d = 0; d < dim; ++d) into[d] *= share;
    }
  }
}

void summarize_block(const KernelSet& kernels,
                     const GateKeysItem& item,
                     const GateWeights& w,
                     uint32_t block,
                     float* pooled) {
  pool_block(kernels, item, w, block, pooled);
  const layout::KvGeometry& g = item.tokens.geometry;
  const uint64_t inputs = uint64_t{w.poolings} * g.head_dim;
  const uint64_t position =
      item.first_position + uint64_t{block} * item.block_tokens + item.position_offset;
  float z[kMaxGateWidth];
  for (uint32_t head = 0; head < g.kv_heads; ++head) {
    project(kernels, pooled + head * inputs, static_cast<int64_t>(inputs),
            w.key + head * inputs * w.width, w.width, z);
    finish_vector(kernels, w, w.key_norm, position, z);
    const uint64_t at =
        head * item.out.head_stride + (uint64_t{item.out_first} + (block - item.first)) * w.width;
    store_floats(z, item.out.dtype, w.width,
                 static_cast<char*>(item.out.data) + at * layout::dtype_bytes(item.out.dtype));
  }
}

// Sixteen partial sums, folded in a fixed order.
float dot(const float* a, const float* b, int64_t n) {
  float sums[16] = {};
  for (int64_t i = 0; i < n; i += 16) {
    for (int j = 0; j < 16; ++j) sums[j] += a[i + j] * b[i + j];
  }
  for (int width = 8; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return sums[0];
}

// ln of the sum of e^s over what was added, without overflow.
class LogSum {
 public:
  void add(float score) {
    if (score > top_) {
      total_ = total_ * std::exp(static_cast<double>(top_) - score) + 1;
      top_ = score;
    } else {
      total_ += std::exp(static_cast<double>(score) - top_);
    }
  }
  float value() const { return static_cast<float>(top_ + std::log(total_)); }

 private:
  float top_ = -std::numeric_limits<float>::infinity();
  double total_ = 0;
};

// Scores of one KV head. queries: its group's rotated queries [group, head_dim]; turned: as much
// scratch.
void score_head(const KernelSet& kernels,
                const GateScoreItem& item,
                const GateWeights& w,
                uint32_t head,
                int64_t head_dim,
                int64_t group,
                const float* queries,
                float* turned) {
  std::copy_n(queries, group * head_dim, turned);
  float cos[kLargestRopeDim / 2];
  float sin[kLargestRopeDim / 2];
  inverse_rope_table(kernels, static_cast<uint32_t>(item.position), w.model_rope, cos, sin);
  for (int64_t g = 0; g < group; ++g) {
    kernels.rope_head(turned + g * head_dim, cos, sin, head_dim / 2);
  }
  float z[kMaxGateWidth];
  project(kernels, turned, group * head_dim, w.query + head * group * head_dim * w.width, w.width,
          z);
  finish_vector(kernels, w, w.query_norm, item.position, z);
  const float scale = 1.0f / std::sqrt(static_cast<float>(w.width));
  float* scores = item.scores + head * item.score_stride;
  float key[kMaxGateWidth];
  const uint64_t row_bytes = w.width * layout::dtype_bytes(item.keys.dtype);
  const auto* rows = static_cast<const char*>(item.keys.data) +
                     head * item.keys.head_stride * layout::dtype_bytes(item.keys.dtype);
  LogSum sum;
  for (uint64_t j = 0; j < uint64_t{item.first} + item.count; ++j) {
    load_floats(rows + j * row_bytes, item.keys.dtype, w.width, key);
    const float score = scale * dot(z, key, w.width);
    sum.add(score);
    if (j >= item.first) scores[j - item.first] = score;
  }
  const float log_sum = sum.value();
  for (uint32_t j = 0; j < item.count; ++j) scores[j] -= log_sum;
}

}  // namespace

void CpuSparseOps::enqueue_gate_keys(std::span<const GateKeysItem> items,
                                     const GateWeights& weights,
                                     StreamRef stream) {
  struct Piece {
    const GateKeysItem* item;
    uint32_t block;
  };
  for (const GateKeysItem& item : items) {
    check_weights(weights, item.tokens.geometry.head_dim);
    SPIN_CHECK(item.block_tokens > 0 && item.out.width == weights.width);
    SPIN_CHECK((uint64_t{item.first} + item.count) * item.block_tokens <= item.tokens.tokens);
    SPIN_CHECK(item.position_offset < item.block_tokens);
  }
  stream.enqueue_task([this, copies = std::vector(items.begin(), items.end()),
                       weights]() -> Status {
    std::vector<Piece> pieces;
    uint64_t most = 0;
    for (const GateKeysItem& item : copies) {
      const layout::KvGeometry& g = item.tokens.geometry;
      most = std::max(most, uint64_t{g.kv_heads} * weights.poolings * g.head_dim);
      for (uint32_t j = 0; j < item.count; ++j) pieces.push_back({&item, item.first + j});
    }
    SPIN_ASSIGN_OR_RETURN(auto lease, workspace_.take(most * pool_.threads() * sizeof(float)));
    auto* memory = reinterpret_cast<float*>(lease.data());
    pool_.parallel_for(pieces.size(), [&](size_t i, uint32_t slot) {
      summarize_block(kernels_, *pieces[i].item, weights, pieces[i].block, memory + slot * most);
    });
    return ok_status();
  });
}

void CpuSparseOps::enqueue_gate_scores(TensorRef q,
                                       std::span<const GateScoreItem> items,
                                       const GateWeights& weights,
                                       const layout::KvGeometry& geometry,
                                       StreamRef stream) {
  const int64_t dim = geometry.head_dim;
  check_weights(weights, dim);
  SPIN_CHECK(q.dtype == layout::DType::kF32);
  SPIN_CHECK(q.cols > 0 && q.cols % (dim * geometry.kv_heads) == 0);
  for (const GateScoreItem& item : items) {
    SPIN_CHECK(item.row < static_cast<uint64_t>(q.rows) && item.keys.width == weights.width);
    SPIN_CHECK(item.count <= item.score_stride);
  }
  const int64_t group = q.cols / dim / geometry.kv_heads;
  stream.enqueue_task([this, q, copies = std::vector(items.begin(), items.end()), weights, dim,
                       group, heads = geometry.kv_heads]() -> Status {
    const size_t floats = static_cast<size_t>(group * dim);
    SPIN_ASSIGN_OR_RETURN(auto lease, workspace_.take(floats * pool_.threads() * sizeof(float)));
    auto* memory = reinterpret_cast<float*>(lease.data());
    pool_.parallel_for(copies.size() * heads, [&](size_t i, uint32_t slot) {
      const GateScoreItem& item = copies[i / heads];
      const auto head = static_cast<uint32_t>(i % heads);
      const float* row =
          static_cast<const float*>(q.data) + static_cast<int64_t>(item.row) * q.row_stride;
      score_head(kernels_, item, weights, head, dim, group, row + head * group * dim,
                 memory + slot * floats);
    });
    return ok_status();
  });
}

}  // namespace spin::backend::cpu
