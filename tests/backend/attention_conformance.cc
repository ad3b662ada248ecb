// SPDX-License-Identifier: Apache-2.0
#include "tests/backend/attention_conformance.h"

#include "base/bf16.h"

namespace spin::testing {
namespace {

using layout::DType;

TEST_P(AttentionConformance, DecodeAroundEveryPowerOfTwoOfContext) {
  const uint32_t page_sizes[] = {1, 8, 16, 64};
  size_t round = 0;
  for (int64_t power = 1; power <= 4096; power *= 2) {
    for (const int64_t context : {power - 1, power, power + 1}) {
      if (context < 1) continue;
      AttentionShape shape;
      shape.page_tokens = page_sizes[round % 4];
      shape.dtype = round / 4 % 2 == 0 ? DType::kF32 : DType::kBF16;
      shape.group = 2;
      ++round;
      SCOPED_TRACE(shape.text() + ", context " + std::to_string(context));
      make_world(shape, {context});
      if (context > 1) append({{0, 0, context - 1}});
      expect_close(run_step({{0, context - 1, 1}}, 3).front(), expected(0, context - 1, 1));
    }
  }
}

TEST_P(AttentionConformance, PrefillOfAnyGroupAndHeadDimension) {
  const AttentionShape shapes[] = {
      {1, 1, 64, 8, DType::kF32},   {2, 2, 64, 16, DType::kBF16}, {3, 3, 64, 8, DType::kBF16},
      {1, 4, 96, 64, DType::kF32},  {2, 5, 96, 1, DType::kBF16},  {1, 6, 128, 8, DType::kBF16},
      {2, 7, 128, 16, DType::kF32}, {1, 8, 64, 8, DType::kBF16},  {2, 3, 8, 8, DType::kF32},
      {1, 2, 24, 16, DType::kBF16}, {1, 1, 72, 8, DType::kF32},   {1, 9, 40, 8, DType::kBF16},
      {1, 2, 256, 8, DType::kBF16},
  };
  for (const AttentionShape& shape : shapes) {
    SCOPED_TRACE(shape.text());
    make_world(shape, {131});
    expect_close(run_step({{0, 0, 67}}).front(), expected(0, 0, 67));
    expect_close(run_step({{0, 67, 64}}).front(), expected(0, 67, 64));
  }
}

TEST_P(AttentionConformance, OutputsDoNotDependOnTheChunkSize) {
  const std::pair<DType, int64_t> kinds[] = {
      {DType::kF32, 64}, {DType::kBF16, 96}, {DType::kBF16, 24}};
  for (const auto& [dtype, head_dim] : kinds) {
    // Across the borders of a block (64) and of a split (512).
    make_world({2, 3, head_dim, 8, dtype}, {580});
    const Matrix whole = run_chunked(0, 0, 580);
    EXPECT_TRUE(same_bits(run_chunked(0, 0, 64), whole));
    EXPECT_TRUE(same_bits(run_chunked(0, 0, 517), whole));
    for (const int64_t chunk : {1, 7, 40}) {
      EXPECT_TRUE(same_bits(run_chunked(0, 490, chunk), rows_of(whole, 490, 90)))
          << "chunk " << chunk;
    }
  }
}

TEST_P(AttentionConformance, OutputsDoNotDependOnTheBatchOrThePageSize) {
  std::vector<Matrix> alone;
  for (const uint32_t page_tokens : {1u, 8u, 64u}) {
    make_world({2, 4, 64, page_tokens, DType::kBF16}, {600, 33, 1, 1300});
    const std::vector<Part> before = {{0, 0, 599}, {3, 0, 1299}, {1, 0, 20}};
    append(before);
    const std::vector<Part> step = {{3, 1299, 1}, {1, 20, 13}, {2, 0, 1}, {0, 599, 1}};
    const std::vector<Matrix> together = run_step(step);
    for (size_t i = 0; i < step.size(); ++i) {
      const Matrix single = run_step({step[i]}).front();
      EXPECT_TRUE(same_bits(single, together[i])) << i;
      expect_close(single, expected(step[i].sequence, step[i].first, step[i].count));
      if (alone.size() <= i) {
        alone.push_back(single);
      } else {
        EXPECT_TRUE(same_bits(single, alone[i])) << i;
      }
    }
  }
}

TEST_P(AttentionConformance, LargeScoresNeitherOverflowNorLoseTheMaximum) {
  make_world({1, 1, 64, 8, DType::kF32}, {300});
  for (float& value : sequences_[0].q.values) value *= 1000;
  // Keys of one direction: the token with the largest factor wins every row after it.
  for (int64_t t = 0; t < 300; ++t) {
    for (int64_t d = 0; d < 64; ++d) {
      sequences_[0].k.at(t, d) = t == 17 ? 1.0f : 0.5f;
      for (int64_t r = 0; r < 300; ++r) sequences_[0].q.at(r, d) = 1000.0f;
    }
  }
  const Matrix found = run_step({{0, 0, 300}}).front();
  for (const int64_t row : {17, 100, 299}) {
    for (int64_t d = 0; d < 64; ++d) EXPECT_EQ(found.at(row, d), sequences_[0].v.at(17, d));
  }
}

TEST_P(AttentionConformance, AppendWritesExactlyTheNewTokensRows) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    make_world({2, 1, 24, 8, dtype}, {21});
    run_step({{0, 0, 13}}, 2);
    run_step({{0, 13, 8}}, 1);
    std::vector<unsigned char> found(pool_bytes_.size());
    stream().enqueue_copy(found.data(), pool_.base, found.size());
    ASSERT_TRUE(stream().wait_idle().ok());
    std::vector<unsigned char> expected_bytes(pool_bytes_.size(), 0xFF);
    const Sequence& sequence = sequences_[0];
    for (uint64_t t = 0; t < 21; ++t) {
      for (uint64_t h = 0; h < 2; ++h) {
        const uint64_t slot = sequence.slots[h * sequence.pages + t / 8];
        unsigned char* key =
            &expected_bytes[slot * geometry_.page_bytes() + t % 8 * geometry_.row_bytes()];
        for (uint64_t d = 0; d < 24; ++d) {
          const float values[] = {sequence.k.values[t * 48 + h * 24 + d],
                                  sequence.v.values[t * 48 + h * 24 + d]};
          for (uint64_t plane = 0; plane < 2; ++plane) {
            unsigned char* to =
                key + plane * geometry_.plane_bytes() + d * layout::dtype_bytes(dtype);
            const base::Bf16 rounded_value = base::to_bf16(values[plane]);
            if (dtype == DType::kF32) std::memcpy(to, &values[plane], 4);
            if (dtype == DType::kBF16) std::memcpy(to, &rounded_value, 2);
          }
        }
      }
    }
    EXPECT_EQ(found, expected_bytes);
  }
}

TEST_P(AttentionConformance, NanInOneSequenceStaysThere) {
  make_world({1, 2, 64, 8, DType::kF32}, {90, 90});
  sequences_[0].v.at(40, 5) = std::nanf("");
  const std::vector<Matrix> found = run_step({{0, 0, 90}, {1, 0, 90}});
  EXPECT_TRUE(std::isnan(found[0].at(89, 5)));
  EXPECT_FALSE(std::isnan(found[0].at(89, 6)));
  expect_close(found[1], expected(1, 0, 90));
}

TEST_P(AttentionConformance, NanQueryGivesNanInItsHeadOnly) {
  make_world({1, 2, 64, 8, DType::kBF16}, {70});
  sequences_[0].q.at(66, 64 + 9) = std::nanf("");
  append({{0, 0, 64}});
  const Matrix found = run_step({{0, 64, 6}}).front();
  for (int64_t row = 0; row < 6; ++row) {
    EXPECT_FALSE(std::isnan(found.at(row, 0))) << row;
    EXPECT_EQ(std::isnan(found.at(row, 64)), row == 2) << row;
  }
}

}  // namespace
}  // namespace spin::testing
