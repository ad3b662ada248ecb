// SPDX-License-Identifier: Apache-2.0
// The inner loops of the CPU backend, one set per instruction set. A device picks its set once, at
// creation; nothing here is global state. Every kernel gives an output row the same bits whatever
// rows surround it. Thread: pure functions on the memory given.
#pragma once

#include <cstdint>

#include "backend/cpu/cluster_kernels.h"
#include "backend/cpu/cpu_device.h"
#include "backend/cpu/sketch_kernels.h"
#include "layout/dtype.h"
#include "spin/status.h"

namespace spin::backend::cpu {

// Products of row blocks with a slice of a packed panel (packed_matrix.h). A "unit" is what one
// step along k takes: one k for f32 matrices, two neighbours for bf16.
struct MatmulKernel {
  static constexpr int64_t kPrefetchBytes = 128;

  int64_t block_rows = 0;    // rows that a block holds at most
  int64_t a_unit_bytes = 0;  // bytes of one row's unit in a packed block

  // Packs x [rows <= block_rows, k] (row stride x_stride floats) as [units][rows]; an odd k of a
  // bf16 matrix gets a zero behind it.
  void (*pack_block)(const float* x, int64_t x_stride, int64_t rows, int64_t k, void* a) = nullptr;

  // c[r, j] = (add ? c[r, j] : 0) + sum over units of a[., r] * b[., j], units in ascending order.
  // a: [units][rows]; b: [units][b_width], the first `cols` (16, 32, 48, 64) of each; c: row
  // stride c_stride floats. `prefetch`: null, or where to fetch kPrefetchBytes per unit ahead.
  void (*multiply)(const void* a,
                   int64_t rows,
                   const void* b,
                   int64_t b_width,
                   int64_t cols,
                   int64_t units,
                   bool add,
                   float* c,
                   int64_t c_stride,
                   const char* prefetch) = nullptr;
};

// Attention of `tokens` query tokens of one group of heads over a range of one KV head's keys.
struct AttentionTask {
  const float* q = nullptr;  // [tokens, group, head_dim], token stride q_stride floats
  int64_t q_stride = 0;
  int64_t tokens = 0;
  int64_t group = 0;
  int64_t head_dim = 0;
  float scale = 1.0f;
  int64_t first_token_sees = 0;  // keys that the first token attends to; each later one sees 1 more

  // Where keys lie: the addresses of those from first_split on, in order, or (null) pages of a
  // pool.
  const char* const* rows = nullptr;
  const char* pool = nullptr;       // pages
  const uint32_t* slots = nullptr;  // of this KV head: [page]
  int64_t page_tokens = 0;
  uint64_t page_bytes = 0;
  uint64_t plane_bytes = 0;
  uint64_t row_bytes = 0;
  layout::DType dtype = layout::DType::kF32;

  int64_t first_split = 0;  // range of splits of kSplitTokens keys
  int64_t last_split = 0;   // exclusive
};

// Keys are taken in blocks of kBlockKeys; partial softmaxes are closed every kSplitTokens keys and
// merged in ascending order. Both are part of the numerics: they fix the order of every sum, so
// neither chunking, batch nor thread count changes a bit.
inline constexpr int64_t kBlockKeys = 64;
inline constexpr int64_t kSplitTokens = 512;

// Softmax state of tokens * group rows. sums: [rows, padded_dim]; max in base 2.
struct AttentionState {
  float* sums = nullptr;
  float* max = nullptr;    // [rows]
  float* total = nullptr;  // [rows]
};

// Columns of `sums`: head_dim rounded up to what kernels handle at once.
constexpr int64_t attention_padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
constexpr int64_t attention_state_floats(int64_t rows, int64_t head_dim) {
  return rows * (attention_padded_dim(head_dim) + 2);
}
// Carves a state out of attention_state_floats() floats.
inline AttentionState attention_state_at(float* memory, int64_t rows, int64_t head_dim) {
  float* max = memory + rows * attention_padded_dim(head_dim);
  return {memory, max, max + rows};
}
// Scratch of one task: scaled queries, a second state, one block of keys, values and scores.
constexpr int64_t attention_scratch_floats(int64_t rows, int64_t head_dim) {
  return rows * head_dim + attention_state_floats(rows, head_dim) +
         kBlockKeys * (head_dim + attention_padded_dim(head_dim)) + 8 * kBlockKeys;
}

// Scores of a group's query heads against vectors in a row.
struct ScoreTask {
  const float* q = nullptr;  // [group, score_padded_dim(width)], scaled, zeros behind each row
  int64_t group = 0;
  int64_t width = 0;            // elements of a vector
  const char* keys = nullptr;   // [count, width]; boxes: the smallest elements
  const char* upper = nullptr;  // boxes: the largest
  layout::DType dtype = layout::DType::kF32;
  const uint32_t* ids = nullptr;  // vector j is number ids[j]; null: number j
  int64_t count = 0;
  float* out = nullptr;  // [group, out_stride]
  int64_t out_stride = 0;
};
constexpr int64_t score_padded_dim(int64_t width) { return (width + 15) / 16 * 16; }

// Keys of one partition of one KV head: `runs` runs of run_tokens rows, row_bytes apart.
struct PoolTask {
  const char* const* runs = nullptr;
  int64_t run_count = 0;
  int64_t run_tokens = 0;
  uint64_t row_bytes = 0;
  int64_t head_dim = 0;
  layout::DType dtype = layout::DType::kF32;
};

struct KernelSet {
  const char* name = "";
  bool has_fast_bf16 = false;  // bf16 products are faster than f32
  MatmulKernel matmul_f32;
  MatmulKernel matmul_bf16;

