// SPDX-License-Identifier: Apache-2.0
// CPU time, so that a busy machine does not fail a test of speed. Tests only.
#pragma once

namespace spin::testing {

// Seconds of CPU time that the calling thread has used so far.
double cpu_seconds();

}  // namespace spin::testing
