// SPDX-License-Identifier: Apache-2.0
#include "tests/backend/sketch_conformance.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/bf16.h"

namespace spin::testing {

using backend::Plane;
using backend::SketchArray;
using layout::DType;

namespace {

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// In place, the definition: sums over rows of a matrix whose entries are +-1 / sqrt(n).
void hadamard(double* y, uint32_t size) {
  const uint32_t n = std::bit_floor(size);
  std::vector<double> out(n, 0.0);
  for (uint32_t r = 0; r < n; ++r) {
    for (uint32_t c = 0; c < n; ++c) {
      out[r] += std::popcount(r & c) % 2 == 0 ? y[c] : -y[c];
    }
    out[r] /= std::sqrt(static_cast<double>(n));
  }
  std::copy(out.begin(), out.end(), y);
  if (size > n) hadamard(y + n, size - n);
}

// Integer levels in ascending order.
std::span<const double> levels_of(uint32_t bits) {
  static constexpr double kOne[] = {-1, 1};
  static constexpr double kTwo[] = {-10, -3, 3, 10};
  static constexpr double kFour[] = {-127, -96, -75, -58, -44, -31, -18, -6,
                                     6,    18,  31,  44,  58,  75,  96,  127};
  if (bits == 1) return kOne;
  if (bits == 2) return kTwo;
  return kFour;
}

double unit_of(uint32_t bits) {
  return bits == 1 ? std::sqrt(2 / 3.14159265358979) : bits == 2 ? 0.151 : 2.7326 / 127;
}

}  // namespace

void SketchConformance::make_tokens(const SketchShape& shape, uint64_t tokens, uint64_t seed) {
  shape_ = shape;
  tokens_ = tokens;
  geometry_ = {.layers = 1,
               .kv_heads = shape.kv_heads,
               .head_dim = shape.head_dim,
               .page_tokens = shape.page_tokens,
               .dtype = shape.dtype};
  for (int p = 0; p < 2; ++p) {
    const Matrix random =
        random_matrix(shape.kv_heads, static_cast<int64_t>(tokens * shape.head_dim),
                      seed + static_cast<uint64_t>(p));
    planes_[p] = random.values;
    // A common direction, as real keys have one: the mean matters.
    for (size_t i = 0; i < planes_[p].size(); ++i) {
      planes_[p][i] = rounded(planes_[p][i] + (i % shape.head_dim == 3 ? 2.0f : 0.0f), shape.dtype);
    }
  }
}

float& SketchConformance::element(Plane plane, uint32_t head, uint64_t token, uint32_t d) {
  return planes_[plane == Plane::kKeys ? 0 : 1][(head * tokens_ + token) * shape_.head_dim + d];
}

void SketchConformance::put_tokens() {
  const uint64_t pages = geometry_.pages_per_head(tokens_);
  std::vector<std::byte> bytes(pages * shape_.kv_heads * geometry_.page_bytes());
  std::vector<uint32_t> slots(pages * shape_.kv_heads);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<uint32_t>(slots.size() - 1 - i);
  for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
    for (uint64_t t = 0; t < tokens_; ++t) {
      const uint64_t slot = slots[head * pages + t / shape_.page_tokens];
      for (const Plane plane : {Plane::kKeys, Plane::kValues}) {
        std::byte* to =
            &bytes[slot * geometry_.page_bytes() + t % shape_.page_tokens * geometry_.row_bytes() +
                   (plane == Plane::kKeys ? 0 : geometry_.plane_bytes())];
        for (uint32_t d = 0; d < shape_.head_dim; ++d) {
          const float value = element(plane, head, t, d);
          if (shape_.dtype == DType::kF32) {
            std::memcpy(to + 4 * d, &value, 4);
          } else {
            const base::Bf16 half = base::to_bf16(value);
            std::memcpy(to + 2 * d, &half, 2);
          }
        }
      }
    }
  }
  pool_ = upload<std::byte>(bytes);
  slots_ = upload<uint32_t>(slots);
  paged_ = {pool_.as<std::byte>(), geometry_, slots_.as<uint32_t>(), pages, tokens_};
}

