// SPDX-License-Identifier: Apache-2.0
// Blocked online-softmax attention over KV pages, for every Highway target.
//
// One routine serves prefill and decode: rows (query token x head of the group) x blocks of 64
// keys. A block's keys are transposed and its values widened once per task, then every six rows
// take
//   scores = q K^T (one chain over the head), running softmax, sums += p V (one chain over the
//   keys).
// A row's sequence of roundings depends on its own query and keys alone, so a token gets the same
// bits in a prefill tile, in a decode step and in any batch.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/highway_targets.h"
#include "backend/cpu/kernels.h"
#include "base/bf16.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/attention_kernels.cc"
#include "hwy/foreach_target.h"  // must come before highway.h and -inl.h files
//
#include "backend/cpu/matmul_tile-inl.h"
#include "backend/cpu/simd_math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spin::backend::cpu {
namespace HWY_NAMESPACE {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int64_t kKeyStep = 16;  // columns that a product takes at least

// Where a task's scratch lies.
struct Scratch {
  float* q;       // [rows, head_dim], scaled
  float* keys;    // [head_dim, kBlockKeys]
  float* values;  // [kBlockKeys, padded_dim]
  float* scores;  // [kBlockRows, kBlockKeys]
  AttentionState part;
};

Scratch scratch_at(float* memory, int64_t rows, int64_t head_dim) {
  Scratch s;
  s.keys = memory;
  s.values = s.keys + kBlockKeys * head_dim;
  s.scores = s.values + kBlockKeys * attention_padded_dim(head_dim);
  s.q = s.scores + 8 * kBlockKeys;
  s.part = attention_state_at(s.q + rows * head_dim, rows, head_dim);
  return s;
}

#if HWY_TARGET != HWY_SCALAR
// Lanes of a vector as 128-bit blocks: block i from rows[stride * i] at `offset` bytes.
HWY_INLINE hn::Vec<U32> load_blocks(const char* const* rows, int64_t offset) {
  const U32 d;
  const auto block = [&](int i) HWY_ATTR {
    return hn::LoadDup128(d, reinterpret_cast<const uint32_t*>(rows[4 * i] + offset));
  };
  if constexpr (kLanes == 4) {
    return block(0);
  } else if constexpr (kLanes == 8) {
    return hn::IfThenElse(hn::FirstN(d, 4), block(0), block(1));
  } else {
    const auto low = hn::IfThenElse(hn::FirstN(d, 4), block(0), block(1));
    const auto high = hn::IfThenElse(hn::FirstN(d, 12), block(2), block(3));
    return hn::IfThenElse(hn::FirstN(d, 8), low, high);
  }
}

// Transposes 16 bytes (four 32-bit words) of each of kLanes rows: out[w] lane i = word w of row i.
HWY_INLINE void transpose_words(const char* const* rows, int64_t offset, hn::Vec<U32>* out) {
  const U32 d;
  const hn::RepartitionToWide<U32> d64;
  const auto r0 = load_blocks(rows + 0, offset);
  const auto r1 = load_blocks(rows + 1, offset);
  const auto r2 = load_blocks(rows + 2, offset);
  const auto r3 = load_blocks(rows + 3, offset);
  const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
  const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
  const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
  const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
  out[0] = hn::BitCast(d, hn::InterleaveLower(d64, low01, low23));
  out[1] = hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23));
  out[2] = hn::BitCast(d, hn::InterleaveLower(d64, high01, high23));
  out[3] = hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23));
}
#endif

// keys[i, j] = element i of row j, j < count, a multiple of kKeyStep. head_dim is a multiple of 8.
HWY_INLINE void load_keys(
    const char* const* rows, layout::DType dtype, int64_t head_dim, int64_t count, float* keys) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < head_dim; ++i) {
      keys[i * kBlockKeys + j] =
          dtype == layout::DType::kF32
              ? reinterpret_cast<const float*>(rows[j])[i]
              : base::to_float(reinterpret_cast<const base::Bf16*>(rows[j])[i]);
    }
  }
#else
  const F32 d;
  hn::Vec<U32> words[4];
  for (int64_t j = 0; j < count; j += kLanes) {
    if (dtype == layout::DType::kF32) {
      for (int64_t i = 0; i < head_dim; i += 4) {
        transpose_words(rows + j, i * 4, words);
        HWY_UNROLL(4)
        for (int w = 0; w < 4; ++w) {
          hn::StoreU(hn::BitCast(d, words[w]), d, keys + (i + w) * kBlockKeys + j);
        }
      }
    } else {
      for (int64_t i = 0; i < head_dim; i += 8) {
        transpose_words(rows + j, i * 2, words);
        HWY_UNROLL(4)
        for (int w = 0; w < 4; ++w) {
          hn::StoreU(even_bf16(d, words[w]), d, keys + (i + 2 * w) * kBlockKeys + j);
          hn::StoreU(odd_bf16(d, words[w]), d, keys + (i + 2 * w + 1) * kBlockKeys + j);
        }
      }
    }
  }
