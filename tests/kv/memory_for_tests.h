// SPDX-License-Identifier: Apache-2.0
// Memory resources for tests of src/kv: plain heap memory, and address space far larger than the
// machine's memory of which only touched pages exist. Thread: external synchronisation.
#pragma once

#include <cstdint>
#include <cstdlib>

#include <sys/mman.h>

#include "backend/device.h"

namespace spin::testing {

class HeapMemory : public backend::MemoryResource {
 public:
  Result<void*> allocate(size_t bytes, size_t alignment) override {
    if (refuse) return Status(StatusCode::kResourceExhausted, "no memory in this test");
    void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (memory == nullptr) return Status(StatusCode::kResourceExhausted, "out of memory");
    in_use_ += bytes;
    return memory;
  }
  void deallocate(void* pointer, size_t bytes, size_t /*alignment*/) override {
    std::free(pointer);
    in_use_ -= bytes;
  }
  uint64_t bytes_in_use() const override { return in_use_; }

  bool refuse = false;

 private:
  uint64_t in_use_ = 0;
};

class SparseMemory : public backend::MemoryResource {
 public:
  Result<void*> allocate(size_t bytes, size_t /*alignment*/) override {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return Status(StatusCode::kResourceExhausted, "no address space");
    return memory;
  }
  void deallocate(void* pointer, size_t bytes, size_t /*alignment*/) override {
    munmap(pointer, bytes);
  }
  uint64_t bytes_in_use() const override { return 0; }
};

}  // namespace spin::testing
