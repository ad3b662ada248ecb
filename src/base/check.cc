// SPDX-License-Identifier: Apache-2.0
#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace spin::base {

void check_failed(const char* expression, const char* file, int line) {
  std::fprintf(stderr, "spin: check failed: %s (%s:%d)\n", expression, file, line);
  std::abort();
}

}  // namespace spin::base
