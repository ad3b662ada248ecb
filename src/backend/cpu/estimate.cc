// SPDX-License-Identifier: Apache-2.0
// One task per (item, KV head): scores of all its partitions, then for every query head weights
// relative to the largest score and two sums in the order of the ids.
#include "backend/cpu/estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace spin::backend::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

class Estimate {
 public:
  Estimate(const EstimateCall& call, const KernelSet& kernels)
      : call_(call),
        kernels_(kernels),
        head_dim_(call.geometry.head_dim),
        padded_(score_padded_dim(call.geometry.head_dim)),
        group_(call.q.cols / head_dim_ / call.geometry.kv_heads) {}

  Status run(base::ThreadPool& pool, WorkspacePool& workspace) {
    const uint64_t heads = call_.geometry.kv_heads;
    int64_t most = 0;
    for (const EstimateItem& item : call_.items) {
      for (uint64_t head = 0; head < heads; ++head) most = std::max(most, partitions(item, head));
    }
    const int64_t floats = group_ * (padded_ + most);
    SPIN_ASSIGN_OR_RETURN(
        auto lease, workspace.take(static_cast<size_t>(floats) * pool.threads() * sizeof(float)));
    auto* memory = reinterpret_cast<float*>(lease.data());
    pool.parallel_for(call_.items.size() * heads, [&](size_t i, uint32_t slot) {
      estimate(call_.items[i / heads], i % heads, memory + floats * slot);
    });
    return ok_status();
  }

 private:
  static int64_t partitions(const EstimateItem& item, uint64_t head) {
    return std::max<int64_t>(0, int64_t{item.counts[head]} - int64_t{item.skip});
  }

  static const char* vectors_of(const HeadVectors& vectors, uint64_t head) {
    return static_cast<const char*>(vectors.data) +
           head * vectors.head_stride * layout::dtype_bytes(vectors.dtype);
  }

  void estimate(const EstimateItem& item, uint64_t head, float* memory) const {
    const int64_t count = partitions(item, head);
    const int64_t first_head = static_cast<int64_t>(head) * group_;
    float* part = item.part + first_head * head_dim_;
    std::fill_n(part, group_ * head_dim_, 0.0f);
    std::fill_n(item.log_sum_exp + first_head, group_, kMinusInfinity);
    if (count == 0) return;
    ScoreTask task;
    task.q = memory;
    task.group = group_;
    task.width = head_dim_;
    task.keys = vectors_of(item.keys, head);
    task.dtype = item.keys.dtype;
    task.ids = item.ids + head * item.id_stride + item.skip;
    task.count = count;
    task.out = memory + group_ * padded_;
    task.out_stride = count;
    load_queries(item, head, memory);
    kernels_.score_keys(task);
    for (int64_t g = 0; g < group_; ++g) {
      item.log_sum_exp[first_head + g] =
          add_values(item, head, task, task.out + g * count, part + g * head_dim_);
    }
  }

  void load_queries(const EstimateItem& item, uint64_t head, float* to) const {
    const float* from = static_cast<const float*>(call_.q.data) +
                        static_cast<int64_t>(item.row) * call_.q.row_stride +
                        static_cast<int64_t>(head) * group_ * head_dim_;
    std::fill_n(to, group_ * padded_, 0.0f);
    for (int64_t g = 0; g < group_; ++g) {
      for (int64_t i = 0; i < head_dim_; ++i) {
        to[g * padded_ + i] = from[g * head_dim_ + i] * call_.scale;
      }
    }
  }

  // One query head's part from its scores; returns its log-sum-exp.
  float add_values(const EstimateItem& item,
                   uint64_t head,
                   const ScoreTask& task,
                   const float* scores,
                   float* part) const {
    const uint32_t* sizes = item.sizes + head * item.size_stride;
    const char* values = vectors_of(item.value_sums, head);
    const uint64_t vector_bytes =
        static_cast<uint64_t>(head_dim_) * layout::dtype_bytes(item.value_sums.dtype);
    float max = kMinusInfinity;
    for (int64_t j = 0; j < task.count; ++j) {
      if (sizes[task.ids[j]] > 0) max = std::max(max, scores[j]);
    }
    if (max == kMinusInfinity) return kMinusInfinity;
    float total = 0;
    for (int64_t j = 0; j < task.count; ++j) {
      const uint32_t id = task.ids[j];
      if (sizes[id] == 0) continue;
      const float weight = std::exp(scores[j] - max);
      total += static_cast<float>(sizes[id]) * weight;
      kernels_.add_scaled(values + id * vector_bytes, item.value_sums.dtype, weight, head_dim_,
                          part);
    }
    for (int64_t i = 0; i < head_dim_; ++i) part[i] /= total;
    return max + std::log(total);
  }

  const EstimateCall& call_;
  const KernelSet& kernels_;
  const int64_t head_dim_;
  const int64_t padded_;
  const int64_t group_;
};

}  // namespace

Status run_estimate(const EstimateCall& call,
                    const KernelSet& kernels,
                    base::ThreadPool& pool,
                    WorkspacePool& workspace) {
  return Estimate(call, kernels).run(pool, workspace);
}

}  // namespace spin::backend::cpu
