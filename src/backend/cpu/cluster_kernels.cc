// SPDX-License-Identifier: Apache-2.0
// Nearest centroids of blocks of tokens, for every Highway target: a matrix product whose results
// are looked at while they are in the first cache.
#include "backend/cpu/cluster_kernels.h"

#include <algorithm>
#include <limits>

#include "backend/cpu/highway_targets.h"
#include "base/bf16.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/cluster_kernels.cc"
#include "hwy/foreach_target.h"  // must come before highway.h and -inl.h files
//
#include "backend/cpu/matmul_tile-inl.h"
#include "backend/cpu/simd_math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spin::backend::cpu {
namespace HWY_NAMESPACE {

// Calls put(i, vector of row[i..] - mean[i..]) and put_one(i, row[i] - mean[i]) for the rest.
template <typename Put, typename PutOne>
HWY_INLINE void for_centred(const std::byte* row,
                            layout::DType dtype,
                            const float* mean,
                            int64_t dim,
                            const Put& put,
                            const PutOne& put_one) {
  const F32 d;
  int64_t i = 0;
  if (dtype == layout::DType::kF32) {
    const auto* from = reinterpret_cast<const float*>(row);
    for (; i + kLanes <= dim; i += kLanes) {
      put(i, hn::Sub(hn::LoadU(d, from + i), hn::LoadU(d, mean + i)));
    }
    for (; i < dim; ++i) put_one(i, from[i] - mean[i]);
    return;
  }
  const hn::Rebind<uint16_t, F32> d16;
  const auto* from = reinterpret_cast<const base::Bf16*>(row);
  for (; i + kLanes <= dim; i += kLanes) {
    const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from + i));
    put(i, hn::Sub(even_bf16(d, hn::PromoteTo(U32(), bits)), hn::LoadU(d, mean + i)));
  }
  for (; i < dim; ++i) put_one(i, base::to_float(from[i]) - mean[i]);
}

void centre_row(
    const std::byte* row, layout::DType dtype, const float* mean, int64_t dim, float* to) {
  const F32 d;
  for_centred(
      row, dtype, mean, dim, [&](int64_t i, VF32 x) HWY_ATTR { hn::StoreU(x, d, to + i); },
      [&](int64_t i, float x) { to[i] = x; });
}

void add_row(
    const std::byte* row, layout::DType dtype, const float* mean, int64_t dim, float* sums) {
  const F32 d;
  for_centred(
      row, dtype, mean, dim,
      [&](int64_t i, VF32 x)
          HWY_ATTR { hn::StoreU(hn::Add(hn::LoadU(d, sums + i), x), d, sums + i); },
      [&](int64_t i, float x) { sums[i] += x; });
}

// Takes the scores of centroids [first, first + width) of one row in; lanes keep their own best,
// found first.
HWY_INLINE void keep_best(
    const float* scores, int64_t first, int64_t width, float* best, int32_t* best_index) {
  const F32 d;
  const I32 di;
  VF32 most = hn::Load(d, best);
  hn::Vec<I32> index = hn::Load(di, best_index);
  hn::Vec<I32> here = hn::Iota(di, static_cast<int32_t>(first));
  for (int64_t j = 0; j < width; j += kLanes) {
    const VF32 score = hn::LoadU(d, scores + j);
    const auto better = hn::Gt(score, most);
    most = hn::IfThenElse(better, score, most);
    index = hn::IfThenElse(hn::RebindMask(di, better), here, index);
    here = hn::Add(here, hn::Set(di, static_cast<int32_t>(kLanes)));
  }
  hn::Store(most, d, best);
  hn::Store(index, di, best_index);
}

void assign(const AssignTask& task) {
  float* scores = task.scratch;  // [kBlockRows, kAssignPanel]
  float* best = scores + 8 * kAssignPanel;
  auto* index = reinterpret_cast<int32_t*>(best + kAssignRows * kLanes);
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  std::fill_n(best, task.count * kLanes, kLeast);
  std::fill_n(index, task.count * kLanes, 0);
  const float* panel = task.panels;
  for (int64_t first = 0; first < task.clusters; first += kAssignPanel) {
    const int64_t width = assign_panel_width(task.clusters - first);
    for (int64_t r = 0; r < task.count; r += kBlockRows) {
      const int64_t part = std::min<int64_t>(kBlockRows, task.count - r);
      float_block<Rows::kStrided>(task.rows + r * task.dim, task.dim, part, panel, width, width,
                                  task.dim, false, scores, kAssignPanel);
      for (int64_t i = 0; i < part; ++i) {
        float* row = scores + i * kAssignPanel;
        keep_best(row, first, width, best + (r + i) * kLanes, index + (r + i) * kLanes);
      }
    }
    panel += task.dim * width;
  }
  for (int64_t r = 0; r < task.count; ++r) {
    const float* values = best + r * kLanes;
    const int32_t* indexes = index + r * kLanes;
    int64_t lane = 0;
    for (int64_t i = 1; i < kLanes; ++i) {
      if (values[i] > values[lane] || (values[i] == values[lane] && indexes[i] < indexes[lane])) {
        lane = i;
      }
    }
    task.nearest[r] = task.first_cluster + static_cast<uint32_t>(indexes[lane]);
  }
}

void fill_cluster(ClusterKernels& kernels) {
  kernels.centre_row = centre_row;
  kernels.add_row = add_row;
  kernels.assign = assign;
}

}  // namespace HWY_NAMESPACE
}  // namespace spin::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spin::backend::cpu {

void fill_cluster_kernels(int64_t target, ClusterKernels& kernels) {
  SPIN_CALL_FOR_TARGET(target, fill_cluster, kernels);
}

}  // namespace spin::backend::cpu
#endif  // HWY_ONCE