  // to[c] = in[c] / sqrt(mean(in^2) + epsilon) * weight[c], c < n. to may be in.
  void (*rms_norm)(const float* in, const float* weight, int64_t n, float epsilon, float* to) =
      nullptr;
  // Fills cos and sin [half] of position * inv_freq, both times factor.
  void (*rope_table)(uint32_t position,
                     const float* inv_freq,
                     int64_t half,
                     float factor,
                     float* cos,
                     float* sin) = nullptr;
  // Rotates one head [2 * half] in place.
  void (*rope_head)(float* head, const float* cos, const float* sin, int64_t half) = nullptr;
  // to[c] = silu(gate[c]) * up[c].
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* to) = nullptr;

  // Leaves the state of the task's whole range of splits in `state`; rows that see none of it get
  // total 0. scratch: attention_scratch_floats(). Alignment of all: 64 bytes.
  void (*attend)(const AttentionTask& task, AttentionState state, float* scratch) = nullptr;
  // Merges the state of later splits into `into`.
  void (*merge_states)(AttentionState into,
                       AttentionState later,
                       int64_t rows,
                       int64_t head_dim) = nullptr;
  // out[row] = sums / total. out: [tokens, group, head_dim] with token stride.
  void (*finish)(AttentionState state,
                 int64_t tokens,
                 int64_t group,
                 int64_t head_dim,
                 float* out,
                 int64_t out_stride) = nullptr;

  // Sparse selection (backend/sparse_ops.h). s = q . key.
  void (*score_keys)(const ScoreTask& task) = nullptr;
  // s = sum over d of max(q_d lower_d, q_d upper_d).
  void (*score_boxes)(const ScoreTask& task) = nullptr;
  // The largest of scores [n] and the sum of e^(score - max); -infinity and 0 if all are -infinity.
  void (*softmax_part)(const float* scores, int64_t n, float* max, float* sum) = nullptr;
  // to[j] = max over g of (s[g, j] - lse[g]), or the logarithm of the sum of e^ of these.
  void (*aggregate_scores)(const float* scores,
                           int64_t stride,
                           int64_t group,
                           const float* lse,
                           bool sum,
                           int64_t n,
                           float* to) = nullptr;
  // mean, min, max [head_dim] of a partition's keys; null: not wanted. The sum of the mean is one
  // chain over the tokens.
  void (*pool_keys)(const PoolTask& task, float* mean, float* min, float* max) = nullptr;
  // The least cosine between mean [head_dim] and a key of the partition.
  float (*least_cosine)(const PoolTask& task, const float* mean) = nullptr;
  // sums[i] += weight * values[i].
  void (*add_scaled)(
      const char* values, layout::DType dtype, float weight, int64_t n, float* sums) = nullptr;
  SketchKernels sketch;

  ClusterKernels cluster;
};

// Errors: kUnsupported if this processor lacks `isa`.
Result<KernelSet> select_kernels(CpuIsa isa);

// Parts of the sets; each fills its members for a Highway target that the processor supports.
void fill_elementwise_kernels(int64_t target, KernelSet& set);
void fill_matmul_kernels(int64_t target, KernelSet& set);
void fill_attention_kernels(int64_t target, KernelSet& set);
void fill_select_kernels(int64_t target, KernelSet& set);
// The bf16 product on AVX-512 BF16. Requires: cpu_has_fast_bf16().
void fill_avx512_bf16_kernels(KernelSet& set);

}  // namespace spin::backend::cpu