SketchConformance::Sketches SketchConformance::make_sketches(uint64_t capacity,
                                                             uint32_t bits,
                                                             uint64_t split) {
  Sketches s;
  s.array.capacity = round_up(capacity, backend::kSketchBlockTokens);
  s.array.bits = bits;
  s.array.split = split;
  const uint64_t words = backend::sketch_words(shape_.head_dim, bits);
  const uint64_t heads = shape_.kv_heads;
  // Whatever was there before must not matter.
  const std::vector<uint32_t> garbage(
      heads * (s.array.capacity * words + s.array.capacity / 2 + 2 * shape_.head_dim), 0xA5A5A5A5u);
  s.memory = upload<uint32_t>(garbage);
  s.array.codes = s.memory.as<uint32_t>();
  s.array.scales = reinterpret_cast<base::Fp16*>(s.array.codes + heads * s.array.capacity * words);
  s.array.means = reinterpret_cast<float*>(s.array.scales + heads * s.array.capacity);
  return s;
}

void SketchConformance::set_means(Sketches& out, Plane plane, uint64_t first) {
  backend::SketchMeanItem item;
  item.tokens = paged_;
  item.plane = plane;
  item.begin = true;
  item.count = first;
  item.factor = 1.0f / static_cast<float>(first);
  item.mean = out.array.means;
  // The second one in two pieces.
  backend::SketchMeanItem start = item;
  start.mean += shape_.kv_heads * shape_.head_dim;
  start.count = out.array.split / 3;
  start.factor = 0.0f;
  backend::SketchMeanItem rest = start;
  rest.begin = false;
  rest.first = start.count;
  rest.count = out.array.split - start.count;
  rest.factor = 1.0f / static_cast<float>(out.array.split);
  for (const backend::SketchMeanItem& one : {item, start, rest}) {
    device_->sparse_ops().enqueue_sketch_mean({&one, 1}, stream());
  }
}

void SketchConformance::encode(Sketches& out, Plane plane, uint64_t first, uint64_t count) {
  backend::EncodeSketchItem item;
  item.tokens = paged_;
  item.first = first;
  item.out_first = first;
  item.count = count;
  item.out = out.array;
  item.plane = plane;
  device_->sparse_ops().enqueue_encode_sketch({&item, 1}, stream());
}

void SketchConformance::read(Sketches& s) {
  const uint64_t heads = shape_.kv_heads;
  s.codes.resize(heads * s.array.capacity * backend::sketch_words(shape_.head_dim, s.array.bits));
  s.scales.resize(heads * s.array.capacity);
  s.means.resize(2 * heads * shape_.head_dim);
  stream().enqueue_copy(s.codes.data(), s.array.codes, s.codes.size() * 4);
  stream().enqueue_copy(s.scales.data(), s.array.scales, s.scales.size() * 2);
  stream().enqueue_copy(s.means.data(), s.array.means, s.means.size() * 4);
  ASSERT_TRUE(stream().wait_idle().ok());
}

double SketchConformance::level(const Sketches& s,
                                uint32_t head,
                                uint64_t token,
                                uint32_t d) const {
  const uint32_t per_word = 32 / s.array.bits;
  const uint64_t words = backend::sketch_words(shape_.head_dim, s.array.bits);
  const uint64_t block = head * s.array.capacity / 16 + token / 16;
  const uint32_t word = s.codes[(block * words + d / per_word) * 16 + token % 16];
  const uint32_t code = word >> (d % per_word * s.array.bits) & ((1u << s.array.bits) - 1);
  return levels_of(s.array.bits)[code];
}

double SketchConformance::scale_of(const Sketches& s, uint32_t head, uint64_t token) const {
  return base::to_float(s.scales[head * s.array.capacity + token]);
}

std::vector<double> SketchConformance::rotated(const float* x, const float* mean) const {
  std::vector<double> y(shape_.head_dim);
  for (uint32_t d = 0; d < shape_.head_dim; ++d) {
    y[d] = static_cast<double>(x[d]) - (mean == nullptr ? 0.0 : static_cast<double>(mean[d]));
  }
  hadamard(y.data(), shape_.head_dim);
  return y;
}

