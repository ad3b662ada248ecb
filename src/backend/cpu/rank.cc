// SPDX-License-Identifier: Apache-2.0
// Radix selection: scores become integers of the same order; histograms of their upper, middle and
// lower bits narrow down the last one that is taken, and one more pass collects in the order of
// ids. Loops over all scores have no branches that depend on them.
#include "backend/cpu/rank.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace spin::backend::cpu {
namespace {

constexpr uint32_t kBinBits = 11;
constexpr uint32_t kBins = 1u << kBinBits;

// Greater for greater scores; 0 for what may not be taken. Both zeros are the same.
uint32_t order_key(float score, float least) {
  const bool taken = score >= least && score > -std::numeric_limits<float>::infinity();
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);
  const uint32_t flips = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x8000'0000u;
  return taken ? bits ^ flips : 0;
}

struct Cut {
  uint32_t key = 1;       // greater keys are all taken
  uint32_t equal = 0;     // and so many of those equal to it, the first ones
  bool all_equal = true;  // which are all of them
};

// The cut that takes `most` of keys [count]. `left`: scratch [count]. Requires: more than `most`
// keys are not 0, most > 0.
Cut find_cut(const uint32_t* keys, uint32_t count, uint32_t most, uint32_t* left) {
  const uint32_t* from = keys;
  uint32_t wanted = most;
  // 11, 11 and 10 bits from the top.
  for (const uint32_t shift : {21u, 10u, 0u}) {
    const uint32_t mask = shift == 0 ? (1u << 10) - 1 : kBins - 1;
    uint32_t histogram[kBins] = {};
    for (uint32_t i = 0; i < count; ++i) ++histogram[(from[i] >> shift) & mask];
    uint32_t bin = mask;
    while (histogram[bin] < wanted) wanted -= histogram[bin--];
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; ++i) {  // in place from the second time on: kept <= i
      const uint32_t key = from[i];
      left[kept] = key;
      kept += ((key >> shift) & mask) == bin ? 1 : 0;
    }
    from = left;
    count = kept;
  }
  return {from[0], wanted, wanted == count};
}

}  // namespace

uint32_t rank_scores(const RankTask& task) {
  uint32_t* keys = task.scratch;
  uint32_t able = 0;
  for (uint32_t i = 0; i < task.count; ++i) {
    keys[i] = order_key(task.scores[i], task.least_score);
    able += keys[i] != 0 ? 1 : 0;
  }
  const uint32_t taken = std::min(able, task.most);
  if (taken == 0) return 0;
  Cut cut;  // takes all that may be taken
  if (able > task.most) cut = find_cut(keys, task.count, task.most, keys + task.count);
  uint32_t written = 0;
  for (uint32_t i = 0; written < taken; ++i) {  // stops in time: `taken` keys pass
    task.ids[written] = i;
    if (cut.all_equal) {
      written += keys[i] >= cut.key ? 1 : 0;
    } else {
      const uint32_t equal = keys[i] == cut.key && cut.equal > 0 ? 1 : 0;
      cut.equal -= equal;
      written += (keys[i] > cut.key ? 1 : 0) + equal;
    }
  }
  if (task.ranked) {
    std::sort(task.ids, task.ids + written, [keys](uint32_t a, uint32_t b) {
      return keys[a] != keys[b] ? keys[a] > keys[b] : a < b;
    });
  }
  for (uint32_t i = 0; i < written; ++i) task.ids[i] += task.first;
  return written;
}

}  // namespace spin::backend::cpu
