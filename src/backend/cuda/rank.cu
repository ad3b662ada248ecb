// SPDX-License-Identifier: Apache-2.0
// Rank: a block per (KV head, item). Scores become integers of the same order, in shared memory
// where they fit. Histograms narrow the range of the last one that is taken down, each over 2048
// bins of what is left of the range, so that scores that lie close together do not meet in a few
// bins; then one pass collects in the order of ids by prefix sums. Ranked lists are sorted by
// (score, id) afterwards. All sums are of integers: the result is exact.
//
// Bytes: scores once where up to kStagedScores of a head are ranked, otherwise up to five times
// (from the L2 cache); ids once.
#include <algorithm>
#include <bit>
#include <vector>

#include "backend/cuda/block_support.cuh"
#include "backend/cuda/cuda_sparse_ops.h"
#include "backend/cuda/cuda_status.h"
#include "base/check.h"

namespace spin::backend::cuda {
namespace {

constexpr uint32_t kRankThreads = 1024;
constexpr uint32_t kBinBits = 11;
constexpr uint32_t kBins = 1u << kBinBits;
static_assert(kBins == 2 * kRankThreads);      // a thread sums up two
constexpr uint32_t kStagedScores = 20 * 1024;  // 80 KiB; GPUs of capability 8.6 have 99
constexpr uint32_t kSortedAtOnce = 8 * 1024;   // 64 KiB
constexpr uint32_t kRounds = 4;                // ids that a lane collects between two barriers
constexpr uint32_t kCollected = kRankThreads * kRounds;  // counted in 16 bits

struct RankUnit {
  RankItem item;
  uint64_t* values = nullptr;  // [kv_heads, value_stride] to sort what shared memory cannot hold
  uint64_t value_stride = 0;
};

// What fits the dynamic shared memory, which first holds keys, then what is sorted.
struct RankRoom {
  uint32_t staged = 0;
  uint32_t sorted = 0;  // a power of two, if anything is ranked
};

struct RankShared {
  uint32_t histogram[kBins];
  BlockScan scan;
  uint32_t collected[2][kWarp];  // in turn, so that one barrier is enough
  uint32_t able;                 // keys that are not 0
  uint32_t least;                // of these
  uint32_t most;
  uint32_t bin;     // that holds the last one that is taken
  uint32_t above;   // keys in higher bins
  uint32_t inside;  // keys in that one
};

// Greater for greater scores; 0 for what may not be taken. Both zeros are the same.
__device__ uint32_t order_key(float score, float least) {
  if (!(score >= least) || score == -INFINITY) return 0;
  const uint32_t bits = score == 0.0f ? 0 : __float_as_uint(score);
  return (bits & 0x8000'0000u) != 0 ? ~bits : bits | 0x8000'0000u;
}

// Keys of one head.
struct Keys {
  const float* scores = nullptr;
  uint32_t* staged = nullptr;  // null: they do not fit
  uint32_t count = 0;
  float least = 0.0f;

  __device__ uint32_t operator[](uint32_t i) const {
    return staged != nullptr ? staged[i] : order_key(scores[i], least);
  }
};

// Stages the keys; finds how many may be taken and their range.
__device__ void survey(const Keys& keys, RankShared& shared) {
  if (threadIdx.x == 0) {
    shared.able = 0;
    shared.least = UINT32_MAX;
    shared.most = 0;
  }
  __syncthreads();
  uint32_t able = 0;
  uint32_t least = UINT32_MAX;
  uint32_t most = 0;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < keys.count; i += kRankThreads) {
    const uint32_t key = order_key(keys.scores[i], keys.least);
    if (keys.staged != nullptr) keys.staged[i] = key;
    able += key != 0 ? 1 : 0;
    least = min(least, key != 0 ? key : UINT32_MAX);
    most = max(most, key);
  }
  able = __reduce_add_sync(kFullMask, able);
  least = __reduce_min_sync(kFullMask, least);
  most = __reduce_max_sync(kFullMask, most);
  if (threadIdx.x % kWarp == 0 && able > 0) {
    atomicAdd(&shared.able, able);
    atomicMin(&shared.least, least);
    atomicMax(&shared.most, most);
  }
  __syncthreads();
}

struct Cut {
  uint32_t key = 0;    // greater keys are all taken
  uint32_t equal = 0;  // and so many of those equal to it, the first ones
};

// The cut that takes `wanted` keys. Requires: more are not 0, these are in [low, high]; wanted > 0.
__device__ Cut
find_cut(const Keys& keys, uint32_t wanted, uint32_t low, uint32_t high, RankShared& shared) {
  while (true) {
    const uint32_t span = high - low;
    const uint32_t shift = span < kBins ? 0 : 32 - kBinBits - __clz(span);
    for (uint32_t i = threadIdx.x; i < kBins; i += kRankThreads) shared.histogram[i] = 0;
    __syncthreads();
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < keys.count; i += kRankThreads) {
      const uint32_t key = keys[i];
      if (key >= low && key <= high) atomicAdd(&shared.histogram[(key - low) >> shift], 1u);
    }
    __syncthreads();
    const uint32_t bin = kBins - 2 - 2 * threadIdx.x;  // the first thread has the highest two
    const uint32_t lower = shared.histogram[bin];
    const uint32_t upper = shared.histogram[bin + 1];
    const uint32_t before = block_sum(lower + upper, shared.scan).before;
    if (before < wanted && wanted <= before + lower + upper) {
      const bool is_upper = wanted <= before + upper;
      shared.bin = is_upper ? bin + 1 : bin;
      shared.above = is_upper ? before : before + upper;
      shared.inside = is_upper ? upper : lower;
    }
    __syncthreads();
    wanted -= shared.above;
    low += shared.bin << shift;
    if (wanted == shared.inside) return {low - 1, 0};
    if (shift == 0) return {low, wanted};
    high = min(high - low, (1u << shift) - 1) + low;
  }
}

// Writes the ids of the `taken` keys that the cut takes, ascending.
__device__ void collect(const Keys& keys,
                        const Cut& cut,
                        uint32_t taken,
                        uint32_t first_id,
                        uint32_t* ids,
                        RankShared& shared) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t warp = threadIdx.x / kWarp;
  const uint32_t lower_lanes = (1u << lane) - 1;
  uint32_t above_before = 0;  // keys so far that are greater than the cut's
  uint32_t equal_before = 0;
  for (uint32_t begin = 0, turn = 0; begin < keys.count; begin += kCollected, turn ^= 1) {
    if (above_before + min(equal_before, cut.equal) == taken) break;
    const uint32_t mine = begin + warp * kWarp * kRounds + lane;
    uint32_t above[kRounds];
    uint32_t equal[kRounds];
    uint32_t counts = 0;  // above in the upper half, equal in the lower one
#pragma unroll
    for (uint32_t r = 0; r < kRounds; ++r) {
      const uint32_t i = mine + r * kWarp;
      const uint32_t key = i < keys.count ? keys[i] : 0;
      above[r] = __ballot_sync(kFullMask, key > cut.key);
      equal[r] = __ballot_sync(kFullMask, key == cut.key);
      counts += (__popc(above[r]) << 16) + __popc(equal[r]);
    }
    if (lane == 0) shared.collected[turn][warp] = counts;
    __syncthreads();
    uint32_t through = shared.collected[turn][lane];  // the warps up to this lane's number
    const uint32_t own = through;
#pragma unroll
    for (uint32_t step = 1; step < kWarp; step *= 2) {
      const uint32_t other = __shfl_up_sync(kFullMask, through, step);
      if (lane >= step) through += other;
    }
    const uint32_t before = __shfl_sync(kFullMask, through - own, warp);
    const uint32_t total = __shfl_sync(kFullMask, through, kWarp - 1);
    uint32_t above_here = above_before + (before >> 16);
    uint32_t equal_here = equal_before + (before & 0xFFFFu);
#pragma unroll
    for (uint32_t r = 0; r < kRounds; ++r) {
      const uint32_t at_above = above_here + __popc(above[r] & lower_lanes);
      const uint32_t at_equal = equal_here + __popc(equal[r] & lower_lanes);
      const bool takes =
          ((above[r] >> lane) & 1) != 0 || (((equal[r] >> lane) & 1) != 0 && at_equal < cut.equal);
      if (takes) ids[at_above + min(at_equal, cut.equal)] = first_id + mine + r * kWarp;
      above_here += __popc(above[r]);
      equal_here += __popc(equal[r]);
    }
    above_before += total >> 16;
    equal_before += total & 0xFFFFu;
  }
}

