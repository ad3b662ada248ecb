// SPDX-License-Identifier: Apache-2.0
// The part of the backends' conformance suite about KV pages: appending to them and attending over
// them. Instantiated like OpsConformance (ops_conformance.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/backend/ops_conformance.h"

namespace spin::testing {

struct AttentionShape {
  int64_t kv_heads = 1;
  int64_t group = 1;
  int64_t head_dim = 64;
  uint32_t page_tokens = 16;
  layout::DType dtype = layout::DType::kF32;

  std::string text() const {
    return std::to_string(kv_heads) + " kv heads x " + std::to_string(group) + ", dim " +
           std::to_string(head_dim) + ", pages of " + std::to_string(page_tokens) + ", " +
           std::string(layout::dtype_name(dtype));
  }
};

// One sequence's inputs for one layer and the place of its pages.
struct Sequence {
  Matrix q;  // [tokens, kv_heads * group * head_dim]
  Matrix k;  // [tokens, kv_heads * head_dim]
  Matrix v;
  std::vector<uint32_t> slots;  // [kv_heads, pages]
  uint64_t pages = 0;
};

// Rows [first, first + count).
inline Matrix rows_of(const Matrix& matrix, int64_t first, int64_t count) {
  Matrix out(count, matrix.cols);
  std::copy_n(matrix.values.begin() + first * matrix.cols, count * matrix.cols, out.values.begin());
  return out;
}

inline Matrix concatenated(const std::vector<Matrix>& parts) {
  Matrix out(0, parts.front().cols);
  for (const Matrix& part : parts) {
    out.rows += part.rows;
    out.values.insert(out.values.end(), part.values.begin(), part.values.end());
  }
  return out;
}

inline bool same_bits(const Matrix& a, const Matrix& b) {
  return a.rows == b.rows && a.cols == b.cols &&
         std::memcmp(a.values.data(), b.values.data(), a.values.size() * sizeof(float)) == 0;
}

class AttentionConformance : public OpsConformance {
 protected:
  // A pool full of NaN with the sequences' pages scattered over it; one page in three is unused.
  void make_world(const AttentionShape& shape, const std::vector<int64_t>& lengths) {
    shape_ = shape;
    scale_ = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    geometry_ = {.layers = 1,
                 .kv_heads = static_cast<uint32_t>(shape.kv_heads),
                 .head_dim = static_cast<uint32_t>(shape.head_dim),
                 .page_tokens = shape.page_tokens,
                 .dtype = shape.dtype};
    sequences_.clear();
    uint64_t needed = 0;
    for (const int64_t tokens : lengths)
      needed += geometry_.pages_for(static_cast<uint64_t>(tokens));
    std::vector<uint32_t> slots(needed + needed / 2 + 1);
    std::iota(slots.begin(), slots.end(), 0u);
    std::shuffle(slots.begin(), slots.end(), std::mt19937(7));
    pool_bytes_.assign(slots.size() * geometry_.page_bytes(), 0xFF);
    pool_buffer_ = upload<unsigned char>(pool_bytes_);
    pool_ = {pool_buffer_.data(), geometry_};
    slot_buffers_.clear();
    for (const int64_t tokens : lengths) add_sequence(tokens, slots);
  }

  void add_sequence(int64_t tokens, std::vector<uint32_t>& free_slots) {
    Sequence sequence;
    const uint64_t seed = 100 * sequences_.size();
    const int64_t width = shape_.kv_heads * shape_.head_dim;
    sequence.q = random_matrix(tokens, width * shape_.group, seed + 1);
    sequence.k = random_matrix(tokens, width, seed + 2);
    sequence.v = random_matrix(tokens, width, seed + 3);
    // Larger scores than 1 / sqrt(d) gives, so that the softmax is not flat.
    for (float& value : sequence.q.values) value *= 6;
    sequence.pages = geometry_.pages_per_head(static_cast<uint64_t>(tokens));
    for (uint64_t i = 0; i < sequence.pages * geometry_.kv_heads; ++i) {
      sequence.slots.push_back(free_slots.back());
      free_slots.pop_back();
    }
    slot_buffers_.push_back(upload<uint32_t>(sequence.slots));
    sequences_.push_back(std::move(sequence));
  }

