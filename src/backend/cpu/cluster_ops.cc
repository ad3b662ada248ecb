// SPDX-License-Identifier: Apache-2.0
// Clustering of one KV head at a time, all threads on it. A pass is
//   assign   tasks = tiles of kAssignRows tokens x all centroids of their run (a matrix product)
//   sort     a counting sort of the tokens by cluster: members in ascending order
//   reduce   tasks = ranges of clusters; a cluster's members are added in that order
// so that no sum depends on the number of threads. Keys are read from their pages in every pass and
// centred in registers: scratch is 12 bytes per token and 8 * head_dim per cluster.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "backend/cpu/cpu_sparse_ops.h"
#include "base/bf16.h"
#include "base/check.h"
#include "base/checked_math.h"

namespace spin::backend::cpu {
namespace {

using base::ceil_div;

constexpr int64_t kMeanTokens = 256;    // tokens of one partial sum of the mean
constexpr int64_t kReduceClusters = 8;  // clusters of one task

void store_row(const float* from, layout::DType dtype, int64_t dim, void* to) {
  if (dtype == layout::DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(dim) * sizeof(float));
    return;
  }
  auto* out = static_cast<base::Bf16*>(to);
  for (int64_t d = 0; d < dim; ++d) out[d] = base::to_bf16(from[d]);
}

void* vector_of(const HeadVectors& vectors, uint32_t head, uint64_t index) {
  const uint64_t element = head * vectors.head_stride + index * vectors.width;
  return static_cast<char*>(vectors.data) + element * layout::dtype_bytes(vectors.dtype);
}

class Clustering {
 public:
  Clustering(const ClusterItem& item, const ClusterKernels& kernels, base::ThreadPool& pool)
      : item_(item),
        kernels_(kernels),
        pool_(pool),
        dim_(item.source.geometry.head_dim),
        tokens_(item.tokens),
        clusters_(item.clusters) {}

  Status run(WorkspacePool& workspace) {
    SPIN_ASSIGN_OR_RETURN(auto lease, workspace.take(carve(nullptr)));
    carve(lease.data());
    for (head_ = 0; head_ < item_.source.geometry.kv_heads; ++head_) run_head();
    return ok_status();
  }