#endif
}

// values[j, i] = element i of row j, j < count; columns past head_dim stay as they are.
HWY_INLINE void load_values(
    const char* const* rows, layout::DType dtype, int64_t head_dim, int64_t count, float* values) {
  const int64_t padded = attention_padded_dim(head_dim);
  for (int64_t j = 0; j < count; ++j) {
    float* to = values + j * padded;
    if (dtype == layout::DType::kF32) {
      std::memcpy(to, rows[j], static_cast<size_t>(head_dim) * sizeof(float));
      continue;
    }
    const auto* from = reinterpret_cast<const base::Bf16*>(rows[j]);
    int64_t i = 0;
    const F32 d;
    const hn::Rebind<uint16_t, F32> d16;
    for (; i + kLanes <= head_dim; i += kLanes) {
      const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from + i));
      hn::StoreU(even_bf16(d, hn::PromoteTo(U32(), bits)), d, to + i);
    }
    for (; i < head_dim; ++i) to[i] = base::to_float(from[i]);
  }
}

// One row's step of the running softmax over a block: turns scores [kBlockKeys] (base 2), of which
// the first `visible` count, into weights, and rescales the row's state. Requires: visible > 0.
HWY_INLINE void softmax_step(float* HWY_RESTRICT scores,
                             int64_t visible,
                             int64_t padded_dim,
                             float* HWY_RESTRICT sums,
                             float& max,
                             float& total) {
  const F32 d;
  for (int64_t j = visible; j < kBlockKeys; ++j) scores[j] = kMinusInfinity;
  VF32 largest = hn::LoadU(d, scores);
  for (int64_t j = kLanes; j < kBlockKeys; j += kLanes) {
    largest = hn::Max(largest, hn::LoadU(d, scores + j));
  }
  const float new_max = std::max(max, hn::GetLane(hn::MaxOfLanes(d, largest)));
  const VF32 shift = hn::Set(d, new_max);
  // Masked scores give 2^-126 here, too little to change a sum that holds a 1 in this block or is
  // multiplied by one that does; their weights are cleared below.
  VF32 sum = hn::Zero(d);
  for (int64_t j = 0; j < kBlockKeys; j += kLanes) {
    const VF32 p = exp2_nonpositive(d, hn::Sub(hn::LoadU(d, scores + j), shift));
    hn::StoreU(p, d, scores + j);
    sum = hn::Add(sum, p);
  }
  for (int64_t j = visible; j < kBlockKeys; ++j) scores[j] = 0.0f;
  const float block_total = hn::GetLane(hn::SumOfLanes(d, sum));
  if (new_max == max) {  // a factor of 1: the same bits without the work
    total += block_total;
    return;
  }
  const VF32 keep = exp2_nonpositive(d, hn::Set(d, max - new_max));
  total = total * hn::GetLane(keep) + block_total;
  for (int64_t i = 0; i < padded_dim; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, sums + i), keep), d, sums + i);
  }
  max = new_max;
}

void clear_state(AttentionState state, int64_t rows, int64_t head_dim) {
  std::fill_n(state.sums, rows * attention_padded_dim(head_dim), 0.0f);
  std::fill_n(state.max, rows, kMinusInfinity);
  std::fill_n(state.total, rows, 0.0f);
}

// Addresses of keys [first_key, first_key + count); past them the last one again: its scores are
// masked, but the row must be readable.
void find_rows(const AttentionTask& task, int64_t first_key, int64_t count, const char** rows) {
  int64_t j = 0;
  if (task.rows != nullptr) {
    const char* const* from = task.rows + (first_key - task.first_split * kSplitTokens);
    for (; j < count; ++j) rows[j] = from[j];
    for (; j < kBlockKeys; ++j) rows[j] = rows[count - 1];
    return;
  }
  int64_t page = first_key / task.page_tokens;
  int64_t in_page = first_key % task.page_tokens;
  while (j < count) {
    const uint64_t slot = task.slots[page];
    const char* row =
        task.pool + slot * task.page_bytes + static_cast<uint64_t>(in_page) * task.row_bytes;
    const int64_t end = std::min(count, j + task.page_tokens - in_page);
    for (; j < end; ++j, row += task.row_bytes) rows[j] = row;
    ++page;
    in_page = 0;
  }
  for (; j < kBlockKeys; ++j) rows[j] = rows[count - 1];
}

