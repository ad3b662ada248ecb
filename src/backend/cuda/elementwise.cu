// SPDX-License-Identifier: Apache-2.0
// Ops over single rows: embedding, normalisation, activation, gathering of rows. All are bound by
// memory and read and write each element once, four at a time.
#include "backend/cuda/cuda_ops.h"
#include "backend/cuda/cuda_stream.h"
#include "backend/cuda/kernel_support.cuh"
#include "backend/cuda/linear.h"
#include "backend/cuda/quads.cuh"
#include "backend/cuda/tensor_views.h"

namespace spin::backend::cuda {
namespace {

constexpr unsigned kThreads = 256;

// ---- Rows by id. A block per row and kThreads quads of it.

// What an id beyond the source's rows gives: wrong to see, no memory of others.
__device__ float4 no_row() {
  const float nan = __int_as_float(0x7FC0'0000);
  return {nan, nan, nan, nan};
}

// out[i, :] = table[ids[i], :]. table [table_rows, table_stride] with whole, aligned quads.
// Bytes: per element 2 or 4 read and 4 written.
template <typename Element>
__global__ void __launch_bounds__(kThreads) embedding_kernel(const Element* table,
                                                             uint64_t table_rows,
                                                             uint64_t table_stride,
                                                             const uint32_t* ids,
                                                             float* out,
                                                             uint64_t out_stride,
                                                             uint64_t cols,
                                                             bool vector) {
  const uint64_t c = (uint64_t{blockIdx.y} * kThreads + threadIdx.x) * kQuad;
  if (c >= cols) return;
  const uint64_t id = ids[blockIdx.x];
  const float4 quad = id < table_rows ? load_whole_quad(table + id * table_stride + c) : no_row();
  store_quad(out + blockIdx.x * out_stride + c, quad, cols - c, vector);
}

// out[i, :] = x[ids[i], :]. Bytes: 8 per element.
__global__ void __launch_bounds__(kThreads) gather_rows_kernel(const float* x,
                                                               uint64_t x_rows,
                                                               uint64_t x_stride,
                                                               const uint32_t* ids,
                                                               float* out,
                                                               uint64_t out_stride,
                                                               uint64_t cols,
                                                               bool vector) {
  const uint64_t c = (uint64_t{blockIdx.y} * kThreads + threadIdx.x) * kQuad;
  if (c >= cols) return;
  const uint64_t id = ids[blockIdx.x];
  const float4 quad = id < x_rows ? load_quad(x + id * x_stride + c, cols - c, vector) : no_row();
  store_quad(out + blockIdx.x * out_stride + c, quad, cols - c, vector);
}

// ---- RMS norm.

struct NormCall {
  const float* x;
  uint64_t x_stride;
  const float* weight;
  float* out;
  uint64_t out_stride;
  uint64_t groups;  // in all rows together
  uint32_t groups_per_row;
  uint32_t size;  // of a group
  float epsilon;
  bool vector;
};

// Groups up to this size are a warp's.
constexpr int64_t kWarpGroup = 1024;
constexpr unsigned kBlockGroupWarps = 16;

// The same sum in every thread of the block, warp after warp.
template <unsigned kWarps>
__device__ float group_sum(float x) {
  x = warp_sum(x);
  if constexpr (kWarps == 1) return x;
  __shared__ float sums[kWarps];
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  float total = 0.0f;
  for (unsigned warp = 0; warp < kWarps; ++warp) total += sums[warp];
  return total;
}

// A group of columns is kWarps warps' work: a block's if there are several. A thread writes what
// it alone has read, so that out may be x. The order of additions depends on the size alone.
// Bytes: 4 per element read, again from the caches, and 4 written.
template <unsigned kWarps, unsigned kBlock>
__global__ void __launch_bounds__(kBlock) rms_norm_kernel(const __grid_constant__ NormCall call) {
  constexpr unsigned kLanes = kWarps * kWarp;
  static_assert(kWarps == 1 || kLanes == kBlock);
  const uint64_t group = uint64_t{blockIdx.x} * (kBlock / kLanes) + threadIdx.x / kLanes;
  if (group >= call.groups) return;  // whole warps
  const uint64_t row = group / call.groups_per_row;
  const uint64_t first = group % call.groups_per_row * call.size;
  const float* const x = call.x + row * call.x_stride + first;
  float* const out = call.out + row * call.out_stride + first;
  const uint32_t begin = threadIdx.x % kLanes * kQuad;
  float squares = 0.0f;
  for (uint32_t c = begin; c < call.size; c += kLanes * kQuad) {
    const float4 quad = load_quad(x + c, call.size - c, call.vector);
    squares += quad.x * quad.x + quad.y * quad.y + quad.z * quad.z + quad.w * quad.w;
  }
  squares = group_sum<kWarps>(squares);
  const float factor = 1.0f / sqrtf(squares / static_cast<float>(call.size) + call.epsilon);
  for (uint32_t c = begin; c < call.size; c += kLanes * kQuad) {
    const float4 quad = load_quad(x + c, call.size - c, call.vector);
    const float4 weight = load_quad(call.weight + c, call.size - c, call.vector);
    store_quad(out + c,
               {quad.x * factor * weight.x, quad.y * factor * weight.y, quad.z * factor * weight.z,
                quad.w * factor * weight.w},
               call.size - c, call.vector);
  }
}

// ---- Activation.

__device__ float silu_product(float gate, float up) {
  // exp overflows to infinity where silu is below the least normal float: the quotient is -0 then.
  return gate / (1.0f + expf(-gate)) * up;
}

// A block per row and kThreads quads of it. Bytes: 8 per element of `out` read and 4 written.
__global__ void __launch_bounds__(kThreads) silu_mul_kernel(const float* gate_up,
                                                            uint64_t gate_up_stride,
                                                            float* out,
                                                            uint64_t out_stride,
                                                            uint64_t width,
                                                            bool vector) {
  const uint64_t c = (uint64_t{blockIdx.y} * kThreads + threadIdx.x) * kQuad;
  if (c >= width) return;
  const float* const row = gate_up + blockIdx.x * gate_up_stride;
  const float4 gate = load_quad(row + c, width - c, vector);
  const float4 up = load_quad(row + width + c, width - c, vector);
  store_quad(out + blockIdx.x * out_stride + c,
             {silu_product(gate.x, up.x), silu_product(gate.y, up.y), silu_product(gate.z, up.z),
              silu_product(gate.w, up.w)},
             width - c, vector);
}

dim3 row_grid(const TensorRef& out) {
  return dim3(static_cast<unsigned>(out.rows),
              blocks_for(quads_in(static_cast<uint64_t>(out.cols)), kThreads));
}

bool is_empty(const TensorRef& tensor) { return tensor.rows == 0 || tensor.cols == 0; }

}  // namespace

void CudaOps::enqueue_embedding(const PackedMatrix& table,
                                const uint32_t* ids,
                                TensorRef out,
                                StreamRef stream_ref) {
  check_f32(out);
  SPIN_CHECK(out.cols == table.cols());
  CudaStream& stream = cuda_stream(stream_ref);
  if (is_empty(out) || !stream.begin()) return;
  const auto& matrix = static_cast<const CudaMatrix&>(table);
  const auto launch = [&](const auto* data) {
    embedding_kernel<<<row_grid(out), kThreads, 0, stream.handle()>>>(
        data, matrix.rows(), matrix.stride(), ids, static_cast<float*>(out.data), out.row_stride,
        out.cols, is_aligned(out));
  };
  if (matrix.dtype() == layout::DType::kF32) {
    launch(static_cast<const float*>(matrix.data()));
  } else {
    launch(static_cast<const __nv_bfloat16*>(matrix.data()));
  }
  stream.end("embedding");
}

void CudaOps::enqueue_rms_norm(TensorRef x,
                               const float* weight,
                               int64_t weight_size,
                               float epsilon,
                               TensorRef out,
                               StreamRef stream_ref) {
  check_f32(x);
  check_f32(out);
  SPIN_CHECK(weight_size > 0 && x.cols % weight_size == 0);
  SPIN_CHECK(weight_size <= INT32_MAX && x.cols / weight_size <= INT32_MAX);
  SPIN_CHECK(x.cols == out.cols && x.rows == out.rows);
  CudaStream& stream = cuda_stream(stream_ref);
  if (is_empty(x) || !stream.begin()) return;
  const int64_t groups_per_row = x.cols / weight_size;
  const NormCall call = {
      .x = static_cast<const float*>(x.data),
      .x_stride = static_cast<uint64_t>(x.row_stride),
      .weight = weight,
      .out = static_cast<float*>(out.data),
      .out_stride = static_cast<uint64_t>(out.row_stride),
      .groups = static_cast<uint64_t>(x.rows * groups_per_row),
      .groups_per_row = static_cast<uint32_t>(groups_per_row),
      .size = static_cast<uint32_t>(weight_size),
      .epsilon = epsilon,
      .vector = is_aligned(x) && is_aligned(out) && is_aligned(weight) && weight_size % kQuad == 0};
  if (weight_size <= kWarpGroup) {
    rms_norm_kernel<1, kThreads>
        <<<blocks_for(call.groups, kThreads / kWarp), kThreads, 0, stream.handle()>>>(call);
  } else {
    constexpr unsigned kBlock = kBlockGroupWarps * kWarp;
    rms_norm_kernel<kBlockGroupWarps, kBlock>
        <<<blocks_for(call.groups, 1), kBlock, 0, stream.handle()>>>(call);
  }
  stream.end("rms_norm");
}

void CudaOps::enqueue_silu_mul(TensorRef gate_up, TensorRef out, StreamRef stream_ref) {
  check_f32(gate_up);
  check_f32(out);
  SPIN_CHECK(gate_up.cols == 2 * out.cols && gate_up.rows == out.rows);
  CudaStream& stream = cuda_stream(stream_ref);
  if (is_empty(out) || !stream.begin()) return;
  const bool vector = is_aligned(gate_up) && is_aligned(out) && out.cols % kQuad == 0;
  silu_mul_kernel<<<row_grid(out), kThreads, 0, stream.handle()>>>(
      static_cast<const float*>(gate_up.data), gate_up.row_stride, static_cast<float*>(out.data),
      out.row_stride, out.cols, vector);
  stream.end("silu_mul");
}

void CudaOps::enqueue_gather_rows(TensorRef x,
                                  const uint32_t* row_ids,
                                  TensorRef out,
                                  StreamRef stream_ref) {
  check_f32(x);
  check_f32(out);
  SPIN_CHECK(x.cols == out.cols);
  CudaStream& stream = cuda_stream(stream_ref);
  if (is_empty(out) || !stream.begin()) return;
  gather_rows_kernel<<<row_grid(out), kThreads, 0, stream.handle()>>>(
      static_cast<const float*>(x.data), x.rows, x.row_stride, row_ids,
      static_cast<float*>(out.data), out.row_stride, out.cols, is_aligned(x) && is_aligned(out));
  stream.end("gather_rows");
}

}  // namespace spin::backend::cuda
