// SPDX-License-Identifier: Apache-2.0
// Inner loops of sparse selection, for every Highway target: pooling keys, scores, softmax parts.
//
// A vector's score is a chain per lane over the dimensions and one sum over the lanes: its bits
// depend on the query and the vector alone, not on what is scored beside it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/highway_targets.h"
#include "backend/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/select_kernels.cc"
#include "hwy/foreach_target.h"  // must come before highway.h and -inl.h files
//
#include "backend/cpu/simd_math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spin::backend::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

// The first min(left, kLanes) elements from `from` on, zeros behind them; left > 0.
template <class D, typename T>
HWY_INLINE hn::Vec<D> load_part(D d, const T* from, int64_t left) {
  if (kLanes == 1 || left >= kLanes) return hn::LoadU(d, from);
  T part[kLanes] = {};
  std::memcpy(part, from, static_cast<size_t>(left) * sizeof(T));
  return hn::LoadU(d, part);
}

HWY_INLINE void store_part(VF32 value, float* to, int64_t left) {
  const F32 d;
  if (kLanes == 1 || left >= kLanes) {
    hn::StoreU(value, d, to);
    return;
  }
  float part[kLanes];
  hn::StoreU(value, d, part);
  std::memcpy(to, part, static_cast<size_t>(left) * sizeof(float));
}

// Elements [i, i + kLanes) of a row as floats; past `n` zeros.
template <layout::DType kDType>
HWY_INLINE VF32 load_row(const char* row, int64_t i, int64_t n) {
  const F32 d;
  if constexpr (kDType == layout::DType::kF32) {
    return load_part(d, reinterpret_cast<const float*>(row) + i, n - i);
  } else {
    const hn::Rebind<uint16_t, F32> d16;
    const auto bits = load_part(d16, reinterpret_cast<const uint16_t*>(row) + i, n - i);
    return even_bf16(d, hn::PromoteTo(U32(), bits));
  }
}

// to[i] = sum of all lanes of sums[i], i < 4. Within blocks of 128 bits by interleaving, then over
// the blocks in ascending order.
HWY_INLINE void sum_lanes_of_four(const VF32* sums, float* to) {
  const F32 d;
#if HWY_TARGET == HWY_SCALAR
  for (int i = 0; i < 4; ++i) to[i] = hn::GetLane(sums[i]);
  (void)d;
#else
  const hn::RepartitionToWide<F32> d64;
  const VF32 ab =
      hn::Add(hn::InterleaveLower(d, sums[0], sums[1]), hn::InterleaveUpper(d, sums[0], sums[1]));
  const VF32 cd =
      hn::Add(hn::InterleaveLower(d, sums[2], sums[3]), hn::InterleaveUpper(d, sums[2], sums[3]));
  const auto ab64 = hn::BitCast(d64, ab);
  const auto cd64 = hn::BitCast(d64, cd);
  const VF32 blocks = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, ab64, cd64)),
                              hn::BitCast(d, hn::InterleaveUpper(d64, ab64, cd64)));
  HWY_ALIGN float parts[kLanes];
  hn::Store(blocks, d, parts);
  const hn::FixedTag<float, 4> d4;
  auto total = hn::Load(d4, parts);
  for (int64_t i = 4; i < kLanes; i += 4) total = hn::Add(total, hn::Load(d4, parts + i));
  hn::StoreU(total, d4, to);
#endif
}

