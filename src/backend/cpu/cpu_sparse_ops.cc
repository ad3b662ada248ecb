// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_sparse_ops.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "backend/cpu/estimate.h"
#include "backend/cpu/rank.h"
#include "backend/cpu/score.h"
#include "base/bf16.h"
#include "base/check.h"
#include "base/checked_math.h"

namespace spin::backend::cpu {
namespace {

constexpr uint64_t kPoolPartitions = 64;  // that one task pools
constexpr uint32_t kMaxHeadDim = 1024;
constexpr uint32_t kMaxRuns = 1024;  // of a partition; their addresses lie on the stack

template <typename Item>
std::vector<Item> copied(std::span<const Item> items) {
  return std::vector<Item>(items.begin(), items.end());
}

void store_vector(const float* from, const HeadVectors& to, uint32_t head, uint64_t index) {
  if (to.data == nullptr) return;
  const uint64_t offset = head * to.head_stride + index * to.width;
  if (to.dtype == layout::DType::kF32) {
    std::copy_n(from, to.width, static_cast<float*>(to.data) + offset);
    return;
  }
  auto* out = static_cast<base::Bf16*>(to.data) + offset;
  for (uint32_t i = 0; i < to.width; ++i) out[i] = base::to_bf16(from[i]);
}

void load_vector(const HeadVectors& from, uint32_t head, uint64_t index, float* to) {
  const uint64_t offset = head * from.head_stride + index * from.width;
  if (from.dtype == layout::DType::kF32) {
    std::copy_n(static_cast<const float*>(from.data) + offset, from.width, to);
    return;
  }
  const auto* in = static_cast<const base::Bf16*>(from.data) + offset;
  for (uint32_t i = 0; i < from.width; ++i) to[i] = base::to_float(in[i]);
}

// Runs of the tokens of one partition that lie in a row: whole pages, or a part of one.
class PartitionRuns {
 public:
  PartitionRuns(const layout::PagedTokens& tokens, uint32_t partition_tokens)
      : tokens_(tokens),
        run_tokens_(std::gcd(partition_tokens, tokens.geometry.page_tokens)),
        run_count_(partition_tokens / run_tokens_) {}

  static bool fits(const layout::PagedTokens& tokens, uint32_t partition_tokens) {
    return partition_tokens / std::gcd(partition_tokens, tokens.geometry.page_tokens) <= kMaxRuns;
  }

  PoolTask at(uint32_t head, uint64_t partition) {
    const uint64_t first = partition * run_count_ * run_tokens_;
    for (uint64_t i = 0; i < run_count_; ++i) {
      runs_[i] = reinterpret_cast<const char*>(tokens_.key(head, first + i * run_tokens_));
    }
    PoolTask task;
    task.runs = runs_;
    task.run_count = run_count_;
    task.run_tokens = run_tokens_;
    task.row_bytes = tokens_.geometry.row_bytes();
    task.head_dim = tokens_.geometry.head_dim;
    task.dtype = tokens_.geometry.dtype;
    return task;
  }

