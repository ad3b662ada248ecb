// SPDX-License-Identifier: Apache-2.0
// The best of many scores without sorting them all. Thread: pure functions.
#pragma once

#include <cstdint>

namespace spin::backend::cpu {

struct RankTask {
  const float* scores = nullptr;  // [count]
  uint32_t first = 0;             // added to the ids
  uint32_t count = 0;
  uint32_t most = 0;
  float least_score = 0;
  bool ranked = false;
  uint32_t* ids = nullptr;      // out, min(most, count)
  uint32_t* scratch = nullptr;  // rank_scratch_words(count)
};
constexpr uint64_t rank_scratch_words(uint64_t count) { return 2 * count; }

// Returns how many ids were written (backend/sparse_ops.h, RankItem). O(count + ids log ids).
// NaN counts as -infinity.
uint32_t rank_scores(const RankTask& task);

}  // namespace spin::backend::cpu
