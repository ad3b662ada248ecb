// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_ops.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "backend/cpu/attention.h"
#include "backend/cpu/matmul.h"
#include "backend/cpu/packed_matrix.h"
#include "base/bf16.h"
#include "base/check.h"
#include "base/checked_math.h"

namespace spin::backend::cpu {
namespace {

// Rows of a weight matrix read at a time while packing.
constexpr int64_t kPackChunkFloats = 1 << 20;

// Largest head that rope takes; its table lies on the stack.
constexpr int64_t kMaxRopeDim = 1024;

float* row_of(const TensorRef& tensor, int64_t row) {
  return static_cast<float*>(tensor.data) + row * tensor.row_stride;
}

// Every slice's rows lie inside the tensors and its new tokens are the last of its context.
void check_slices(std::span<const layout::SequenceSlice> slices, int64_t rows) {
  for (const layout::SequenceSlice& slice : slices) {
    SPIN_CHECK(slice.query_tokens <= slice.context_tokens);
    SPIN_CHECK(slice.query_tokens <= static_cast<uint64_t>(rows));
    SPIN_CHECK(slice.first_row <= static_cast<uint64_t>(rows) - slice.query_tokens);
  }
}

void check_f32(const TensorRef& tensor) {
  SPIN_CHECK(tensor.dtype == layout::DType::kF32);
  SPIN_CHECK(tensor.rows >= 0 && tensor.cols >= 0 && tensor.row_stride >= tensor.cols);
}

// Elements that a piece of an elementwise operation holds at least: some microseconds of work.
constexpr int64_t kPieceFloats = 1 << 13;

void store_values(const float* from, layout::DType dtype, int64_t count, char* to) {
  if (dtype == layout::DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  auto* out = reinterpret_cast<base::Bf16*>(to);
  for (int64_t i = 0; i < count; ++i) out[i] = base::to_bf16(from[i]);
}

// Writes one token's keys and values of all KV heads; k, v: [kv_heads, head_dim].
void append_token(const KvPoolRef& pool,
                  const layout::SequenceSlice& slice,
                  uint64_t token,
                  const float* k,
                  const float* v) {
  const layout::KvGeometry& g = pool.geometry;
  for (uint64_t head = 0; head < g.kv_heads; ++head) {
    const uint64_t slot = slice.slots[head * slice.slot_stride + token / g.page_tokens];
    char* key = static_cast<char*>(pool.base) + slot * g.page_bytes() +
                (token % g.page_tokens) * g.row_bytes();
    store_values(k + head * g.head_dim, g.dtype, g.head_dim, key);
    store_values(v + head * g.head_dim, g.dtype, g.head_dim, key + g.plane_bytes());
  }
}

}  // namespace

template <typename Body>
void CpuOps::for_rows(const TensorRef& tensor, const Body& body) {
  const int64_t rows_per_piece =
      std::max<int64_t>(1, kPieceFloats / std::max<int64_t>(1, tensor.cols));
  const int64_t pieces = base::ceil_div(tensor.rows, rows_per_piece);
  pool_.parallel_for(static_cast<size_t>(pieces), [&](size_t piece, uint32_t) {
    const int64_t first = static_cast<int64_t>(piece) * rows_per_piece;
    const int64_t last = std::min(first + rows_per_piece, tensor.rows);
    for (int64_t row = first; row < last; ++row) body(row);
  });
}

Result<std::unique_ptr<PackedMatrix>> CpuOps::pack_matrix(int64_t rows,
                                                          int64_t cols,
                                                          layout::DType dtype,
                                                          const RowSource& source) {
  SPIN_ASSIGN_OR_RETURN(const uint64_t bytes, CpuPackedMatrix::packed_bytes(rows, cols, dtype));
  SPIN_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(fast_memory_, bytes));
  auto matrix = std::make_unique<CpuPackedMatrix>(rows, cols, dtype, std::move(buffer));
  matrix->clear_padding();
  // Whole panels, so that threads do not write to each other's cache lines.
  const int64_t panels = std::max<int64_t>(1, kPackChunkFloats / kPanelCols / cols);
  const int64_t chunk = std::min(panels * kPanelCols, rows);
  std::vector<float> values(static_cast<size_t>(chunk * cols));
  for (int64_t first = 0; first < rows; first += chunk) {
    const int64_t count = std::min(chunk, rows - first);
    const std::span<float> part(values.data(), static_cast<size_t>(count * cols));
    SPIN_RETURN_IF_ERROR(source(first, count, part));
    pool_.parallel_for(
        static_cast<size_t>(base::ceil_div(count, kPanelCols)), [&](size_t panel, uint32_t) {
          const int64_t begin = static_cast<int64_t>(panel) * kPanelCols;
          const int64_t length = std::min(kPanelCols, count - begin);
          matrix->store_rows(
              first + begin, length,
              part.subspan(static_cast<size_t>(begin * cols), static_cast<size_t>(length * cols)));
        });
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
    for_rows(out, [&](int64_t row) {
      SPIN_CHECK(ids[row] < matrix.rows());
      matrix.load_row(ids[row], row_of(out, row));
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
  const MatmulCall call = {x, out, static_cast<const CpuPackedMatrix*>(&w), bias, accumulate};
  stream.enqueue_task([this, call] {
    const bool is_bf16 = call.w->dtype() == layout::DType::kBF16;
    return run_matmul(call, is_bf16 ? kernels_.matmul_bf16 : kernels_.matmul_f32, pool_,
                      workspace_);
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
    for_rows(x, [&](int64_t row) {
      for (int64_t first = 0; first < x.cols; first += weight_size) {
        kernels_.rms_norm(row_of(x, row) + first, weight, weight_size, epsilon,
                          row_of(out, row) + first);
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
  SPIN_CHECK(head_dim > 0 && head_dim <= kMaxRopeDim && head_dim % 2 == 0);
  SPIN_CHECK(x.cols % head_dim == 0);
  SPIN_CHECK(rope.inv_freq.size() == static_cast<size_t>(head_dim / 2));
  stream.enqueue_task([this, x, head_dim, positions, rope] {
    const int64_t half = head_dim / 2;
    for_rows(x, [&](int64_t row) {
      float cos[kMaxRopeDim / 2];
      float sin[kMaxRopeDim / 2];
      kernels_.rope_table(positions[row], rope.inv_freq.data(), half, rope.attention_factor, cos,
                          sin);
      for (int64_t first = 0; first < x.cols; first += head_dim) {
        kernels_.rope_head(row_of(x, row) + first, cos, sin, half);
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
    for_rows(gate_up, [&](int64_t row) {
      const float* gate = row_of(gate_up, row);
      kernels_.silu_mul(gate, gate + out.cols, out.cols, row_of(out, row));
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
  stream.enqueue_task([this, x, row_ids, out] {
    for_rows(out, [&](int64_t row) {
      SPIN_CHECK(row_ids[row] < x.rows);
      std::memcpy(row_of(out, row), row_of(x, row_ids[row]),
                  static_cast<size_t>(x.cols) * sizeof(float));
    });
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
  const int64_t width = int64_t{pool.geometry.kv_heads} * pool.geometry.head_dim;
  SPIN_CHECK(k.cols == width && v.cols == width && k.rows == v.rows);
  check_slices(slices, k.rows);
  stream.enqueue_task([this, k, v, slices, pool] {
    for (const layout::SequenceSlice& slice : slices) {
      const TensorRef rows = k.row_range(static_cast<int64_t>(slice.first_row),
                                         static_cast<int64_t>(slice.query_tokens));
      for_rows(rows, [&](int64_t i) {
        const int64_t row = static_cast<int64_t>(slice.first_row) + i;
        append_token(pool, slice,
                     slice.context_tokens - slice.query_tokens + static_cast<uint64_t>(i),
                     row_of(k, row), row_of(v, row));
      });
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
  SPIN_CHECK(g.head_dim > 0 && g.head_dim % 8 == 0 && g.kv_heads > 0 && g.page_tokens > 0);
  SPIN_CHECK(q.cols == out.cols && q.rows == out.rows && q.cols > 0);
  SPIN_CHECK(q.cols % (int64_t{g.head_dim} * g.kv_heads) == 0);
  check_slices(slices, q.rows);
  const AttentionCall call = {q, out, slices, pool, scale};
  stream.enqueue_task([this, call] { return run_attention(call, kernels_, pool_, workspace_); });
}

}  // namespace spin::backend::cpu
