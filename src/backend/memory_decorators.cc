// SPDX-License-Identifier: Apache-2.0
#include "backend/memory_decorators.h"

#include <string>

#include "base/checked_math.h"

namespace spin::backend {

Result<void*> LimitingMemoryResource::allocate(size_t bytes, size_t alignment) {
  uint64_t used = in_use_.load(std::memory_order_relaxed);
  do {
    const auto sum = base::checked_add<uint64_t>(used, bytes);
    if (!sum || *sum > limit_) {
      return Status(StatusCode::kResourceExhausted, "asked for " + std::to_string(bytes) +
                                                        " bytes, " + std::to_string(limit_ - used) +
                                                        " of " + std::to_string(limit_) +
                                                        " are left");
    }
  } while (!in_use_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  auto pointer = upstream_.allocate(bytes, alignment);
  if (!pointer.ok()) in_use_.fetch_sub(bytes, std::memory_order_relaxed);
  return pointer;
}

void LimitingMemoryResource::deallocate(void* pointer, size_t bytes, size_t alignment) {
  upstream_.deallocate(pointer, bytes, alignment);
  in_use_.fetch_sub(bytes, std::memory_order_relaxed);
}

Result<void*> CountingMemoryResource::allocate(size_t bytes, size_t alignment) {
  SPIN_ASSIGN_OR_RETURN(void* pointer, upstream_.allocate(bytes, alignment));
  const uint64_t used = in_use_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  uint64_t peak = peak_.load(std::memory_order_relaxed);
  while (peak < used && !peak_.compare_exchange_weak(peak, used, std::memory_order_relaxed)) {
  }
  allocations_.fetch_add(1, std::memory_order_relaxed);
  live_.fetch_add(1, std::memory_order_relaxed);
  return pointer;
}

void CountingMemoryResource::deallocate(void* pointer, size_t bytes, size_t alignment) {
  upstream_.deallocate(pointer, bytes, alignment);
  in_use_.fetch_sub(bytes, std::memory_order_relaxed);
  live_.fetch_sub(1, std::memory_order_relaxed);
}

Result<void*> FailingMemoryResource::allocate(size_t bytes, size_t alignment) {
  uint64_t left = countdown_.load(std::memory_order_relaxed);
  while (left != 0 &&
         !countdown_.compare_exchange_weak(left, left - 1, std::memory_order_relaxed)) {
  }
  if (left == 1) {
    failed_.store(true, std::memory_order_relaxed);
    return Status(StatusCode::kResourceExhausted,
                  "injected failure of an allocation of " + std::to_string(bytes) + " bytes");
  }
  return upstream_.allocate(bytes, alignment);
}

}  // namespace spin::backend
