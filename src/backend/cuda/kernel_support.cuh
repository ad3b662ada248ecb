// SPDX-License-Identifier: Apache-2.0
// What kernels share: items as kernel arguments, element types, reductions, faults.
//
// Items travel as arguments, so that nothing has to live until a kernel has run and a launch is one
// call: launch_packs() cuts a span into packs that fit the argument space.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "backend/cuda/cuda_stream.h"
#include "layout/dtype.h"

namespace spin::backend::cuda {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kFullMask = 0xFFFF'FFFFu;

// ---- Items as arguments.

inline constexpr size_t kPackBytes = 3584;  // of the 4 KiB that every driver takes

template <typename Item>
struct ItemPack {
  static_assert(std::is_trivially_copyable_v<Item> && sizeof(Item) <= kPackBytes);
  static constexpr uint32_t kMost = static_cast<uint32_t>(kPackBytes / sizeof(Item));

  // Bytes, because a kernel argument must not need a constructor.
  alignas(Item) unsigned char bytes[kMost * sizeof(Item)];

  const __device__ Item& operator[](uint32_t i) const {
    return reinterpret_cast<const Item*>(bytes)[i];
  }
};

// Calls launch(pack, count, first) for items [first, first + count), in order. In the kernel the
// parameter is `const __grid_constant__ ItemPack<Item>`.
template <typename Item, typename Launch>
void launch_packs(std::span<const Item> items, Launch&& launch) {
  for (size_t first = 0; first < items.size(); first += ItemPack<Item>::kMost) {
    const size_t count = std::min<size_t>(ItemPack<Item>::kMost, items.size() - first);
    ItemPack<Item> pack;
    std::memcpy(pack.bytes, items.data() + first, count * sizeof(Item));
    launch(pack, static_cast<uint32_t>(count), first);
  }
}

// Calls launch(run) for each longest run of items that are all same(first of the run, item).
template <typename Item, typename Same, typename Launch>
void for_runs(std::span<const Item> items, Same&& same, Launch&& launch) {
  while (!items.empty()) {
    size_t count = 1;
    while (count < items.size() && same(items.front(), items[count])) ++count;
    launch(items.first(count));
    items = items.subspan(count);
  }
}

inline unsigned blocks_for(uint64_t work, unsigned per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);
}

// ---- Faults.

// Keeps an earlier one. Plain accesses: the bus has no atomic operations on host memory, and which
// of several faults stays does not matter. The stream reads it when it is idle.
__device__ inline void report_fault(uint32_t* fault, KernelFault what) {
  volatile uint32_t* const word = fault;
  if (*word == static_cast<uint32_t>(KernelFault::kNone)) *word = static_cast<uint32_t>(what);
}

// ---- Elements. bf16 rounding is to nearest even, as base/bf16.h.

__device__ inline float load_element(const void* data, layout::DType dtype, uint64_t i) {
  return dtype == layout::DType::kF32
             ? static_cast<const float*>(data)[i]
             : __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
}

__device__ inline void store_element(void* data, layout::DType dtype, uint64_t i, float value) {
  if (dtype == layout::DType::kF32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
  }
}

// ---- Reductions over a warp; every lane gets the result, in the same order of additions.

__device__ inline float warp_sum(float x) {
  for (unsigned step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullMask, x, step);
  return x;
}

__device__ inline float warp_max(float x) {
  for (unsigned step = kWarp / 2; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, step));
  }
  return x;
}

// ln(e^a + e^b), also where one or both are -infinity.
__device__ inline float log_add(float a, float b) {
  const float most = fmaxf(a, b);
  if (most == -INFINITY) return most;
  return most + log1pf(expf(fminf(a, b) - most));
}

}  // namespace spin::backend::cuda
