// SPDX-License-Identifier: Apache-2.0
// Inner loops over sketches (backend/sketch_ops.h): blocks of 16 tokens, a token per lane. Sums of
// codes are integers, so scores have the same bits on every instruction set.
// Thread: pure functions on the memory given.
#pragma once

#include <cstdint>

#include "base/fp16.h"

namespace spin::backend::cpu {

inline constexpr int64_t kSketchGroup = 8;  // query heads that one pass over the codes serves

// Queries of one row and KV head, ready for the codes. All arrays have one entry per query head.
struct SketchQuery {
  // r_g in pairs: step i of word w takes dimensions w * (32 / bits) + i and + i + 16 / bits, the
  // first in the low half; entry ((w * 16 / bits) + i) * group + g. Dimensions past the head: 0.
  const uint32_t* pairs = nullptr;
  const int32_t* corrections = nullptr;  // levels' offset * sum of r_g
  const float* factors = nullptr;        // scale * t
  const float* biases = nullptr;         // added to every score
  int64_t group = 0;                     // <= kSketchGroup
};

struct SketchBlocks {
  const uint32_t* codes = nullptr;     // of the first block: [blocks, words, 16]
  const base::Fp16* scales = nullptr;  // [blocks * 16]
  int64_t blocks = 0;
  int64_t words = 0;  // per token
  uint32_t bits = 2;
};

struct SketchKernels {
  // out[g * stride + t] = a_t * (factor_g * <c_t, r_g>) + bias_g for all t < blocks * 16.
  void (*score)(const SketchBlocks& blocks,
                const SketchQuery& query,
                float* out,
                int64_t stride) = nullptr;
  // page_max[p] = the largest of scores [p * page_tokens, (p + 1) * page_tokens).
  // max: of all; sum: of e^(score - max), in a fixed order.
  void (*page_maxima)(const float* scores,
                      int64_t pages,
                      int64_t page_tokens,
                      float* page_max,
                      float* max,
                      float* sum) = nullptr;
  // scores[t] becomes b_t e^(scores[t] - max), t < blocks * 16, and -infinity 0; max of all, sum of
  // the e^(...) alone. All -infinity: max -infinity, sum 0. b: the blocks' scales.
  void (*weigh)(const SketchBlocks& values, float* scores, float* max, float* sum) = nullptr;
  // acc[g * words * 16 + d] = sum over t of weights[g * stride + t] * level of dimension d of token
  // t; 2 bits.
  void (*accumulate)(const SketchBlocks& values,
                     const float* weights,
                     int64_t stride,
                     int64_t group,
                     float* acc) = nullptr;
};

void fill_sketch_kernels(int64_t target, SketchKernels& kernels);

}  // namespace spin::backend::cpu
