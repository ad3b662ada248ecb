// SPDX-License-Identifier: Apache-2.0
// Prefix sums and sorting by all threads of a block. All of them call, with whole warps.
#pragma once

#include <cstdint>

#include "backend/cuda/kernel_support.cuh"

namespace spin::backend::cuda {

// What a scan over a block keeps between warps; in shared memory. Scans may follow each other.
struct BlockScan {
  uint32_t warps[kWarp];
};

// Of the threads before this one; `total`: of all.
struct Scanned {
  uint32_t before = 0;
  uint32_t total = 0;
};

// combine: associative, with 0 as its neutral element.
template <typename Combine>
__device__ inline Scanned block_scan(uint32_t x, BlockScan& shared, const Combine& combine) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t warp = threadIdx.x / kWarp;
  const auto scan_warp = [&](uint32_t value) {
#pragma unroll
    for (uint32_t step = 1; step < kWarp; step *= 2) {
      const uint32_t other = __shfl_up_sync(kFullMask, value, step);
      if (lane >= step) value = combine(value, other);
    }
    return value;
  };
  const auto exclusive = [&](uint32_t inclusive) {
    const uint32_t other = __shfl_up_sync(kFullMask, inclusive, 1);
    return lane == 0 ? 0 : other;
  };
  const uint32_t mine = scan_warp(x);
  __syncthreads();  // an earlier scan has been read
  if (lane == kWarp - 1) shared.warps[warp] = mine;
  __syncthreads();
  const uint32_t all = scan_warp(lane < blockDim.x / kWarp ? shared.warps[lane] : 0);
  const uint32_t before_warp = __shfl_sync(kFullMask, exclusive(all), warp);
  return {combine(before_warp, exclusive(mine)), __shfl_sync(kFullMask, all, kWarp - 1)};
}

__device__ inline Scanned block_sum(uint32_t x, BlockScan& shared) {
  return block_scan(x, shared, [](uint32_t a, uint32_t b) { return a + b; });
}

__device__ inline Scanned block_max(uint32_t x, BlockScan& shared) {
  return block_scan(x, shared, [](uint32_t a, uint32_t b) { return max(a, b); });
}

// ---- Bitonic sorting of distinct or equal 64-bit values, ascending. Counts are powers of two.

// Compares values `stride` apart; runs of `size` values go up and down in turn. `first`: the place
// of values[0] among all that are sorted.
__device__ inline void sort_step(
    uint64_t* values, uint32_t count, uint32_t first, uint32_t size, uint32_t stride) {
  for (uint32_t t = threadIdx.x; t < count / 2; t += blockDim.x) {
    const uint32_t i = 2 * t - (t & (stride - 1));
    const uint64_t a = values[i];
    const uint64_t b = values[i + stride];
    const bool ascends = ((first + i) & size) == 0;
    if ((a > b) == ascends) {
      values[i] = b;
      values[i + stride] = a;
    }
  }
}

// The steps of runs of `from` up to `to` values that stay within these. Values are visible to all
// threads before and after.
__device__ inline void sort_within(
    uint64_t* values, uint32_t count, uint32_t first, uint32_t from, uint32_t to) {
  bool wide = true;  // the step before crossed warps
  for (uint32_t size = from; size <= to; size *= 2) {
    for (uint32_t stride = min(size, count) / 2; stride > 0; stride /= 2) {
      // With strides up to 32 a warp stays within its own 64 values.
      if (wide || stride > kWarp) {
        __syncthreads();
      } else {
        __syncwarp();
      }
      wide = stride > kWarp;
      sort_step(values, count, first, size, stride);
    }
  }
  __syncthreads();
}

// Sorts values [count] in memory of any kind by way of `shared` [shared_count].
__device__ inline void sort_by_parts(uint64_t* values,
                                     uint32_t count,
                                     uint64_t* shared,
                                     uint32_t shared_count) {
  const auto sort_parts = [&](uint32_t from, uint32_t to) {
    for (uint32_t first = 0; first < count; first += shared_count) {
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < shared_count; i += blockDim.x) {
        shared[i] = values[first + i];
      }
      sort_within(shared, shared_count, first, from, to);
      for (uint32_t i = threadIdx.x; i < shared_count; i += blockDim.x) {
        values[first + i] = shared[i];
      }
    }
    __syncthreads();
  };
  sort_parts(2, shared_count);
  for (uint32_t size = 2 * shared_count; size <= count; size *= 2) {
    for (uint32_t stride = size / 2; stride >= shared_count; stride /= 2) {
      __syncthreads();
      sort_step(values, count, 0, size, stride);
    }
    sort_parts(size, size);
  }
}

__device__ inline uint32_t power_of_two(uint32_t least) {
  return least <= 1 ? 1 : 1u << (32 - __clz(least - 1));
}

}  // namespace spin::backend::cuda
