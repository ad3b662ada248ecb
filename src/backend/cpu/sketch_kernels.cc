// SPDX-License-Identifier: Apache-2.0
// Loops over sketches for every Highway target.
//
// Scores: the two codes of a pair are masked out of a word, a byte look-up turns them into shifted
// levels (0 .. 254, the upper bytes stay 0), and one multiplication of 16-bit pairs adds both
// products to the lane's 32-bit sum. Thread: pure functions.
#include "backend/cpu/sketch_kernels.h"

#include <algorithm>
#include <limits>

#include "backend/cpu/highway_targets.h"
#include "backend/sketch_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/sketch_kernels.cc"
#include "hwy/foreach_target.h"  // must come before highway.h and -inl.h files
//
#include "backend/cpu/simd_math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spin::backend::cpu {
namespace HWY_NAMESPACE {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = kSketchBlockTokens;

// sum + low half of levels * low half of pair + the same of the upper halves, per 32-bit lane.
HWY_INLINE hn::Vec<I32> add_products(hn::Vec<I32> levels, hn::Vec<I32> pair, hn::Vec<I32> sum) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
  const hn::RepartitionToNarrow<I32> d16;
  hn::Vec<I32> unused = sum;
  return hn::ReorderWidenMulAccumulate(I32(), hn::BitCast(d16, levels), hn::BitCast(d16, pair), sum,
                                       unused);
#else
  const auto low = hn::ShiftRight<16>(hn::ShiftLeft<16>(pair));
  const auto low_levels = hn::And(levels, hn::Set(I32(), 0xFFFF));
  const auto high_levels = hn::ShiftRight<16>(levels);
  return hn::Add(sum,
                 hn::Add(hn::Mul(low_levels, low), hn::Mul(high_levels, hn::ShiftRight<16>(pair))));
#endif
}

// Shifted levels of the two codes of a pair. `codes`: a word moved right and masked.
HWY_INLINE hn::Vec<I32> shifted_levels(hn::Vec<U32> codes, const uint8_t* table) {
#if HWY_TARGET == HWY_SCALAR
  const uint32_t pair = hn::GetLane(codes);
  return hn::Set(I32(), static_cast<int32_t>(table[pair & 15] | (table[pair >> 16] << 16)));
#else
  const hn::Repartition<uint8_t, U32> d8;
  return hn::BitCast(I32(),
                     hn::TableLookupBytes(hn::LoadDup128(d8, table), hn::BitCast(d8, codes)));
#endif
}

template <int kGroup, int kBits>
void score_blocks(const SketchBlocks& in, const SketchQuery& query, float* out, int64_t stride) {
  constexpr int kSteps = 16 / kBits;
  constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x10001u;
  const I32 di;
  const U32 du;
  const F32 d;
  alignas(16) uint8_t table[16];
  std::copy_n(sketch_levels(kBits).shifted.data(), 16, table);
  const auto mask = hn::Set(du, kMask);
  const auto* scales = reinterpret_cast<const hwy::float16_t*>(in.scales);
  const hn::Rebind<hwy::float16_t, F32> d16;
  for (int64_t b = 0; b < in.blocks; ++b) {
    const uint32_t* block = in.codes + b * in.words * kBlock;
    for (int64_t lane = 0; lane < kBlock; lane += kLanes) {
      hn::Vec<I32> sums[kGroup];
      HWY_UNROLL(8)
      for (int g = 0; g < kGroup; ++g) sums[g] = hn::Zero(di);
      const auto* pair = reinterpret_cast<const int32_t*>(query.pairs);
      for (int64_t w = 0; w < in.words; ++w) {
        auto word = hn::LoadU(du, block + w * kBlock + lane);
        for (int i = 0; i < kSteps; ++i, pair += kGroup) {
          const auto levels = shifted_levels(hn::And(word, mask), table);
          HWY_UNROLL(8)
          for (int g = 0; g < kGroup; ++g) {
            sums[g] = add_products(levels, hn::Set(di, pair[g]), sums[g]);
          }
          word = hn::ShiftRight<kBits>(word);
        }
      }
      const int64_t at = b * kBlock + lane;
      const auto scale = hn::PromoteTo(d, hn::LoadU(d16, scales + at));
      for (int g = 0; g < kGroup; ++g) {
        const auto sum = hn::ConvertTo(d, hn::Sub(sums[g], hn::Set(di, query.corrections[g])));
        const auto dot = hn::Mul(scale, hn::Mul(hn::Set(d, query.factors[g]), sum));
        hn::StoreU(hn::Add(dot, hn::Set(d, query.biases[g])), d, out + g * stride + at);
      }
    }
  }
}

template <int kBits>
void score_bits(const SketchBlocks& in, const SketchQuery& query, float* out, int64_t stride) {
  switch (query.group) {
    case 1:
      return score_blocks<1, kBits>(in, query, out, stride);
    case 2:
      return score_blocks<2, kBits>(in, query, out, stride);
    case 3:
      return score_blocks<3, kBits>(in, query, out, stride);
    case 4:
      return score_blocks<4, kBits>(in, query, out, stride);
    case 5:
      return score_blocks<5, kBits>(in, query, out, stride);
    case 6:
      return score_blocks<6, kBits>(in, query, out, stride);
    case 7:
      return score_blocks<7, kBits>(in, query, out, stride);
    default:
      return score_blocks<8, kBits>(in, query, out, stride);
  }
}

void score(const SketchBlocks& in, const SketchQuery& query, float* out, int64_t stride) {
  if (in.bits == 1) return score_bits<1>(in, query, out, stride);
  if (in.bits == 2) return score_bits<2>(in, query, out, stride);
  score_bits<4>(in, query, out, stride);
}

