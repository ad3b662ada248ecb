// SPDX-License-Identifier: Apache-2.0
// Ops of the CPU backend: checks shapes, cuts each operation into pieces for the thread pool and
// calls the kernels. Thread: thread-safe; the work runs on the stream's thread and the pool.
#pragma once

#include <memory>
#include <span>

#include "backend/cpu/kernels.h"
#include "backend/cpu/workspace.h"
#include "backend/ops.h"
#include "base/thread_pool.h"

namespace spin::backend::cpu {

class CpuOps final : public Ops {
 public:
  // Packed weights go to `fast_memory`, scratch to `host_memory`.
  // Lifetime: pool and memories outlive this object and everything enqueued.
  CpuOps(const KernelSet& kernels,
         base::ThreadPool& pool,
         MemoryResource& fast_memory,
         MemoryResource& host_memory)
      : kernels_(kernels), pool_(pool), fast_memory_(fast_memory), workspace_(host_memory) {}

  Result<std::unique_ptr<PackedMatrix>> pack_matrix(int64_t rows,
                                                    int64_t cols,
                                                    layout::DType dtype,
                                                    const RowSource& source) override;
  void enqueue_embedding(const PackedMatrix& table,
                         const uint32_t* ids,
                         TensorRef out,
                         StreamRef stream) override;
  void enqueue_matmul(TensorRef x,
                      const PackedMatrix& w,
                      const float* bias,
                      bool accumulate,
                      TensorRef out,
                      StreamRef stream) override;
  void enqueue_rms_norm(TensorRef x,
                        const float* weight,
                        int64_t weight_size,
                        float epsilon,
                        TensorRef out,
                        StreamRef stream) override;
  void enqueue_rope(TensorRef x,
                    int64_t head_dim,
                    const uint32_t* positions,
                    const RopeParams& rope,
                    StreamRef stream) override;
  void enqueue_silu_mul(TensorRef gate_up, TensorRef out, StreamRef stream) override;
  void enqueue_gather_rows(TensorRef x,
                           const uint32_t* row_ids,
                           TensorRef out,
                           StreamRef stream) override;
  void enqueue_kv_append(TensorRef k,
                         TensorRef v,
                         std::span<const layout::SequenceSlice> slices,
                         const KvPoolRef& pool,
                         StreamRef stream) override;
  void enqueue_paged_attention(TensorRef q,
                               std::span<const layout::SequenceSlice> slices,
                               const KvPoolRef& pool,
                               float scale,
                               TensorRef out,
                               StreamRef stream) override;

 private:
  // Calls body(row) for all rows; few elements stay on the stream's thread.
  template <typename Body>
  void for_rows(const TensorRef& tensor, const Body& body);

  const KernelSet kernels_;
  base::ThreadPool& pool_;
  MemoryResource& fast_memory_;
  WorkspacePool workspace_;
};

}  // namespace spin::backend::cpu
