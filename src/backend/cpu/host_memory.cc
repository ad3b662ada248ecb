// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/host_memory.h"

#include <algorithm>
#include <cstdlib>

#include <sys/mman.h>

#include "base/check.h"
#include "base/checked_math.h"

namespace spin::backend::cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

bool HostMemory::reserve(uint64_t bytes) {
  uint64_t used = in_use_.load(std::memory_order_relaxed);
  while (true) {
    const auto sum = base::checked_add(used, bytes);
    if (!sum || (limit_ != 0 && *sum > limit_)) return false;
    if (in_use_.compare_exchange_weak(used, *sum, std::memory_order_relaxed)) return true;
  }
}

Result<void*> HostMemory::allocate(size_t bytes, size_t alignment) {
  SPIN_CHECK(alignment != 0 && (alignment & (alignment - 1)) == 0);
  if (!reserve(bytes)) {
    const uint64_t used = bytes_in_use();
    return Status(StatusCode::kResourceExhausted,
                  name_ + " memory: asked for " + std::to_string(bytes) + " bytes, " +
                      std::to_string(limit_ - std::min(limit_, used)) + " of " +
                      std::to_string(limit_) + " are left");
  }
  const size_t wanted =
      std::max({alignment, sizeof(void*), bytes >= 2 * kHugePage ? kHugePage : size_t{1}});
  void* pointer = nullptr;
  // One byte at least, so that empty buffers too have an address of their own.
  if (posix_memalign(&pointer, wanted, std::max<size_t>(bytes, 1)) != 0) {
    in_use_.fetch_sub(bytes, std::memory_order_relaxed);
    return Status(StatusCode::kResourceExhausted,
                  name_ + " memory: the system refused " + std::to_string(bytes) + " bytes");
  }
  // Advice only: without huge pages everything works, slower.
  if (wanted == kHugePage) (void)madvise(pointer, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return pointer;
}

void HostMemory::deallocate(void* pointer, size_t bytes, size_t /*alignment*/) {
  std::free(pointer);
  in_use_.fetch_sub(bytes, std::memory_order_relaxed);
}

}  // namespace spin::backend::cpu
