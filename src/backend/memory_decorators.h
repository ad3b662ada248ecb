// SPDX-License-Identifier: Apache-2.0
// Memory resources around another one: they limit, count and fail. All pass through to `upstream`,
// which outlives them, and a buffer must be returned to the resource it came from.
// Thread: thread-safe.
#pragma once

#include <atomic>
#include <cstdint>

#include "backend/device.h"

namespace spin::backend {

// Refuses what would bring the bytes in use above a limit.
class LimitingMemoryResource final : public MemoryResource {
 public:
  LimitingMemoryResource(MemoryResource& upstream, uint64_t limit_bytes)
      : upstream_(upstream), limit_(limit_bytes) {}

  Result<void*> allocate(size_t bytes, size_t alignment) override;
  void deallocate(void* pointer, size_t bytes, size_t alignment) override;
  uint64_t bytes_in_use() const override { return in_use_.load(std::memory_order_relaxed); }
  uint64_t limit_bytes() const { return limit_; }

 private:
  MemoryResource& upstream_;
  const uint64_t limit_;
  std::atomic<uint64_t> in_use_ = 0;
};

// Keeps count of allocations and the highest use.
class CountingMemoryResource final : public MemoryResource {
 public:
  explicit CountingMemoryResource(MemoryResource& upstream) : upstream_(upstream) {}

  Result<void*> allocate(size_t bytes, size_t alignment) override;
  void deallocate(void* pointer, size_t bytes, size_t alignment) override;
  uint64_t bytes_in_use() const override { return in_use_.load(std::memory_order_relaxed); }

  uint64_t peak_bytes() const { return peak_.load(std::memory_order_relaxed); }
  // Successful allocations so far, and those not yet returned.
  uint64_t allocations() const { return allocations_.load(std::memory_order_relaxed); }
  uint64_t live_allocations() const { return live_.load(std::memory_order_relaxed); }

 private:
  MemoryResource& upstream_;
  std::atomic<uint64_t> in_use_ = 0;
  std::atomic<uint64_t> peak_ = 0;
  std::atomic<uint64_t> allocations_ = 0;
  std::atomic<uint64_t> live_ = 0;
};

// Fails one allocation: the `fail_at`-th from now, counted from 1; 0 fails none. A test calls the
// code under test with 1, 2, 3, ... until it passes, and so sees every failure path.
class FailingMemoryResource final : public MemoryResource {
 public:
  explicit FailingMemoryResource(MemoryResource& upstream, uint64_t fail_at = 0)
      : upstream_(upstream), countdown_(fail_at) {}

  Result<void*> allocate(size_t bytes, size_t alignment) override;
  void deallocate(void* pointer, size_t bytes, size_t alignment) override {
    upstream_.deallocate(pointer, bytes, alignment);
  }
  uint64_t bytes_in_use() const override { return upstream_.bytes_in_use(); }

  void fail_at(uint64_t nth) { countdown_.store(nth, std::memory_order_relaxed); }
  // Whether the failure has been delivered.
  bool has_failed() const { return failed_.load(std::memory_order_relaxed); }

 private:
  MemoryResource& upstream_;
  std::atomic<uint64_t> countdown_;
  std::atomic<bool> failed_ = false;
};

}  // namespace spin::backend