std::vector<Bounded> SketchConformance::token_scores(
    const Sketches& keys, const float* q, uint32_t head, uint64_t tokens, float scale) const {
  const std::vector<double> y = rotated(q, nullptr);
  double largest = 0;
  for (const double value : y) largest = std::max(largest, std::fabs(value));
  const double step = largest / 127;
  std::vector<double> r(shape_.head_dim);
  std::vector<bool> unsure(shape_.head_dim);  // rounding could go either way in float
  for (uint32_t d = 0; d < shape_.head_dim; ++d) {
    r[d] = std::nearbyint(y[d] / step);
    unsure[d] = std::fabs(std::fabs(y[d] / step - std::trunc(y[d] / step)) - 0.5) < 1e-4;
  }
  std::vector<Bounded> scores(tokens);
  for (uint64_t t = 0; t < tokens; ++t) {
    double dot = 0;
    double doubt = 0;
    for (uint32_t d = 0; d < shape_.head_dim; ++d) {
      dot += level(keys, head, t, d) * r[d];
      if (unsure[d]) doubt += std::fabs(level(keys, head, t, d));
    }
    const double factor = static_cast<double>(scale) * scale_of(keys, head, t) * step;
    double bias = 0;
    double absolute = 0;
    const float* mean = keys.mean(head, t, shape_);
    for (uint32_t d = 0; d < shape_.head_dim; ++d) {
      bias += static_cast<double>(scale) * static_cast<double>(q[d]) * static_cast<double>(mean[d]);
      absolute += std::fabs(static_cast<double>(scale * q[d] * mean[d]));
    }
    // The step is a float of a rotation: log2(head_dim) additions and some products.
    scores[t] = {factor * dot + bias,
                 std::fabs(factor) * (doubt + 32 * kFloatRoundoff * std::fabs(dot)) +
                     (shape_.head_dim + 2) * kFloatRoundoff * absolute};
  }
  return scores;
}

