// SPDX-License-Identifier: Apache-2.0
#include "tests/backend/sparse_ops_conformance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "base/bf16.h"

namespace spin::testing {

using layout::DType;

std::string SelectShape::text() const {
  return std::to_string(kv_heads) + " kv heads x " + std::to_string(group) + ", dim " +
         std::to_string(head_dim) + ", pages of " + std::to_string(page_tokens) + ", " +
         std::string(layout::dtype_name(dtype));
}

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Half the distance from 1 to the next number of the type.
double roundoff(DType dtype) { return dtype == DType::kF32 ? kFloatRoundoff : 1.0 / 256; }

void put(std::vector<unsigned char>& bytes, uint64_t offset, DType dtype, float value) {
  if (dtype == DType::kF32) {
    std::memcpy(bytes.data() + offset, &value, sizeof(value));
  } else {
    const base::Bf16 narrow = base::to_bf16(value);
    std::memcpy(bytes.data() + offset, &narrow, sizeof(narrow));
  }
}

Matrix stored(const Matrix& values, DType dtype) {
  Matrix out = values;
  for (float& value : out.values) value = rounded(value, dtype);
  return out;
}

}  // namespace

PagedKeys SparseOpsConformance::make_keys(const SelectShape& shape, const Matrix& keys) {
  const layout::KvGeometry g = shape.geometry();
  PagedKeys out;
  out.keys = stored(keys, shape.dtype);
  const auto tokens = static_cast<uint64_t>(keys.rows);
  const uint64_t pages = g.pages_per_head(tokens);
  std::vector<uint32_t> slots(pages * g.kv_heads * 2 + 1);
  std::iota(slots.begin(), slots.end(), 0u);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(5));
  const size_t element = layout::dtype_bytes(shape.dtype);
  std::vector<unsigned char> bytes(slots.size() * g.page_bytes());
  for (uint64_t at = 0; at < bytes.size(); at += element) put(bytes, at, shape.dtype, kNan);
  for (uint64_t head = 0; head < g.kv_heads; ++head) {
    for (uint64_t t = 0; t < tokens; ++t) {
      const uint64_t slot = slots[head * pages + t / g.page_tokens];
      const uint64_t row = slot * g.page_bytes() + t % g.page_tokens * g.row_bytes();
      for (uint64_t i = 0; i < g.head_dim; ++i) {
        put(bytes, row + i * element, shape.dtype,
            out.keys.at(static_cast<int64_t>(t), static_cast<int64_t>(head * g.head_dim + i)));
      }
    }
  }
  out.pool = upload(std::span<const unsigned char>(bytes));
  out.slots = upload(std::span<const uint32_t>(slots));
  out.tokens.base = out.pool.as<std::byte>();
  out.tokens.geometry = g;
  out.tokens.slots = out.slots.as<uint32_t>();
  out.tokens.slot_stride = pages;
  out.tokens.tokens = tokens;
  return out;
}

DeviceVectors SparseOpsConformance::make_vectors(const SelectShape& shape,
                                                 uint32_t count,
                                                 const Matrix& values) {
  DeviceVectors out;
  out.values = stored(values, shape.dtype);
  const uint64_t stride = (uint64_t{count} + 3) * shape.head_dim;
  const size_t element = layout::dtype_bytes(shape.dtype);
  std::vector<unsigned char> bytes(shape.kv_heads * stride * element);
  for (uint64_t at = 0; at < bytes.size(); at += element) put(bytes, at, shape.dtype, kNan);
  for (uint64_t head = 0; head < shape.kv_heads; ++head) {
    for (uint64_t i = 0; i < uint64_t{count} * shape.head_dim; ++i) {
      put(bytes, (head * stride + i) * element, shape.dtype,
          out.values.values[head * count * shape.head_dim + i]);
    }
  }
  out.buffer = upload(std::span<const unsigned char>(bytes));
  out.ref = {out.buffer.data(), shape.dtype, shape.head_dim, stride};
  return out;
}

DeviceVectors SparseOpsConformance::make_vectors(const SelectShape& shape,
                                                 uint32_t count,
                                                 uint64_t seed) {
  return make_vectors(shape, count,
                      random_matrix(int64_t{shape.kv_heads} * count, shape.head_dim, seed));
}

