// SPDX-License-Identifier: Apache-2.0
// Scores and ranking (backend/sparse_ops.h) against double arithmetic and a full sort.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "tests/backend/sparse_ops_conformance.h"

namespace spin::testing {

using layout::DType;

Bounded reference_score(
    const float* q, const float* low, const float* high, uint32_t head_dim, float scale) {
  Bounded out;
  double absolute = 0;
  for (uint32_t i = 0; i < head_dim; ++i) {
    const double a = double{q[i]} * scale * low[i];
    const double b = double{q[i]} * scale * high[i];
    out.value += std::max(a, b);
    absolute += std::max(std::abs(a), std::abs(b));
  }
  out.tolerance = (head_dim + 2) * kFloatRoundoff * absolute;
  return out;
}

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class ScoreReference {
 public:
  ScoreReference(const ScoreCase& c, const Matrix& q, const Matrix& low, const Matrix& high)
      : c_(c), q_(q), low_(low), high_(high) {}

  static bool has_size(const ScoreCase& c, uint32_t partition) {
    return !c.holes || partition % 3 != 1;
  }

  // Scores of one KV head for one row of q.
  std::vector<Bounded> head_scores(int64_t row, uint32_t head, float scale) const {
    const uint32_t per = c_.keys_per_partition;
    const int64_t stride = low_.rows / c_.shape.kv_heads;
    std::vector<std::vector<double>> parts(c_.count);
    double worst = 0;
    for (uint32_t g = 0; g < c_.shape.group; ++g) {
      const float* q = q_.values.data() + row * q_.cols +
                       (int64_t{head} * c_.shape.group + g) * c_.shape.head_dim;
      std::vector<double> best(c_.count, -kInfinity);
      std::vector<double> all;
      for (uint32_t j = 0; j < c_.count; ++j) {
        if (!has_size(c_, c_.first + j)) continue;
        for (uint32_t i = 0; i < per; ++i) {
          const int64_t key = head * stride + (int64_t{c_.first} + j) * per + i;
          const Bounded s =
              reference_score(q, low_.values.data() + key * low_.cols,
                              high_.values.data() + key * high_.cols, c_.shape.head_dim, scale);
          best[j] = std::max(best[j], s.value);
          all.push_back(s.value);
          worst = std::max(worst, s.tolerance);
        }
      }
      const double most = all.empty() ? 0 : *std::max_element(all.begin(), all.end());
      double total = 0;
      for (const double s : all) total += std::exp(s - most);
      for (uint32_t j = 0; j < c_.count; ++j) {
        parts[j].push_back(std::isinf(best[j]) ? best[j] : best[j] - most - std::log(total));
      }
    }
    std::vector<Bounded> out(c_.count);
    for (uint32_t j = 0; j < c_.count; ++j) out[j] = aggregate(parts[j], worst);
    return out;
  }

 private:
  Bounded aggregate(const std::vector<double>& parts, double worst) const {
    Bounded out;
    out.value = *std::max_element(parts.begin(), parts.end());
    // The score's and the sum's products, tiles of up to 512 exponentials (2 units each) added up,
    // and a handful of roundings of the size of the result.
    const double keys = 1.0 * c_.keys_per_partition * c_.count;
    out.tolerance = 2 * worst + kFloatRoundoff * (512 + keys / 512 + 64 + 8 * std::abs(out.value));
    if (c_.aggregation == backend::Aggregation::kSoftmaxMax || std::isinf(out.value)) return out;
    double total = 0;
    for (const double part : parts) total += std::exp(part - out.value);
    out.value += std::log(total);
    out.tolerance += kFloatRoundoff * 16;
    return out;
  }

  const ScoreCase& c_;
  const Matrix& q_;
  const Matrix& low_;
  const Matrix& high_;
};

}  // namespace

