// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/cuda_memory.h"

#include <algorithm>
#include <string>

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_status.h"
#include "base/check.h"

namespace spin::backend::cuda {
namespace {

// What cudaMalloc and cudaHostAlloc promise at least.
constexpr size_t kDriverAlignment = 256;

Status refused(const char* kind, size_t bytes, uint64_t left) {
  return Status(StatusCode::kResourceExhausted, std::string(kind) + " memory: asked for " +
                                                    std::to_string(bytes) + " bytes, " +
                                                    std::to_string(left) + " are left");
}

// The GPU of this thread from now on.
Status select(int ordinal) { return cuda_status(cudaSetDevice(ordinal), "select the GPU"); }

}  // namespace

Result<void*> DeviceMemory::allocate(size_t bytes, size_t alignment) {
  SPIN_CHECK(alignment != 0 && (alignment & (alignment - 1)) == 0);
  SPIN_CHECK(alignment <= kDriverAlignment);
  SPIN_RETURN_IF_ERROR(select(ordinal_));
  uint64_t used = in_use_.load(std::memory_order_relaxed);
  do {
    const uint64_t left = limit_ - std::min(limit_, used);
    if (limit_ != 0 && bytes > left) return refused("fast", bytes, left);
  } while (!in_use_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  void* pointer = nullptr;
  const cudaError_t error = cudaMalloc(&pointer, std::max<size_t>(bytes, 1));
  if (error == cudaSuccess) return pointer;
  in_use_.fetch_sub(bytes, std::memory_order_relaxed);
  (void)cudaGetLastError();  // not sticky: the next call starts clean
  size_t free = 0;
  size_t total = 0;
  if (error == cudaErrorMemoryAllocation && cudaMemGetInfo(&free, &total) == cudaSuccess) {
    return refused("fast", bytes, free);
  }
  return cuda_status(error, "allocate fast memory");
}

void DeviceMemory::deallocate(void* pointer, size_t bytes, size_t /*alignment*/) {
  // A failed GPU refuses; its memory goes with the process.
  if (select(ordinal_).ok()) (void)cudaFree(pointer);
  in_use_.fetch_sub(bytes, std::memory_order_relaxed);
}

Result<void*> PinnedMemory::allocate(size_t bytes, size_t alignment) {
  SPIN_CHECK(alignment != 0 && (alignment & (alignment - 1)) == 0);
  SPIN_CHECK(alignment <= 4096);  // pages are pinned whole
  SPIN_RETURN_IF_ERROR(select(ordinal_));
  void* pointer = nullptr;
  const cudaError_t error = cudaHostAlloc(&pointer, std::max<size_t>(bytes, 1),
                                          cudaHostAllocPortable | cudaHostAllocMapped);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return cuda_status(error, "pin " + std::to_string(bytes) + " bytes of host memory");
  }
  in_use_.fetch_add(bytes, std::memory_order_relaxed);
  return pointer;
}

void PinnedMemory::deallocate(void* pointer, size_t bytes, size_t /*alignment*/) {
  if (select(ordinal_).ok()) (void)cudaFreeHost(pointer);
  in_use_.fetch_sub(bytes, std::memory_order_relaxed);
}

}  // namespace spin::backend::cuda
