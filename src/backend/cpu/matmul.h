// SPDX-License-Identifier: Apache-2.0
// Cuts a matrix product into pieces for the thread pool and the register kernels. Thread: runs on a
// stream's thread and the pool's workers.
#pragma once

#include "backend/cpu/kernels.h"
#include "backend/cpu/packed_matrix.h"
#include "backend/cpu/workspace.h"
#include "backend/tensor.h"
#include "base/thread_pool.h"
#include "spin/status.h"

namespace spin::backend::cpu {

struct MatmulCall {
  TensorRef x;    // f32 [m, k]
  TensorRef out;  // f32 [m, n]
  const CpuPackedMatrix* w = nullptr;
  const float* bias = nullptr;  // [n] or null
  bool accumulate = false;
};

// Errors: kResourceExhausted if there is no scratch memory.
Status run_matmul(const MatmulCall& call,
                  const MatmulKernel& kernel,
                  base::ThreadPool& pool,
                  WorkspacePool& workspace);

}  // namespace spin::backend::cpu