DeviceVectors SparseOpsConformance::empty_vectors(const SelectShape& shape,
                                                  uint32_t count,
                                                  float fill) {
  Matrix values(int64_t{shape.kv_heads} * count, shape.head_dim);
  std::fill(values.values.begin(), values.values.end(), fill);
  return make_vectors(shape, count, values);
}

Matrix SparseOpsConformance::read_vectors(const SelectShape& shape,
                                          const DeviceVectors& vectors,
                                          uint32_t count) {
  const size_t element = layout::dtype_bytes(shape.dtype);
  const auto bytes = read_back<unsigned char>(vectors.buffer.data(), vectors.buffer.size_bytes());
  Matrix out(int64_t{shape.kv_heads} * count, shape.head_dim);
  for (uint64_t head = 0; head < shape.kv_heads; ++head) {
    for (uint64_t i = 0; i < uint64_t{count} * shape.head_dim; ++i) {
      const unsigned char* at = bytes.data() + (head * vectors.ref.head_stride + i) * element;
      float value = 0;
      if (shape.dtype == DType::kF32) {
        std::memcpy(&value, at, sizeof(value));
      } else {
        base::Bf16 narrow;
        std::memcpy(&narrow, at, sizeof(narrow));
        value = base::to_float(narrow);
      }
      out.values[head * count * shape.head_dim + i] = value;
    }
  }
  return out;
}

namespace {

// ---- Summaries ----

struct Pooled {
  Bounded mean;
  float min = kInfinity;
  float max = -kInfinity;
};

Pooled reference_pool(const PagedKeys& keys, uint64_t first, uint32_t tokens, int64_t column) {
  Pooled out;
  double absolute = 0;
  for (uint64_t t = first; t < first + tokens; ++t) {
    const float key = keys.keys.at(static_cast<int64_t>(t), column);
    out.mean.value += double{key} / tokens;
    absolute += std::abs(double{key}) / tokens;
    out.min = std::min(out.min, key);
    out.max = std::max(out.max, key);
  }
  // A chain of additions and one division; then the rounding to what is stored.
  out.mean.tolerance = (tokens + 1) * kFloatRoundoff * absolute +
                       roundoff(keys.tokens.geometry.dtype) * std::abs(out.mean.value);
  return out;
}

}  // namespace

TEST_P(SparseOpsConformance, MeansAndBoxesOfPartitionsOfAnySize) {
  const std::tuple<SelectShape, uint32_t> cases[] = {
      {{2, 1, 64, 8, DType::kF32}, 8},   {{1, 1, 128, 8, DType::kBF16}, 16},
      {{3, 1, 64, 16, DType::kBF16}, 4}, {{2, 1, 24, 8, DType::kF32}, 64},
      {{1, 1, 72, 1, DType::kBF16}, 8},  {{2, 1, 128, 64, DType::kF32}, 1},
      {{1, 1, 96, 8, DType::kF32}, 12},
  };
  for (const auto& [shape, partition_tokens] : cases) {
    SCOPED_TRACE(shape.text() + ", partitions of " + std::to_string(partition_tokens));
    constexpr uint32_t kFirst = 2, kCount = 67, kOutFirst = 3, kRoom = kCount + kOutFirst + 2;
    const int64_t tokens = int64_t{kFirst + kCount} * partition_tokens + 5;
    const PagedKeys keys =
        make_keys(shape, random_matrix(tokens, int64_t{shape.kv_heads} * shape.head_dim, 1));
    DeviceVectors mean = empty_vectors(shape, kRoom, 9);
    DeviceVectors min = empty_vectors(shape, kRoom, 9);
    DeviceVectors max = empty_vectors(shape, kRoom, 9);
    backend::PoolKeysItem item;
    item.tokens = keys.tokens;
    item.partition_tokens = partition_tokens;
    item.first = kFirst;
    item.count = kCount;
    item.out_first = kOutFirst;
    item.mean = mean.ref;
    item.min = min.ref;
    item.max = max.ref;
    sparse().enqueue_pool_keys({&item, 1}, stream());
    ASSERT_TRUE(stream().wait_idle().ok());
    const Matrix means = read_vectors(shape, mean, kRoom);
    const Matrix mins = read_vectors(shape, min, kRoom);
    const Matrix maxs = read_vectors(shape, max, kRoom);
    for (uint32_t row = 0; row < shape.kv_heads * kRoom; ++row) {
      const uint32_t head = row / kRoom;
      const uint32_t j = row % kRoom;
      for (uint32_t i = 0; i < shape.head_dim; ++i) {
        if (j < kOutFirst || j >= kOutFirst + kCount) {
          ASSERT_EQ(means.at(row, i), 9) << "partition " << j << " was not asked for";
          continue;
        }
        const Pooled expected =
            reference_pool(keys, uint64_t{kFirst + j - kOutFirst} * partition_tokens,
                           partition_tokens, int64_t{head} * shape.head_dim + i);
        ASSERT_NEAR(means.at(row, i), expected.mean.value, expected.mean.tolerance);
        ASSERT_EQ(mins.at(row, i), expected.min);
        ASSERT_EQ(maxs.at(row, i), expected.max);
      }
    }
  }
}

