// SPDX-License-Identifier: Apache-2.0
// A loop over independent pieces that wakes other threads only when that pays: a futex wake-up
// costs 5 to 50 us, as much as copying some hundred KiB.
// Thread: as base::ThreadPool::parallel_for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/thread_pool.h"

namespace spin::backend::cpu {

// What is copied faster by one thread.
inline constexpr uint64_t kSmallBytes = 64 << 10;

// Calls body(index) for every index < count, on all threads if the work is large.
template <typename Body>
void loop(base::ThreadPool& threads, size_t count, bool is_large, const Body& body) {
  if (is_large) {
    threads.parallel_for(count, [&body](size_t i, uint32_t) { body(i); });
  } else {
    for (size_t i = 0; i < count; ++i) body(i);
  }
}

}  // namespace spin::backend::cpu