namespace {

const SketchShape kShapes[] = {
    {2, 2, 64, 8, 2, DType::kF32},   {1, 3, 64, 16, 2, DType::kBF16},
    {1, 5, 128, 8, 1, DType::kBF16}, {2, 4, 128, 32, 4, DType::kBF16},
    {1, 9, 96, 8, 2, DType::kF32},   {1, 1, 80, 64, 4, DType::kF32},
    {2, 8, 24, 1, 1, DType::kF32},   {1, 6, 64, 24, 1, DType::kBF16},
    {3, 7, 40, 8, 2, DType::kF32},
};

TEST_P(SketchConformance, CodesScalesAndMeansAreThoseOfTheDefinition) {
  for (const SketchShape& shape : kShapes) {
    const uint64_t tokens = round_up(90, shape.page_tokens);
    make_tokens(shape, tokens, 5);
    for (uint32_t d = 0; d < shape.head_dim; ++d) element(Plane::kKeys, 0, 7, d) = 0.0f;
    put_tokens();
    for (const Plane plane : {Plane::kKeys, Plane::kValues}) {
      const uint64_t split = 48;
      Sketches s = make_sketches(tokens, shape.bits, split);
      set_means(s, plane, 13);
      encode(s, plane, 0, tokens);
      read(s);
      const std::span<const double> levels = levels_of(shape.bits);
      for (uint32_t head = 0; head < shape.kv_heads; ++head) {
        for (uint32_t d = 0; d < shape.head_dim; ++d) {
          double sum = 0;
          double absolute = 0;
          for (uint64_t t = 0; t < split; ++t) {
            sum += static_cast<double>(element(plane, head, t, d));
            absolute += std::fabs(static_cast<double>(element(plane, head, t, d)));
            if (t != 12 && t != split - 1) continue;
            const auto n = static_cast<double>(t + 1);
            ASSERT_NEAR(s.mean(head, t == 12 ? 0 : split, shape)[d], sum / n,
                        absolute * kFloatRoundoff * 2);
          }
        }
        for (uint64_t t = 0; t < tokens; ++t) {
          const std::vector<double> y =
              rotated(&element(plane, head, t, 0), s.mean(head, t, shape));
          double squares = 0;
          for (const double value : y) squares += value * value;
          const double rms = std::sqrt(squares / shape.head_dim);
          double dot = 0;
          double norm = 0;
          for (uint32_t d = 0; d < shape.head_dim; ++d) {
            const double u = y[d] / rms;
            const double found = level(s, head, t, d) * unit_of(shape.bits);
            for (const double other : levels) {
              // No other level is nearer, but for rounding at a boundary.
              ASSERT_LE(std::fabs(u - found), std::fabs(u - other * unit_of(shape.bits)) + 1e-5);
            }
            dot += y[d] * level(s, head, t, d);
            norm += level(s, head, t, d) * level(s, head, t, d);
          }
          // fp16 rounds by 2^-11.
          ASSERT_NEAR(scale_of(s, head, t), dot / norm, dot / norm * (0x1p-11 + 1e-5));
        }
      }
    }
  }
}

TEST_P(SketchConformance, TokensComeOutTheSameInOnePieceAndOneByOne) {
  for (const SketchShape& shape : kShapes) {
    const uint64_t tokens = round_up(100, shape.page_tokens);
    make_tokens(shape, tokens, 9);
    put_tokens();
    Sketches whole = make_sketches(tokens, shape.bits, 48);
    set_means(whole, Plane::kKeys, 20);
    encode(whole, Plane::kKeys, 0, tokens);
    read(whole);
    Sketches parts = make_sketches(tokens, shape.bits, 48);
    set_means(parts, Plane::kKeys, 20);
    for (uint64_t t = 0; t < tokens; t += shape.page_tokens) {
      encode(parts, Plane::kKeys, t, shape.page_tokens);
    }
    read(parts);
    EXPECT_EQ(whole.means, parts.means);
    const uint64_t words = backend::sketch_words(shape.head_dim, shape.bits);
    for (uint64_t head = 0; head < shape.kv_heads; ++head) {
      const uint64_t used = round_up(tokens, 16);
      const uint64_t from = head * whole.array.capacity;
      EXPECT_EQ(
          std::memcmp(&whole.codes[from * words], &parts.codes[from * words], used * words * 4), 0);
      EXPECT_TRUE(std::equal(whole.scales.begin() + static_cast<int64_t>(from),
                             whole.scales.begin() + static_cast<int64_t>(from + used),
                             parts.scales.begin() + static_cast<int64_t>(from)));
    }
  }
}

TEST_P(SketchConformance, KeysEqualToTheMeanOrNotFiniteGetAScaleOfZero) {
  make_tokens({1, 1, 64, 8, 2, DType::kF32}, 16, 3);
  for (uint64_t t = 0; t < 16; ++t) {
    for (uint32_t d = 0; d < 64; ++d) element(Plane::kKeys, 0, t, d) = 0.25f;
  }
  element(Plane::kKeys, 0, 9, 5) = std::numeric_limits<float>::infinity();
  element(Plane::kKeys, 0, 10, 5) = std::nanf("");
  for (uint32_t d = 0; d < 64; ++d) element(Plane::kKeys, 0, 11, d) = d % 2 == 0 ? 1e8f : -1e8f;
  put_tokens();
  Sketches s = make_sketches(16, 2, 16);
  set_means(s, Plane::kKeys, 8);
  encode(s, Plane::kKeys, 0, 16);
  read(s);
  for (uint64_t t = 0; t < 16; ++t) {
    if (t == 11) {
      EXPECT_EQ(scale_of(s, 0, t), 65504.0);  // the largest there is, not infinity
    } else {
      EXPECT_EQ(scale_of(s, 0, t), 0.0) << t;
    }
  }
}

TEST_P(SketchConformance, PageScoresAreMaximaOfTokenScoresInTheLogarithmicDomain) {
  for (const SketchShape& shape : kShapes) {
    const uint64_t tokens = round_up(1500, shape.page_tokens);
    const auto pages = static_cast<uint32_t>(tokens / shape.page_tokens);
    make_tokens(shape, tokens, 21);
    put_tokens();
    Sketches s = make_sketches(tokens + 40, shape.bits, 112);
    set_means(s, Plane::kKeys, 70);
    encode(s, Plane::kKeys, 0, tokens);
    read(s);
    const int64_t q_heads = int64_t{shape.kv_heads} * shape.group;
    const Matrix q = random_matrix(3, q_heads * shape.head_dim, 2);
    const Tensor q_on_device = upload_matrix(q, 5);
    const float scale = 2.0f / std::sqrt(static_cast<float>(shape.head_dim));
    for (const uint32_t first : {0u, 1u, pages - 1}) {
      const std::vector<float> before(size_t{shape.kv_heads} * (pages + 3), -7.0f);
      const backend::Buffer out = upload<float>(before);
      backend::ScoreSketchItem item;
      item.row = 1;
      item.keys = s.array;
      item.first = first;
      item.count = pages - first;
      item.scores = out.as<float>();
      item.score_stride = pages + 3;
      device_->sparse_ops().enqueue_score_sketch(q_on_device.ref, {&item, 1}, geometry_, scale,
                                                 stream());
      std::vector<float> found(before.size());
      stream().enqueue_copy(found.data(), out.data(), found.size() * 4);
      ASSERT_TRUE(stream().wait_idle().ok());
      for (uint32_t head = 0; head < shape.kv_heads; ++head) {
        std::vector<Bounded> best(pages - first, {-1e30, 0});
        for (uint32_t g = 0; g < shape.group; ++g) {
          const std::vector<Bounded> scores = token_scores(
              s, &q.values[static_cast<size_t>(q.cols + (head * shape.group + g) * shape.head_dim)],
              head, tokens, scale);
          double sum = 0;
          double doubt = 0;
          for (uint64_t t = uint64_t{first} * shape.page_tokens; t < tokens; ++t) {
            sum += std::exp(scores[t].value);
            doubt = std::max(doubt, scores[t].tolerance);
          }
          for (uint64_t t = uint64_t{first} * shape.page_tokens; t < tokens; ++t) {
            Bounded& page = best[t / shape.page_tokens - first];
            page.value = std::max(page.value, scores[t].value - std::log(sum));
            page.tolerance = std::max(page.tolerance, scores[t].tolerance + doubt);
          }
        }
        for (uint32_t p = 0; p < pages; ++p) {
          const float value = found[head * (pages + 3) + p];
          if (p >= pages - first) {
            EXPECT_EQ(value, -7.0f);  // behind the last score
          } else {
            // The sum of up to 1,500 exponentials in float, its logarithm, a subtraction.
            ASSERT_NEAR(value, best[p].value, best[p].tolerance + 2000 * kFloatRoundoff)
                << head << " " << p;
          }
        }
      }
    }
  }
}

TEST_P(SketchConformance, EstimatesCoverExactlyTheTokensThatAreNotOnTheList) {
  for (const SketchShape& shape : kShapes) {
    const uint64_t tokens = round_up(1100, shape.page_tokens);
    const auto pages = static_cast<uint32_t>(tokens / shape.page_tokens);
    make_tokens(shape, tokens, 33);
    put_tokens();
    Sketches keys = make_sketches(tokens, shape.bits, 80);
    Sketches values = make_sketches(tokens, 2, 80);
    for (Sketches* one : {&keys, &values}) {
      const Plane plane = one == &keys ? Plane::kKeys : Plane::kValues;
      set_means(*one, plane, 72);
      encode(*one, plane, 0, tokens);
    }
    read(keys);
    read(values);
    const uint32_t heads = shape.kv_heads;
    const uint32_t q_heads = heads * shape.group;
    const Matrix q = random_matrix(1, int64_t{q_heads} * shape.head_dim, 6);
    const Tensor q_on_device = upload_matrix(q);
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    // 0: nothing on the list; 1: every third page (another one per head) and pages of a tail that
    // has no sketches; 2: everything.
    for (int choice = 0; choice < 3; ++choice) {
      std::vector<uint32_t> list(size_t{heads} * (pages + 2));
      std::vector<uint32_t> counts(heads, 0);
      std::vector<std::vector<bool>> listed(heads, std::vector<bool>(pages + 2));
      for (uint32_t head = 0; head < heads && choice > 0; ++head) {
        for (uint32_t p = 0; p < pages + 2; ++p) {
          if (choice == 1 && p < pages && p % 3 != head % 3) continue;
          list[head * (pages + 2) + counts[head]++] = p;
          listed[head][p] = true;
        }
      }
      const backend::Buffer pages_on_device = upload<uint32_t>(list);
      const backend::Buffer counts_on_device = upload<uint32_t>(counts);
      const backend::Buffer out =
          upload<float>(std::vector<float>(size_t{q_heads} * (shape.head_dim + 1), -7.0f));
      backend::EstimateSketchItem item;
      item.keys = keys.array;
      item.values = values.array;
      item.tokens = tokens;
      item.list = {pages_on_device.as<uint32_t>(), nullptr, counts_on_device.as<uint32_t>(),
                   pages + 2};
      item.part = out.as<float>();
      item.log_sum_exp = out.as<float>() + size_t{q_heads} * shape.head_dim;
      device_->sparse_ops().enqueue_estimate_sketch(q_on_device.ref, {&item, 1}, geometry_, scale,
                                                    stream());
      std::vector<float> found(size_t{q_heads} * (shape.head_dim + 1));
      stream().enqueue_copy(found.data(), out.data(), found.size() * 4);
      ASSERT_TRUE(stream().wait_idle().ok());
      for (uint32_t h = 0; h < q_heads; ++h) {
        const uint32_t head = h / shape.group;
        const float lse = found[size_t{q_heads} * shape.head_dim + h];
        const float* part = &found[size_t{h} * shape.head_dim];
        if (choice == 2) {
          EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
          for (uint32_t d = 0; d < shape.head_dim; ++d) EXPECT_EQ(part[d], 0.0f);
          continue;
        }
        const float* query = &q.values[size_t{h} * shape.head_dim];
        const std::vector<Bounded> scores = token_scores(keys, query, head, tokens, scale);
        double total = 0;
        double doubt = 0;
        std::vector<double> sum(shape.head_dim, 0.0);
        std::vector<double> absolute(shape.head_dim, 0.0);
        double mass[2] = {0, 0};
        for (uint64_t t = 0; t < tokens; ++t) {
          if (listed[head][t / shape.page_tokens]) continue;
          const double weight = std::exp(scores[t].value);
          total += weight;
          mass[t < 80 ? 0 : 1] += weight;
          doubt = std::max(doubt, scores[t].tolerance);
          for (uint32_t d = 0; d < shape.head_dim; ++d) {
            const double value = weight * scale_of(values, head, t) * level(values, head, t, d);
            sum[d] += value;
            absolute[d] += std::fabs(value);
          }
        }
        const double error = doubt + 1200 * kFloatRoundoff;  // sums over up to 1,100 tokens
        ASSERT_NEAR(lse, std::log(total), error);
        double largest = 0;
        for (uint32_t d = 0; d < shape.head_dim; ++d) {
          sum[d] /= total;
          largest = std::max(largest, absolute[d] / total);
        }
        hadamard(sum.data(), shape.head_dim);
        const double spread = std::sqrt(static_cast<double>(shape.head_dim));
        for (uint32_t d = 0; d < shape.head_dim; ++d) {
          const double mean = (mass[0] * values.mean(head, 0, shape)[d] +
                               mass[1] * values.mean(head, 80, shape)[d]) /
                              total;
          ASSERT_NEAR(part[d], sum[d] + mean,
                      2 * error * (largest * spread + 3))  // |mean| < 3
              << h << " " << d;
        }
      }
    }
  }
}

TEST_P(SketchConformance, ARowsScoresDoNotDependOnWhatElseIsInTheCall) {
  const SketchShape shape{2, 3, 64, 8, 2, DType::kBF16};
  make_tokens(shape, 2400, 44);
  put_tokens();
  Sketches s = make_sketches(2400, 2, 1024);
  set_means(s, Plane::kKeys, 72);
  encode(s, Plane::kKeys, 0, 2400);
  const Matrix q = random_matrix(4, 2 * 3 * 64, 8);
  const Tensor q_on_device = upload_matrix(q);
  const auto run = [&](const std::vector<uint64_t>& rows) {
    const backend::Buffer out = upload<float>(std::vector<float>(rows.size() * 600, 0.0f));
    std::vector<backend::ScoreSketchItem> items(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      items[i].row = rows[i];
      items[i].keys = s.array;
      items[i].first = 1;
      items[i].count = static_cast<uint32_t>(290 - rows[i]);
      items[i].scores = out.as<float>() + i * 600;
      items[i].score_stride = 300;
    }
    device_->sparse_ops().enqueue_score_sketch(q_on_device.ref, items, geometry_, 0.125f, stream());
    std::vector<float> found(rows.size() * 600);
    stream().enqueue_copy(found.data(), out.data(), found.size() * 4);
    EXPECT_TRUE(stream().wait_idle().ok());
    return found;
  };
  const std::vector<float> together = run({2, 0, 3, 1});
  const std::vector<float> alone = run({3});
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + 1200));
}

}  // namespace
}  // namespace spin::testing
