// SPDX-License-Identifier: Apache-2.0
// The CPU backend's memory: the C library's allocator with a bound and a count. Big blocks ask for
// huge pages: streamed weights touch a new 4 KiB page every 100 ns otherwise.
// Thread: thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "backend/device.h"

namespace spin::backend::cpu {

class HostMemory final : public MemoryResource {
 public:
  // `limit_bytes` 0: no bound. `name` is used in messages: "fast", "host".
  HostMemory(std::string_view name, uint64_t limit_bytes) : name_(name), limit_(limit_bytes) {}

  Result<void*> allocate(size_t bytes, size_t alignment) override;
  void deallocate(void* pointer, size_t bytes, size_t alignment) override;
  uint64_t bytes_in_use() const override { return in_use_.load(std::memory_order_relaxed); }

 private:
  bool reserve(uint64_t bytes);

  const std::string name_;
  const uint64_t limit_;
  std::atomic<uint64_t> in_use_ = 0;
};

}  // namespace spin::backend::cpu
