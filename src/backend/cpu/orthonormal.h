// SPDX-License-Identifier: Apache-2.0
// Orthonormal bases by Householder reflections. Thread: pure function.
#pragma once

#include <cstdint>
#include <span>

namespace spin::backend::cpu {

// Replaces the columns of y by an orthonormal basis of a space that holds them: Q of y = Q R. Where
// columns depend on each other the basis is still orthonormal to double precision.
// y: [cols][rows], column-major, cols <= rows; scratch: as much and cols more.
void orthonormalize(int64_t rows, int64_t cols, std::span<double> y, std::span<double> scratch);

}  // namespace spin::backend::cpu
