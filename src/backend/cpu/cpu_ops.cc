// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "backend/cpu/packed_matrix.h"
#include "base/bf16.h"
#include "base/check.h"

namespace spin::backend::cpu {
namespace {

// Rows of a weight matrix read at a time while packing.
constexpr int64_t kPackChunkFloats = 1 << 20;

float* row_of(const TensorRef& tensor, int64_t row) {
  return static_cast<float*>(tensor.data) + row * tensor.row_stride;
}

void check_f32(const TensorRef& tensor) {
  SPIN_CHECK(tensor.dtype == layout::DType::kF32);
  SPIN_CHECK(tensor.rows >= 0 && tensor.cols >= 0 && tensor.row_stride >= tensor.cols);
}

// Address of token `token`'s key of KV head `head`; the value is plane_bytes further.
char* key_address(const KvPoolRef& pool,
                  const layout::SequenceSlice& slice,
                  uint64_t head,
                  uint64_t token) {
  const layout::KvGeometry& g = pool.geometry;
  const uint64_t slot = slice.slots[head * slice.slot_stride + token / g.page_tokens];
  return static_cast<char*>(pool.base) + slot * g.page_bytes() +
         (token % g.page_tokens) * g.row_bytes();
}

float element(const char* row, layout::DType dtype, uint64_t i) {
  if (dtype == layout::DType::kF32) return reinterpret_cast<const float*>(row)[i];
  return base::to_float(reinterpret_cast<const base::Bf16*>(row)[i]);
}

void store_element(char* row, layout::DType dtype, uint64_t i, float value) {
  if (dtype == layout::DType::kF32) {
    reinterpret_cast<float*>(row)[i] = value;
  } else {
    reinterpret_cast<base::Bf16*>(row)[i] = base::to_bf16(value);
  }
}

}  // namespace

Result<std::unique_ptr<PackedMatrix>> CpuOps::pack_matrix(int64_t rows,
                                                          int64_t cols,
                                                          layout::DType dtype,
                                                          const RowSource& source) {
  SPIN_ASSIGN_OR_RETURN(const uint64_t bytes, CpuPackedMatrix::packed_bytes(rows, cols, dtype));
  SPIN_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(fast_memory_, bytes));
  std::memset(buffer.data(), 0, bytes);
  auto matrix = std::make_unique<CpuPackedMatrix>(rows, cols, dtype, std::move(buffer));
  const int64_t chunk = std::clamp<int64_t>(kPackChunkFloats / cols, 1, rows);
  std::vector<float> values(static_cast<size_t>(chunk * cols));
  for (int64_t first = 0; first < rows; first += chunk) {
    const int64_t count = std::min(chunk, rows - first);
    const std::span<float> part(values.data(), static_cast<size_t>(count * cols));
    SPIN_RETURN_IF_ERROR(source(first, count, part));
    matrix->store_rows(first, count, part);
  }
  return std::unique_ptr<PackedMatrix>(std::move(matrix));
}

void CpuOps::enqueue_embedding(const PackedMatrix& table,
                               const uint32_t* ids,
                               TensorRef out,
                               StreamRef stream) {
  check_f32(out);
  SPIN_CHECK(out.cols == table.cols());
  const auto& matrix = static_cast<const CpuPackedMatrix&>(table);
  stream.enqueue_task([this, &matrix, ids, out] {
    pool_.parallel_for(static_cast<size_t>(out.rows), [&](size_t row, uint32_t) {
      SPIN_CHECK(ids[row] < matrix.rows());
      matrix.load_row(ids[row], row_of(out, static_cast<int64_t>(row)));
    });
    return ok_status();
  });
}