TEST_P(SparseOpsConformance, ASummaryHasTheSameBitsWhereverItsTokensLie) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const SelectShape shape{2, 1, 64, 8, dtype};
    const int64_t width = int64_t{shape.kv_heads} * shape.head_dim;
    const Matrix all = random_matrix(160, width, 2);
    const PagedKeys prompt = make_keys(shape, all);
    DeviceVectors at_once = empty_vectors(shape, 10, 0);
    DeviceVectors one_by_one = empty_vectors(shape, 10, 0);
    backend::PoolKeysItem item;
    item.tokens = prompt.tokens;
    item.partition_tokens = 16;
    item.count = 10;
    item.mean = at_once.ref;
    sparse().enqueue_pool_keys({&item, 1}, stream());
    ASSERT_TRUE(stream().wait_idle().ok());
    for (uint32_t j = 0; j < 10; ++j) {
      Matrix part(16, width);
      std::copy_n(all.values.begin() + j * 16 * width, 16 * width, part.values.begin());
      SelectShape other = shape;
      other.page_tokens = j % 2 == 0 ? 4 : 16;
      const PagedKeys tail = make_keys(other, part);
      item.tokens = tail.tokens;
      item.count = 1;
      item.out_first = j;
      item.mean = one_by_one.ref;
      sparse().enqueue_pool_keys({&item, 1}, stream());
      ASSERT_TRUE(stream().wait_idle().ok());
    }
    EXPECT_EQ(read_vectors(shape, at_once, 10).values, read_vectors(shape, one_by_one, 10).values);
  }
}

TEST_P(SparseOpsConformance, StraysAreMeasuredByTheLeastCosineToTheMean) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const SelectShape shape{2, 1, 64, 8, dtype};
    Matrix values = random_matrix(96, 128, 3);
    for (int64_t i = 0; i < 64; ++i) values.at(17, i) = 0;  // no direction
    const PagedKeys keys = make_keys(shape, values);
    DeviceVectors mean = empty_vectors(shape, 12, 0);
    backend::PoolKeysItem pool;
    pool.tokens = keys.tokens;
    pool.partition_tokens = 8;
    pool.count = 12;
    pool.mean = mean.ref;
    sparse().enqueue_pool_keys({&pool, 1}, stream());
    const backend::Buffer scores = filled<float>(2 * 20, 7.0f);
    backend::ScoreStraysItem item;
    item.tokens = keys.tokens;
    item.partition_tokens = 8;
    item.first = 1;
    item.count = 11;
    item.mean = mean.ref;
    item.scores = scores.as<float>();
    item.score_stride = 20;
    sparse().enqueue_score_strays({&item, 1}, stream());
    const auto found = read_back<float>(scores.data(), 40);
    const Matrix means = read_vectors(shape, mean, 12);
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t j = 1; j < 12; ++j) {
        double least = 1;
        for (int64_t t = j * 8; t < (j + 1) * 8; ++t) {
          double dot = 0, key_square = 0, mean_square = 0;
          for (int64_t i = 0; i < 64; ++i) {
            const double key = keys.keys.at(t, head * 64 + i);
            const double m = means.at(head * 12 + j, i);
            dot += key * m;
            key_square += key * key;
            mean_square += m * m;
          }
          const double lengths = std::sqrt(key_square * mean_square);
          least = std::min(least, lengths > 0 ? dot / lengths : 0.0);
        }
        // By Cauchy's inequality the error of the product is at most that of the lengths.
        EXPECT_NEAR(found[static_cast<size_t>(head * 20 + j - 1)], -least, 3 * 66 * kFloatRoundoff);
      }
      EXPECT_EQ(found[static_cast<size_t>(head * 20 + 11)], 7.0f);
    }
  }
}

