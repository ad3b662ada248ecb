// SPDX-License-Identifier: Apache-2.0
#include "tests/backend/gate_conformance.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "backend/sparse_ops.h"
#include "base/bf16.h"

namespace spin::testing {
namespace {

using backend::Pooling;
using layout::DType;

constexpr double kU = kFloatRoundoff;

std::vector<GateShape> shapes() {
  std::vector<GateShape> out;
  out.push_back({{2, 2, 64, 8, DType::kF32}, 64, 32});
  out.push_back({{1, 8, 128, 16, DType::kBF16}, 128, 64});
  out.push_back({{3, 1, 96, 8, DType::kF32}, 48, 24, {Pooling::kMean}});
  out.push_back({{2, 3, 64, 4, DType::kBF16}, 16, 4, {Pooling::kMin, Pooling::kMax}, false});
  out.push_back({{1, 2, 16, 8, DType::kF32}, 80, 8, {Pooling::kMean, Pooling::kMax}, true, false});
  out.back().factor = 1.25f;
  out.push_back({{2, 2, 64, 8, DType::kF32}, 64, 16});
  out.back().factor = 1.5f;
  return out;
}

std::vector<float> frequencies(int64_t dim) {
  std::vector<float> out;
  for (int64_t i = 0; i < dim / 2; ++i) {
    out.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(dim)));
  }
  return out;
}

using Vector = std::vector<Bounded>;

// Rotation by `position`, or its inverse; the float code's error is that of reference_rope().
Vector rotated(
    const Vector& x, double position, std::span<const float> freq, double factor, bool inverse) {
  const size_t half = x.size() / 2;
  Vector out(x.size());
  const double size = inverse ? 1.0 / factor : factor;
  for (size_t i = 0; i < half; ++i) {
    const double angle = position * freq[i];
    const double c = std::cos(angle) * size;
    const double s = (inverse ? -1 : 1) * std::sin(angle) * size;
    const Bounded a = x[i];
    const Bounded b = x[i + half];
    const double error = (a.tolerance + b.tolerance) * size * (1 + 8 * kU) +
                         (std::abs(a.value) + std::abs(b.value)) * size * 6 * kU;
    out[i] = {a.value * c - b.value * s, error};
    out[i + half] = {b.value * c + a.value * s, error};
  }
  return out;
}

// x . w, w: rows [first, first + x.size()) of a matrix.
Vector projected(const Vector& x, const Matrix& w, int64_t first) {
  Vector out(static_cast<size_t>(w.cols));
  for (int64_t j = 0; j < w.cols; ++j) {
    double sum = 0, size = 0, error = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double weight = w.at(first + static_cast<int64_t>(i), j);
      sum += x[i].value * weight;
      size += std::abs(x[i].value * weight);
      error += x[i].tolerance * std::abs(weight);
    }
    out[static_cast<size_t>(j)] = {
        sum, error * (1 + 1e-3) + (static_cast<double>(x.size()) + 1) * kU * size};
  }
  return out;
}

Vector normed(const Vector& x, const Matrix& weight, double epsilon) {
  double squares = 0, error = 0;
  for (const Bounded& e : x) {
    squares += e.value * e.value;
    error += 2 * std::abs(e.value) * e.tolerance + e.tolerance * e.tolerance;
  }
  const auto n = static_cast<double>(x.size());
  const double factor = 1 / std::sqrt(squares / n + epsilon);
  const double relative = error / squares / 2 + (n + 6) / 2 * kU;
  Vector out(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double w = weight.at(0, static_cast<int64_t>(i));
    out[i] = {
        x[i].value * factor * w,
        std::abs(w) * factor * (x[i].tolerance + std::abs(x[i].value) * relative) * (1 + 1e-3)};
  }
  return out;
}

Vector pooled(const std::vector<Vector>& keys, Pooling pooling) {
  Vector out = keys.front();
  for (size_t d = 0; d < out.size(); ++d) {
    double sum = 0, size = 0, worst = 0;
    for (const Vector& key : keys) {
      sum += key[d].value;
      size += std::abs(key[d].value);
      worst = std::max(worst, key[d].tolerance);
      if (pooling == Pooling::kMax) out[d].value = std::max(out[d].value, key[d].value);
      if (pooling == Pooling::kMin) out[d].value = std::min(out[d].value, key[d].value);
    }
    const auto n = static_cast<double>(keys.size());
    out[d].tolerance = worst;
    if (pooling == Pooling::kMean) out[d] = {sum / n, worst * (1 + 1e-3) + (n + 2) * kU * size / n};
  }
  return out;
}

