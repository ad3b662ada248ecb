// SPDX-License-Identifier: Apache-2.0
// Seeds that nobody chose. Thread: thread-safe.
#pragma once

#include <cstdint>

namespace spin::base {

// From the system's source of entropy; the time, where there is none.
uint64_t system_entropy();

}  // namespace spin::base