TEST_P(SparseOpsConformance, SizesAreFilledAndPunched) {
  const backend::Buffer sizes = filled<uint32_t>(2 * 10, 99);
  const std::vector<uint32_t> ids = {3, 7, 0, 4, 0, 0};
  const std::vector<uint32_t> counts = {2, 1};
  const backend::Buffer id_buffer = upload(std::span<const uint32_t>(ids));
  const backend::Buffer count_buffer = upload(std::span<const uint32_t>(counts));
  backend::FillSizesItem item;
  item.sizes = sizes.as<uint32_t>();
  item.size_stride = 10;
  item.first = 2;
  item.count = 6;
  item.value = 8;
  item.ids = id_buffer.as<uint32_t>();
  item.counts = count_buffer.as<uint32_t>();
  item.id_stride = 3;
  sparse().enqueue_fill_sizes({&item, 1}, 2, stream());
  EXPECT_EQ(read_back<uint32_t>(sizes.data(), 20),
            (std::vector<uint32_t>{99, 99, 8, 0, 8, 8, 8, 0, 99, 99,  //
                                   99, 99, 8, 8, 0, 8, 8, 8, 99, 99}));
}

// ---- Lists ----

ListConformance::List ListConformance::empty_list(uint32_t heads, uint32_t stride) {
  List list;
  list.pages = filled<uint32_t>(heads * stride, 4711);
  list.tokens = filled<uint8_t>(heads * stride, 255);
  list.counts = filled<uint32_t>(heads, 4711);
  list.attended = filled<uint64_t>(heads, 1000);
  list.ref = {list.pages.as<uint32_t>(), list.tokens.as<uint8_t>(), list.counts.as<uint32_t>(),
              stride};
  return list;
}

void ListConformance::expect_list(const List& list,
                                  uint32_t head,
                                  const std::vector<uint32_t>& pages,
                                  const std::vector<uint8_t>& tokens) {
  const auto all_pages =
      read_back<uint32_t>(list.pages.data(), list.pages.size_bytes() / sizeof(uint32_t));
  const auto all_tokens = read_back<uint8_t>(list.tokens.data(), list.tokens.size_bytes());
  const auto counts =
      read_back<uint32_t>(list.counts.data(), list.counts.size_bytes() / sizeof(uint32_t));
  const auto attended =
      read_back<uint64_t>(list.attended.data(), list.attended.size_bytes() / sizeof(uint64_t));
  ASSERT_EQ(counts[head], pages.size());
  const size_t row = size_t{head} * list.ref.stride;
  for (size_t i = 0; i < pages.size(); ++i) {
    EXPECT_EQ(all_pages[row + i], pages[i]) << i;
    EXPECT_EQ(all_tokens[row + i], tokens[i]) << i;
  }
  EXPECT_EQ(attended[head], std::accumulate(tokens.begin(), tokens.end(), uint64_t{1000}));
}

namespace {

layout::KvGeometry geometry(uint32_t heads) { return {1, heads, 64, 8, layout::DType::kF32}; }

}  // namespace