// Sorts ids [taken], ascending before, by (score descending, id ascending).
__device__ void sort_ranked(const Keys& keys,
                            uint32_t taken,
                            uint32_t first_id,
                            uint32_t* ids,
                            uint64_t* overflow,
                            uint64_t* shared_values,
                            uint32_t shared_count) {
  const uint32_t count = power_of_two(taken);
  uint64_t* const values = count <= shared_count ? shared_values : overflow;
  __syncthreads();  // staged keys are not read any more, ids are written
  for (uint32_t i = threadIdx.x; i < count; i += kRankThreads) {
    uint64_t value = UINT64_MAX;
    if (i < taken) {
      const uint32_t id = ids[i] - first_id;
      value = uint64_t{~order_key(keys.scores[id], keys.least)} << 32 | id;
    }
    values[i] = value;
  }
  if (values == shared_values) {
    sort_within(values, count, 0, 2, count);
  } else {
    sort_by_parts(values, count, shared_values, shared_count);
  }
  for (uint32_t i = threadIdx.x; i < taken; i += kRankThreads) {
    ids[i] = first_id + static_cast<uint32_t>(values[i]);
  }
}

// Grid (KV heads, items).
__global__ void __launch_bounds__(kRankThreads)
    rank_kernel(const __grid_constant__ ItemPack<RankUnit> units, const RankRoom room) {
  extern __shared__ uint64_t dynamic[];
  __shared__ RankShared shared;
  const RankUnit& unit = units[blockIdx.y];
  const RankItem& item = unit.item;
  const uint64_t head = blockIdx.x;
  Keys keys;
  keys.scores = item.scores + head * item.score_stride;
  keys.staged = item.count <= room.staged ? reinterpret_cast<uint32_t*>(dynamic) : nullptr;
  keys.count = item.count;
  keys.least = item.least_score;
  uint32_t* const ids = item.ids + head * item.id_stride;

  survey(keys, shared);
  const uint32_t able = shared.able;
  const uint32_t taken = min(able, item.most);
  if (threadIdx.x == 0) {
    item.counts[head] = taken;
    if (item.selected != nullptr) item.selected[head] += taken;
  }
  if (taken == 0) return;
  Cut cut;  // takes all that may be taken
  if (able > taken) cut = find_cut(keys, taken, shared.least, shared.most, shared);
  collect(keys, cut, taken, item.first, ids, shared);
  if (!item.ranked || taken == 1) return;
  sort_ranked(keys, taken, item.first, ids, unit.values + head * unit.value_stride, dynamic,
              room.sorted);
}

