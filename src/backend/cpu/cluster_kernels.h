// SPDX-License-Identifier: Apache-2.0
// Inner loops of clustering, one set per instruction set (as backend/cpu/kernels.h).
// Thread: pure functions on the memory given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/dtype.h"

namespace spin::backend::cpu {

// Rows that one call of assign() takes at most: with head_dim 128 they fill 48 KiB of the second
// cache, while a panel of 64 centroids (32 KiB) stays in the first.
inline constexpr int64_t kAssignRows = 96;
inline constexpr int64_t kAssignPanel = 64;
inline constexpr int64_t kAssignScratchFloats = 8 * kAssignPanel + 2 * kAssignRows * 16;

// Columns of a panel that holds the `left` last centroids.
constexpr int64_t assign_panel_width(int64_t left) {
  return left >= kAssignPanel ? kAssignPanel : (left + 15) / 16 * 16;
}

struct AssignTask {
  const float* rows = nullptr;  // [count, dim]
  int64_t count = 0;            // <= kAssignRows
  int64_t dim = 0;
  // Centroids, transposed: panels of kAssignPanel, [dim, assign_panel_width()] each, one after the
  // other. Padding columns repeat the last centroid.
  const float* panels = nullptr;
  int64_t clusters = 0;
  uint32_t first_cluster = 0;   // added to what is found
  uint32_t* nearest = nullptr;  // out [count]
  float* scratch = nullptr;     // [kAssignScratchFloats], aligned to 64 bytes
};

struct ClusterKernels {
  // to[i] = row[i] - mean[i], row of `dtype`.
  void (*centre_row)(const std::byte* row,
                     layout::DType dtype,
                     const float* mean,
                     int64_t dim,
                     float* to) = nullptr;
  // sums[i] += row[i] - mean[i].
  void (*add_row)(const std::byte* row,
                  layout::DType dtype,
                  const float* mean,
                  int64_t dim,
                  float* sums) = nullptr;
  // nearest[r] = first_cluster + argmax_i rows[r] . centroid_i; ties and NaN: the lowest i. Each
  // product is one chain over ascending dimensions.
  void (*assign)(const AssignTask& task) = nullptr;
};

void fill_cluster_kernels(int64_t target, ClusterKernels& kernels);

}  // namespace spin::backend::cpu
