// SPDX-License-Identifier: Apache-2.0
// Which of cuBLASLt's algorithms multiplies by a matrix of some shape, for every number of rows m,
// so that a row of the product depends on that row alone (backend/ops.h).
//
// cuBLASLt left to itself breaks that: it cuts k into parts that are summed apart (split-K,
// stream-K), as many as fill the GPU, and for other m it takes kernels of other instructions, which
// add in another order. One algorithm for all m would not: its tiles do the same whatever the
// others do. But a tile that is right for a prompt is several times too slow for a decode step. So:
//
//   - only algorithms that need no reduction and no workspace but a counter of tiles are
//   considered:
//     each sum over k is formed by one thread block;
//   - per (n, k, type) one of them is the reference, the fastest for many rows if possible;
//   - for each range of m the plan takes the fastest whose results on random rows are the
//     reference's bit for bit, at both ends of the range. Kernels built from one matrix instruction
//     walk k in the same steps, so that tiles of many sizes agree; the others are passed over. The
//     reference itself is the last choice of every range.
//
// The trials run once per shape, when its first matrix is packed: some hundred small products. They
// cost memory for a moment: (kTrialRows + at most 511) rows of k, and three results.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>

#include <cuda_runtime_api.h>

#include "backend/cuda/cublas_lt.h"
#include "backend/device.h"
#include "base/mutex.h"
#include "spin/status.h"

namespace spin::backend::cuda {

// Ranges of m: each goes from the last one's end + 1 to its own end. Within one the fastest tile
// changes little.
inline constexpr std::array<int64_t, 9> kRangeEnds = {8, 16, 32, 64, 128, 256, 512, 1024, 4096};

// More rows are multiplied in turns of this many, which costs nothing: a turn of them fills the
// GPU, and their bf16 copy is still in its L2 cache when it is read.
inline constexpr int64_t kMostGemmRows = kRangeEnds.back();

// Immutable.
struct MatmulPlan {
  GemmShape shape;
  std::array<cublasLtMatmulAlgo_t, kRangeEnds.size()> algorithms;  // by range

  // Requires: 1 <= m <= kMostGemmRows.
  const cublasLtMatmulAlgo_t& algorithm(int64_t m) const;
};

// Makes plans and keeps them. Thread: thread-safe; trials of one at a time.
class MatmulPlanner {
 public:
  // Lifetime: all outlive it. `stream` runs the trials.
  MatmulPlanner(const CublasLt& lt, MemoryResource& fast, MemoryResource& host, cudaStream_t stream)
      : lt_(lt), fast_(fast), host_(host), stream_(stream) {}

  // The plan of a shape, which lives as long as this object; blocks while it is made.
  // Errors: kUnsupported (no algorithms agree), kResourceExhausted, kInternal.
  Result<const MatmulPlan*> plan_for(const GemmShape& shape);

 private:
  Result<std::unique_ptr<const MatmulPlan>> make_plan(const GemmShape& shape);

  const CublasLt& lt_;
  MemoryResource& fast_;
  MemoryResource& host_;
  const cudaStream_t stream_;
  base::Mutex mutex_;
  std::map<GemmShape, std::unique_ptr<const MatmulPlan>> plans_ SPIN_GUARDED_BY(mutex_);
};

}  // namespace spin::backend::cuda
