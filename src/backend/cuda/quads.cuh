// SPDX-License-Identifier: Apache-2.0
// Rows of elements four at a time: one vector access where the row is aligned, single ones where it
// is not or ends. What is computed from a row does not depend on which it was.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace spin::backend::cuda {

inline constexpr unsigned kQuad = 4;

__host__ __device__ constexpr uint64_t quads_in(uint64_t elements) {
  return (elements + kQuad - 1) / kQuad;
}

// Of four elements at `from`, `left` exist (at least one); the others are 0.
// Requires: `from` is 16-byte aligned if `vector`.
__device__ inline float4 load_quad(const float* from, uint64_t left, bool vector) {
  if (vector && left >= kQuad) return *reinterpret_cast<const float4*>(from);
  float4 quad = {from[0], 0.0f, 0.0f, 0.0f};
  if (left > 1) quad.y = from[1];
  if (left > 2) quad.z = from[2];
  if (left > 3) quad.w = from[3];
  return quad;
}

__device__ inline void store_quad(float* to, float4 quad, uint64_t left, bool vector) {
  if (vector && left >= kQuad) {
    *reinterpret_cast<float4*>(to) = quad;
    return;
  }
  to[0] = quad.x;
  if (left > 1) to[1] = quad.y;
  if (left > 2) to[2] = quad.z;
  if (left > 3) to[3] = quad.w;
}

// Four bf16 as one access.
struct alignas(8) Bf16Quad {
  __nv_bfloat162 low, high;
};

// Rounds to nearest even. Requires: `to` is 8-byte aligned if `vector`.
__device__ inline void store_quad(__nv_bfloat16* to, float4 quad, uint64_t left, bool vector) {
  const Bf16Quad rounded = {__floats2bfloat162_rn(quad.x, quad.y),
                            __floats2bfloat162_rn(quad.z, quad.w)};
  if (vector && left >= kQuad) {
    *reinterpret_cast<Bf16Quad*>(to) = rounded;
    return;
  }
  to[0] = rounded.low.x;
  if (left > 1) to[1] = rounded.low.y;
  if (left > 2) to[2] = rounded.high.x;
  if (left > 3) to[3] = rounded.high.y;
}

// Four bf16 as floats. Requires: all four exist, `from` is 8-byte aligned.
__device__ inline float4 load_whole_quad(const __nv_bfloat16* from) {
  const Bf16Quad quad = *reinterpret_cast<const Bf16Quad*>(from);
  const float2 low = __bfloat1622float2(quad.low);
  const float2 high = __bfloat1622float2(quad.high);
  return {low.x, low.y, high.x, high.y};
}
__device__ inline float4 load_whole_quad(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

}  // namespace spin::backend::cuda
