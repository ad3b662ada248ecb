// SPDX-License-Identifier: Apache-2.0
// Every computation that the layers above may ask a device for. Each member states its formula and
// shapes; the CPU backend is the reference, other backends match it in tests/backend.
//
// All members enqueue. Stream: the last parameter. Lifetime: memory behind the views, id arrays and
// slices stays alive and unchanged until the operation has run. Errors: sticky on the stream.
// Numerics: products and sums accumulate in float. A row of the result depends on that row of the
// input alone, never on how many other rows the call holds, so a sequence's tokens do not depend on
// its batch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "backend/device.h"
#include "backend/tensor.h"
#include "layout/kv_geometry.h"
#include "layout/ragged_batch.h"
#include "spin/status.h"

namespace spin::backend {

// A weight matrix [rows, cols] in the backend's own packed form. Immutable once made.
class PackedMatrix {
 public:
  virtual ~PackedMatrix() = default;
  virtual int64_t rows() const = 0;
  virtual int64_t cols() const = 0;
  virtual layout::DType dtype() const = 0;
  virtual uint64_t size_bytes() const = 0;
};

// Delivers rows [first_row, first_row + rows) of a matrix as floats, row-major, into `out`
// ([rows, cols]). Called with ascending, disjoint ranges, possibly from one thread only.
using RowSource = std::function<Status(int64_t first_row, int64_t rows, std::span<float> out)>;

// Rotary embedding for every position: inv_freq[i] for i < head_dim / 2, and a factor on cos and
// sin (YaRN's attention factor; 1 otherwise). Pairs are (i, i + head_dim / 2) (half split).
// The rotated dimensions are the whole head.
struct RopeParams {
  std::span<const float> inv_freq;  // [head_dim / 2], host memory that outlives the operations
  float attention_factor = 1.0f;
};

// The KV pool that a layer's attention reads and appends to.
struct KvPoolRef {
  void* base = nullptr;  // slot s at base + s * geometry.page_bytes()
  layout::KvGeometry geometry;
};

class Ops {
 public:
  virtual ~Ops() = default;

  // Packs a weight matrix; blocks until it is packed (used at load). Errors: kResourceExhausted,
  // or the first error of `source`.
  virtual Result<std::unique_ptr<PackedMatrix>> pack_matrix(int64_t rows,
                                                            int64_t cols,
                                                            layout::DType dtype,
                                                            const RowSource& source) = 0;

  // out[i, :] = table[ids[i], :]. ids: [out.rows] in fast memory, each < table.rows().
  virtual void enqueue_embedding(const PackedMatrix& table,
                                 const uint32_t* ids,
                                 TensorRef out,
                                 StreamRef stream) = 0;

  // out[r, n] = sum_k x[r, k] * w[n, k] + bias[n] (+ out[r, n] if accumulate).
  // x: f32 [m, w.cols()], w: [n, k] packed, bias: f32 [n] or null, out: f32 [m, w.rows()].
  // With a bf16 matrix, x is rounded to bf16 before the product.
  virtual void enqueue_matmul(TensorRef x,
                              const PackedMatrix& w,
                              const float* bias,
                              bool accumulate,
                              TensorRef out,
                              StreamRef stream) = 0;

  // For every row r and group g of `weight_size` columns:
  // out[r, g, :] = x[r, g, :] / sqrt(mean(x[r, g, :]^2) + epsilon) * weight[:].
  // weight_size divides x.cols: the whole row for a layer norm, head_dim for a per-head norm.
  // weight: f32 [weight_size]. out may be x.
  virtual void enqueue_rms_norm(TensorRef x,
                                const float* weight,
                                int64_t weight_size,
                                float epsilon,
                                TensorRef out,
                                StreamRef stream) = 0;

  // Rotates each head of x ([tokens, heads * head_dim], f32) in place by its row's position.
  // positions: [tokens]; angles are right to 2^-27 below position 2^27. Requires: head_dim even, at
  // most 1024.
  virtual void enqueue_rope(TensorRef x,
                            int64_t head_dim,
                            const uint32_t* positions,
                            const RopeParams& rope,
                            StreamRef stream) = 0;

  // out[r, c] = silu(gate_up[r, c]) * gate_up[r, width + c], c < width = out.cols; f32.
  virtual void enqueue_silu_mul(TensorRef gate_up, TensorRef out, StreamRef stream) = 0;

  // out[i, :] = x[row_ids[i], :].
  virtual void enqueue_gather_rows(TensorRef x,
                                   const uint32_t* row_ids,
                                   TensorRef out,
                                   StreamRef stream) = 0;

  // Writes the new tokens' keys and values ([tokens, kv_heads * head_dim], f32, keys after RoPE)
  // into the sequences' pages, rounded to the pool's type. Row r of slice s is token
  // context_tokens - query_tokens + r.
  virtual void enqueue_kv_append(TensorRef k,
                                 TensorRef v,
                                 std::span<const layout::SequenceSlice> slices,
                                 const KvPoolRef& pool,
                                 StreamRef stream) = 0;

  // Causal attention of the new tokens over their sequences' pages, grouped queries:
  // out[t, h, :] = softmax_j(scale * q[t, h, :] . K[j, h / group, :]) V[j, h / group, :].
  // q, out: f32 [tokens, q_heads * head_dim]; group = q_heads / kv_heads in 1..8 (any divisor);
  // head_dim 64, 96 or 128 fast, any multiple of 8 right. Requires: kv_append of these slices is
  // queued before. Splits over the context are at fixed logical positions.
  virtual void enqueue_paged_attention(TensorRef q,
                                       std::span<const layout::SequenceSlice> slices,
                                       const KvPoolRef& pool,
                                       float scale,
                                       TensorRef out,
                                       StreamRef stream) = 0;
};

}  // namespace spin::backend