TEST_P(ListConformance, SinksPinnedPagesRangesAndTailInAscendingOrder) {
  const std::vector<uint32_t> pinned_pages = {4, 5, 5, 0};
  const std::vector<uint8_t> pinned_tokens = {8, 8, 8, 0};
  const std::vector<uint32_t> pinned_counts = {2, 1};
  const std::vector<uint32_t> ids = {9, 4, 3,
                                     2, 0, 0};  // in any order; page 5 is pinned and selected
  const std::vector<uint32_t> counts = {3, 1};
  const backend::Buffer b[] = {upload(std::span<const uint32_t>(pinned_pages)),
                               upload(std::span<const uint8_t>(pinned_tokens)),
                               upload(std::span<const uint32_t>(pinned_counts)),
                               upload(std::span<const uint32_t>(ids)),
                               upload(std::span<const uint32_t>(counts))};
  const List list = empty_list(2, 13);
  backend::BuildListItem item;
  item.sink_pages = 2;
  item.pinned = {b[0].as<uint32_t>(), b[1].as<uint8_t>(), b[2].as<uint32_t>(), 2};
  item.ids = b[3].as<uint32_t>();
  item.counts = b[4].as<uint32_t>();
  item.id_stride = 3;
  item.pages_per_partition = 2;
  item.tail_first_page = 30;
  item.tail_tokens = 17;
  item.list = list.ref;
  item.attended = list.attended.as<uint64_t>();
  sparse().enqueue_build_lists({&item, 1}, geometry(2), stream());
  ASSERT_TRUE(stream().wait_idle().ok());
  expect_list(list, 0, {0, 1, 4, 5, 6, 7, 8, 9, 18, 19, 30, 31, 32},
              {8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 1});
  expect_list(list, 1, {0, 1, 4, 5, 30, 31, 32}, {8, 8, 8, 8, 8, 8, 1});
}

TEST_P(ListConformance, ClustersEndInPartlyFilledPages) {
  const std::vector<uint32_t> ids = {2, 0, 1};
  const std::vector<uint32_t> counts = {3};
  const std::vector<uint32_t> first_pages = {10, 13, 1, 50};
  const std::vector<uint32_t> sizes = {17, 0, 8, 3};
  const backend::Buffer b[] = {
      upload(std::span<const uint32_t>(ids)), upload(std::span<const uint32_t>(counts)),
      upload(std::span<const uint32_t>(first_pages)), upload(std::span<const uint32_t>(sizes))};
  const List list = empty_list(1, 9);
  backend::BuildListItem item;
  item.sink_pages = 1;
  item.ids = b[0].as<uint32_t>();
  item.counts = b[1].as<uint32_t>();
  item.id_stride = 3;
  item.first_pages = b[2].as<uint32_t>();
  item.sizes = b[3].as<uint32_t>();
  item.cluster_stride = 4;
  item.tail_first_page = 8;  // the tail's ids may lie below those of later clusters
  item.tail_tokens = 9;
  item.list = list.ref;
  item.attended = list.attended.as<uint64_t>();
  sparse().enqueue_build_lists({&item, 1}, geometry(1), stream());
  ASSERT_TRUE(stream().wait_idle().ok());
  expect_list(list, 0, {0, 1, 8, 9, 10, 11, 12}, {8, 8, 8, 1, 8, 8, 1});
}

TEST_P(ListConformance, NothingButATailOrNothingAtAll) {
  const List first = empty_list(1, 2);
  const List second = empty_list(1, 2);
  std::vector<backend::BuildListItem> items(2);
  items[0].tail_first_page = 3;
  items[0].tail_tokens = 16;
  items[0].list = first.ref;
  items[0].attended = first.attended.as<uint64_t>();
  items[1].list = second.ref;
  items[1].attended = second.attended.as<uint64_t>();
  sparse().enqueue_build_lists(items, geometry(1), stream());
  ASSERT_TRUE(stream().wait_idle().ok());
  expect_list(first, 0, {3, 4}, {8, 8});
  expect_list(second, 0, {}, {});
}

TEST_P(ListConformance, AListThatDoesNotFitFailsTheStreamAndIsNotCut) {
  const List list = empty_list(1, 2);
  backend::BuildListItem item;
  item.sink_pages = 1;
  item.tail_first_page = 5;
  item.tail_tokens = 9;
  item.list = list.ref;
  sparse().enqueue_build_lists({&item, 1}, geometry(1), stream());
  EXPECT_EQ(stream().wait_idle().code(), StatusCode::kInternal);
}

// ---- Estimation ----

