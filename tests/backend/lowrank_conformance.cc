// SPDX-License-Identifier: Apache-2.0
#include "tests/backend/lowrank_conformance.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/sparse_ops.h"
#include "base/bf16.h"

namespace spin::testing {

using layout::DType;

namespace {

constexpr double kU = kFloatRoundoff;

double roundoff(DType dtype) { return dtype == DType::kF32 ? kU : 0x1p-8; }

// Columns of a random matrix made orthonormal by Gram-Schmidt, twice.
std::vector<std::vector<double>> orthonormal(int64_t rows, int64_t cols, uint64_t seed) {
  const Matrix start = random_matrix(cols, rows, seed);
  std::vector<std::vector<double>> out;
  for (int64_t c = 0; c < cols; ++c) {
    std::vector<double> v(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) v[static_cast<size_t>(r)] = start.at(c, r);
    for (int pass = 0; pass < 2; ++pass) {
      for (const auto& u : out) {
        double dot = 0;
        for (size_t i = 0; i < v.size(); ++i) dot += u[i] * v[i];
        for (size_t i = 0; i < v.size(); ++i) v[i] -= dot * u[i];
      }
    }
    double norm = 0;
    for (const double x : v) norm += x * x;
    for (double& x : v) x /= std::sqrt(norm);
    out.push_back(std::move(v));
  }
  return out;
}

// A matrix with these singular values.
Matrix with_singular_values(int64_t rows, int64_t cols, const std::vector<double>& sigma) {
  const auto rank = static_cast<int64_t>(sigma.size());
  const auto u = orthonormal(rows, rank, 71);
  const auto v = orthonormal(cols, rank, 72);
  Matrix out(rows, cols);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      double sum = 0;
      for (size_t i = 0; i < sigma.size(); ++i) {
        sum += sigma[i] * u[i][static_cast<size_t>(r)] * v[i][static_cast<size_t>(c)];
      }
      out.at(r, c) = static_cast<float>(sum);
    }
  }
  return out;
}

double square_distance(const Matrix& a, const Matrix& b) {
  double sum = 0;
  for (size_t i = 0; i < a.values.size(); ++i) {
    const double d = static_cast<double>(a.values[i]) - b.values[i];
    sum += d * d;
  }
  return sum;
}

// What a key rebuilt at full rank may differ from the stored one. With a a token's keys of all
// heads and Q orthonormal: |a Q| = |a|, so a sum of r products of token and head factors of
// relative error e is off by at most e |a|, one of n products of floats by n u |a|.
double full_rank_tolerance(const Matrix& stored, int64_t token, DType dtype, double key) {
  double squares = 0;
  for (int64_t c = 0; c < stored.cols; ++c) {
    squares += static_cast<double>(stored.at(token, c)) * stored.at(token, c);
  }
  const double norm = std::sqrt(squares);
  const auto n = static_cast<double>(stored.cols);
  const double rank = std::sqrt(n);
  const double products = (n + 1) * (1 + rank) + 2 * rank + 16;  // both products, Q, rotations
  const double factors = dtype == DType::kF32 ? 0 : 2 * roundoff(dtype) * (1 + roundoff(dtype));
  return norm * (products * kU + factors) + roundoff(dtype) * std::abs(key) * (1 + 1e-2);
}

}  // namespace

void LowRankConformance::make_keys(const AttentionShape& shape, const Matrix& keys) {
  make_world(shape, {keys.rows});
  inv_freq_.clear();
  for (int64_t i = 0; i < shape.head_dim / 2; ++i) {
    inv_freq_.push_back(
        std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(shape.head_dim)));
  }
  std::vector<uint32_t> positions;
  for (int64_t t = 0; t < keys.rows; ++t) positions.push_back(static_cast<uint32_t>(t));
  const BoundedMatrix turned = reference_rope(keys, shape.head_dim, positions, inv_freq_, factor_);
  Matrix& k = sequences_[0].k;
  for (size_t i = 0; i < k.values.size(); ++i) {
    k.values[i] = static_cast<float>(turned.values[i].value);
  }
  append({{0, 0, keys.rows}});
}