  // What part of a sequence one call computes: tokens [first, first + count).
  struct Part {
    size_t sequence = 0;
    int64_t first = 0;
    int64_t count = 0;
  };

  // Appends and attends in one step; the outputs in the order of `parts`.
  std::vector<Matrix> run_step(const std::vector<Part>& parts, int64_t extra = 0) {
    const std::vector<layout::SequenceSlice> slices = append(parts, extra);
    std::vector<Matrix> q;
    for (const Part& part : parts) {
      q.push_back(rows_of(sequences_[part.sequence].q, part.first, part.count));
    }
    const Tensor q_tensor = upload_matrix(concatenated(q), extra);
    const Tensor out = empty_matrix(q_tensor.ref.rows, q_tensor.ref.cols, extra);
    ops().enqueue_paged_attention(q_tensor.ref, slices, pool_, scale_, out.ref, stream());
    const Matrix all = download(out);
    std::vector<Matrix> outputs;
    for (size_t i = 0; i < parts.size(); ++i) {
      outputs.push_back(rows_of(all, static_cast<int64_t>(slices[i].first_row), parts[i].count));
    }
    return outputs;
  }

  // Only writes the parts' keys and values; the slices that a step over them has.
  std::vector<layout::SequenceSlice> append(const std::vector<Part>& parts, int64_t extra = 0) {
    std::vector<Matrix> k, v;
    std::vector<layout::SequenceSlice> slices;
    uint64_t row = 0;
    for (const Part& part : parts) {
      const Sequence& sequence = sequences_[part.sequence];
      k.push_back(rows_of(sequence.k, part.first, part.count));
      v.push_back(rows_of(sequence.v, part.first, part.count));
      slices.push_back({.first_row = row,
                        .query_tokens = static_cast<uint64_t>(part.count),
                        .context_tokens = static_cast<uint64_t>(part.first + part.count),
                        .slots = slot_buffers_[part.sequence].as<uint32_t>(),
                        .slot_stride = sequence.pages});
      row += static_cast<uint64_t>(part.count);
    }
    const Tensor k_tensor = upload_matrix(concatenated(k), extra);
    const Tensor v_tensor = upload_matrix(concatenated(v), extra);
    ops().enqueue_kv_append(k_tensor.ref, v_tensor.ref, slices, pool_, stream());
    const Status status = stream().wait_idle();
    EXPECT_TRUE(status.ok()) << status.to_string();
    return slices;
  }

  // Outputs of a sequence's tokens from `first` on, `chunk` tokens a step.
  Matrix run_chunked(size_t sequence, int64_t first, int64_t chunk) {
    std::vector<Matrix> outputs;
    if (first > 0) append({{sequence, 0, first}});
    const int64_t tokens = sequences_[sequence].q.rows;
    for (; first < tokens; first += chunk) {
      outputs.push_back(run_step({{sequence, first, std::min(chunk, tokens - first)}}).front());
    }
    return concatenated(outputs);
  }

  BoundedMatrix expected(size_t index, int64_t first, int64_t count) {
    const Sequence& sequence = sequences_[index];
    return reference_attention(rows_of(sequence.q, first, count),
                               rows_of(sequence.k, 0, first + count),
                               rows_of(sequence.v, 0, first + count), shape_.kv_heads,
                               shape_.head_dim, shape_.dtype, scale_);
  }

  AttentionShape shape_;
  float scale_ = 1.0f;
  layout::KvGeometry geometry_;
  std::vector<unsigned char> pool_bytes_;
  backend::Buffer pool_buffer_;
  backend::KvPoolRef pool_;
  std::vector<Sequence> sequences_;
  std::vector<backend::Buffer> slot_buffers_;
};

}  // namespace spin::testing
