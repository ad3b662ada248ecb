// SPDX-License-Identifier: Apache-2.0
#include "tests/backend/cluster_conformance.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "base/bf16.h"

namespace spin::testing {
namespace {

using layout::DType;

// Tokens in pages whose slots are shuffled; unused bytes are NaN.
struct PagedWorld {
  std::vector<unsigned char> pool;
  std::vector<uint32_t> slots;  // [kv_heads, pages]
  layout::KvGeometry geometry;
  uint64_t pages = 0;
};

void store(float value, DType dtype, unsigned char* to) {
  const base::Bf16 narrow = base::to_bf16(value);
  if (dtype == DType::kF32) std::memcpy(to, &value, 4);
  if (dtype == DType::kBF16) std::memcpy(to, &narrow, 2);
}

PagedWorld lay_out(const ClusterShape& shape, const Matrix& keys, const Matrix& values) {
  PagedWorld world;
  world.geometry = {.layers = 1,
                    .kv_heads = shape.kv_heads,
                    .head_dim = shape.head_dim,
                    .page_tokens = shape.page_tokens,
                    .dtype = shape.dtype};
  const auto tokens = static_cast<uint64_t>(keys.rows);
  world.pages = world.geometry.pages_per_head(tokens);
  world.slots.resize(world.pages * shape.kv_heads);
  std::iota(world.slots.begin(), world.slots.end(), 0u);
  std::shuffle(world.slots.begin(), world.slots.end(), std::mt19937(11));
  world.pool.assign(world.slots.size() * world.geometry.page_bytes(), 0xFF);
  const size_t element = layout::dtype_bytes(shape.dtype);
  for (uint64_t h = 0; h < shape.kv_heads; ++h) {
    for (uint64_t t = 0; t < tokens; ++t) {
      const uint64_t slot = world.slots[h * world.pages + t / shape.page_tokens];
      unsigned char* row = &world.pool[slot * world.geometry.page_bytes() +
                                       t % shape.page_tokens * world.geometry.row_bytes()];
      for (uint64_t d = 0; d < shape.head_dim; ++d) {
        const auto column = static_cast<int64_t>(h * shape.head_dim + d);
        store(keys.at(static_cast<int64_t>(t), column), shape.dtype, row + d * element);
        store(values.at(static_cast<int64_t>(t), column), shape.dtype,
              row + world.geometry.plane_bytes() + d * element);
      }
    }
  }
  return world;
}

backend::Buffer fast(backend::Device& device, size_t bytes) {
  auto buffer = backend::Buffer::allocate(device.memory(backend::MemoryKind::kFast), bytes);
  EXPECT_TRUE(buffer.ok()) << buffer.status().to_string();
  return std::move(buffer).value();
}

template <typename T>
std::vector<T> download_values(backend::Stream& stream, const backend::Buffer& buffer) {
  std::vector<T> values(buffer.size_bytes() / sizeof(T));
  stream.enqueue_copy(values.data(), buffer.data(), buffer.size_bytes());
  const Status status = stream.wait_idle();
  EXPECT_TRUE(status.ok()) << status.to_string();
  return values;
}

std::vector<float> download_vectors(backend::Stream& stream,
                                    const backend::Buffer& buffer,
                                    DType dtype) {
  if (dtype == DType::kF32) return download_values<float>(stream, buffer);
  std::vector<float> values;
  for (const base::Bf16 narrow : download_values<base::Bf16>(stream, buffer)) {
    values.push_back(base::to_float(narrow));
  }
  return values;
}

}  // namespace

std::string ClusterShape::text() const {
  return std::to_string(kv_heads) + " heads of " + std::to_string(head_dim) + ", pages of " +
         std::to_string(page_tokens) + ", " + std::string(layout::dtype_name(dtype)) + ", " +
         std::to_string(tokens) + " tokens from " + std::to_string(first_token) + " in " +
         std::to_string(segments) + " x " + std::to_string(clusters / segments) + " clusters, " +
         std::to_string(iterations) + " iterations";
}

ClusterResult run_cluster(backend::Device& device,
                          backend::Stream& stream,
                          const ClusterShape& shape,
                          const Matrix& keys,
                          const Matrix& values) {
  const PagedWorld world = lay_out(shape, keys, values);
  const backend::Buffer pool = fast(device, world.pool.size());
  const backend::Buffer slots = fast(device, world.slots.size() * 4);
  stream.enqueue_copy(pool.data(), world.pool.data(), world.pool.size());
  stream.enqueue_copy(slots.data(), world.slots.data(), world.slots.size() * 4);
  const uint64_t heads = shape.kv_heads;
  const uint64_t stride = shape.out_first + shape.clusters;
  ClusterResult result;
  result.page_stride = static_cast<uint32_t>(
      backend::most_cluster_pages(shape.tokens, shape.clusters, shape.page_tokens) + 1);
  const uint64_t vector_bytes = heads * stride * shape.head_dim * layout::dtype_bytes(shape.dtype);
  const backend::Buffer centroids = fast(device, vector_bytes);
  const backend::Buffer value_sums = fast(device, vector_bytes);
  const backend::Buffer sizes = fast(device, heads * stride * 4);
  const backend::Buffer first_pages = fast(device, heads * stride * 4);
  const backend::Buffer page_counts = fast(device, heads * 4);
  const backend::Buffer page_starts = fast(device, heads * result.page_stride * 4);
  const backend::Buffer token_ids = fast(device, heads * shape.tokens * 4);
  // Entries that the operation must leave alone, or does not write, compare as zeros.
  for (const backend::Buffer* buffer :
       {&centroids, &value_sums, &sizes, &first_pages, &page_starts}) {
    const std::vector<char> zeros(buffer->size_bytes());
    stream.enqueue_copy(buffer->data(), zeros.data(), zeros.size());
    EXPECT_TRUE(stream.wait_idle().ok());
  }
  backend::ClusterItem item;
  item.source = {pool.as<std::byte>(), world.geometry, slots.as<uint32_t>(), world.pages,
                 static_cast<uint64_t>(keys.rows)};
  item.first_token = shape.first_token;
  item.tokens = shape.tokens;
  item.clusters = shape.clusters;
  item.segments = shape.segments;
  item.iterations = shape.iterations;
  item.out_first = shape.out_first;
  item.centroids = {centroids.data(), shape.dtype, shape.head_dim, stride * shape.head_dim};
  item.value_sums = {value_sums.data(), shape.dtype, shape.head_dim, stride * shape.head_dim};
  item.sizes = sizes.as<uint32_t>();
  item.first_pages = first_pages.as<uint32_t>();
  item.cluster_stride = stride;
  item.first_page_id = shape.first_page_id;
  item.page_counts = page_counts.as<uint32_t>();
  item.page_starts = page_starts.as<uint32_t>();
  item.token_ids = token_ids.as<uint32_t>();
  item.page_stride = result.page_stride;
  item.token_stride = shape.tokens;
  device.sparse_ops().enqueue_cluster({&item, 1}, stream);
  result.centroids = download_vectors(stream, centroids, shape.dtype);
  result.value_sums = download_vectors(stream, value_sums, shape.dtype);
  result.sizes = download_values<uint32_t>(stream, sizes);
  result.first_pages = download_values<uint32_t>(stream, first_pages);
  result.page_counts = download_values<uint32_t>(stream, page_counts);
  result.page_starts = download_values<uint32_t>(stream, page_starts);
  result.token_ids = download_values<uint32_t>(stream, token_ids);
  return result;
}

std::vector<uint32_t> clusters_of_tokens(const ClusterShape& shape,
                                         const ClusterResult& result,
                                         uint32_t head) {
  const uint64_t stride = shape.out_first + shape.clusters;
  const uint32_t* starts = &result.page_starts[head * uint64_t{result.page_stride}];
  const uint32_t* ids = &result.token_ids[head * uint64_t{shape.tokens}];
  std::vector<uint32_t> clusters(shape.tokens, UINT32_MAX);
  uint32_t page = 0;
  for (uint32_t i = 0; i < shape.clusters; ++i) {
    const uint64_t at = head * stride + shape.out_first + i;
    uint32_t left = result.sizes[at];
    EXPECT_EQ(result.first_pages[at], shape.first_page_id + page) << "cluster " << i;
    uint32_t before = 0;
    for (; left > 0 && page < result.page_counts[head]; ++page) {
      // Full pages, the last one excepted.
      const uint32_t held = starts[page + 1] - starts[page];
      EXPECT_EQ(held, std::min(left, shape.page_tokens)) << "page " << page;
      for (uint32_t k = starts[page]; k < starts[page + 1]; ++k) {
        const uint32_t token = ids[k] - shape.first_token;
        if (token >= shape.tokens || clusters[token] != UINT32_MAX) {
          ADD_FAILURE() << "token id " << ids[k] << " is out of range or there twice";
          return clusters;
        }
        EXPECT_TRUE(before <= token) << "cluster " << i << " is not in token order";
        before = token;
        clusters[token] = i;
      }
      left -= std::min(left, held);
    }
    EXPECT_EQ(left, 0u) << "cluster " << i;
  }
  EXPECT_EQ(page, result.page_counts[head]);
  EXPECT_EQ(std::count(clusters.begin(), clusters.end(), UINT32_MAX), 0);
  return clusters;
}

namespace {

// The definition of ClusterItem once more, in double.
struct ReferenceClusters {
  std::vector<uint32_t> nearest;               // [tokens]
  std::vector<std::vector<double>> centroids;  // [clusters][head_dim], without mu
  std::vector<double> mean;                    // mu
  // Least lead of a nearest centroid over the next one, relative to |x| |c|.
  double margin = std::numeric_limits<double>::infinity();
};

double norm_of(const std::vector<double>& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

class ReferenceClustering {
 public:
  ReferenceClustering(const ClusterShape& shape, const Matrix& keys, uint32_t head)
      : shape_(shape) {
    out_.mean.assign(shape.head_dim, 0.0);
    for (uint32_t t = 0; t < shape.tokens; ++t) {
      std::vector<double> x;
      for (uint32_t d = 0; d < shape.head_dim; ++d) {
        x.push_back(static_cast<double>(
            rounded(keys.at(shape.first_token + t, head * shape.head_dim + d), shape.dtype)));
        out_.mean[d] += x.back() / shape.tokens;
      }
      x_.push_back(x);
    }
    for (std::vector<double>& x : x_) {
      for (uint32_t d = 0; d < shape.head_dim; ++d) x[d] -= out_.mean[d];
    }
  }

  ReferenceClusters run() {
    for (uint64_t i = 0; i < shape_.clusters; ++i) {
      out_.centroids.push_back(x_[(2 * i + 1) * shape_.tokens / (2 * shape_.clusters)]);
    }
    out_.nearest.assign(shape_.tokens, 0);
    const uint32_t run_tokens = shape_.tokens / shape_.segments;
    const uint32_t run_clusters = shape_.clusters / shape_.segments;
    for (uint32_t i = 0; i < shape_.iterations; ++i) {
      for (uint32_t s = 0; s < shape_.segments; ++s) {
        assign(s * run_tokens, run_tokens, s * run_clusters, run_clusters);
      }
      average(shape_.segments * run_tokens, true);
    }
    assign(0, shape_.tokens, 0, shape_.clusters);
    average(shape_.tokens, false);
    return out_;
  }

 private:
  void assign(uint32_t first, uint32_t tokens, uint32_t first_cluster, uint32_t clusters) {
    for (uint32_t t = first; t < first + tokens; ++t) {
      double best = -std::numeric_limits<double>::infinity();
      double second = best;
      for (uint32_t i = first_cluster; i < first_cluster + clusters; ++i) {
        const std::vector<double>& c = out_.centroids[i];
        const double s = std::inner_product(c.begin(), c.end(), x_[t].begin(), 0.0);
        if (s > best) {
          second = best;
          best = s;
          out_.nearest[t] = i;
        } else if (s > second && c != out_.centroids[out_.nearest[t]]) {
          second = s;  // of equal centroids the first one wins in any arithmetic
        }
      }
      const double size = norm_of(x_[t]) * norm_of(out_.centroids[out_.nearest[t]]);
      out_.margin = std::min(out_.margin, (best - second) / size);
    }
  }

  void average(uint32_t tokens, bool normalise) {
    for (uint32_t i = 0; i < shape_.clusters; ++i) {
      std::vector<double> sum(shape_.head_dim, 0.0);
      double members = 0;
      for (uint32_t t = 0; t < tokens; ++t) {
        if (out_.nearest[t] != i) continue;
        ++members;
        for (uint32_t d = 0; d < shape_.head_dim; ++d) sum[d] += x_[t][d];
      }
      if (members == 0) {
        if (!normalise) out_.centroids[i].assign(shape_.head_dim, 0.0);
        continue;
      }
      for (double& value : sum) value /= members;
      const double norm = norm_of(sum);
      for (double& value : sum) value /= normalise && norm > 0 ? norm : 1.0;
      out_.centroids[i] = sum;
    }
  }

  const ClusterShape& shape_;
  std::vector<std::vector<double>> x_;  // [tokens][head_dim], centred
  ReferenceClusters out_;
};

// A float computation finds the same clusters when every lead is larger than what a product may be
// off: the chain of head_dim terms, and centroids that come from sums of at most `tokens` terms.
double needed_margin(const ClusterShape& shape) {
  return 4.0 * (shape.head_dim + shape.tokens) * kFloatRoundoff;
}

double dtype_roundoff(DType dtype) { return dtype == DType::kF32 ? kFloatRoundoff : 1.0 / 256; }

void expect_reference(const ClusterShape& shape,
                      const Matrix& keys,
                      const Matrix& values,
                      const ClusterResult& found,
                      uint32_t head) {
  const ReferenceClusters expected = ReferenceClustering(shape, keys, head).run();
  ASSERT_GT(expected.margin, needed_margin(shape)) << "these data cannot tell";
  EXPECT_EQ(clusters_of_tokens(shape, found, head), expected.nearest);
  const uint64_t stride = shape.out_first + shape.clusters;
  for (uint32_t i = 0; i < shape.clusters; ++i) {
    const uint64_t at = head * stride + shape.out_first + i;
    for (uint32_t d = 0; d < shape.head_dim; ++d) {
      double value_sum = 0;
      double magnitude = 0;  // of what is added up
      for (uint32_t t = 0; t < shape.tokens; ++t) {
        if (expected.nearest[t] != i) continue;
        const float value =
            rounded(values.at(shape.first_token + t, head * shape.head_dim + d), shape.dtype);
        value_sum += static_cast<double>(value);
        magnitude += std::abs(static_cast<double>(value));
      }
      const double error = (shape.tokens + 2) * kFloatRoundoff;
      const double centroid = expected.centroids[i][d] + expected.mean[d];
      // |x| <= 2 and |mu| <= 1 by the range of the keys.
      EXPECT_NEAR(found.centroids[at * shape.head_dim + d], centroid,
                  4 * error + dtype_roundoff(shape.dtype) * std::abs(centroid))
          << "cluster " << i << ", dimension " << d;
      EXPECT_NEAR(found.value_sums[at * shape.head_dim + d], value_sum,
                  error * magnitude + dtype_roundoff(shape.dtype) * std::abs(value_sum))
          << "cluster " << i << ", dimension " << d;
    }
  }
}

TEST_P(ClusterConformance, ClustersAreThoseOfTheDefinition) {
  const ClusterShape shapes[] = {
      {2, 64, 8, DType::kF32, 8, 300, 24, 1, 9, 0, 1},
      {1, 128, 8, DType::kBF16, 16, 211, 16, 2, 9, 5, 7},
      {3, 24, 16, DType::kBF16, 0, 100, 12, 3, 4, 0, 0},
      {1, 64, 1, DType::kF32, 3, 150, 10, 1, 3, 2, 100},
      {1, 72, 32, DType::kF32, 32, 260, 140, 2, 1, 0, 3},
      {2, 96, 64, DType::kBF16, 64, 199, 130, 1, 0, 0, 0},
      {1, 40, 8, DType::kF32, 0, 1, 1, 1, 2, 0, 0},
      {1, 8, 8, DType::kF32, 4, 33, 3, 1, 2, 1, 9},
  };
  for (const ClusterShape& shape : shapes) {
    SCOPED_TRACE(shape.text());
    const int64_t width = int64_t{shape.kv_heads} * shape.head_dim;
    const Matrix keys = random_matrix(shape.first_token + shape.tokens, width, 3);
    const Matrix values = random_matrix(shape.first_token + shape.tokens, width, 4);
    const ClusterResult found = run_cluster(*device_, stream(), shape, keys, values);
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      SCOPED_TRACE("head " + std::to_string(head));
      expect_reference(shape, keys, values, found, head);
    }
  }
}

TEST_P(ClusterConformance, KeysAroundPlantedDirectionsAreFoundAgain) {
  // 6 directions, 40 tokens each, in an order of no period; noise far below the distances.
  const ClusterShape shape{1, 64, 8, DType::kF32, 0, 240, 6, 1, 9, 0, 0};
  const Matrix directions = random_matrix(6, 64, 21);
  Matrix keys = random_matrix(240, 64, 22);
  std::vector<uint32_t> planted(240);
  for (uint32_t t = 0; t < 240; ++t) {
    // The start tokens (every 40th from 20 on) have one direction each.
    planted[t] = t % 40 == 20 ? t / 40 : (t * 7 + t / 6) % 6;
    for (int64_t d = 0; d < 64; ++d) {
      keys.at(t, d) = 4 * directions.at(planted[t], d) + 0.05f * keys.at(t, d);
    }
  }
  const ClusterResult found =
      run_cluster(*device_, stream(), shape, keys, random_matrix(240, 64, 23));
  EXPECT_EQ(clusters_of_tokens(shape, found, 0), planted);
}

TEST_P(ClusterConformance, ACentroidWithoutMembersKeepsItsValue) {
  // Five kinds of keys longer than 1 and more centroids: the first of a kind takes all its tokens
  // and is brought to length 1; the second stays a raw key, which then has the larger products.
  const ClusterShape shape{1, 64, 8, DType::kF32, 0, 120, 12, 1, 1, 0, 0};
  const Matrix kinds = random_matrix(5, 64, 41);
  Matrix keys(120, 64);
  for (int64_t t = 0; t < 120; ++t) {
    for (int64_t d = 0; d < 64; ++d) keys.at(t, d) = kinds.at(t / 10 % 5, d);
  }
  const Matrix values = random_matrix(120, 64, 42);
  const ClusterResult found = run_cluster(*device_, stream(), shape, keys, values);
  expect_reference(shape, keys, values, found, 0);
  const std::vector<uint32_t> clusters = clusters_of_tokens(shape, found, 0);
  EXPECT_EQ(clusters[0], 5u);  // not 0
}

TEST_P(ClusterConformance, EqualKeysAndFewerTokensThanClustersLeaveClustersEmpty) {
  const ClusterShape equal{1, 64, 8, DType::kBF16, 8, 1001, 64, 4, 9, 0, 1};
  Matrix keys(1009, 64);
  for (float& value : keys.values) value = 0.3f;
  const ClusterResult found =
      run_cluster(*device_, stream(), equal, keys, random_matrix(1009, 64, 5));
  clusters_of_tokens(equal, found, 0);
  // More than bf16 can count one by one.
  EXPECT_EQ(found.sizes[0], 1001u);
  EXPECT_EQ(found.page_counts[0], 126u);
  for (const float value : found.centroids) EXPECT_EQ(value, rounded(0.3f, DType::kBF16));

  const ClusterShape few{1, 64, 8, DType::kF32, 0, 5, 16, 2, 9, 0, 0};
  const ClusterResult five =
      run_cluster(*device_, stream(), few, random_matrix(5, 64, 6), random_matrix(5, 64, 7));
  clusters_of_tokens(few, five, 0);
  EXPECT_LE(five.page_counts[0], 5u);
}

TEST_P(ClusterConformance, ZeroKeysGiveNumbersAndKeysThatAreNoneStillHaveOneClusterEach) {
  const ClusterShape shape{2, 64, 8, DType::kF32, 0, 130, 16, 2, 9, 0, 0};
  Matrix keys = random_matrix(130, 128, 8);
  for (int64_t t = 0; t < 130; ++t) {
    for (int64_t d = 0; d < 64; ++d) keys.at(t, d) = 0.0f;
  }
  keys.at(77, 64 + 3) = std::nanf("");
  keys.at(78, 64 + 4) = std::numeric_limits<float>::infinity();
  const ClusterResult found =
      run_cluster(*device_, stream(), shape, keys, random_matrix(130, 128, 9));
  clusters_of_tokens(shape, found, 0);
  clusters_of_tokens(shape, found, 1);
  EXPECT_EQ(found.sizes[0], 130u);
  for (size_t i = 0; i < size_t{16} * 64; ++i) EXPECT_EQ(found.centroids[i], 0.0f);
}

TEST_P(ClusterConformance, RankedClustersAreSplitByThePagesThatFit) {
  // Two heads; sizes in tokens, pages of 8.
  const std::vector<uint32_t> ids = {3, 0, 5, 1, 4, 0, 2, 1, 0, 0};
  const std::vector<uint32_t> counts = {5, 3};
  const std::vector<uint32_t> sizes = {9, 8, 0, 1, 17, 40, 24, 16, 300, 7, 7, 7};
  const backend::Buffer ids_buffer = upload<uint32_t>(ids);
  const backend::Buffer counts_buffer = upload<uint32_t>(counts);
  const backend::Buffer sizes_buffer = upload<uint32_t>(sizes);
  const std::vector<uint32_t> blank(10, 77);
  const backend::Buffer exact = upload<uint32_t>(blank);
  const backend::Buffer estimated = upload<uint32_t>(blank);
  const backend::Buffer exact_counts = upload<uint32_t>(blank);
  const backend::Buffer estimated_counts = upload<uint32_t>(blank);
  const std::vector<uint64_t> sums = {10, 20};
  const backend::Buffer exact_total = upload<uint64_t>(sums);
  const backend::Buffer overflows = upload<uint64_t>(sums);
  backend::SplitRankedItem item;
  item.ids = ids_buffer.as<uint32_t>();
  item.counts = counts_buffer.as<uint32_t>();
  item.id_stride = 5;
  item.sizes = sizes_buffer.as<uint32_t>();
  item.size_stride = 6;
  item.most = 4;
  item.page_limit = 5;
  item.exact = exact.as<uint32_t>();
  item.exact_counts = exact_counts.as<uint32_t>();
  item.exact_stride = 4;
  item.estimated = estimated.as<uint32_t>();
  item.estimated_counts = estimated_counts.as<uint32_t>();
  item.exact_total = exact_total.as<uint64_t>();
  item.overflows = overflows.as<uint64_t>();
  const layout::KvGeometry geometry{.kv_heads = 2, .head_dim = 8, .page_tokens = 8};
  device_->sparse_ops().enqueue_split_ranked({&item, 1}, geometry, stream());
  // Head 0: 3 (1 page), 0 (2), 5 (5: does not fit), 1 (1) are the first four; 4 is estimated.
  // Head 1: 0 (3), 2 (38: does not fit), 1 (2).
  EXPECT_EQ(download_values<uint32_t>(stream(), exact),
            (std::vector<uint32_t>{3, 0, 1, 77, 0, 1, 77, 77, 77, 77}));
  EXPECT_EQ(download_values<uint32_t>(stream(), estimated),
            (std::vector<uint32_t>{5, 4, 77, 77, 77, 2, 77, 77, 77, 77}));
  EXPECT_EQ(download_values<uint32_t>(stream(), exact_counts)[0], 3u);
  EXPECT_EQ(download_values<uint32_t>(stream(), exact_counts)[1], 2u);
  EXPECT_EQ(download_values<uint32_t>(stream(), estimated_counts)[0], 2u);
  EXPECT_EQ(download_values<uint32_t>(stream(), estimated_counts)[1], 1u);
  EXPECT_EQ(download_values<uint64_t>(stream(), exact_total), (std::vector<uint64_t>{13, 22}));
  EXPECT_EQ(download_values<uint64_t>(stream(), overflows), (std::vector<uint64_t>{11, 21}));
}

}  // namespace
}  // namespace spin::testing
