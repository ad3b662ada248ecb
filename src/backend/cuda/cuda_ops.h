// SPDX-License-Identifier: Apache-2.0
// Ops on a GPU. Linear layers are cuBLASLt's (linear.cc), attention over pages is
// paged_attention.cu, then rope.cu, kv_append.cu, elementwise.cu. Thread: as Ops.
#pragma once

#include <memory>

#include "backend/ops.h"
#include "spin/status.h"

namespace spin::backend::cuda {

class Linear;  // linear.h

class CudaOps final : public Ops {
 public:
  // Lifetime: the memories outlive it.
  CudaOps(int ordinal, MemoryResource& fast, MemoryResource& host);
  ~CudaOps() override;
  // Errors: kInternal, kResourceExhausted.
  Status initialize();

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
  const int ordinal_;
  MemoryResource& fast_;
  MemoryResource& host_;
  std::unique_ptr<Linear> linear_;
};

}  // namespace spin::backend::cuda