 private:
  // Places the arrays from `memory` on; the bytes they take.
  size_t carve(char* memory) {
    size_t used = 0;
    const auto take = [&](int64_t count, auto*& array) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory + used);
      used += ceil_div<size_t>(static_cast<size_t>(count) * sizeof(*array), 64) * 64;
    };
    take(dim_, mean_);
    take(dim_, zero_);
    take(ceil_div(tokens_, kMeanTokens) * dim_, partial_);
    take(clusters_ * dim_, centroids_);
    // Panels are padded to 16 columns, once per run.
    take((clusters_ + 15 * static_cast<int64_t>(item_.segments)) * dim_, panels_);
    take(tokens_, nearest_);
    take(tokens_, order_);
    take(clusters_ + 1, begins_);
    take(pool_.threads() * slot_floats(), slots_);
    return used;
  }

  int64_t slot_floats() const {
    return kAssignScratchFloats + ceil_div<int64_t>((kAssignRows + 1) * dim_, 16) * 16;
  }
  int64_t panel_floats(int64_t clusters) const {
    const int64_t full = clusters / kAssignPanel * kAssignPanel;
    return (full + assign_panel_width(clusters - full)) * dim_;
  }
  float* slot_scratch(uint32_t slot) const { return slots_ + slot * slot_floats(); }
  float* slot_rows(uint32_t slot) const { return slot_scratch(slot) + kAssignScratchFloats; }

  const std::byte* key(int64_t token) const {
    return item_.source.key(head_, item_.first_token + static_cast<uint64_t>(token));
  }
  const std::byte* value(int64_t token) const {
    return item_.source.value(head_, item_.first_token + static_cast<uint64_t>(token));
  }
  layout::DType dtype() const { return item_.source.geometry.dtype; }

  void run_head() {
    find_mean();
    for (int64_t i = 0; i < clusters_; ++i) {
      const int64_t token = (2 * i + 1) * tokens_ / (2 * clusters_);
      kernels_.centre_row(key(token), dtype(), mean_, dim_, centroids_ + i * dim_);
    }
    const int64_t segments = item_.segments;
    const int64_t run_tokens = tokens_ / segments;
    const int64_t run_clusters = clusters_ / segments;
    for (uint32_t i = 0; i < item_.iterations; ++i) {
      assign(segments, run_tokens, run_clusters);
      sort(segments * run_tokens);
      reduce([this](int64_t cluster, float* sums) { update_centroid(cluster, sums); });
    }
    assign(1, tokens_, clusters_);
    sort(tokens_);
    reduce([this](int64_t cluster, float* sums) { write_cluster(cluster, sums); });
    write_pages();
  }

  // Partial sums over kMeanTokens tokens, added in order.
  void find_mean() {
    std::fill_n(zero_, dim_, 0.0f);
    const int64_t parts = ceil_div(tokens_, kMeanTokens);
    pool_.parallel_for(static_cast<size_t>(parts), [this](size_t part, uint32_t) {
      float* sums = partial_ + static_cast<int64_t>(part) * dim_;
      std::fill_n(sums, dim_, 0.0f);
      const int64_t first = static_cast<int64_t>(part) * kMeanTokens;
      const int64_t last = std::min(tokens_, first + kMeanTokens);
      for (int64_t t = first; t < last; ++t) kernels_.add_row(key(t), dtype(), zero_, dim_, sums);
    });
    std::fill_n(mean_, dim_, 0.0f);
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t d = 0; d < dim_; ++d) mean_[d] += partial_[part * dim_ + d];
    }
    for (int64_t d = 0; d < dim_; ++d) mean_[d] /= static_cast<float>(tokens_);
  }

  // Nearest centroids in `runs` runs of so many tokens and clusters, one after the other.
  void assign(int64_t runs, int64_t run_tokens, int64_t run_clusters) {
    const int64_t run_panels = panel_floats(run_clusters);
    const int64_t panels = ceil_div(run_clusters, kAssignPanel);
    pool_.parallel_for(static_cast<size_t>(runs * panels), [&](size_t i, uint32_t) {
      const int64_t run = static_cast<int64_t>(i) / panels;
      pack_panel(run * run_clusters, run_clusters, static_cast<int64_t>(i) % panels,
                 panels_ + run * run_panels);
    });
    const int64_t tiles = ceil_div(run_tokens, kAssignRows);
    pool_.parallel_for(static_cast<size_t>(runs * tiles), [&](size_t i, uint32_t slot) {
      const int64_t run = static_cast<int64_t>(i) / tiles;
      const int64_t in_run = static_cast<int64_t>(i) % tiles * kAssignRows;
      AssignTask task;
      task.count = std::min(kAssignRows, run_tokens - in_run);
      task.dim = dim_;
      task.panels = panels_ + run * run_panels;
      task.clusters = run_clusters;
      task.first_cluster = static_cast<uint32_t>(run * run_clusters);
      const int64_t token = run * run_tokens + in_run;
      task.nearest = nearest_ + token;
      task.scratch = slot_scratch(slot);
      float* rows = slot_rows(slot);
      for (int64_t r = 0; r < task.count; ++r) {
        kernels_.centre_row(key(token + r), dtype(), mean_, dim_, rows + r * dim_);
      }
      task.rows = rows;
      kernels_.assign(task);
    });
  }

  void pack_panel(int64_t first_cluster, int64_t clusters, int64_t panel, float* panels) {
    const int64_t first = panel * kAssignPanel;
    const int64_t width = assign_panel_width(clusters - first);
    float* to = panels + first * dim_;
    for (int64_t j = 0; j < width; ++j) {
      // Padding repeats the last one, which wins the tie.
      const int64_t cluster = first_cluster + std::min(first + j, clusters - 1);
      const float* from = centroids_ + cluster * dim_;
      for (int64_t d = 0; d < dim_; ++d) to[d * width + j] = from[d];
    }
  }

  // order_: tokens [0, tokens) by cluster; those of cluster i from begins_[i] on.
  void sort(int64_t tokens) {
    std::fill_n(begins_, clusters_ + 1, 0u);
    for (int64_t t = 0; t < tokens; ++t) ++begins_[nearest_[t] + 1];
    for (int64_t i = 0; i < clusters_; ++i) begins_[i + 1] += begins_[i];
    // Placing moves each begin to the next one's; they are moved back afterwards.
    for (int64_t t = 0; t < tokens; ++t) order_[begins_[nearest_[t]]++] = static_cast<uint32_t>(t);
    for (int64_t i = clusters_; i > 0; --i) begins_[i] = begins_[i - 1];
    begins_[0] = 0;
  }

  template <typename Body>
  void reduce(const Body& body) {
    const int64_t tasks = ceil_div(clusters_, kReduceClusters);
    pool_.parallel_for(static_cast<size_t>(tasks), [&](size_t task, uint32_t slot) {
      const int64_t first = static_cast<int64_t>(task) * kReduceClusters;
      const int64_t last = std::min(clusters_, first + kReduceClusters);
      for (int64_t i = first; i < last; ++i) body(i, slot_rows(slot));
    });
  }

  int64_t size(int64_t cluster) const {
    return static_cast<int64_t>(begins_[cluster + 1]) - static_cast<int64_t>(begins_[cluster]);
  }

  // sums: the mean of the members, centred.
  void member_mean(int64_t cluster, float* sums) const {
    std::fill_n(sums, dim_, 0.0f);
    for (uint32_t i = begins_[cluster]; i < begins_[cluster + 1]; ++i) {
      kernels_.add_row(key(order_[i]), dtype(), mean_, dim_, sums);
    }
    const auto count = static_cast<float>(size(cluster));
    for (int64_t d = 0; d < dim_; ++d) sums[d] /= count;
  }

  void update_centroid(int64_t cluster, float* sums) {
    if (size(cluster) == 0) return;
    member_mean(cluster, sums);
    float squares = 0.0f;
    for (int64_t d = 0; d < dim_; ++d) squares += sums[d] * sums[d];
    const float norm = squares > 0.0f ? std::sqrt(squares) : 1.0f;
    float* centroid = centroids_ + cluster * dim_;
    for (int64_t d = 0; d < dim_; ++d) centroid[d] = sums[d] / norm;
  }

  void write_cluster(int64_t cluster, float* sums) {
    const uint64_t out = item_.out_first + static_cast<uint64_t>(cluster);
    const auto members = static_cast<uint32_t>(size(cluster));
    item_.sizes[head_ * item_.cluster_stride + out] = members;
    if (members > 0) {
      member_mean(cluster, sums);
    } else {
      std::fill_n(sums, dim_, 0.0f);
    }
    for (int64_t d = 0; d < dim_; ++d) sums[d] += mean_[d];
    store_row(sums, item_.centroids.dtype, dim_, vector_of(item_.centroids, head_, out));
    std::fill_n(sums, dim_, 0.0f);
    for (uint32_t i = begins_[cluster]; i < begins_[cluster + 1]; ++i) {
      kernels_.add_row(value(order_[i]), dtype(), zero_, dim_, sums);
    }
    store_row(sums, item_.value_sums.dtype, dim_, vector_of(item_.value_sums, head_, out));
  }

  void write_pages() {
    const uint32_t page_tokens = item_.source.geometry.page_tokens;
    uint32_t* starts = item_.page_starts + uint64_t{head_} * item_.page_stride;
    uint32_t* ids = item_.token_ids + head_ * item_.token_stride;
    uint32_t* first_pages = item_.first_pages + head_ * item_.cluster_stride + item_.out_first;
    for (int64_t i = 0; i < tokens_; ++i) {
      ids[i] = static_cast<uint32_t>(item_.first_token) + order_[i];
    }
    uint32_t pages = 0;
    for (int64_t cluster = 0; cluster < clusters_; ++cluster) {
      first_pages[cluster] = item_.first_page_id + pages;
      for (uint32_t i = begins_[cluster]; i < begins_[cluster + 1]; i += page_tokens) {
        starts[pages++] = i;
      }
    }
    starts[pages] = static_cast<uint32_t>(tokens_);
    item_.page_counts[head_] = pages;
  }

  const ClusterItem& item_;
  const ClusterKernels& kernels_;
  base::ThreadPool& pool_;
  const int64_t dim_;
  const int64_t tokens_;
  const int64_t clusters_;
  uint32_t head_ = 0;
  float* mean_ = nullptr;        // [dim]
  float* zero_ = nullptr;        // [dim] zeros
  float* partial_ = nullptr;     // [parts, dim] of the mean
  float* centroids_ = nullptr;   // [clusters, dim]
  float* panels_ = nullptr;      // the same, transposed (AssignTask::panels), per run
  uint32_t* nearest_ = nullptr;  // [tokens]
  uint32_t* order_ = nullptr;    // [tokens]
  uint32_t* begins_ = nullptr;   // [clusters + 1]
  float* slots_ = nullptr;       // [threads, slot_floats()]
};

