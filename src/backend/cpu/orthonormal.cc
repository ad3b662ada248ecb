// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/orthonormal.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace spin::backend::cpu {
namespace {

double dot(const double* a, const double* b, int64_t n) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += a[i + j] * b[i + j];
  }
  for (; i < n; ++i) sums[0] += a[i] * b[i];
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

// x -= factor * v
void subtract(double* x, double factor, const double* v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] -= factor * v[i];
}

// Applies I - beta v v^T to x.
void reflect(double* x, double beta, const double* v, int64_t n) {
  if (beta != 0) subtract(x, beta * dot(v, x, n), v, n);
}

}  // namespace

void orthonormalize(int64_t rows, int64_t cols, std::span<double> y, std::span<double> scratch) {
  SPIN_CHECK(cols <= rows && y.size() >= static_cast<size_t>(rows * cols));
  SPIN_CHECK(scratch.size() >= static_cast<size_t>((rows + 1) * cols));
  double* reflectors = scratch.data();  // reflector k: [k, rows) of its column
  double* betas = reflectors + rows * cols;
  for (int64_t k = 0; k < cols; ++k) {
    const int64_t n = rows - k;
    double* v = reflectors + k * rows + k;
    double* column = y.data() + k * rows + k;
    std::copy_n(column, n, v);
    const double norm = std::sqrt(dot(v, v, n));
    // v = x + sign(x_0) |x| e_0 cannot cancel.
    v[0] += v[0] < 0 ? -norm : norm;
    const double length = dot(v, v, n);
    betas[k] = length > 0 ? 2 / length : 0;
    for (int64_t j = k; j < cols; ++j) reflect(y.data() + j * rows + k, betas[k], v, n);
  }
  // Q = H_0 H_1 ... applied to the first columns of the unit matrix, last reflection first; column
  // j is a unit vector until reflection j.
  std::fill_n(y.data(), rows * cols, 0.0);
  for (int64_t k = cols - 1; k >= 0; --k) {
    y[static_cast<size_t>(k * rows + k)] = 1;
    const double* v = reflectors + k * rows + k;
    for (int64_t j = k; j < cols; ++j) reflect(y.data() + j * rows + k, betas[k], v, rows - k);
  }
}

}  // namespace spin::backend::cpu