Vector exact(const Matrix& m, int64_t row, int64_t first, int64_t count, DType dtype) {
  Vector out;
  for (int64_t i = 0; i < count; ++i) out.push_back({rounded(m.at(row, first + i), dtype), 0});
  return out;
}

Bounded stored(Bounded value, DType dtype) {
  if (dtype == DType::kBF16) {
    value.tolerance += 0x1p-8 * (std::abs(value.value) + value.tolerance);
  }
  return value;
}

}  // namespace

Gate GateConformance::make_gate(const GateShape& shape) {
  const AttentionShape& a = shape.attention;
  const auto poolings = static_cast<int64_t>(shape.order.size());
  Gate gate;
  gate.key = random_matrix(a.kv_heads * poolings * a.head_dim, shape.width, 51);
  gate.query = random_matrix(a.kv_heads * a.group * a.head_dim, shape.width, 52);
  gate.key_norm = random_matrix(1, shape.width, 53);
  gate.query_norm = random_matrix(1, shape.width, 54);
  gate.model_freq = frequencies(a.head_dim);
  if (shape.use_rope) gate.gate_freq = frequencies(shape.width);
  const Matrix* parts[] = {&gate.key, &gate.query, &gate.key_norm, &gate.query_norm};
  for (size_t i = 0; i < 4; ++i) gate.buffers[i] = upload<float>(parts[i]->values);
  gate.weights.key = gate.buffers[0].as<float>();
  gate.weights.query = gate.buffers[1].as<float>();
  if (shape.use_norm) {
    gate.weights.key_norm = gate.buffers[2].as<float>();
    gate.weights.query_norm = gate.buffers[3].as<float>();
  }
  gate.weights.width = shape.width;
  gate.weights.poolings = static_cast<uint32_t>(poolings);
  std::copy(shape.order.begin(), shape.order.end(), gate.weights.order.begin());
  return gate;
}

void GateConformance::bind(Gate& gate, const GateShape& shape) {
  gate.weights.model_rope = {gate.model_freq, shape.factor};
  gate.weights.gate_rope = {gate.gate_freq, shape.factor};
}

layout::PagedTokens GateConformance::view(size_t sequence, uint64_t tokens) {
  return {static_cast<const std::byte*>(pool_.base), geometry_,
          slot_buffers_[sequence].as<uint32_t>(), sequences_[sequence].pages, tokens};
}

Matrix GateConformance::run_keys(const Gate& gate,
                                 const GateShape& shape,
                                 const layout::PagedTokens& tokens,
                                 uint64_t first_position,
                                 uint32_t first,
                                 uint32_t count,
                                 uint32_t offset) {
  const uint32_t stride_vectors = count + 3;
  const DType dtype = shape.attention.dtype;
  const std::vector<unsigned char> nothing(
      geometry_.kv_heads * uint64_t{stride_vectors} * shape.width * layout::dtype_bytes(dtype),
      0xFF);
  const backend::Buffer buffer = upload<unsigned char>(nothing);
  backend::GateKeysItem item;
  item.tokens = tokens;
  item.first_position = first_position;
  item.block_tokens = shape.block_tokens;
  item.first = first;
  item.count = count;
  item.out_first = 2;
  item.position_offset = offset;
  item.out = {buffer.data(), dtype, shape.width, uint64_t{stride_vectors} * shape.width};
  device_->sparse_ops().enqueue_gate_keys({&item, 1}, gate.weights, stream());
  std::vector<unsigned char> bytes(nothing.size());
  stream().enqueue_copy(bytes.data(), buffer.data(), bytes.size());
  const Status status = stream().wait_idle();
  EXPECT_TRUE(status.ok()) << status.to_string();
  Matrix out(int64_t{geometry_.kv_heads} * count, shape.width);
  for (uint64_t h = 0; h < geometry_.kv_heads; ++h) {
    for (uint64_t v = 0; v < stride_vectors; ++v) {
      for (uint64_t j = 0; j < shape.width; ++j) {
        const uint64_t at = ((h * stride_vectors + v) * shape.width + j);
        float value = 0;
        if (dtype == DType::kF32) {
          std::memcpy(&value, &bytes[at * 4], 4);
        } else {
          base::Bf16 half;
          std::memcpy(&half, &bytes[at * 2], 2);
          value = base::to_float(half);
        }
        if (v >= 2 && v < 2 + count) {
          out.at(static_cast<int64_t>(h * count + v - 2), static_cast<int64_t>(j)) = value;
        } else {
          EXPECT_TRUE(std::isnan(value)) << "written outside, vector " << v;
        }
      }
    }
  }
  return out;
}