// Scores two rows of q and compares them with the reference.
void ScoreConformance::check(const ScoreCase& c) {
  SCOPED_TRACE(c.shape.text() + ", partitions " + std::to_string(c.first) + " + " +
               std::to_string(c.count) + " of " + std::to_string(c.keys_per_partition));
  const uint32_t vectors = (c.first + c.count) * c.keys_per_partition;
  Matrix low = random_matrix(int64_t{c.shape.kv_heads} * vectors, c.shape.head_dim, 11);
  Matrix high = low;
  if (c.boxes) {
    const Matrix extent = random_matrix(low.rows, low.cols, 12);
    for (size_t i = 0; i < high.values.size(); ++i) high.values[i] += std::abs(extent.values[i]);
  }
  const DeviceVectors keys = make_vectors(c.shape, vectors, low);
  const DeviceVectors upper = make_vectors(c.shape, vectors, high);
  const Matrix q =
      random_matrix(3, int64_t{c.shape.kv_heads} * c.shape.group * c.shape.head_dim, 13);
  const Tensor q_tensor = upload_matrix(q, 5);
  const float scale = 3.0f / std::sqrt(static_cast<float>(c.shape.head_dim));
  std::vector<uint32_t> size_values;
  for (uint32_t i = 0; i < c.shape.kv_heads * (c.first + c.count); ++i) {
    size_values.push_back(
        ScoreReference::has_size(c, i % (c.first + c.count)) ? c.keys_per_partition : 0);
  }
  size_values.push_back(0);  // a buffer is never empty
  const backend::Buffer sizes = upload(std::span<const uint32_t>(size_values));
  const uint64_t stride = uint64_t{c.count} + 2;
  backend::Buffer scores[2];
  const uint64_t rows[2] = {2, 0};
  std::vector<backend::ScoreMeansItem> means;
  std::vector<backend::ScoreBoxesItem> boxes;
  for (int i = 0; i < 2; ++i) {
    scores[i] = filled<float>(c.shape.kv_heads * stride, 77.0f);
    backend::ScoreItem item;
    item.row = rows[i];
    item.first = c.first;
    item.count = c.count;
    item.sizes = c.holes ? sizes.as<uint32_t>() : nullptr;
    item.size_stride = c.first + c.count;
    item.scores = scores[i].as<float>();
    item.score_stride = stride;
    means.push_back({item, keys.ref, c.keys_per_partition});
    boxes.push_back({item, keys.ref, upper.ref});
  }
  if (c.boxes) {
    sparse().enqueue_score_boxes(q_tensor.ref, boxes, c.shape.geometry(), scale, c.aggregation,
                                 stream());
  } else {
    sparse().enqueue_score_means(q_tensor.ref, means, c.shape.geometry(), scale, c.aggregation,
                                 stream());
  }
  ASSERT_TRUE(stream().wait_idle().ok());
  const ScoreReference reference(c, q, keys.values, upper.values);
  for (int i = 0; i < 2; ++i) {
    const auto found = read_back<float>(scores[i].data(), c.shape.kv_heads * stride);
    for (uint32_t head = 0; head < c.shape.kv_heads; ++head) {
      const auto expected = reference.head_scores(static_cast<int64_t>(rows[i]), head, scale);
      for (uint32_t j = 0; j < c.count; ++j) {
        const float score = found[head * stride + j];
        if (std::isinf(expected[j].value)) {
          ASSERT_EQ(score, -kInfinity) << j;
        } else {
          ASSERT_NEAR(score, expected[j].value, expected[j].tolerance) << j;
        }
      }
      ASSERT_EQ(found[head * stride + c.count], 77.0f) << "written past the end";
    }
  }
}

TEST_P(ScoreConformance, MeansOfAnyGroupAndHeadDimension) {
  for (uint32_t group = 1; group <= 8; ++group) {
    const DType dtype = group % 2 == 0 ? DType::kF32 : DType::kBF16;
    const auto aggregation =
        group % 3 == 0 ? backend::Aggregation::kSoftmaxSum : backend::Aggregation::kSoftmaxMax;
    check({{2, group, 64, 8, dtype}, 1, 37, 1, false, false, aggregation});
    check({{1, group, 128, 8, dtype}, 0, 21, 1, group % 2 == 0, false, aggregation});
  }
  check({{1, 9, 40, 8, DType::kBF16}, 0, 19, 1, false, false});
  check({{2, 3, 8, 8, DType::kF32}, 5, 40, 1, true, false});
}