layout::PagedTokens LowRankConformance::view(uint64_t tokens) {
  return {static_cast<const std::byte*>(pool_.base), geometry_, slot_buffers_[0].as<uint32_t>(),
          sequences_[0].pages, tokens};
}

LowRankConformance::Factors LowRankConformance::factor(uint64_t tokens,
                                                       uint32_t rank,
                                                       uint32_t power) {
  const uint64_t bytes = layout::dtype_bytes(shape_.dtype);
  const uint64_t pages = geometry_.pages_per_head(tokens);
  Factors out;
  out.token = upload<unsigned char>(
      std::vector<unsigned char>(pages * geometry_.page_tokens * rank * bytes, 0xFF));
  out.head = upload<unsigned char>(std::vector<unsigned char>(
      uint64_t{geometry_.kv_heads} * rank * geometry_.head_dim * bytes, 0xFF));
  out.ref = {out.token.data(), out.head.data(), shape_.dtype, rank};
  backend::FactorKeysItem item;
  item.tokens = view(tokens);
  item.factors = out.ref;
  item.power = power;
  device_->sparse_ops().enqueue_factor_keys(item, rope(), stream());
  const Status status = stream().wait_idle();
  EXPECT_TRUE(status.ok()) << status.to_string();
  return out;
}

void LowRankConformance::rebuild_tokens(const Factors& factors,
                                        uint64_t tokens,
                                        uint32_t first_page,
                                        uint32_t end_page,
                                        const std::vector<std::vector<uint32_t>>& kept) {
  backend::RebuildTokensItem item;
  item.base = static_cast<std::byte*>(pool_.base);
  item.tokens = view(tokens);
  item.first_page = first_page;
  item.end_page = end_page;
  item.factors = factors.ref;
  constexpr uint32_t kStride = 8;
  std::vector<uint32_t> pages(geometry_.kv_heads * kStride);
  std::vector<uint32_t> counts(geometry_.kv_heads);
  for (size_t h = 0; h < kept.size(); ++h) {
    std::copy(kept[h].begin(), kept[h].end(), pages.begin() + static_cast<ptrdiff_t>(h * kStride));
    counts[h] = static_cast<uint32_t>(kept[h].size());
  }
  const backend::Buffer page_buffer = upload<uint32_t>(std::span<const uint32_t>(pages));
  const backend::Buffer count_buffer = upload<uint32_t>(std::span<const uint32_t>(counts));
  if (!kept.empty()) {
    item.kept = {page_buffer.as<uint32_t>(), nullptr, count_buffer.as<uint32_t>(), kStride};
  }
  device_->sparse_ops().enqueue_rebuild_tokens(item, rope(), stream());
  const Status status = stream().wait_idle();
  EXPECT_TRUE(status.ok()) << status.to_string();
}

std::vector<unsigned char> LowRankConformance::pool() {
  std::vector<unsigned char> bytes(pool_buffer_.size_bytes());
  stream().enqueue_copy(bytes.data(), pool_buffer_.data(), bytes.size());
  EXPECT_TRUE(stream().wait_idle().ok());
  return bytes;
}

Matrix LowRankConformance::stored_keys(const std::vector<unsigned char>& bytes, int64_t tokens) {
  Matrix out(tokens, shape_.kv_heads * shape_.head_dim);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < shape_.kv_heads; ++h) {
      const uint64_t page = static_cast<uint64_t>(t) / geometry_.page_tokens;
      const uint64_t slot =
          sequences_[0].slots[static_cast<uint64_t>(h) * sequences_[0].pages + page];
      const unsigned char* row =
          bytes.data() + slot * geometry_.page_bytes() +
          static_cast<uint64_t>(t) % geometry_.page_tokens * geometry_.row_bytes();
      for (int64_t d = 0; d < shape_.head_dim; ++d) {
        float& value = out.at(t, h * shape_.head_dim + d);
        if (shape_.dtype == DType::kF32) {
          std::memcpy(&value, row + d * 4, 4);
        } else {
          base::Bf16 half;
          std::memcpy(&half, row + d * 2, 2);
          value = base::to_float(half);
        }
      }
    }
  }
  return out;
}