// Lane sums over whole vectors first, the rest one by one: an order of the count alone.
HWY_INLINE float sum_of_exponentials(const float* scores, int64_t count, float max) {
  const F32 d;
  VF32 sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    sum = hn::Add(sum, exp_any(d, hn::Sub(hn::LoadU(d, scores + i), hn::Set(d, max))));
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < count; ++i) total += hn::GetLane(exp_any(d, hn::Set(d, scores[i] - max)));
  return total;
}

void page_maxima(const float* scores,
                 int64_t pages,
                 int64_t page_tokens,
                 float* page_max,
                 float* max,
                 float* sum) {
  float most = kMinusInfinity;
  for (int64_t p = 0; p < pages; ++p) {
    const float* page = scores + p * page_tokens;
    float largest = page[0];
    for (int64_t t = 1; t < page_tokens; ++t) largest = std::max(largest, page[t]);
    page_max[p] = largest;
    most = std::max(most, largest);
  }
  *max = most;
  *sum = sum_of_exponentials(scores, pages * page_tokens, most);
}

void weigh(const SketchBlocks& values, float* scores, float* max, float* sum) {
  const F32 d;
  const int64_t count = values.blocks * kBlock;
  VF32 largest = hn::Set(d, kMinusInfinity);
  for (int64_t i = 0; i < count; i += kLanes) largest = hn::Max(largest, hn::LoadU(d, scores + i));
  const float most = hn::GetLane(hn::MaxOfLanes(d, largest));
  *max = most;
  *sum = 0.0f;
  if (most == kMinusInfinity) {
    std::fill_n(scores, count, 0.0f);
    return;
  }
  VF32 total = hn::Zero(d);
  const hn::Rebind<hwy::float16_t, F32> d16;
  const auto* scales = reinterpret_cast<const hwy::float16_t*>(values.scales);
  for (int64_t i = 0; i < count; i += kLanes) {
    const VF32 weight = exp_any(d, hn::Sub(hn::LoadU(d, scores + i), hn::Set(d, most)));
    total = hn::Add(total, weight);
    hn::StoreU(hn::Mul(weight, hn::PromoteTo(d, hn::LoadU(d16, scales + i))), d, scores + i);
  }
  *sum = hn::GetLane(hn::SumOfLanes(d, total));
}

// The level of the lowest code of each lane, 2 bits: -10, -3, 3, 10.
HWY_INLINE VF32 two_bit_levels(hn::Vec<U32> word) {
  const I32 di;
  const auto code = hn::BitCast(di, hn::And(word, hn::Set(U32(), 3)));
  // 7 c - (c >> 1) - 10
  const auto seven = hn::Sub(hn::ShiftLeft<3>(code), code);
  return hn::ConvertTo(F32(), hn::Sub(seven, hn::Add(hn::ShiftRight<1>(code), hn::Set(di, 10))));
}

template <int kGroup>
void accumulate_group(const SketchBlocks& in, const float* weights, int64_t stride, float* acc) {
  const F32 d;
  const U32 du;
  for (int64_t w = 0; w < in.words; ++w) {
    // Four dimensions at a time: each block's word and weights serve them all.
    for (int i = 0; i < 16; i += 4) {
      VF32 sums[4][kGroup];
      for (int k = 0; k < 4; ++k) {
        for (int g = 0; g < kGroup; ++g) sums[k][g] = hn::Zero(d);
      }
      for (int64_t b = 0; b < in.blocks; ++b) {
        for (int64_t lane = 0; lane < kBlock; lane += kLanes) {
          const uint32_t* at = in.codes + (b * in.words + w) * kBlock + lane;
          auto word = hn::ShiftRightSame(hn::LoadU(du, at), 2 * i);
          HWY_UNROLL(4)
          for (int k = 0; k < 4; ++k) {
            const VF32 level = two_bit_levels(word);
            HWY_UNROLL(4)
            for (int g = 0; g < kGroup; ++g) {
              const VF32 weight = hn::LoadU(d, weights + g * stride + b * kBlock + lane);
              sums[k][g] = hn::MulAdd(weight, level, sums[k][g]);
            }
            word = hn::ShiftRight<2>(word);
          }
        }
      }
      for (int k = 0; k < 4; ++k) {
        for (int g = 0; g < kGroup; ++g) {
          acc[(g * in.words + w) * 16 + i + k] = hn::GetLane(hn::SumOfLanes(d, sums[k][g]));
        }
      }
    }
  }
}

void accumulate(
    const SketchBlocks& in, const float* weights, int64_t stride, int64_t group, float* acc) {
  for (int64_t g = 0; g < group; g += 4) {
    const float* from = weights + g * stride;
    float* to = acc + g * in.words * 16;
    switch (std::min<int64_t>(4, group - g)) {
      case 1:
        accumulate_group<1>(in, from, stride, to);
        break;
      case 2:
        accumulate_group<2>(in, from, stride, to);
        break;
      case 3:
        accumulate_group<3>(in, from, stride, to);
        break;
      default:
        accumulate_group<4>(in, from, stride, to);
    }
  }
}

void fill_sketch(SketchKernels& kernels) {
  kernels.score = score;
  kernels.page_maxima = page_maxima;
  kernels.weigh = weigh;
  kernels.accumulate = accumulate;
}

}  // namespace HWY_NAMESPACE
}  // namespace spin::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spin::backend::cpu {

void fill_sketch_kernels(int64_t target, SketchKernels& kernels) {
  SPIN_CALL_FOR_TARGET(target, fill_sketch, kernels);
}

}  // namespace spin::backend::cpu
#endif  // HWY_ONCE