BoundedMatrix GateConformance::expected_keys(const Gate& gate,
                                             const GateShape& shape,
                                             uint64_t first_position,
                                             uint32_t first,
                                             uint32_t count,
                                             uint32_t offset) {
  const int64_t dim = shape.attention.head_dim;
  BoundedMatrix out(int64_t{geometry_.kv_heads} * count, shape.width);
  for (int64_t h = 0; h < int64_t{geometry_.kv_heads}; ++h) {
    for (uint32_t block = first; block < first + count; ++block) {
      std::vector<Vector> keys;
      for (uint32_t t = 0; t < shape.block_tokens; ++t) {
        const uint64_t token = uint64_t{block} * shape.block_tokens + t;
        const Vector key = exact(sequences_[0].k, static_cast<int64_t>(token), h * dim, dim,
                                 shape.attention.dtype);
        keys.push_back(rotated(key, static_cast<double>(first_position + token), gate.model_freq,
                               shape.factor, true));
      }
      Vector x;
      for (const Pooling pooling : shape.order) {
        const Vector part = pooled(keys, pooling);
        x.insert(x.end(), part.begin(), part.end());
      }
      Vector z = projected(x, gate.key, h * static_cast<int64_t>(x.size()));
      if (shape.use_norm) z = normed(z, gate.key_norm, gate.weights.epsilon);
      if (shape.use_rope) {
        z = rotated(
            z, static_cast<double>(first_position + uint64_t{block} * shape.block_tokens + offset),
            gate.gate_freq, shape.factor, false);
      }
      for (size_t j = 0; j < z.size(); ++j) {
        out.at(h * count + (block - first), static_cast<int64_t>(j)) =
            stored(z[j], shape.attention.dtype);
      }
    }
  }
  return out;
}

// Vectors 1 .. count of `keys` ([kv_heads, count + 2]) for row 1 of q, which is sequence 0's.
Matrix GateConformance::run_scores(const Gate& gate,
                                   const GateShape& shape,
                                   const Matrix& keys,
                                   uint32_t count,
                                   uint64_t position) {
  std::vector<uint16_t> halves;
  for (const float value : keys.values) halves.push_back(base::to_bf16(value).bits);
  const bool wide = shape.attention.dtype == DType::kF32;
  const backend::Buffer vectors =
      wide ? upload<float>(keys.values) : upload<uint16_t>(std::span<const uint16_t>(halves));
  const Tensor q = upload_matrix(sequences_[0].q, 3);
  const Tensor scores = empty_matrix(int64_t{geometry_.kv_heads}, count, 2);
  backend::GateScoreItem item;
  item.row = 1;
  item.position = position;
  item.first = 1;
  item.count = count;
  item.keys = {vectors.data(), shape.attention.dtype, shape.width,
               uint64_t{count + 2} * shape.width};
  item.scores = static_cast<float*>(scores.ref.data);
  item.score_stride = static_cast<uint64_t>(scores.ref.row_stride);
  device_->sparse_ops().enqueue_gate_scores(q.ref, {&item, 1}, gate.weights, geometry_, stream());
  return download(scores);
}

