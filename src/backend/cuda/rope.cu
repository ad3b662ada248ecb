// SPDX-License-Identifier: Apache-2.0
// Rotary embedding in place.
#include <algorithm>

#include "backend/cuda/cuda_ops.h"
#include "backend/cuda/cuda_stream.h"
#include "backend/cuda/kernel_support.cuh"
#include "backend/cuda/quads.cuh"
#include "backend/cuda/tensor_views.h"

namespace spin::backend::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr uint32_t kMostHalf = 512;  // of the largest head's pairs

struct RopeCall {
  float* x;
  uint64_t row_stride;
  const uint32_t* positions;  // [rows]
  uint32_t heads;
  uint32_t half;  // pairs of a head
  float factor;
  bool vector;
  float inv_freq[kMostHalf];  // of `half` pairs
};
static_assert(sizeof(RopeCall) <= kPackBytes);

struct Turn {
  float cos, sin;
};

// cos and sin of position * inv_freq, times `factor`, in double and rounded once at the end. The
// angle is exact for positions below 2^29 (29 and 24 bits), the reduced one to some units of 2^-53,
// and the polynomials' remainders are below (pi / 4)^11 / 11! = 1.8e-9 < 2^-29.
__device__ Turn turn_of(uint32_t position, float inv_freq, float factor) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  // pi / 2 in three parts; the first two end in so many zero bits that their products with 32-bit
  // quadrants are exact.
  constexpr double kHalfPi1 = 0x1.921fbp0;
  constexpr double kHalfPi2 = 0x5.4442p-24;
  constexpr double kHalfPi3 = 0xd.18469898cc518p-44;
  const double angle = static_cast<double>(position) * static_cast<double>(inv_freq);
  const double quadrant = rint(angle * kTwoOverPi);
  const double r = ((angle - quadrant * kHalfPi1) - quadrant * kHalfPi2) - quadrant * kHalfPi3;
  const double z = r * r;
  const double s = r + r * z * (((1.0 / 362880 * z - 1.0 / 5040) * z + 1.0 / 120) * z - 1.0 / 6);
  const double c =
      1.0 + z * (z * (((-1.0 / 3628800 * z + 1.0 / 40320) * z - 1.0 / 720) * z + 1.0 / 24) - 0.5);
  const auto turn = static_cast<uint64_t>(static_cast<int64_t>(quadrant));
  const double swapped_cos = (turn & 1) != 0 ? s : c;
  const double swapped_sin = (turn & 1) != 0 ? c : s;
  const double signed_cos = ((turn + 1) & 2) != 0 ? -swapped_cos : swapped_cos;
  const double signed_sin = (turn & 2) != 0 ? -swapped_sin : swapped_sin;
  return {static_cast<float>(signed_cos * factor), static_cast<float>(signed_sin * factor)};
}

// A block per row: the row's turns once, then all its heads, four pairs at a time.
// Bytes: 4 per element read and 4 written; the turns, some 40 double operations each, are shared by
// the heads.
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ RopeCall call) {
  __shared__ alignas(16) float cosines[kMostHalf];
  __shared__ alignas(16) float sines[kMostHalf];
  const uint32_t position = call.positions[blockIdx.x];
  for (uint32_t i = threadIdx.x; i < call.half; i += kThreads) {
    const Turn turn = turn_of(position, call.inv_freq[i], call.factor);
    cosines[i] = turn.cos;
    sines[i] = turn.sin;
  }
  __syncthreads();
  float* const row = call.x + blockIdx.x * call.row_stride;
  const auto quads = static_cast<uint32_t>(quads_in(call.half));
  for (uint32_t u = threadIdx.x; u < call.heads * quads; u += kThreads) {
    const uint32_t i = u % quads * kQuad;
    const uint32_t left = call.half - i;
    float* const head = row + uint64_t{u / quads} * 2 * call.half + i;
    const float4 a = load_quad(head, left, call.vector);
    const float4 b = load_quad(head + call.half, left, call.vector);
    // The tables are whole quads: kMostHalf is one's multiple.
    const float4 c = load_whole_quad(cosines + i);
    const float4 s = load_whole_quad(sines + i);
    store_quad(head,
               {a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y, a.z * c.z - b.z * s.z,
                a.w * c.w - b.w * s.w},
               left, call.vector);
    store_quad(head + call.half,
               {b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y, b.z * c.z + a.z * s.z,
                b.w * c.w + a.w * s.w},
               left, call.vector);
  }
}

}  // namespace

void CudaOps::enqueue_rope(TensorRef x,
                           int64_t head_dim,
                           const uint32_t* positions,
                           const RopeParams& rope,
                           StreamRef stream_ref) {
  check_f32(x);
  SPIN_CHECK(head_dim > 0 && head_dim <= 2 * kMostHalf && head_dim % 2 == 0);
  SPIN_CHECK(x.cols % head_dim == 0 && x.cols <= INT32_MAX);
  SPIN_CHECK(rope.inv_freq.size() == static_cast<size_t>(head_dim / 2));
  CudaStream& stream = cuda_stream(stream_ref);
  if (x.rows == 0 || x.cols == 0 || !stream.begin()) return;
  RopeCall call = {.x = static_cast<float*>(x.data),
                   .row_stride = static_cast<uint64_t>(x.row_stride),
                   .positions = positions,
                   .heads = static_cast<uint32_t>(x.cols / head_dim),
                   .half = static_cast<uint32_t>(head_dim / 2),
                   .factor = rope.attention_factor,
                   .vector = is_aligned(x) && head_dim / 2 % kQuad == 0,
                   .inv_freq = {}};
  std::copy(rope.inv_freq.begin(), rope.inv_freq.end(), call.inv_freq);
  rope_kernel<<<static_cast<unsigned>(x.rows), kThreads, 0, stream.handle()>>>(call);
  stream.end("rope");
}

}  // namespace spin::backend::cuda