TEST_P(LowRankConformance, FullRankRebuildsTheKeys) {
  const AttentionShape shapes[] = {{2, 1, 64, 8, DType::kF32},
                                   {1, 1, 128, 16, DType::kBF16},
                                   {3, 1, 24, 4, DType::kF32},
                                   {2, 1, 96, 32, DType::kBF16}};
  for (const AttentionShape& shape : shapes) {
    SCOPED_TRACE(shape.text());
    factor_ = shape.head_dim == 64 ? 1.25f : 1.0f;
    const int64_t width = shape.kv_heads * shape.head_dim;
    // More than a chunk of tokens, and not a whole number of pages.
    const int64_t tokens = 570;
    make_keys(shape, random_matrix(tokens, width, 31));
    const Matrix before = stored_keys(pool(), tokens);
    const Factors factors = factor(static_cast<uint64_t>(tokens), static_cast<uint32_t>(width), 1);
    const auto pages = static_cast<uint32_t>(tokens / shape.page_tokens);
    rebuild_tokens(factors, static_cast<uint64_t>(tokens), 0, pages);
    const Matrix after = stored_keys(pool(), tokens);
    const int64_t whole = int64_t{pages} * shape.page_tokens;
    for (int64_t t = 0; t < whole; ++t) {
      for (int64_t c = 0; c < width; ++c) {
        ASSERT_NEAR(after.at(t, c), before.at(t, c),
                    full_rank_tolerance(before, t, shape.dtype, before.at(t, c)))
            << "token " << t << " column " << c;
      }
    }
    // The last, partial page is nobody's.
    EXPECT_TRUE(
        same_bits(rows_of(after, whole, tokens - whole), rows_of(before, whole, tokens - whole)));
  }
}

TEST_P(LowRankConformance, KeysOfLowRankAreRebuiltByAsManyFactors) {
  const AttentionShape shape{2, 1, 64, 8, DType::kF32};
  const Matrix keys = with_singular_values(400, 128, std::vector<double>(10, 20.0));
  make_keys(shape, keys);
  const Matrix before = stored_keys(pool(), 400);
  rebuild_tokens(factor(400, 10), 400, 0, 50);
  const Matrix after = stored_keys(pool(), 400);
  for (int64_t t = 0; t < 400; ++t) {
    for (int64_t c = 0; c < 128; ++c) {
      // The Gram matrix in floats hides directions below sqrt(u) of the largest; there are none.
      const double tolerance = 4 * full_rank_tolerance(before, t, shape.dtype, before.at(t, c));
      ASSERT_NEAR(after.at(t, c), before.at(t, c), tolerance) << t << " " << c;
    }
  }
}

TEST_P(LowRankConformance, TruncationIsNearlyAsGoodAsThatOfSingularValues) {
  // Singular values 1 / sqrt(i): a slow decay, which is the hard case for a range finder.
  const AttentionShape shape{2, 1, 64, 8, DType::kF32};
  std::vector<double> sigma;
  for (int i = 1; i <= 128; ++i) sigma.push_back(50 / std::sqrt(i));
  make_keys(shape, with_singular_values(600, 128, sigma));
  const std::vector<unsigned char> start = pool();
  const Matrix before = stored_keys(start, 600);
  for (const uint32_t rank : {8u, 40u, 80u}) {
    SCOPED_TRACE(rank);
    stream().enqueue_copy(pool_buffer_.data(), start.data(), start.size());
    rebuild_tokens(factor(600, rank), 600, 0, 75);
    double best = 0;
    for (size_t i = rank; i < sigma.size(); ++i) best += sigma[i] * sigma[i];
    const double found = square_distance(stored_keys(pool(), 600), before);
    EXPECT_GE(found, best * 0.999);
    EXPECT_LE(found, best * 1.1);  // five per cent of its norm
  }
}