TEST_P(ScoreConformance, AnyNumberOfPartitions) {
  for (const uint32_t count : {0u, 1u, 2u, 15u, 16u, 17u, 511u, 512u, 513u, 1025u}) {
    const DType dtype = count % 2 == 0 ? DType::kF32 : DType::kBF16;
    check(
        {{1, 2, 64, 8, dtype}, 3, count, 1, count > 100, false, backend::Aggregation::kSoftmaxSum});
  }
  check({{1, 2, 64, 8, DType::kBF16}, 1, 1, 1, true, false});  // nothing has a size
}

TEST_P(ScoreConformance, TheLargestOfSeveralKeysIsThePartitionsScore) {
  check({{2, 2, 64, 8, DType::kF32}, 1, 130, 8, false, false});
  check({{1, 3, 128, 8, DType::kBF16}, 0, 41, 3, true, false, backend::Aggregation::kSoftmaxSum});
  check({{1, 1, 64, 8, DType::kBF16}, 2, 3, 600, false, false});
}

TEST_P(ScoreConformance, BoxesOfAnyGroupAndHeadDimension) {
  for (uint32_t group = 1; group <= 8; ++group) {
    const DType dtype = group % 2 == 0 ? DType::kBF16 : DType::kF32;
    const auto aggregation =
        group % 3 == 0 ? backend::Aggregation::kSoftmaxSum : backend::Aggregation::kSoftmaxMax;
    check({{2, group, 64, 8, dtype}, 2, 23, 1, group == 5, true, aggregation});
    check({{1, group, 128, 8, dtype}, 0, 33, 1, false, true, aggregation});
  }
  check({{1, 1, 72, 8, DType::kF32}, 0, 1300, 1, true, true});
}

TEST_P(ScoreConformance, LongContexts) {
#ifdef SPIN_SANITIZED
  const uint32_t keys = 1u << 14;
#else
  const uint32_t keys = 1u << 17;
#endif
  check({{1, 1, 64, 8, DType::kBF16}, 1, keys / 8, 8, false, false});
}

TEST_P(SparseOpsConformance, ScoresDoNotDependOnTheBatch) {
  const SelectShape shape{2, 3, 64, 8, DType::kBF16};
  const DeviceVectors keys = make_vectors(shape, 1500, 21);
  const Matrix q = random_matrix(4, 2 * 3 * 64, 22);
  const Tensor q_tensor = upload_matrix(q);
  const auto run = [&](const std::vector<uint64_t>& rows) {
    std::vector<backend::Buffer> buffers;
    std::vector<backend::ScoreMeansItem> items;
    for (const uint64_t row : rows) {
      buffers.push_back(filled<float>(2 * 1500, 0.0f));
      backend::ScoreMeansItem item;
      item.row = row;
      item.count = static_cast<uint32_t>(700 + 250 * row);
      item.scores = buffers.back().as<float>();
      item.score_stride = 1500;
      item.keys = keys.ref;
      items.push_back(item);
    }
    sparse().enqueue_score_means(q_tensor.ref, items, shape.geometry(), 0.3f,
                                 backend::Aggregation::kSoftmaxMax, stream());
    std::vector<std::vector<float>> out;
    for (const backend::Buffer& buffer : buffers) {
      out.push_back(read_back<float>(buffer.data(), 2 * 1500));
    }
    return out;
  };
  const auto together = run({3, 1, 0, 2});
  EXPECT_EQ(together[0], run({3})[0]);
  EXPECT_EQ(together[1], run({1})[0]);
  EXPECT_EQ(together[3], run({0, 2})[1]);
}

