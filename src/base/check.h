// SPDX-License-Identifier: Apache-2.0
// Assertions about our own code. User input never reaches a CHECK: bad input is a Status.
// Thread: any.
#pragma once

namespace spin::base {

// Prints the expression and its place to stderr and aborts.
[[noreturn]] void check_failed(const char* expression, const char* file, int line);

}  // namespace spin::base

// Always on: we are wrong if this does not hold, and going on would corrupt something.
#define SPIN_CHECK(expr) \
  (static_cast<bool>(expr) ? void(0) : ::spin::base::check_failed(#expr, __FILE__, __LINE__))

// On in debug and sanitizer builds only: for hot paths.
#ifdef NDEBUG
#define SPIN_DCHECK(expr) (true ? void(0) : void(expr))
#else
#define SPIN_DCHECK(expr) SPIN_CHECK(expr)
#endif