 private:
  const layout::PagedTokens& tokens_;
  uint32_t run_tokens_;
  uint32_t run_count_;
  const char* runs_[kMaxRuns];
};

// Calls body(item, KV head, first partition, last) for pieces of all items.
template <typename Item, typename Body>
void for_partitions(base::ThreadPool& pool, const std::vector<Item>& items, const Body& body) {
  struct Piece {
    const Item* item;
    uint32_t head;
    uint64_t first;
  };
  std::vector<Piece> pieces;
  for (const Item& item : items) {
    for (uint32_t head = 0; head < item.tokens.geometry.kv_heads; ++head) {
      for (uint64_t j = 0; j < item.count; j += kPoolPartitions) pieces.push_back({&item, head, j});
    }
  }
  pool.parallel_for(pieces.size(), [&](size_t i, uint32_t) {
    const Piece& piece = pieces[i];
    const uint64_t last = std::min<uint64_t>(piece.item->count, piece.first + kPoolPartitions);
    body(*piece.item, piece.head, piece.first, last);
  });
}

template <typename Item>
void check_partitions(const Item& item) {
  SPIN_CHECK(item.partition_tokens > 0 && item.tokens.geometry.head_dim <= kMaxHeadDim);
  SPIN_CHECK(PartitionRuns::fits(item.tokens, item.partition_tokens));
  SPIN_CHECK((uint64_t{item.first} + item.count) * item.partition_tokens <= item.tokens.tokens);
}

void check_vectors(const HeadVectors& vectors, uint32_t width) {
  SPIN_CHECK(vectors.data == nullptr || vectors.width == width);
}

void check_queries(const TensorRef& q, const layout::KvGeometry& geometry) {
  SPIN_CHECK(q.dtype == layout::DType::kF32 && geometry.head_dim > 0 && geometry.kv_heads > 0);
  SPIN_CHECK(q.cols > 0 && q.cols % (int64_t{geometry.head_dim} * geometry.kv_heads) == 0);
  SPIN_CHECK(geometry.head_dim <= kMaxHeadDim);
}

}  // namespace

void CpuSparseOps::enqueue_pool_keys(std::span<const PoolKeysItem> items, StreamRef stream) {
  for (const PoolKeysItem& item : items) {
    check_partitions(item);
    const uint32_t width = item.tokens.geometry.head_dim;
    check_vectors(item.mean, width);
    check_vectors(item.min, width);
    check_vectors(item.max, width);
  }
  stream.enqueue_host([this, items = copied(items)] {
    for_partitions(pool_, items,
                   [this](const PoolKeysItem& item, uint32_t head, uint64_t first, uint64_t last) {
                     float mean[kMaxHeadDim];
                     float min[kMaxHeadDim];
                     float max[kMaxHeadDim];
                     PartitionRuns runs(item.tokens, item.partition_tokens);
                     for (uint64_t j = first; j < last; ++j) {
                       kernels_.pool_keys(runs.at(head, item.first + j),
                                          item.mean.data != nullptr ? mean : nullptr,
                                          item.min.data != nullptr ? min : nullptr,
                                          item.max.data != nullptr ? max : nullptr);
                       store_vector(mean, item.mean, head, item.out_first + j);
                       store_vector(min, item.min, head, item.out_first + j);
                       store_vector(max, item.max, head, item.out_first + j);
                     }
                   });
  });
}

void CpuSparseOps::enqueue_score_strays(std::span<const ScoreStraysItem> items, StreamRef stream) {
  for (const ScoreStraysItem& item : items) {
    check_partitions(item);
    SPIN_CHECK(item.mean.width == item.tokens.geometry.head_dim);
  }
  stream.enqueue_host([this, items = copied(items)] {
    for_partitions(
        pool_, items,
        [this](const ScoreStraysItem& item, uint32_t head, uint64_t first, uint64_t last) {
          float mean[kMaxHeadDim];
          PartitionRuns runs(item.tokens, item.partition_tokens);
          for (uint64_t j = first; j < last; ++j) {
            load_vector(item.mean, head, item.first + j, mean);
            item.scores[head * item.score_stride + j] =
                -kernels_.least_cosine(runs.at(head, item.first + j), mean);
          }
        });
  });
}

void CpuSparseOps::enqueue_fill_sizes(std::span<const FillSizesItem> items,
                                      uint32_t kv_heads,
                                      StreamRef stream) {
  stream.enqueue_host([items = copied(items), kv_heads] {
    for (const FillSizesItem& item : items) {
      for (uint32_t head = 0; head < kv_heads; ++head) {
        uint32_t* sizes = item.sizes + head * item.size_stride;
        std::fill_n(sizes + item.first, item.count, item.value);
        if (item.ids == nullptr) continue;
        const uint32_t* ids = item.ids + uint64_t{head} * item.id_stride;
        for (uint32_t i = 0; i < item.counts[head]; ++i) sizes[ids[i]] = 0;
      }
    }
  });
}

void CpuSparseOps::enqueue_score_means(TensorRef q,
                                       std::span<const ScoreMeansItem> items,
                                       const layout::KvGeometry& geometry,
                                       float scale,
                                       Aggregation aggregation,
                                       StreamRef stream) {
  check_queries(q, geometry);
  std::vector<ScoreUnit> units;
  for (const ScoreMeansItem& item : items) {
    SPIN_CHECK(item.keys.width == geometry.head_dim && item.keys_per_partition > 0);
    SPIN_CHECK(item.row < static_cast<uint64_t>(q.rows));
    units.push_back({item, item.keys, {}, item.keys_per_partition});
  }
  stream.enqueue_task([this, q, units = std::move(units), geometry, scale, aggregation] {
    return run_scores({q, units, geometry, scale, aggregation}, kernels_, pool_, workspace_);
  });
}

void CpuSparseOps::enqueue_score_boxes(TensorRef q,
                                       std::span<const ScoreBoxesItem> items,
                                       const layout::KvGeometry& geometry,
                                       float scale,
                                       Aggregation aggregation,
                                       StreamRef stream) {
  check_queries(q, geometry);
  std::vector<ScoreUnit> units;
  for (const ScoreBoxesItem& item : items) {
    SPIN_CHECK(item.min.width == geometry.head_dim && item.max.width == geometry.head_dim);
    SPIN_CHECK(item.min.dtype == item.max.dtype && item.row < static_cast<uint64_t>(q.rows));
    units.push_back({item, item.min, item.max, 1});
  }
  stream.enqueue_task([this, q, units = std::move(units), geometry, scale, aggregation] {
    return run_scores({q, units, geometry, scale, aggregation}, kernels_, pool_, workspace_);
  });
}

void CpuSparseOps::enqueue_rank(std::span<const RankItem> items,
                                uint32_t kv_heads,
                                StreamRef stream) {
  for (const RankItem& item : items) SPIN_CHECK(item.id_stride >= std::min(item.most, item.count));
  stream.enqueue_task([this, items = copied(items), kv_heads]() -> Status {
    uint64_t words = 0;
    for (const RankItem& item : items) words = std::max(words, rank_scratch_words(item.count));
    SPIN_ASSIGN_OR_RETURN(auto lease, workspace_.take(words * pool_.threads() * sizeof(uint32_t)));
    auto* scratch = reinterpret_cast<uint32_t*>(lease.data());
    pool_.parallel_for(items.size() * kv_heads, [&](size_t i, uint32_t slot) {
      const RankItem& item = items[i / kv_heads];
      const uint64_t head = i % kv_heads;
      RankTask task;
      task.scores = item.scores + head * item.score_stride;
      task.first = item.first;
      task.count = item.count;
      task.most = item.most;
      task.least_score = item.least_score;
      task.ranked = item.ranked;
      task.ids = item.ids + head * item.id_stride;
      task.scratch = scratch + words * slot;
      item.counts[head] = rank_scores(task);
      if (item.selected != nullptr) item.selected[head] += item.counts[head];
    });
    return ok_status();
  });
}

namespace {

// A page and its valid tokens; sorted by page.
struct ListedPage {
  uint32_t page;
  uint32_t tokens;
};

// Lists one KV head's pages. Requires: `scratch` holds all pages of all sources.
class ListBuilder {
 public:
  ListBuilder(const BuildListItem& item, uint32_t head, uint32_t page_tokens)
      : item_(item), head_(head), page_tokens_(page_tokens) {}