// kRows query heads against four vectors (or boxes) at these offsets; `stored` scores are wanted.
template <layout::DType kDType, bool kBox, int kRows>
HWY_INLINE void score_four(
    const ScoreTask& task, const float* q, const uint64_t* offsets, float* out, int64_t stored) {
  const F32 d;
  const int64_t padded = score_padded_dim(task.width);
  VF32 sums[kRows][4];
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < 4; ++k) sums[r][k] = hn::Zero(d);
  }
  for (int64_t i = 0; i < task.width; i += kLanes) {
    VF32 key[4];
    VF32 upper[4];
    for (int k = 0; k < 4; ++k) {
      key[k] = load_row<kDType>(task.keys + offsets[k], i, task.width);
      if constexpr (kBox) upper[k] = load_row<kDType>(task.upper + offsets[k], i, task.width);
    }
    for (int r = 0; r < kRows; ++r) {
      const VF32 qr = hn::LoadU(d, q + r * padded + i);
      for (int k = 0; k < 4; ++k) {
        if constexpr (kBox) {
          sums[r][k] = hn::Add(sums[r][k], hn::Max(hn::Mul(qr, key[k]), hn::Mul(qr, upper[k])));
        } else {
          sums[r][k] = hn::MulAdd(qr, key[k], sums[r][k]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float four[4];
    sum_lanes_of_four(sums[r], four);
    std::memcpy(out + r * task.out_stride, four, static_cast<size_t>(stored) * sizeof(float));
  }
}

// Query heads at once: four sums each, four vectors (eight for boxes) and a query fit the
// registers.
#if HWY_TARGET <= HWY_AVX3
constexpr int kKeyRows = 5;
constexpr int kBoxRows = 4;
#else
constexpr int kKeyRows = 2;
constexpr int kBoxRows = 1;
#endif

template <layout::DType kDType, bool kBox>
HWY_INLINE void score_rows(
    const ScoreTask& task, int64_t g, int64_t rows, const uint64_t* offsets, int64_t j) {
  const float* q = task.q + g * score_padded_dim(task.width);
  float* out = task.out + g * task.out_stride + j;
  const int64_t stored = std::min<int64_t>(4, task.count - j);
  switch (rows) {
#if HWY_TARGET <= HWY_AVX3
    case 5:
      return score_four < kDType, kBox, kBox ? kBoxRows : 5 > (task, q, offsets, out, stored);
    case 4:
      return score_four<kDType, kBox, 4>(task, q, offsets, out, stored);
    case 3:
      return score_four<kDType, kBox, 3>(task, q, offsets, out, stored);
#endif
    case 2:
      return score_four<kDType, kBox, 2>(task, q, offsets, out, stored);
    default:
      return score_four<kDType, kBox, 1>(task, q, offsets, out, stored);
  }
}

template <layout::DType kDType, bool kBox>
HWY_INLINE void score_all(const ScoreTask& task) {
  constexpr int64_t kMostRows = kBox ? kBoxRows : kKeyRows;
  const int64_t blocks = (task.group + kMostRows - 1) / kMostRows;
  const int64_t rows = (task.group + blocks - 1) / blocks;
  const uint64_t row_bytes = static_cast<uint64_t>(task.width) * layout::dtype_bytes(kDType);
  for (int64_t j = 0; j < task.count; j += 4) {
    uint64_t offsets[4];
    for (int64_t k = 0; k < 4; ++k) {  // past the end the last one again
      const int64_t i = std::min(j + k, task.count - 1);
      offsets[k] = (task.ids != nullptr ? task.ids[i] : static_cast<uint64_t>(i)) * row_bytes;
    }
    for (int64_t g = 0; g < task.group; g += rows) {
      score_rows<kDType, kBox>(task, g, std::min(rows, task.group - g), offsets, j);
    }
  }
}

void score_keys(const ScoreTask& task) {
  if (task.dtype == layout::DType::kF32) {
    score_all<layout::DType::kF32, false>(task);
  } else {
    score_all<layout::DType::kBF16, false>(task);
  }
}

void score_boxes(const ScoreTask& task) {
  if (task.dtype == layout::DType::kF32) {
    score_all<layout::DType::kF32, true>(task);
  } else {
    score_all<layout::DType::kBF16, true>(task);
  }
}

// Sum of e^(scores[j] - max); scores of -infinity add nothing.
HWY_INLINE float exp_sum(const float* scores, int64_t n, float max) {
  const F32 d;
  const VF32 shift = hn::Set(d, max);
  VF32 sum = hn::Zero(d);
  for (int64_t j = 0; j < n; j += kLanes) {
    // Zeros behind the end become -infinity.
    const auto inside = hn::FirstN(d, static_cast<size_t>(std::min<int64_t>(kLanes, n - j)));
    const VF32 s =
        hn::IfThenElse(inside, load_part(d, scores + j, n - j), hn::Set(d, kMinusInfinity));
    const VF32 p = exp2_nonpositive(d, hn::Mul(hn::Sub(s, shift), hn::Set(d, kLog2E)));
    const auto counts = hn::Gt(s, hn::Set(d, kMinusInfinity));
    sum = hn::Add(sum, hn::IfThenElse(hn::Eq(s, s), hn::IfThenElseZero(counts, p), s));
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

void softmax_part(const float* scores, int64_t n, float* max, float* sum) {
  const F32 d;
  float most = kMinusInfinity;
  int64_t j = 0;
  if (n >= kLanes) {
    VF32 largest = hn::LoadU(d, scores);
    for (j = kLanes; j + kLanes <= n; j += kLanes) {
      largest = hn::Max(largest, hn::LoadU(d, scores + j));
    }
    most = hn::GetLane(hn::MaxOfLanes(d, largest));
  }
  for (; j < n; ++j) most = std::max(most, scores[j]);
  *max = most;
  *sum = most == kMinusInfinity ? 0.0f : exp_sum(scores, n, most);
}

void aggregate_scores(const float* scores,
                      int64_t stride,
                      int64_t group,
                      const float* lse,
                      bool sum,
                      int64_t n,
                      float* to) {
  const F32 d;
  for (int64_t j = 0; j < n; j += kLanes) {
    const auto part = [&](int64_t g) HWY_ATTR {
      return hn::Sub(load_part(d, scores + g * stride + j, n - j), hn::Set(d, lse[g]));
    };
    VF32 most = part(0);
    for (int64_t g = 1; g < group; ++g) most = hn::Max(most, part(g));
    store_part(most, to + j, n - j);
    if (!sum) continue;
    VF32 total = hn::Zero(d);
    for (int64_t g = 0; g < group; ++g) {
      const VF32 x = hn::Mul(hn::Sub(part(g), most), hn::Set(d, kLog2E));
      total = hn::Add(total, exp2_nonpositive(d, x));
    }
    HWY_ALIGN float totals[kLanes];
    hn::Store(total, d, totals);
    for (int64_t i = 0; i < std::min<int64_t>(kLanes, n - j); ++i) {
      if (to[j + i] != kMinusInfinity) to[j + i] += std::log(totals[i]);
    }
  }
}

template <layout::DType kDType>
void pool_as(const PoolTask& task, float* mean, float* min, float* max) {
  const F32 d;
  const VF32 count = hn::Set(d, static_cast<float>(task.run_count * task.run_tokens));
  for (int64_t i = 0; i < task.head_dim; i += kLanes) {
    VF32 sum = hn::Zero(d);
    VF32 least = hn::Set(d, std::numeric_limits<float>::infinity());
    VF32 most = hn::Set(d, kMinusInfinity);
    for (int64_t run = 0; run < task.run_count; ++run) {
      const char* row = task.runs[run];
      for (int64_t t = 0; t < task.run_tokens; ++t, row += task.row_bytes) {
        const VF32 key = load_row<kDType>(row, i, task.head_dim);
        sum = hn::Add(sum, key);
        least = hn::Min(least, key);
        most = hn::Max(most, key);
      }
    }
    const int64_t left = task.head_dim - i;
    if (mean != nullptr) store_part(hn::Div(sum, count), mean + i, left);
    if (min != nullptr) store_part(least, min + i, left);
    if (max != nullptr) store_part(most, max + i, left);
  }
}

void pool_keys(const PoolTask& task, float* mean, float* min, float* max) {
  if (task.dtype == layout::DType::kF32) {
    pool_as<layout::DType::kF32>(task, mean, min, max);
  } else {
    pool_as<layout::DType::kBF16>(task, mean, min, max);
  }
}

template <layout::DType kDType>
float least_cosine_as(const PoolTask& task, const float* mean) {
  const F32 d;
  float least = 1.0f;
  for (int64_t run = 0; run < task.run_count; ++run) {
    const char* row = task.runs[run];
    for (int64_t t = 0; t < task.run_tokens; ++t, row += task.row_bytes) {
      VF32 dot = hn::Zero(d);
      VF32 key_square = hn::Zero(d);
      VF32 mean_square = hn::Zero(d);
      for (int64_t i = 0; i < task.head_dim; i += kLanes) {
        const VF32 key = load_row<kDType>(row, i, task.head_dim);
        const VF32 m =
            load_row<layout::DType::kF32>(reinterpret_cast<const char*>(mean), i, task.head_dim);
        dot = hn::MulAdd(key, m, dot);
        key_square = hn::MulAdd(key, key, key_square);
        mean_square = hn::MulAdd(m, m, mean_square);
      }
      const float lengths = std::sqrt(hn::GetLane(hn::SumOfLanes(d, key_square))) *
                            std::sqrt(hn::GetLane(hn::SumOfLanes(d, mean_square)));
      const float cosine = lengths > 0 ? hn::GetLane(hn::SumOfLanes(d, dot)) / lengths : 0.0f;
      least = std::min(least, cosine);
    }
  }
  return least;
}

float least_cosine(const PoolTask& task, const float* mean) {
  return task.dtype == layout::DType::kF32 ? least_cosine_as<layout::DType::kF32>(task, mean)
                                           : least_cosine_as<layout::DType::kBF16>(task, mean);
}

template <layout::DType kDType>
void add_scaled_as(const char* values, float weight, int64_t n, float* sums) {
  const F32 d;
  const VF32 w = hn::Set(d, weight);
  for (int64_t i = 0; i < n; i += kLanes) {
    const VF32 value = load_row<kDType>(values, i, n);
    const VF32 sum = hn::MulAdd(value, w, load_part(d, sums + i, n - i));
    store_part(sum, sums + i, n - i);
  }
}

void add_scaled(const char* values, layout::DType dtype, float weight, int64_t n, float* sums) {
  if (dtype == layout::DType::kF32) {
    add_scaled_as<layout::DType::kF32>(values, weight, n, sums);
  } else {
    add_scaled_as<layout::DType::kBF16>(values, weight, n, sums);
  }
}

}  // namespace

void fill_select(KernelSet& set) {
  set.score_keys = score_keys;
  set.score_boxes = score_boxes;
  set.softmax_part = softmax_part;
  set.aggregate_scores = aggregate_scores;
  set.pool_keys = pool_keys;
  set.least_cosine = least_cosine;
  set.add_scaled = add_scaled;
}

}  // namespace HWY_NAMESPACE
}  // namespace spin::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spin::backend::cpu {

void fill_select_kernels(int64_t target, KernelSet& set) {
  SPIN_CALL_FOR_TARGET(target, fill_select, set);
}

}  // namespace spin::backend::cpu
#endif  // HWY_ONCE