BoundedMatrix GateConformance::expected_scores(const Gate& gate,
                                               const GateShape& shape,
                                               const Matrix& keys,
                                               uint32_t count,
                                               uint64_t position) {
  const AttentionShape& a = shape.attention;
  BoundedMatrix out(a.kv_heads, count);
  for (int64_t h = 0; h < a.kv_heads; ++h) {
    Vector x;
    for (int64_t g = 0; g < a.group; ++g) {
      const Vector query =
          exact(sequences_[0].q, 1, (h * a.group + g) * a.head_dim, a.head_dim, DType::kF32);
      const Vector turned =
          rotated(query, static_cast<double>(position), gate.model_freq, shape.factor, true);
      x.insert(x.end(), turned.begin(), turned.end());
    }
    Vector z = projected(x, gate.query, h * a.group * a.head_dim);
    if (shape.use_norm) z = normed(z, gate.query_norm, gate.weights.epsilon);
    if (shape.use_rope) {
      z = rotated(z, static_cast<double>(position), gate.gate_freq, shape.factor, false);
    }
    double total = 0, worst = 0;
    for (uint32_t j = 0; j <= count; ++j) {
      double sum = 0, size = 0, error = 0;
      for (uint32_t d = 0; d < shape.width; ++d) {
        const double key = rounded(keys.at(h * (count + 2) + j, d), a.dtype);
        sum += z[d].value * key;
        size += std::abs(z[d].value * key);
        error += z[d].tolerance * std::abs(key);
      }
      const double scale = 1 / std::sqrt(static_cast<double>(shape.width));
      const Bounded score = {sum * scale,
                             scale * (error * (1 + 1e-3) + (shape.width + 4.0) * kU * size)};
      if (j > 0) out.at(h, j - 1) = score;
      total += std::exp(score.value);
      worst = std::max(worst, score.tolerance);
    }
    const double lse = std::log(total);
    for (uint32_t j = 0; j < count; ++j) {
      const double value = out.at(h, j).value;
      // Shifting all scores by at most `worst` shifts their log-sum-exp by as much; then the
      // roundings of both and of their difference, and of the exponentials.
      out.at(h, j) = {value - lse, out.at(h, j).tolerance + worst +
                                       4 * kU * (std::abs(value) + std::abs(lse) + 1)};
    }
  }
  return out;
}

TEST_P(GateConformance, KeysOfBlocksAreWithinTheirRoundingBound) {
  for (const GateShape& shape : shapes()) {
    SCOPED_TRACE(shape.text());
    const int64_t tokens = 5 * int64_t{shape.block_tokens} + 3;
    make_world(shape.attention, {tokens});
    append({{0, 0, tokens}});
    Gate gate = make_gate(shape);
    bind(gate, shape);
    const layout::PagedTokens all = view(0, static_cast<uint64_t>(tokens));
    expect_close(run_keys(gate, shape, all, 0, 0, 5, 0), expected_keys(gate, shape, 0, 0, 5, 0));
    // A tail far in a sequence; the published code's position.
    const uint32_t last = shape.block_tokens - 1;
    const uint64_t far = 131072;
    expect_close(run_keys(gate, shape, all, far, 2, 3, last),
                 expected_keys(gate, shape, far, 2, 3, last));
  }
}

TEST_P(GateConformance, KeysOfABlockHaveTheSameBitsWhereverItsTokensLie) {
  for (const GateShape& shape : shapes()) {
    SCOPED_TRACE(shape.text());
    const auto block = int64_t{shape.block_tokens};
    make_world(shape.attention, {4 * block, block});
    append({{0, 0, 4 * block}});
    // The third block again, as a sequence of its own.
    sequences_[1].k = rows_of(sequences_[0].k, 2 * block, block);
    append({{1, 0, block}});
    Gate gate = make_gate(shape);
    bind(gate, shape);
    const auto tokens = static_cast<uint64_t>(4 * block);
    const Matrix whole = run_keys(gate, shape, view(0, tokens), 0, 0, 4, 0);
    const Matrix alone = run_keys(gate, shape, view(1, static_cast<uint64_t>(block)),
                                  static_cast<uint64_t>(2 * block), 0, 1, 0);
    for (int64_t h = 0; h < shape.attention.kv_heads; ++h) {
      EXPECT_TRUE(same_bits(rows_of(whole, h * 4 + 2, 1), rows_of(alone, h, 1)));
    }
  }
}

TEST_P(GateConformance, ScoresAreLogarithmsOfTheSoftmaxOverBlocks) {
  for (const GateShape& shape : shapes()) {
    SCOPED_TRACE(shape.text());
    make_world(shape.attention, {8});
    Gate gate = make_gate(shape);
    bind(gate, shape);
    for (const uint32_t count : {1u, 7u, 50u}) {
      const Matrix keys = random_matrix(shape.attention.kv_heads * (count + 2), shape.width, 61);
      expect_close(run_scores(gate, shape, keys, count, 5000),
                   expected_scores(gate, shape, keys, count, 5000));
    }
  }
}

TEST_P(GateConformance, NoItemsAndNoBlocksAreNothing) {
  const GateShape shape = shapes().front();
  make_world(shape.attention, {8});
  Gate gate = make_gate(shape);
  bind(gate, shape);
  device_->sparse_ops().enqueue_gate_keys({}, gate.weights, stream());
  EXPECT_EQ(run_keys(gate, shape, view(0, 8), 0, 0, 0, 0).rows, 0);
  EXPECT_EQ(run_scores(gate, shape, random_matrix(4, shape.width, 1), 0, 3).cols, 0);
}

}  // namespace spin::testing
