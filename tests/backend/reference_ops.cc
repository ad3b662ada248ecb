// SPDX-License-Identifier: Apache-2.0
#include "tests/backend/reference_ops.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "base/bf16.h"

namespace spin::testing {
namespace {

constexpr double kU = kFloatRoundoff;
// Vector exp, sqrt and division: a few units each.
constexpr double kFunctionError = 8 * kU;

}  // namespace

Matrix random_matrix(int64_t rows, int64_t cols, uint64_t seed) {
  std::mt19937_64 generator(seed);
  Matrix out(rows, cols);
  for (float& value : out.values) {
    value = static_cast<float>(static_cast<int32_t>(generator() >> 32)) * 0x1p-31f;
  }
  return out;
}

float rounded(float value, layout::DType dtype) {
  return dtype == layout::DType::kF32 ? value : base::to_float(base::to_bf16(value));
}

BoundedMatrix reference_matmul(const Matrix& x,
                               const Matrix& w,
                               layout::DType dtype,
                               const Matrix* bias,
                               const Matrix* added) {
  BoundedMatrix out(x.rows, w.rows);
  Matrix rx = x;
  Matrix rw = w;
  for (float& value : rx.values) value = rounded(value, dtype);
  for (float& value : rw.values) value = rounded(value, dtype);
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t n = 0; n < w.rows; ++n) {
      double sum = 0;
      double magnitude = 0;
      for (int64_t k = 0; k < x.cols; ++k) {
        const double product = static_cast<double>(rx.at(r, k)) * rw.at(n, k);
        sum += product;
        magnitude += std::abs(product);
      }
      if (bias != nullptr) sum += bias->at(0, n);
      if (bias != nullptr) magnitude += std::abs(bias->at(0, n));
      if (added != nullptr) sum += added->at(r, n);
      if (added != nullptr) magnitude += std::abs(added->at(r, n));
      // The smallest normal float stands for products that the bf16 instruction flushes to zero.
      out.at(r, n) = {sum, static_cast<double>(x.cols + 3) * (kU * magnitude + 0x1p-126)};
    }
  }
  return out;
}

BoundedMatrix reference_rms_norm(const Matrix& x, const Matrix& weight, float epsilon) {
  BoundedMatrix out(x.rows, x.cols);
  const int64_t size = weight.cols;
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t first = 0; first < x.cols; first += size) {
      double squares = 0;
      for (int64_t c = first; c < first + size; ++c) {
        squares += static_cast<double>(x.at(r, c)) * x.at(r, c);
      }
      const double factor = 1.0 / std::sqrt(squares / static_cast<double>(size) + epsilon);
      for (int64_t c = first; c < first + size; ++c) {
        const double value = x.at(r, c) * factor * weight.at(0, c - first);
        // A sum of squares is relatively as good as its length; the root halves that.
        const double relative = static_cast<double>(size + 2) / 2 * kU + kFunctionError;
        out.at(r, c) = {value, std::abs(value) * relative + 0x1p-149};
      }
    }
  }
  return out;
}

BoundedMatrix reference_rope(const Matrix& x,
                             int64_t head_dim,
                             std::span<const uint32_t> positions,
                             std::span<const float> inv_freq,
                             float factor) {
  BoundedMatrix out(x.rows, x.cols);
  const int64_t half = head_dim / 2;
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t first = 0; first < x.cols; first += head_dim) {
      for (int64_t i = 0; i < half; ++i) {
        // Exact in long double: 32 bits of position times 24 bits of frequency.
        const long double angle = static_cast<long double>(positions[static_cast<size_t>(r)]) *
                                  inv_freq[static_cast<size_t>(i)];
        const double c = static_cast<double>(std::cos(angle)) * factor;
        const double s = static_cast<double>(std::sin(angle)) * factor;
        const double a = x.at(r, first + i);
        const double b = x.at(r, first + i + half);
        const double tolerance = (std::abs(a) + std::abs(b)) * std::abs(factor) * 4 * kU;
        out.at(r, first + i) = {a * c - b * s, tolerance};
        out.at(r, first + i + half) = {b * c + a * s, tolerance};
      }
    }
  }
  return out;
}

BoundedMatrix reference_silu_mul(const Matrix& gate_up) {
  const int64_t width = gate_up.cols / 2;
  BoundedMatrix out(gate_up.rows, width);
  for (int64_t r = 0; r < gate_up.rows; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      const double gate = gate_up.at(r, c);
      const double value = gate / (1.0 + std::exp(-gate)) * gate_up.at(r, c + width);
      // Below 2^-126 the exponential may be flushed.
      const double flushed = std::abs(gate * gate_up.at(r, c + width)) * 0x1p-125;
      out.at(r, c) = {value, std::abs(value) * (kFunctionError + 4 * kU) + flushed + 0x1p-149};
    }
  }
  return out;
}

BoundedMatrix reference_attention(const Matrix& q,
                                  const Matrix& k,
                                  const Matrix& v,
                                  int64_t kv_heads,
                                  int64_t head_dim,
                                  layout::DType dtype,
                                  float scale) {
  BoundedMatrix out(q.rows, q.cols);
  const int64_t q_heads = q.cols / head_dim;
  const int64_t group = q_heads / kv_heads;
  std::vector<double> scores(static_cast<size_t>(k.rows));
  for (int64_t r = 0; r < q.rows; ++r) {
    const int64_t visible = k.rows - q.rows + r + 1;
    for (int64_t h = 0; h < q_heads; ++h) {
      const int64_t kv_first = h / group * head_dim;
      double max = -INFINITY;
      double score_error = 0;
      for (int64_t j = 0; j < visible; ++j) {
        double score = 0;
        double magnitude = 0;
        for (int64_t d = 0; d < head_dim; ++d) {
          const double product = static_cast<double>(q.at(r, h * head_dim + d)) *
                                 rounded(k.at(j, kv_first + d), dtype);
          score += product;
          magnitude += std::abs(product);
        }
        scores[static_cast<size_t>(j)] = score * scale;
        max = std::max(max, score * scale);
        score_error = std::max(
            score_error, std::abs(scale) * magnitude * static_cast<double>(head_dim + 2) * kU);
      }
      double total = 0;
      for (int64_t j = 0; j < visible; ++j) {
        double& score = scores[static_cast<size_t>(j)];
        score = std::exp(score - max);
        total += score;
      }
      // Every weight is off by its score's error (also through the maximum), by exp and by the
      // rescalings, then two sums of `visible` terms.
      const double relative =
          2 * (2 * score_error + kFunctionError) + 2 * static_cast<double>(visible + 8) * kU;
      for (int64_t d = 0; d < head_dim; ++d) {
        double sum = 0;
        double magnitude = 0;
        for (int64_t j = 0; j < visible; ++j) {
          const double term =
              scores[static_cast<size_t>(j)] * rounded(v.at(j, kv_first + d), dtype);
          sum += term;
          magnitude += std::abs(term);
        }
        out.at(r, h * head_dim + d) = {sum / total, magnitude / total * relative + 0x1p-126};
      }
    }
  }
  return out;
}

}  // namespace spin::testing
