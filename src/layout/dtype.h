// SPDX-License-Identifier: Apache-2.0
// Element types of tensors that kernels see. Thread: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace spin::layout {

enum class DType : uint8_t { kF32, kBF16 };

constexpr size_t dtype_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

constexpr std::string_view dtype_name(DType dtype) {
  return dtype == DType::kF32 ? "float32" : "bfloat16";
}

}  // namespace spin::layout