// Values that sorting an item's list may take.
uint32_t most_sorted(const RankItem& item) {
  return item.ranked ? std::bit_ceil(std::min(item.most, item.count)) : 0;
}

// Deals out scratch, the same to one pack after the other; returns how many values that takes.
// memory == nullptr: only counts.
uint64_t place_values(std::span<RankUnit> units, uint32_t kv_heads, uint64_t* memory) {
  uint64_t most = 0;
  uint64_t used = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    if (i % ItemPack<RankUnit>::kMost == 0) used = 0;
    const uint32_t sorted = most_sorted(units[i].item);
    if (sorted <= kSortedAtOnce) continue;
    if (memory != nullptr) units[i].values = memory + used;
    units[i].value_stride = sorted;
    used += uint64_t{sorted} * kv_heads;
    most = std::max(most, used);
  }
  return most;
}

RankRoom room_for(std::span<const RankUnit> units) {
  RankRoom room;
  for (const RankUnit& unit : units) {
    if (unit.item.count <= kStagedScores) room.staged = std::max(room.staged, unit.item.count);
    room.sorted = std::max(room.sorted, std::min(most_sorted(unit.item), kSortedAtOnce));
  }
  return room;
}

}  // namespace

void CudaSparseOps::enqueue_rank(std::span<const RankItem> items,
                                 uint32_t kv_heads,
                                 StreamRef stream_ref) {
  std::vector<RankUnit> units;
  for (const RankItem& item : items) {
    SPIN_CHECK(item.id_stride >= std::min(item.most, item.count));
    SPIN_CHECK(item.count <= 1u << 31);
    units.push_back({item});
  }
  CudaStream& stream = cuda_stream(stream_ref);
  if (units.empty() || kv_heads == 0 || !stream.begin()) return;
  if (const uint64_t values = place_values(units, kv_heads, nullptr); values > 0) {
    void* const scratch = stream.scratch(values * sizeof(uint64_t));
    if (scratch == nullptr) return;
    place_values(units, kv_heads, static_cast<uint64_t*>(scratch));
  }
  constexpr int kMostShared = std::max(kStagedScores * 4, kSortedAtOnce * 8);
  stream.fail(cuda_status(
      cudaFuncSetAttribute(rank_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared),
      "rank"));
  const std::span<const RankUnit> all(units);
  launch_packs(all, [&](const ItemPack<RankUnit>& pack, uint32_t count, size_t first) {
    const RankRoom room = room_for(all.subspan(first, count));
    const size_t shared =
        std::max(size_t{room.staged} * sizeof(uint32_t), size_t{room.sorted} * sizeof(uint64_t));
    rank_kernel<<<dim3(kv_heads, count), kRankThreads, shared, stream.handle()>>>(pack, room);
    stream.end("rank");
  });
}

}  // namespace spin::backend::cuda