TEST_P(LowRankConformance, FewerTokensThanFactorsAreRebuiltToo) {
  const AttentionShape shape{1, 1, 64, 8, DType::kF32};
  make_keys(shape, random_matrix(16, 64, 33));
  const Matrix before = stored_keys(pool(), 16);
  rebuild_tokens(factor(16, 40), 16, 0, 2);
  const Matrix after = stored_keys(pool(), 16);
  for (int64_t t = 0; t < 16; ++t) {
    for (int64_t c = 0; c < 64; ++c) {
      ASSERT_NEAR(after.at(t, c), before.at(t, c),
                  4 * full_rank_tolerance(before, t, shape.dtype, before.at(t, c)));
    }
  }
}

TEST_P(LowRankConformance, KeysThatAreAllZeroStayZero) {
  make_keys({1, 1, 64, 8, DType::kBF16}, Matrix(32, 64));
  rebuild_tokens(factor(32, 16), 32, 0, 4);
  for (const float value : stored_keys(pool(), 32).values) ASSERT_EQ(value, 0.0f);
}

TEST_P(LowRankConformance, KeptPagesAndThoseOutsideTheRangeAreNotTouched) {
  const AttentionShape shape{2, 1, 64, 8, DType::kBF16};
  make_keys(shape, random_matrix(80, 128, 34));
  const Matrix before = stored_keys(pool(), 80);
  rebuild_tokens(factor(80, 16), 80, 1, 8, {{3, 5}, {1}});
  const Matrix after = stored_keys(pool(), 80);
  for (uint32_t page = 0; page < 10; ++page) {
    for (uint32_t head = 0; head < 2; ++head) {
      const bool kept = page == 0 || page >= 8 || (head == 0 && (page == 3 || page == 5)) ||
                        (head == 1 && page == 1);
      bool same = true;
      for (int64_t t = 0; t < 8; ++t) {
        for (int64_t d = 0; d < 64; ++d) {
          const int64_t row = int64_t{page} * 8 + t;
          same = same && after.at(row, head * 64 + d) == before.at(row, head * 64 + d);
        }
      }
      EXPECT_EQ(same, kept) << "page " << page << " head " << head;
    }
  }
}

TEST_P(LowRankConformance, FetchedPagesGetTheBitsOfTheWholePrompt) {
  const AttentionShape shape{3, 1, 64, 16, DType::kBF16};
  make_keys(shape, random_matrix(160, 192, 35));
  const Factors factors = factor(160, 24);
  rebuild_tokens(factors, 160, 0, 10);
  const std::vector<unsigned char> rebuilt = pool();
  // Pages 1, 4, 6, 9 are listed, all but the second were fetched; 9 is not the prompt's.
  std::vector<uint32_t> pages, slots, fetched;
  std::vector<uint32_t> counts;
  std::vector<unsigned char> wiped = rebuilt;
  for (uint32_t head = 0; head < 3; ++head) {
    for (const uint32_t page : {1u, 4u, 6u, 9u}) {
      pages.push_back(page);
      slots.push_back(sequences_[0].slots[head * sequences_[0].pages + page]);
      if (page == 1 || page == 6) {
        std::memset(wiped.data() + slots.back() * geometry_.page_bytes(), 0xFF,
                    geometry_.plane_bytes());
      }
    }
    fetched.insert(fetched.end(), {0, 2, 3, 77});
    counts.push_back(3);
  }
  stream().enqueue_copy(pool_buffer_.data(), wiped.data(), wiped.size());
  const backend::Buffer page_buffer = upload<uint32_t>(std::span<const uint32_t>(pages));
  const backend::Buffer slot_buffer = upload<uint32_t>(std::span<const uint32_t>(slots));
  const backend::Buffer fetched_buffer = upload<uint32_t>(std::span<const uint32_t>(fetched));
  const backend::Buffer count_buffer = upload<uint32_t>(std::span<const uint32_t>(counts));
  backend::RebuildPagesItem item;
  item.list = {page_buffer.as<uint32_t>(), nullptr, nullptr, 4};
  item.slots = slot_buffer.as<uint32_t>();
  item.fetched = fetched_buffer.as<uint32_t>();
  item.fetched_counts = count_buffer.as<uint32_t>();
  item.end_page = 9;
  item.factors = factors.ref;
  device_->sparse_ops().enqueue_rebuild_pages({&item, 1}, pool_, rope(), stream());
  EXPECT_EQ(pool(), rebuilt);
}

}  // namespace spin::testing