void CpuOps::enqueue_matmul(TensorRef x,
                            const PackedMatrix& w,
                            const float* bias,
                            bool accumulate,
                            TensorRef out,
                            StreamRef stream) {
  check_f32(x);
  check_f32(out);
  SPIN_CHECK(x.cols == w.cols() && out.cols == w.rows() && x.rows == out.rows);
  const auto& matrix = static_cast<const CpuPackedMatrix&>(w);
  stream.enqueue_task([this, x, &matrix, bias, accumulate, out] {
    const bool bf16 = matrix.dtype() == layout::DType::kBF16;
    pool_.parallel_for(static_cast<size_t>(out.cols), [&](size_t n, uint32_t) {
      std::vector<float> weights(static_cast<size_t>(x.cols));
      matrix.load_row(static_cast<int64_t>(n), weights.data());
      for (int64_t r = 0; r < x.rows; ++r) {
        const float* in = row_of(x, r);
        float sum = 0;
        for (int64_t k = 0; k < x.cols; ++k) {
          sum += (bf16 ? base::to_float(base::to_bf16(in[k])) : in[k]) *
                 weights[static_cast<size_t>(k)];
        }
        if (bias != nullptr) sum += bias[n];
        float& target = row_of(out, r)[n];
        target = accumulate ? target + sum : sum;
      }
    });
    return ok_status();
  });
}

void CpuOps::enqueue_rms_norm(TensorRef x,
                              const float* weight,
                              int64_t weight_size,
                              float epsilon,
                              TensorRef out,
                              StreamRef stream) {
  check_f32(x);
  check_f32(out);
  SPIN_CHECK(weight_size > 0 && x.cols % weight_size == 0);
  SPIN_CHECK(x.cols == out.cols && x.rows == out.rows);
  stream.enqueue_task([this, x, weight, weight_size, epsilon, out] {
    pool_.parallel_for(static_cast<size_t>(x.rows), [&](size_t row, uint32_t) {
      for (int64_t first = 0; first < x.cols; first += weight_size) {
        const float* in = row_of(x, static_cast<int64_t>(row)) + first;
        float* to = row_of(out, static_cast<int64_t>(row)) + first;
        float squares = 0;
        for (int64_t c = 0; c < weight_size; ++c) squares += in[c] * in[c];
        const float factor = 1.0f / std::sqrt(squares / static_cast<float>(weight_size) + epsilon);
        for (int64_t c = 0; c < weight_size; ++c) to[c] = in[c] * factor * weight[c];
      }
    });
    return ok_status();
  });
}

void CpuOps::enqueue_rope(TensorRef x,
                          int64_t head_dim,
                          const uint32_t* positions,
                          const RopeParams& rope,
                          StreamRef stream) {
  check_f32(x);
  SPIN_CHECK(head_dim > 0 && head_dim % 2 == 0 && x.cols % head_dim == 0);
  SPIN_CHECK(rope.inv_freq.size() == static_cast<size_t>(head_dim / 2));
  stream.enqueue_task([this, x, head_dim, positions, rope] {
    const int64_t half = head_dim / 2;
    pool_.parallel_for(static_cast<size_t>(x.rows), [&](size_t row, uint32_t) {
      for (int64_t i = 0; i < half; ++i) {
        const double angle =
            static_cast<double>(positions[row]) * rope.inv_freq[static_cast<size_t>(i)];
        const float c = static_cast<float>(std::cos(angle)) * rope.attention_factor;
        const float s = static_cast<float>(std::sin(angle)) * rope.attention_factor;
        for (int64_t first = 0; first < x.cols; first += head_dim) {
          float* head = row_of(x, static_cast<int64_t>(row)) + first;
          const float a = head[i];
          const float b = head[i + half];
          head[i] = a * c - b * s;
          head[i + half] = b * c + a * s;
        }
      }
    });
    return ok_status();
  });
}

void CpuOps::enqueue_silu_mul(TensorRef gate_up, TensorRef out, StreamRef stream) {
  check_f32(gate_up);
  check_f32(out);
  SPIN_CHECK(gate_up.cols == 2 * out.cols && gate_up.rows == out.rows);
  stream.enqueue_task([this, gate_up, out] {
    pool_.parallel_for(static_cast<size_t>(out.rows), [&](size_t row, uint32_t) {
      const float* in = row_of(gate_up, static_cast<int64_t>(row));
      float* to = row_of(out, static_cast<int64_t>(row));
      for (int64_t c = 0; c < out.cols; ++c) {
        to[c] = in[c] / (1.0f + std::exp(-in[c])) * in[out.cols + c];
      }
    });
    return ok_status();
  });
}