  uint64_t most_pages() const {
    uint64_t pages = item_.sink_pages + tail_pages();
    if (item_.pinned.counts != nullptr) pages += item_.pinned.counts[head_];
    for (uint32_t i = 0; i < selected(); ++i) pages += partition_pages(partition(i));
    return pages;
  }

  // Errors: kInternal if the list cannot hold the pages.
  Status build(ListedPage* scratch) {
    ListedPage* end = collect(scratch);
    std::sort(scratch, end,
              [](const ListedPage& a, const ListedPage& b) { return a.page < b.page; });
    end = std::unique(scratch, end,
                      [](const ListedPage& a, const ListedPage& b) { return a.page == b.page; });
    const auto count = static_cast<uint64_t>(end - scratch);
    if (count > item_.list.stride) {
      return Status(StatusCode::kInternal, "a list of selected pages is longer than its buffer");
    }
    uint64_t tokens = 0;
    const uint64_t row = uint64_t{head_} * item_.list.stride;
    for (uint64_t i = 0; i < count; ++i) {
      item_.list.pages[row + i] = scratch[i].page;
      item_.list.tokens[row + i] = static_cast<uint8_t>(scratch[i].tokens);
      tokens += scratch[i].tokens;
    }
    item_.list.counts[head_] = static_cast<uint32_t>(count);
    if (item_.attended != nullptr) item_.attended[head_] += tokens;
    return ok_status();
  }

