// SPDX-License-Identifier: Apache-2.0
// The operations of Ops written down once more, in double and without any cleverness, and bounds on
// what float arithmetic may differ from them. Tests only. Thread: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layout/dtype.h"

namespace spin::testing {

// Unit roundoff of float: half the distance from 1 to the next float.
inline constexpr double kFloatRoundoff = 1.0 / (1 << 24);

// A dense row-major matrix.
struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<float> values;  // [rows, cols]

  Matrix() = default;
  Matrix(int64_t r, int64_t c) : rows(r), cols(c), values(static_cast<size_t>(r * c)) {}
  float& at(int64_t r, int64_t c) { return values[static_cast<size_t>(r * cols + c)]; }
  float at(int64_t r, int64_t c) const { return values[static_cast<size_t>(r * cols + c)]; }
};

// A value and how far a float computation of it may be off.
struct Bounded {
  double value = 0;
  double tolerance = 0;
};

// [rows, cols] of bounded values.
struct BoundedMatrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<Bounded> values;

  BoundedMatrix(int64_t r, int64_t c) : rows(r), cols(c), values(static_cast<size_t>(r * c)) {}
  Bounded& at(int64_t r, int64_t c) { return values[static_cast<size_t>(r * cols + c)]; }
};

// Uniform in [-1, 1), from a fixed generator.
Matrix random_matrix(int64_t rows, int64_t cols, uint64_t seed);

// `value` as it is after a round trip through `dtype`.
float rounded(float value, layout::DType dtype);

// k products summed in any order: error <= (k + 1) u sum |x w|.
BoundedMatrix reference_matmul(
    const Matrix& x, const Matrix& w, layout::DType dtype, const Matrix* bias, const Matrix* added);

BoundedMatrix reference_rms_norm(const Matrix& x, const Matrix& weight, float epsilon);

BoundedMatrix reference_rope(const Matrix& x,
                             int64_t head_dim,
                             std::span<const uint32_t> positions,
                             std::span<const float> inv_freq,
                             float factor);

BoundedMatrix reference_silu_mul(const Matrix& gate_up);

// Causal attention of the last q.rows tokens of a sequence whose keys and values are k and v
// ([tokens, kv_heads * head_dim]), rounded to `dtype`.
BoundedMatrix reference_attention(const Matrix& q,
                                  const Matrix& k,
                                  const Matrix& v,
                                  int64_t kv_heads,
                                  int64_t head_dim,
                                  layout::DType dtype,
                                  float scale);

}  // namespace spin::testing
