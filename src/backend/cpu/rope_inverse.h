// SPDX-License-Identifier: Apache-2.0
// Stored keys as floats, and their rotation undone. Thread: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "backend/cpu/kernels.h"
#include "backend/ops.h"
#include "base/bf16.h"
#include "layout/dtype.h"

namespace spin::backend::cpu {

// Largest head whose table is kept on the stack.
inline constexpr int64_t kLargestRopeDim = 1024;

inline void load_floats(const void* from, layout::DType dtype, int64_t count, float* to) {
  if (dtype == layout::DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const auto* in = static_cast<const base::Bf16*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = base::to_float(in[i]);
}

inline void store_floats(const float* from, layout::DType dtype, int64_t count, void* to) {
  if (dtype == layout::DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  auto* out = static_cast<base::Bf16*>(to);
  for (int64_t i = 0; i < count; ++i) out[i] = base::to_bf16(from[i]);
}

// Table that makes kernels.rope_head() undo the rotation at `position`. RoPE multiplies by
// f (cos a, sin a), so its inverse multiplies by (cos a, -sin a) / f. cos, sin: [half].
inline void inverse_rope_table(
    const KernelSet& kernels, uint32_t position, const RopeParams& rope, float* cos, float* sin) {
  const auto half = static_cast<int64_t>(rope.inv_freq.size());
  kernels.rope_table(position, rope.inv_freq.data(), half, 1.0f / rope.attention_factor, cos, sin);
  for (int64_t i = 0; i < half; ++i) sin[i] = -sin[i];
}

}  // namespace spin::backend::cpu
