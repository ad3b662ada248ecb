// SPDX-License-Identifier: Apache-2.0
#include "tests/io/allocation_watch.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include <malloc.h>

namespace {

thread_local bool watching = false;
thread_local size_t largest_bytes = 0;
thread_local ptrdiff_t live_bytes = 0;
thread_local ptrdiff_t peak_bytes = 0;

void* allocate(size_t size) noexcept {
  if (watching) largest_bytes = std::max(largest_bytes, size);
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (watching && memory != nullptr) {
    live_bytes += static_cast<ptrdiff_t>(malloc_usable_size(memory));
    peak_bytes = std::max(peak_bytes, live_bytes);
  }
  return memory;
}

void release(void* memory) noexcept {
  if (watching && memory != nullptr) {
    live_bytes -= static_cast<ptrdiff_t>(malloc_usable_size(memory));
  }
  std::free(memory);
}

}  // namespace

void* operator new(size_t size) {
  if (void* memory = allocate(size)) return memory;
  throw std::bad_alloc();
}
void* operator new[](size_t size) { return operator new(size); }
void* operator new(size_t size, const std::nothrow_t&) noexcept { return allocate(size); }
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return allocate(size); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, size_t) noexcept { release(memory); }
void operator delete[](void* memory, size_t) noexcept { release(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { release(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { release(memory); }

namespace spin::testing {

AllocationWatch::AllocationWatch() {
  largest_bytes = 0;
  live_bytes = 0;
  peak_bytes = 0;
  watching = true;
}

AllocationWatch::~AllocationWatch() { watching = false; }

size_t AllocationWatch::largest() const { return largest_bytes; }

size_t AllocationWatch::peak() const { return static_cast<size_t>(peak_bytes); }

}  // namespace spin::testing
