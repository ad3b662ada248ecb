// SPDX-License-Identifier: Apache-2.0
// Radix selection: scores become integers of the same order; histograms of their upper, middle and
// lower bits find the last one that is taken, and one more pass collects in the order of ids.
#include "backend/cpu/rank.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace spin::backend::cpu {
namespace {

constexpr uint32_t kBinBits = 11;
constexpr uint32_t kBins = 1u << kBinBits;

// Greater for greater scores; 0 for what may not be taken. Both zeros are the same.
uint32_t order_key(float score, float least) {
  if (!(score >= least) || score == -std::numeric_limits<float>::infinity()) return 0;
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);
  return (bits & 0x8000'0000u) != 0 ? ~bits : bits | 0x8000'0000u;
}

struct Cut {
  uint32_t key = 0;    // greater keys are all taken
  uint32_t equal = 0;  // and so many of those equal to it, the first ones
};

// Requires: more than task.most scores may be taken.
Cut find_cut(const RankTask& task) {
  uint32_t prefix = 0;
  uint32_t wanted = task.most;
  // 11, 11 and 10 bits from the top; the last step overlaps the second by a bit that is fixed.
  for (const uint32_t shift : {21u, 10u, 0u}) {
    uint32_t histogram[kBins] = {};
    const uint32_t above = shift == 21 ? 0 : ~uint32_t{0} << (shift == 10 ? 21 : 10);
    for (uint32_t i = 0; i < task.count; ++i) {
      const uint32_t key = order_key(task.scores[i], task.least_score);
      if (key == 0 || (key & above) != prefix) continue;
      ++histogram[(key >> shift) & (kBins - 1)];
    }
    uint32_t bin = kBins - 1;
    while (histogram[bin] < wanted) wanted -= histogram[bin--];
    prefix = (prefix & above) | (bin << shift);
  }
  return {prefix, wanted};
}

}  // namespace

uint32_t rank_scores(const RankTask& task) {
  uint32_t able = 0;
  for (uint32_t i = 0; i < task.count; ++i) {
    able += order_key(task.scores[i], task.least_score) != 0 ? 1 : 0;
  }
  const uint32_t taken = std::min(able, task.most);
  if (taken == 0) return 0;
  Cut cut;  // takes all
  if (able > task.most) cut = find_cut(task);
  uint32_t written = 0;
  for (uint32_t i = 0; i < task.count && written < taken; ++i) {
    const uint32_t key = order_key(task.scores[i], task.least_score);
    if (key <= cut.key) {
      if (key == 0 || key < cut.key || cut.equal == 0) continue;
      --cut.equal;
    }
    task.ids[written++] = i;
  }
  if (task.ranked) {
    std::sort(task.ids, task.ids + written, [&task](uint32_t a, uint32_t b) {
      return task.scores[a] != task.scores[b] ? task.scores[a] > task.scores[b] : a < b;
    });
  }
  for (uint32_t i = 0; i < written; ++i) task.ids[i] += task.first;
  return written;
}

}  // namespace spin::backend::cpu
