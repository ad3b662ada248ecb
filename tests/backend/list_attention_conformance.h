// SPDX-License-Identifier: Apache-2.0
// The part of the backends' conformance suite about attention over lists of pages and about merging
// parts. Instantiated like OpsConformance (ops_conformance.h).
#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "tests/backend/kv_ops_conformance.h"

namespace spin::testing {

// Pages of one row's list for one KV head, as positions among the sequence's pages.
struct PagePick {
  uint32_t page = 0;
  uint8_t tokens = 0;
};
using RowLists = std::vector<std::vector<PagePick>>;  // [kv_heads]

class ListAttentionConformance : public KvOpsConformance {
 protected:
  struct Attended {
    Matrix out;
    Matrix log_sum_exp;  // [rows, q_heads]
  };

  // Attention of query rows of sequences over their lists.
  struct Row {
    size_t sequence = 0;
    int64_t token = 0;  // whose query
    RowLists lists;
  };
  Attended attend_lists(const std::vector<Row>& rows, int64_t extra = 0) {
    const int64_t q_heads = shape_.kv_heads * shape_.group;
    std::vector<Matrix> queries;
    std::vector<List> lists;
    std::vector<backend::Buffer> slots;
    const Tensor lse = empty_matrix(static_cast<int64_t>(rows.size()), q_heads);
    std::vector<backend::ListAttentionItem> items;
    for (size_t r = 0; r < rows.size(); ++r) {
      const Sequence& sequence = sequences_[rows[r].sequence];
      queries.push_back(rows_of(sequence.q, rows[r].token, 1));
      std::vector<WantedList> wanted(rows[r].lists.size());
      for (size_t h = 0; h < wanted.size(); ++h) {
        for (const PagePick& pick : rows[r].lists[h]) {
          wanted[h].pages.push_back(pick.page);
          wanted[h].tokens.push_back(pick.tokens);
        }
      }
      lists.push_back(make_list(wanted));
      const size_t stride = lists.back().view.stride;
      std::vector<uint32_t> row_slots(wanted.size() * stride, 0xDDDD'DDDD);
      for (size_t h = 0; h < wanted.size(); ++h) {
        for (size_t i = 0; i < wanted[h].pages.size(); ++i) {
          row_slots[h * stride + i] = wanted[h].pages[i] == layout::kNoPage
                                          ? layout::kNoSlot
                                          : sequence.slots[h * sequence.pages + wanted[h].pages[i]];
        }
      }
      slots.push_back(upload<uint32_t>(row_slots));
      items.push_back({.row = r,
                       .slots = slots.back().as<uint32_t>(),
                       .pages = lists.back().view,
                       .log_sum_exp = static_cast<float*>(lse.ref.data) +
                                      static_cast<int64_t>(r) * lse.ref.row_stride});
    }
    const Tensor q = upload_matrix(concatenated(queries), extra);
    const Tensor out = empty_matrix(q.ref.rows, q.ref.cols, extra);
    kv_ops().enqueue_list_attention(q.ref, items, pool_, scale_, out.ref, stream());
    return {download(out), download(lse)};
  }

  // All pages of the first `context` tokens.
  RowLists all_pages(int64_t context) const {
    RowLists lists(static_cast<size_t>(shape_.kv_heads));
    const int64_t page_tokens = shape_.page_tokens;
    for (auto& list : lists) {
      for (int64_t first = 0; first < context; first += page_tokens) {
        list.push_back({static_cast<uint32_t>(first / page_tokens),
                        static_cast<uint8_t>(std::min(page_tokens, context - first))});
      }
    }
    return lists;
  }

  // Other pages for every head, some of them with fewer tokens.
  RowLists some_pages(int64_t context, uint32_t seed) const {
    std::mt19937 random(seed);
    RowLists lists = all_pages(context);
    for (size_t h = 0; h < lists.size(); ++h) {
      std::vector<PagePick> kept;
      for (PagePick pick : lists[h]) {
        if (random() % 3 == 0) continue;
        if (random() % 4 == 0) pick.tokens = static_cast<uint8_t>(1 + random() % pick.tokens);
        kept.push_back(pick);
      }
      if (kept.empty()) kept.push_back(lists[h].front());
      lists[h] = kept;
    }
    return lists;
  }

  // One head's listed rows of k or v, [tokens, head_dim].
  Matrix listed(const Matrix& rows, size_t h, const std::vector<PagePick>& list) const {
    std::vector<Matrix> parts;
    for (const PagePick& pick : list) {
      const Matrix part = rows_of(rows, int64_t{pick.page} * shape_.page_tokens, pick.tokens);
      Matrix head(part.rows, shape_.head_dim);
      for (int64_t r = 0; r < part.rows; ++r) {
        for (int64_t d = 0; d < shape_.head_dim; ++d) {
          head.at(r, d) = part.at(r, static_cast<int64_t>(h) * shape_.head_dim + d);
        }
      }
      parts.push_back(head);
    }
    return concatenated(parts);
  }

  void expect_row(const Row& row, const Attended& found, int64_t r);

  // Bound of the error of a log-sum-exp: that of its largest score, and of a sum of `n` terms.
  Bounded reference_lse(const Matrix& q, const Matrix& k) const {
    double max = -INFINITY;
    double error = 0;
    std::vector<double> scores;
    for (int64_t j = 0; j < k.rows; ++j) {
      double score = 0;
      double magnitude = 0;
      for (int64_t d = 0; d < shape_.head_dim; ++d) {
        const double product = static_cast<double>(q.at(0, d)) * rounded(k.at(j, d), shape_.dtype);
        score += product;
        magnitude += std::abs(product);
      }
      scores.push_back(score * scale_);
      max = std::max(max, scores.back());
      error = std::max(error, std::abs(scale_) * magnitude *
                                  static_cast<double>(shape_.head_dim + 4) * kFloatRoundoff);
    }
    double total = 0;
    for (const double score : scores) total += std::exp(score - max);
    const double value = max + std::log(total);
    const double sum_error = static_cast<double>(k.rows + 16) * kFloatRoundoff;
    return {value, 2 * error + sum_error + std::abs(value) * 2 * kFloatRoundoff};
  }
};

}  // namespace spin::testing
