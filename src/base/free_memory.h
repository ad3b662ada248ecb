// SPDX-License-Identifier: Apache-2.0
// Gives freed heap back to the system. The allocator keeps what a burst of small blocks took, per
// thread, until the top of its heap is free, which may be never. Thread: thread-safe.
#pragma once

#include <cstdlib>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace spin::base {

// Takes milliseconds; for use after work that had hundreds of megabytes.
inline void return_freed_memory() {
#if defined(__GLIBC__)
  ::malloc_trim(0);
#endif
}

}  // namespace spin::base
