// SPDX-License-Identifier: Apache-2.0
#include "tests/support/cpu_time.h"

#include <time.h>

namespace spin::testing {

double cpu_seconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace spin::testing