void CpuOps::enqueue_gather_rows(TensorRef x,
                                 const uint32_t* row_ids,
                                 TensorRef out,
                                 StreamRef stream) {
  check_f32(x);
  check_f32(out);
  SPIN_CHECK(x.cols == out.cols);
  stream.enqueue_task([x, row_ids, out] {
    for (int64_t i = 0; i < out.rows; ++i) {
      SPIN_CHECK(row_ids[i] < x.rows);
      std::memcpy(row_of(out, i), row_of(x, row_ids[i]),
                  static_cast<size_t>(x.cols) * sizeof(float));
    }
    return ok_status();
  });
}

void CpuOps::enqueue_kv_append(TensorRef k,
                               TensorRef v,
                               std::span<const layout::SequenceSlice> slices,
                               const KvPoolRef& pool,
                               StreamRef stream) {
  check_f32(k);
  check_f32(v);
  stream.enqueue_task([k, v, slices, pool] {
    const layout::KvGeometry& g = pool.geometry;
    for (const layout::SequenceSlice& slice : slices) {
      for (uint64_t r = 0; r < slice.query_tokens; ++r) {
        const uint64_t token = slice.context_tokens - slice.query_tokens + r;
        const int64_t row = static_cast<int64_t>(slice.first_row + r);
        for (uint64_t head = 0; head < g.kv_heads; ++head) {
          char* key = key_address(pool, slice, head, token);
          for (uint64_t d = 0; d < g.head_dim; ++d) {
            store_element(key, g.dtype, d, row_of(k, row)[head * g.head_dim + d]);
            store_element(key + g.plane_bytes(), g.dtype, d, row_of(v, row)[head * g.head_dim + d]);
          }
        }
      }
    }
    return ok_status();
  });
}

void CpuOps::enqueue_paged_attention(TensorRef q,
                                     std::span<const layout::SequenceSlice> slices,
                                     const KvPoolRef& pool,
                                     float scale,
                                     TensorRef out,
                                     StreamRef stream) {
  check_f32(q);
  check_f32(out);
  const layout::KvGeometry& g = pool.geometry;
  SPIN_CHECK(q.cols == out.cols && q.cols % g.head_dim == 0);
  const uint64_t q_heads = static_cast<uint64_t>(q.cols) / g.head_dim;
  SPIN_CHECK(q_heads % g.kv_heads == 0);
  stream.enqueue_task([this, q, slices, pool, scale, out, q_heads] {
    const layout::KvGeometry& geometry = pool.geometry;
    const uint64_t dim = geometry.head_dim;
    for (const layout::SequenceSlice& slice : slices) {
      pool_.parallel_for(slice.query_tokens * q_heads, [&](size_t index, uint32_t) {
        const uint64_t head = index % q_heads;
        const int64_t row = static_cast<int64_t>(slice.first_row + index / q_heads);
        const uint64_t visible = slice.context_tokens - slice.query_tokens + index / q_heads + 1;
        const float* query = row_of(q, row) + head * dim;
        float* to = row_of(out, row) + head * dim;
        std::vector<float> sums(dim);
        float max = -INFINITY;
        float total = 0;
        for (uint64_t token = 0; token < visible; ++token) {
          const char* key = key_address(pool, slice, head / (q_heads / geometry.kv_heads), token);
          float score = 0;
          for (uint64_t d = 0; d < dim; ++d) score += query[d] * element(key, geometry.dtype, d);
          score *= scale;
          const float new_max = std::max(max, score);
          const float keep = std::exp(max - new_max);
          const float p = std::exp(score - new_max);
          const char* value = key + geometry.plane_bytes();
          for (uint64_t d = 0; d < dim; ++d) {
            sums[d] = sums[d] * keep + p * element(value, geometry.dtype, d);
          }
          total = total * keep + p;
          max = new_max;
        }
        for (uint64_t d = 0; d < dim; ++d) to[d] = sums[d] / total;
      });
    }
    return ok_status();
  });
}

}  // namespace spin::backend::cpu
