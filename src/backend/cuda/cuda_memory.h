// SPDX-License-Identifier: Apache-2.0
// Memory of one GPU and pinned host memory that it can reach, straight from the driver: slow, and
// both stop the device, so that backend/chunked_memory.h stands in front of them.
// Thread: thread-safe.
#pragma once

#include <atomic>
#include <cstdint>

#include "backend/device.h"

namespace spin::backend::cuda {

class DeviceMemory final : public MemoryResource {
 public:
  // `limit_bytes` 0: what the GPU has.
  DeviceMemory(int ordinal, uint64_t limit_bytes) : ordinal_(ordinal), limit_(limit_bytes) {}

  Result<void*> allocate(size_t bytes, size_t alignment) override;
  void deallocate(void* pointer, size_t bytes, size_t alignment) override;
  uint64_t bytes_in_use() const override { return in_use_.load(std::memory_order_relaxed); }

 private:
  const int ordinal_;
  const uint64_t limit_;
  std::atomic<uint64_t> in_use_ = 0;
};

// Pinned and mapped: kernels read and write it by the host's addresses.
class PinnedMemory final : public MemoryResource {
 public:
  explicit PinnedMemory(int ordinal) : ordinal_(ordinal) {}

  Result<void*> allocate(size_t bytes, size_t alignment) override;
  void deallocate(void* pointer, size_t bytes, size_t alignment) override;
  uint64_t bytes_in_use() const override { return in_use_.load(std::memory_order_relaxed); }

 private:
  const int ordinal_;
  std::atomic<uint64_t> in_use_ = 0;
};

}  // namespace spin::backend::cuda