TEST_P(SparseOpsConformance, ABoxScoresNoLessThanAnyKeyInIt) {
  // Partition 0 repeats one key, so that its bound is exact and gives the log-sum-exp away.
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const SelectShape shape{1, 1, 64, 8, dtype};
    Matrix values = random_matrix(16 * 40, 64, 31);
    for (int64_t t = 1; t < 16; ++t) {
      for (int64_t i = 0; i < 64; ++i) values.at(t, i) = values.at(0, i);
    }
    const PagedKeys keys = make_keys(shape, values);
    DeviceVectors min = empty_vectors(shape, 40, 0);
    DeviceVectors max = empty_vectors(shape, 40, 0);
    backend::PoolKeysItem pool;
    pool.tokens = keys.tokens;
    pool.partition_tokens = 16;
    pool.count = 40;
    pool.min = min.ref;
    pool.max = max.ref;
    sparse().enqueue_pool_keys({&pool, 1}, stream());
    const Matrix q = random_matrix(1, 64, 32);
    const Tensor q_tensor = upload_matrix(q);
    const backend::Buffer scores = filled<float>(40, 0.0f);
    backend::ScoreBoxesItem item;
    item.count = 40;
    item.scores = scores.as<float>();
    item.score_stride = 40;
    item.min = min.ref;
    item.max = max.ref;
    sparse().enqueue_score_boxes(q_tensor.ref, {&item, 1}, shape.geometry(), 1.0f,
                                 backend::Aggregation::kSoftmaxMax, stream());
    const auto found = read_back<float>(scores.data(), 40);
    const auto product = [&](int64_t token) {
      double sum = 0;
      for (int64_t i = 0; i < 64; ++i) sum += double{q.at(0, i)} * keys.keys.at(token, i);
      return sum;
    };
    for (int64_t j = 0; j < 40; ++j) {
      double most = -kInfinity;
      for (int64_t t = 16 * j; t < 16 * (j + 1); ++t) most = std::max(most, product(t));
      const double bound = double{found[static_cast<size_t>(j)]} - found[0] + product(0);
      // Products of 64 numbers in [-1, 1) and scores of at most 64 plus the logarithm of 40.
      EXPECT_GE(bound, most - 4 * 66 * 64 * kFloatRoundoff) << j;
      if (j == 0) continue;
      EXPECT_GT(bound, most) << "a box of 16 random keys is wider than any of them";
    }
  }
}

// ---- Ranking ----

namespace {

// What Rank must select of one head's scores, by sorting all.
std::vector<uint32_t> reference_rank(
    const std::vector<float>& scores, uint32_t first, uint32_t most, float least, bool ranked) {
  std::vector<uint32_t> ids;
  for (uint32_t i = 0; i < scores.size(); ++i) {
    if (scores[i] >= least && scores[i] != -kInfinity) ids.push_back(i);
  }
  std::stable_sort(ids.begin(), ids.end(),
                   [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
  if (ids.size() > most) ids.resize(most);
  if (!ranked) std::sort(ids.begin(), ids.end());
  for (uint32_t& id : ids) id += first;
  return ids;
}

}  // namespace

// Two heads: the scores and the scores backwards.
void RankConformance::check(const std::vector<float>& scores,
                            uint32_t most,
                            float least,
                            bool ranked) {
  SCOPED_TRACE(std::to_string(scores.size()) + " scores, " + std::to_string(most) + " best");
  std::vector<float> both = scores;
  both.insert(both.end(), scores.rbegin(), scores.rend());
  both.push_back(0);
  const backend::Buffer score_buffer = upload(std::span<const float>(both));
  const auto count = static_cast<uint32_t>(scores.size());
  const uint32_t stride = std::min(most, count) + 1;
  const backend::Buffer ids = filled<uint32_t>(2 * stride, 12345);
  const backend::Buffer counts = filled<uint32_t>(2, 9);
  const backend::Buffer selected = filled<uint64_t>(2, 100);
  backend::RankItem item;
  item.scores = score_buffer.as<float>();
  item.score_stride = count;
  item.first = 6;
  item.count = count;
  item.most = most;
  item.least_score = least;
  item.ranked = ranked;
  item.ids = ids.as<uint32_t>();
  item.counts = counts.as<uint32_t>();
  item.id_stride = stride;
  item.selected = selected.as<uint64_t>();
  sparse().enqueue_rank({&item, 1}, 2, stream());
  const auto found = read_back<uint32_t>(ids.data(), 2 * stride);
  const auto found_counts = read_back<uint32_t>(counts.data(), 2);
  const auto found_selected = read_back<uint64_t>(selected.data(), 2);
  for (uint32_t head = 0; head < 2; ++head) {
    const std::vector<float> mine(both.begin() + head * count, both.begin() + (head + 1) * count);
    const auto expected = reference_rank(mine, 6, most, least, ranked);
    ASSERT_EQ(found_counts[head], expected.size());
    ASSERT_EQ(found_selected[head], 100 + expected.size());
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), found.begin() + head * stride));
    ASSERT_EQ(found[head * stride + stride - 1], 12345u) << "written past the end";
  }
}