void check_item(const ClusterItem& item) {
  const layout::KvGeometry& g = item.source.geometry;
  SPIN_CHECK(item.clusters > 0 && item.segments > 0 && item.clusters % item.segments == 0);
  SPIN_CHECK(item.tokens > 0 && item.first_token + item.tokens <= item.source.tokens);
  SPIN_CHECK(item.first_token + item.tokens <= UINT32_MAX && item.token_stride >= item.tokens);
  SPIN_CHECK(item.centroids.width == g.head_dim && item.value_sums.width == g.head_dim);
  SPIN_CHECK(uint64_t{item.out_first} + item.clusters <= item.cluster_stride);
  SPIN_CHECK(item.page_stride > most_cluster_pages(item.tokens, item.clusters, g.page_tokens));
}

void split_head(const SplitRankedItem& item, uint32_t head, uint32_t page_tokens) {
  const uint32_t* ids = item.ids + uint64_t{head} * item.id_stride;
  const uint32_t* sizes = item.sizes + head * item.size_stride;
  uint32_t* exact = item.exact + uint64_t{head} * item.exact_stride;
  uint32_t* estimated = item.estimated + uint64_t{head} * item.id_stride;
  uint32_t exact_count = 0;
  uint32_t estimated_count = 0;
  uint32_t overflows = 0;
  uint64_t pages = 0;
  for (uint32_t i = 0; i < item.counts[head]; ++i) {
    const uint32_t id = ids[i];
    const uint64_t needed = ceil_div(sizes[id], page_tokens);
    if (i < item.most && pages + needed <= item.page_limit) {
      exact[exact_count++] = id;
      pages += needed;
      continue;
    }
    overflows += i < item.most ? 1 : 0;
    estimated[estimated_count++] = id;
  }
  item.exact_counts[head] = exact_count;
  item.estimated_counts[head] = estimated_count;
  if (item.exact_total != nullptr) item.exact_total[head] += exact_count;
  if (item.overflows != nullptr) item.overflows[head] += overflows;
}

}  // namespace

void CpuSparseOps::enqueue_cluster(std::span<const ClusterItem> items, StreamRef stream) {
  for (const ClusterItem& item : items) check_item(item);
  stream.enqueue_task([this, items = std::vector<ClusterItem>(items.begin(), items.end())] {
    for (const ClusterItem& item : items) {
      SPIN_RETURN_IF_ERROR(Clustering(item, kernels_.cluster, pool_).run(workspace_));
    }
    return ok_status();
  });
}

void CpuSparseOps::enqueue_split_ranked(std::span<const SplitRankedItem> items,
                                        const layout::KvGeometry& geometry,
                                        StreamRef stream) {
  for (const SplitRankedItem& item : items) SPIN_CHECK(item.exact_stride >= item.most);
  stream.enqueue_task([items = std::vector<SplitRankedItem>(items.begin(), items.end()), geometry] {
    for (const SplitRankedItem& item : items) {
      for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
        split_head(item, head, geometry.page_tokens);
      }
    }
    return ok_status();
  });
}

}  // namespace spin::backend::cpu