TEST_P(SparseOpsConformance, EstimatesWeighClustersByTheirSizes) {
  for (const uint32_t group : {1u, 3u, 8u}) {
    const SelectShape shape{2, group, group == 3 ? 128u : 64u, 8,
                            group == 1 ? DType::kF32 : DType::kBF16};
    SCOPED_TRACE(shape.text());
    constexpr uint32_t kClusters = 50, kStride = 40, kSkip = 3;
    const DeviceVectors keys = make_vectors(shape, kClusters, 41);
    const DeviceVectors sums = make_vectors(shape, kClusters, 42);
    std::vector<uint32_t> size_values, id_values;
    for (uint32_t i = 0; i < 2 * kClusters; ++i) size_values.push_back(i % 7 == 3 ? 0 : 1 + i % 40);
    for (uint32_t i = 0; i < 2 * kStride; ++i) id_values.push_back((i * 7 + 1) % kClusters);
    const std::vector<uint32_t> count_values = {kStride, 3};  // the second: all are skipped
    const backend::Buffer sizes = upload(std::span<const uint32_t>(size_values));
    const backend::Buffer ids = upload(std::span<const uint32_t>(id_values));
    const backend::Buffer counts = upload(std::span<const uint32_t>(count_values));
    const uint32_t q_heads = 2 * group;
    const Matrix q = random_matrix(2, int64_t{q_heads} * shape.head_dim, 43);
    const Tensor q_tensor = upload_matrix(q);
    const backend::Buffer part = filled<float>(q_heads * shape.head_dim, 5.0f);
    const backend::Buffer lse = filled<float>(q_heads, 5.0f);
    backend::EstimateItem item;
    item.row = 1;
    item.keys = keys.ref;
    item.value_sums = sums.ref;
    item.sizes = sizes.as<uint32_t>();
    item.size_stride = kClusters;
    item.ids = ids.as<uint32_t>();
    item.counts = counts.as<uint32_t>();
    item.id_stride = kStride;
    item.skip = kSkip;
    item.part = part.as<float>();
    item.log_sum_exp = lse.as<float>();
    sparse().enqueue_estimate(q_tensor.ref, {&item, 1}, shape.geometry(), 0.5f, stream());
    const auto found = read_back<float>(part.data(), q_heads * shape.head_dim);
    const auto found_lse = read_back<float>(lse.data(), q_heads);
    for (uint32_t h = 0; h < q_heads; ++h) {
      const uint32_t head = h / group;
      std::vector<double> sum(shape.head_dim), absolute(shape.head_dim);
      double den = 0, worst = 0;
      for (uint32_t i = kSkip; i < count_values[head]; ++i) {
        const uint32_t id = id_values[head * kStride + i];
        const uint32_t size = size_values[head * kClusters + id];
        if (size == 0) continue;
        const float* key =
            keys.values.values.data() + (head * kClusters + id) * uint64_t{shape.head_dim};
        const Bounded s = reference_score(q.values.data() + q.cols + uint64_t{h} * shape.head_dim,
                                          key, key, shape.head_dim, 0.5f);
        worst = std::max(worst, s.tolerance);
        den += size * std::exp(s.value);
        for (uint32_t d = 0; d < shape.head_dim; ++d) {
          const double value = sums.values.at(head * kClusters + id, d);
          sum[d] += std::exp(s.value) * value;
          absolute[d] += std::exp(s.value) * std::abs(value);
        }
      }
      if (head == 1) {
        EXPECT_EQ(found_lse[h], -kInfinity);
        for (uint32_t d = 0; d < shape.head_dim; ++d) {
          EXPECT_EQ(found[h * shape.head_dim + d], 0.0f);
        }
        continue;
      }
      const double relative = 2 * worst + (kStride + 16) * kFloatRoundoff;
      EXPECT_NEAR(found_lse[h], std::log(den),
                  relative + 8 * kFloatRoundoff * std::abs(std::log(den)));
      for (uint32_t d = 0; d < shape.head_dim; ++d) {
        EXPECT_NEAR(found[h * shape.head_dim + d], sum[d] / den, 2 * relative * absolute[d] / den);
      }
    }
  }
}

}  // namespace spin::testing