// Adds keys [first_key, first_key + count) to the state of every row that sees them.
void attend_block(const AttentionTask& task,
                  int64_t first_key,
                  int64_t count,
                  const Scratch& s,
                  AttentionState state) {
  const char* rows_k[kBlockKeys];
  const char* rows_v[kBlockKeys];
  find_rows(task, first_key, count, rows_k);
  for (int64_t j = 0; j < kBlockKeys; ++j) rows_v[j] = rows_k[j] + task.plane_bytes;
  // The last block is seldom full; scores behind its keys are masked.
  const int64_t width = (count + kKeyStep - 1) / kKeyStep * kKeyStep;
  load_keys(rows_k, task.dtype, task.head_dim, width, s.keys);
  load_values(rows_v, task.dtype, task.head_dim, count, s.values);
  const int64_t padded = attention_padded_dim(task.head_dim);
  const int64_t rows = task.tokens * task.group;
  // The first row that sees the block's first key.
  const int64_t skipped = std::max<int64_t>(0, first_key + 1 - task.first_token_sees) * task.group;
  for (int64_t r = skipped; r < rows; r += kBlockRows) {
    const int64_t part = std::min<int64_t>(kBlockRows, rows - r);
    float_block<Rows::kStrided>(s.q + r * task.head_dim, task.head_dim, part, s.keys, kBlockKeys,
                                width, task.head_dim, false, s.scores, kBlockKeys);
    int64_t most = 0;
    for (int64_t i = 0; i < part; ++i) {
      const int64_t sees = task.first_token_sees + (r + i) / task.group - first_key;
      const int64_t visible = std::min(sees, count);
      most = std::max(most, visible);
      softmax_step(s.scores + i * kBlockKeys, visible, padded, state.sums + (r + i) * padded,
                   state.max[r + i], state.total[r + i]);
    }
    float_block<Rows::kStrided>(s.scores, kBlockKeys, part, s.values, padded, padded, most, true,
                                state.sums + r * padded, padded);
  }
}

void merge_states(AttentionState into, AttentionState later, int64_t rows, int64_t head_dim) {
  const F32 d;
  const int64_t padded = attention_padded_dim(head_dim);
  for (int64_t r = 0; r < rows; ++r) {
    if (later.total[r] == 0.0f) continue;  // the row sees nothing there
    const float max = std::max(into.max[r], later.max[r]);
    const VF32 keep = exp2_nonpositive(d, hn::Set(d, into.max[r] - max));
    const VF32 take = exp2_nonpositive(d, hn::Set(d, later.max[r] - max));
    for (int64_t i = 0; i < padded; i += kLanes) {
      const VF32 kept = hn::Mul(hn::LoadU(d, into.sums + r * padded + i), keep);
      const VF32 added = hn::LoadU(d, later.sums + r * padded + i);
      hn::StoreU(hn::MulAdd(added, take, kept), d, into.sums + r * padded + i);
    }
    into.total[r] = into.total[r] * hn::GetLane(keep) + later.total[r] * hn::GetLane(take);
    into.max[r] = max;
  }
}

void attend(const AttentionTask& task, AttentionState state, float* scratch) {
  const int64_t rows = task.tokens * task.group;
  const Scratch s = scratch_at(scratch, rows, task.head_dim);
  // Weights are 2^(score - max): one multiplication here instead of one per score.
  const float scale = task.scale * 1.44269504f;
  for (int64_t t = 0; t < task.tokens; ++t) {
    const float* from = task.q + t * task.q_stride;
    float* to = s.q + t * task.group * task.head_dim;
    for (int64_t i = 0; i < task.group * task.head_dim; ++i) to[i] = from[i] * scale;
  }
  // Columns behind the head are read, and their sums dropped.
  if (attention_padded_dim(task.head_dim) != task.head_dim) {
    std::fill_n(s.values, kBlockKeys * attention_padded_dim(task.head_dim), 0.0f);
  }
  clear_state(state, rows, task.head_dim);
  const int64_t end_of_keys = task.first_token_sees + task.tokens - 1;
  for (int64_t split = task.first_split; split < task.last_split; ++split) {
    const int64_t begin = split * kSplitTokens;
    const int64_t end = std::min(begin + kSplitTokens, end_of_keys);
    const bool first = split == task.first_split;
    const AttentionState target = first ? state : s.part;
    if (!first) clear_state(target, rows, task.head_dim);
    for (int64_t key = begin; key < end; key += kBlockKeys) {
      attend_block(task, key, std::min(kBlockKeys, end - key), s, target);
    }
    if (!first) merge_states(state, s.part, rows, task.head_dim);
  }
}

void finish(AttentionState state,
            int64_t tokens,
            int64_t group,
            int64_t head_dim,
            float* out,
            int64_t out_stride) {
  const int64_t padded = attention_padded_dim(head_dim);
  for (int64_t r = 0; r < tokens * group; ++r) {
    float* to = out + r / group * out_stride + r % group * head_dim;
    const float total = state.total[r];
    for (int64_t i = 0; i < head_dim; ++i) to[i] = state.sums[r * padded + i] / total;
  }
}

void fill_attention(KernelSet& set) {
  set.attend = attend;
  set.merge_states = merge_states;
  set.finish = finish;
}

}  // namespace HWY_NAMESPACE
}  // namespace spin::backend::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spin::backend::cpu {

void fill_attention_kernels(int64_t target, KernelSet& set) {
  SPIN_CALL_FOR_TARGET(target, fill_attention, set);
}

}  // namespace spin::backend::cpu
#endif  // HWY_ONCE
