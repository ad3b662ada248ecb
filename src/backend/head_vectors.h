// SPDX-License-Identifier: Apache-2.0
// Arrays of vectors per KV head: summaries, factors. Thread: plain data.
// Lifetime: the memory outlives the operations that use it.
#pragma once

#include <cstdint>

#include "layout/dtype.h"

namespace spin::backend {

// Vectors per KV head: vector i of head h at data + (h * head_stride + i * width) elements.
struct HeadVectors {
  void* data = nullptr;
  layout::DType dtype = layout::DType::kF32;
  uint32_t width = 0;
  uint64_t head_stride = 0;  // elements, >= most vectors * width
};

}  // namespace spin::backend
