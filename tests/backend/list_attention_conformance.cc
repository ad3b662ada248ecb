// SPDX-License-Identifier: Apache-2.0
#include "tests/backend/list_attention_conformance.h"

#include <limits>

namespace spin::testing {

void ListAttentionConformance::expect_row(const Row& row, const Attended& found, int64_t r) {
  const Sequence& sequence = sequences_[row.sequence];
  for (size_t h = 0; h < row.lists.size(); ++h) {
    const Matrix k = listed(sequence.k, h, row.lists[h]);
    const Matrix v = listed(sequence.v, h, row.lists[h]);
    for (int64_t g = 0; g < shape_.group; ++g) {
      const int64_t q_head = static_cast<int64_t>(h) * shape_.group + g;
      Matrix q(1, shape_.head_dim);
      Matrix out(1, shape_.head_dim);
      for (int64_t d = 0; d < shape_.head_dim; ++d) {
        q.at(0, d) = sequence.q.at(row.token, q_head * shape_.head_dim + d);
        out.at(0, d) = found.out.at(r, q_head * shape_.head_dim + d);
      }
      expect_close(out, reference_attention(q, k, v, 1, shape_.head_dim, shape_.dtype, scale_));
      const Bounded lse = reference_lse(q, k);
      EXPECT_LE(std::abs(found.log_sum_exp.at(r, q_head) - lse.value), lse.tolerance)
          << "log-sum-exp of head " << q_head;
    }
  }
}

namespace {

using layout::DType;

// Groups 1 to 8 over head sizes, page sizes and types, none of which goes round with another.
std::vector<AttentionShape> shapes() {
  const int64_t head_dims[] = {64, 96, 128};
  const uint32_t page_sizes[] = {8, 16, 32, 64};
#ifdef SPIN_SANITIZED
  const int64_t step = 3;
#else
  const int64_t step = 1;
#endif
  std::vector<AttentionShape> out;
  for (int64_t group = 1; group <= 8; group += step) {
    const DType dtype = group <= 4 ? DType::kBF16 : DType::kF32;
    out.push_back({group % 3 + 1, group, head_dims[(group + 1) % 3], page_sizes[group % 4], dtype});
  }
  return out;
}

TEST_P(ListAttentionConformance, AllPagesGiveTheBitsOfPagedAttention) {
  for (const AttentionShape& shape : shapes()) {
    SCOPED_TRACE(shape.text());
    make_world(shape, {1, 64, 205, 512, 1100});
    std::vector<Part> parts;
    std::vector<Row> rows;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const int64_t context = sequences_[s].q.rows;
      if (context > 1) append({{s, 0, context - 1}});
      parts.push_back({s, context - 1, 1});
      rows.push_back({s, context - 1, all_pages(context)});
    }
    const Matrix paged = concatenated(run_step(parts));
    EXPECT_TRUE(same_bits(attend_lists(rows, 3).out, paged));
  }
}

TEST_P(ListAttentionConformance, ListsOfAnyPagesAndFillsAgainstTheReference) {
  for (const AttentionShape& shape : shapes()) {
    SCOPED_TRACE(shape.text());
    make_world(shape, {90, 1300});
    append({{0, 0, 90}, {1, 0, 1300}});
    std::vector<Row> rows;
    rows.push_back({1, 1299, some_pages(1300, 1)});  // pages across the borders of splits
    rows.push_back({0, 89, some_pages(90, 2)});
    rows.push_back({1, 20, some_pages(64, 3)});
    const Attended found = attend_lists(rows);
    for (size_t r = 0; r < rows.size(); ++r) {
      expect_row(rows[r], found, static_cast<int64_t>(r));
      // Alone as in a batch.
      const Attended alone = attend_lists({rows[r]});
      EXPECT_TRUE(same_bits(alone.out, rows_of(found.out, static_cast<int64_t>(r), 1)));
    }
  }
}

TEST_P(ListAttentionConformance, AnEmptyListGivesZerosAndMinusInfinity) {
  make_world({2, 3, 64, 8, DType::kBF16}, {40});
  append({{0, 0, 40}});
  RowLists lists = all_pages(40);
  lists[1].clear();
  const Attended found = attend_lists({{0, 39, lists}});
  for (int64_t h = 0; h < 6; ++h) {
    EXPECT_EQ(found.log_sum_exp.at(0, h) == -std::numeric_limits<float>::infinity(), h >= 3) << h;
    EXPECT_EQ(found.out.at(0, h * 64 + 5) == 0.0f, h >= 3) << h;
  }
}

TEST_P(ListAttentionConformance, PagesWithoutASlotArePassedOver) {
  make_world({1, 2, 64, 16, DType::kF32}, {900});
  append({{0, 0, 900}});
  RowLists with_holes = all_pages(900);
  RowLists without = with_holes;
  const auto hole = [&](size_t i) {
    with_holes[0].insert(with_holes[0].begin() + static_cast<std::ptrdiff_t>(i),
                         {layout::kNoPage, 16});
  };
  for (const size_t i : {0, 1, 32, 33, 60}) hole(i);
  EXPECT_TRUE(
      same_bits(attend_lists({{0, 899, with_holes}}).out, attend_lists({{0, 899, without}}).out));
}

TEST_P(ListAttentionConformance, NanInOneListStaysThere) {
  make_world({1, 1, 64, 8, DType::kF32}, {100});
  sequences_[0].v.at(50, 5) = std::nanf("");
  append({{0, 0, 100}});
  RowLists without = all_pages(100);
  without[0].erase(without[0].begin() + 6);
  const Attended found = attend_lists({{0, 99, all_pages(100)}, {0, 99, without}});
  EXPECT_TRUE(std::isnan(found.out.at(0, 5)));
  EXPECT_FALSE(std::isnan(found.out.at(0, 6)));
  EXPECT_FALSE(std::isnan(found.out.at(1, 5)));
}

TEST_P(ListAttentionConformance, MergedPartsAreTheWhole) {
  for (const AttentionShape& shape : shapes()) {
    SCOPED_TRACE(shape.text());
    make_world(shape, {700});
    append({{0, 0, 700}});
    RowLists first = all_pages(700);
    RowLists second = first;
    for (size_t h = 0; h < first.size(); ++h) {
      const auto cut = static_cast<std::ptrdiff_t>(first[h].size() / 3 + h);
      first[h].erase(first[h].begin() + cut, first[h].end());
      second[h].erase(second[h].begin(), second[h].begin() + cut);
    }
    const Attended a = attend_lists({{0, 699, first}});
    const Attended b = attend_lists({{0, 699, second}});
    const Tensor out = upload_matrix(concatenated({a.out, a.out}), 2);
    const Tensor lse = upload_matrix(a.log_sum_exp);
    const Tensor part = upload_matrix(b.out);
    const Tensor part_lse = upload_matrix(b.log_sum_exp);
    const auto data = [](const Tensor& tensor) { return static_cast<float*>(tensor.ref.data); };
    const backend::MergeItem item{1, data(lse), data(part), data(part_lse)};
    const int64_t q_heads = shape.kv_heads * shape.group;
    kv_ops().enqueue_merge({&item, 1}, q_heads, shape.head_dim, out.ref, stream());
    const Matrix merged = download(out);
    EXPECT_TRUE(same_bits(rows_of(merged, 0, 1), a.out));  // the row beside it
    Attended whole{rows_of(merged, 1, 1), attend_lists({{0, 699, all_pages(700)}}).log_sum_exp};
    BoundedMatrix expected_row = expected(0, 699, 1);
    // Two rounded parts, two rounded logarithms as exponents, two products and a sum.
    for (int64_t c = 0; c < expected_row.cols; ++c) {
      Bounded& bound = expected_row.at(0, c);
      const int64_t h = c / shape.head_dim;
      const double size = std::abs(a.log_sum_exp.at(0, h)) + std::abs(b.log_sum_exp.at(0, h)) + 8;
      bound.tolerance = 2 * bound.tolerance + 4 * size * kFloatRoundoff;
    }
    expect_close(whole.out, expected_row);
  }
}

TEST_P(ListAttentionConformance, ManyRowsAreMergedAsEachAlone) {
  // So many that the work is shared out.
  constexpr int64_t kRows = 600;
  const Matrix ours = random_matrix(kRows, 3 * 24, 1);
  const Matrix lse = random_matrix(kRows, 3, 2);
  const Tensor part = upload_matrix(random_matrix(kRows, 3 * 24, 3));
  const Tensor part_lse = upload_matrix(random_matrix(kRows, 3, 4));
  const Tensor our_lse = upload_matrix(lse);
  const auto row = [](const Tensor& tensor, int64_t r) {
    return static_cast<float*>(tensor.ref.data) + r * tensor.ref.row_stride;
  };
  std::vector<backend::MergeItem> items;
  for (int64_t r = 0; r < kRows; ++r) {
    items.push_back({static_cast<uint64_t>(r), row(our_lse, r), row(part, r), row(part_lse, r)});
  }
  const Tensor together = upload_matrix(ours, 1);
  kv_ops().enqueue_merge(items, 3, 24, together.ref, stream());
  const Tensor alone = upload_matrix(ours);
  for (const backend::MergeItem& item : items) {
    kv_ops().enqueue_merge({&item, 1}, 3, 24, alone.ref, stream());
  }
  EXPECT_TRUE(same_bits(download(together), download(alone)));
}

TEST_P(ListAttentionConformance, MergingAnEmptyPartChangesNoBitAndIntoAnEmptyOneTakesThePart) {
  const float infinity = std::numeric_limits<float>::infinity();
  const Matrix ours = random_matrix(1, 3 * 24, 1);
  const Matrix theirs = random_matrix(1, 3 * 24, 2);
  Matrix our_lse(1, 3);
  Matrix their_lse(1, 3);
  our_lse.values = {5.0f, -infinity, -infinity};
  their_lse.values = {-infinity, 3.0f, -infinity};
  const Tensor out = upload_matrix(ours);
  const Tensor lse = upload_matrix(our_lse);
  const Tensor part = upload_matrix(theirs);
  const Tensor part_lse = upload_matrix(their_lse);
  const auto data = [](const Tensor& tensor) { return static_cast<float*>(tensor.ref.data); };
  const backend::MergeItem item{0, data(lse), data(part), data(part_lse)};
  kv_ops().enqueue_merge({&item, 1}, 3, 24, out.ref, stream());
  const Matrix found = download(out);
  for (int64_t c = 0; c < 72; ++c) {
    EXPECT_EQ(found.at(0, c), c / 24 == 1 ? theirs.at(0, c) : ours.at(0, c)) << c;
  }
}

}  // namespace
}  // namespace spin::testing