namespace {

std::vector<float> random_scores(size_t count, uint64_t seed, float step) {
  std::vector<float> scores = random_matrix(1, static_cast<int64_t>(count), seed).values;
  for (float& score : scores) {
    score = step > 0 ? std::round(score / step) * step : score * 30;
  }
  return scores;
}

}  // namespace

TEST_P(RankConformance, AnyNumberOfTheBest) {
  constexpr float kNone = -3.0e38f;
  for (const size_t count : {0u, 1u, 2u, 7u, 64u, 999u}) {
    for (const float step : {0.0f, 0.25f}) {
      const auto scores = random_scores(count, count + 1, step);
      const auto n = static_cast<uint32_t>(count);
      for (const uint32_t most : {0u, 1u, n / 3, n / 2, n, n + 3}) {
        check(scores, most, kNone, false);
        check(scores, most, kNone, true);
        check(scores, most, 0.1f, most % 2 == 0);
      }
    }
  }
}

TEST_P(RankConformance, EqualScoresGoToTheLowerId) {
  constexpr float kNone = -3.0e38f;
  check(std::vector<float>(1000, -2.5f), 100, kNone, false);
  check(std::vector<float>(1000, 0.0f), 3, kNone, true);
  std::vector<float> zeros(100, 0.0f);
  for (size_t i = 0; i < zeros.size(); i += 2) zeros[i] = -0.0f;
  check(zeros, 7, kNone, false);
  check(zeros, 7, 0.0f, true);
}

TEST_P(RankConformance, WhatHasNoScoreIsNeverTaken) {
  constexpr float kNone = -3.0e38f;
  std::vector<float> scores(50, -kInfinity);
  check(scores, 10, kNone, false);
  check(scores, 10, -kInfinity, true);
  for (size_t i = 0; i < scores.size(); i += 7) scores[i] = static_cast<float>(i) - 20;
  scores[3] = kNan;
  check(scores, 4, kNone, false);
  check(scores, 40, kNone, true);
  check(scores, 40, -kInfinity, true);
  scores[5] = kInfinity;
  scores[6] = std::numeric_limits<float>::max();
  scores[8] = std::numeric_limits<float>::denorm_min();
  check(scores, 3, kNone, true);
}

TEST_P(RankConformance, LongContexts) {
#ifdef SPIN_SANITIZED
  const size_t counts[] = {20'001};
#else
  const size_t counts[] = {100'000, 131'072, 262'144};
#endif
  for (const size_t count : counts) {
    check(random_scores(count, 5, 0), 2048, -3.0e38f, false);
    check(random_scores(count, 6, 1e-3f), 4096, -3.0e38f, true);
  }
}

}  // namespace spin::testing