 private:
  uint64_t tail_pages() const { return base::ceil_div<uint64_t>(item_.tail_tokens, page_tokens_); }
  uint32_t selected() const { return item_.counts == nullptr ? 0 : item_.counts[head_]; }
  uint64_t partition(uint32_t i) const { return item_.ids[uint64_t{head_} * item_.id_stride + i]; }
  uint32_t cluster_size(uint64_t j) const { return item_.sizes[head_ * item_.cluster_stride + j]; }
  uint64_t partition_pages(uint64_t j) const {
    if (item_.pages_per_partition > 0) return item_.pages_per_partition;
    return base::ceil_div(cluster_size(j), page_tokens_);
  }

  ListedPage* add_run(ListedPage* to, uint64_t first_page, uint64_t pages, uint64_t tokens) const {
    for (uint64_t i = 0; i < pages; ++i, tokens -= std::min<uint64_t>(tokens, page_tokens_)) {
      *to++ = {static_cast<uint32_t>(first_page + i),
               static_cast<uint32_t>(std::min<uint64_t>(tokens, page_tokens_))};
    }
    return to;
  }

  ListedPage* collect(ListedPage* to) const {
    to = add_run(to, 0, item_.sink_pages, uint64_t{item_.sink_pages} * page_tokens_);
    if (item_.pinned.counts != nullptr) {
      const uint64_t row = uint64_t{head_} * item_.pinned.stride;
      for (uint32_t i = 0; i < item_.pinned.counts[head_]; ++i) {
        *to++ = {item_.pinned.pages[row + i], item_.pinned.tokens[row + i]};
      }
    }
    for (uint32_t i = 0; i < selected(); ++i) {
      const uint64_t j = partition(i);
      const uint64_t pages = partition_pages(j);
      const bool range = item_.pages_per_partition > 0;
      to = add_run(to, range ? j * pages : item_.first_pages[head_ * item_.cluster_stride + j],
                   pages, range ? pages * page_tokens_ : cluster_size(j));
    }
    return add_run(to, item_.tail_first_page, tail_pages(), item_.tail_tokens);
  }

  const BuildListItem& item_;
  const uint32_t head_;
  const uint32_t page_tokens_;
};

}  // namespace

void CpuSparseOps::enqueue_build_lists(std::span<const BuildListItem> items,
                                       const layout::KvGeometry& geometry,
                                       StreamRef stream) {
  stream.enqueue_task([this, items = copied(items), geometry]() -> Status {
    const uint64_t heads = geometry.kv_heads;
    uint64_t most = 0;
    for (const BuildListItem& item : items) {
      for (uint32_t head = 0; head < heads; ++head) {
        most = std::max(most, ListBuilder(item, head, geometry.page_tokens).most_pages());
      }
    }
    SPIN_ASSIGN_OR_RETURN(auto lease, workspace_.take(most * pool_.threads() * sizeof(ListedPage)));
    auto* scratch = reinterpret_cast<ListedPage*>(lease.data());
    std::vector<Status> results(items.size() * heads);
    pool_.parallel_for(results.size(), [&](size_t i, uint32_t slot) {
      const auto head = static_cast<uint32_t>(i % heads);
      results[i] =
          ListBuilder(items[i / heads], head, geometry.page_tokens).build(scratch + most * slot);
    });
    for (const Status& result : results) SPIN_RETURN_IF_ERROR(result);
    return ok_status();
  });
}

void CpuSparseOps::enqueue_estimate(TensorRef q,
                                    std::span<const EstimateItem> items,
                                    const layout::KvGeometry& geometry,
                                    float scale,
                                    StreamRef stream) {
  check_queries(q, geometry);
  for (const EstimateItem& item : items) {
    SPIN_CHECK(item.keys.width == geometry.head_dim && item.value_sums.width == geometry.head_dim);
    SPIN_CHECK(item.row < static_cast<uint64_t>(q.rows));
  }
  stream.enqueue_task([this, q, items = copied(items), geometry, scale] {
    return run_estimate({q, items, geometry, scale}, kernels_, pool_, workspace_);
  });
}

}  // namespace spin::backend::cpu
