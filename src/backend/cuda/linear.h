// SPDX-License-Identifier: Apache-2.0
// Weight matrices on a GPU and the products with them, through cuBLASLt. Which algorithm, and why a
// row of a product depends on that row alone: matmul_plan.h.
//
// Everything but the sums over k is done outside of cuBLASLt, so that one algorithm serves every
// call with a matrix: rows of x that are to be rounded, or do not lie as its kernels want them
// (16-byte aligned, k filled up with zeros, which add nothing), are copied to scratch; a result
// whose rows are not aligned is formed in scratch; bias is what the product is added to. Decoder
// shapes need none of that but the rounding.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_stream.h"
#include "backend/ops.h"

namespace spin::backend::cuda {

class CublasLt;
class MatmulPlanner;
struct MatmulPlan;

// w [n, k], row-major, rows filled up with zeros to multiples of 16 bytes. Thread: immutable.
class CudaMatrix final : public PackedMatrix {
 public:
  // Lifetime: `plan` outlives it.
  CudaMatrix(int64_t rows,
             int64_t cols,
             layout::DType dtype,
             int64_t stride,
             Buffer buffer,
             const MatmulPlan& plan)
      : rows_(rows),
        cols_(cols),
        dtype_(dtype),
        stride_(stride),
        buffer_(std::move(buffer)),
        plan_(plan) {}

  int64_t rows() const override { return rows_; }
  int64_t cols() const override { return cols_; }
  layout::DType dtype() const override { return dtype_; }
  uint64_t size_bytes() const override { return buffer_.size_bytes(); }

  const void* data() const { return buffer_.data(); }
  // Elements from one row to the next.
  int64_t stride() const { return stride_; }
  const MatmulPlan& plan() const { return plan_; }

 private:
  const int64_t rows_;
  const int64_t cols_;
  const layout::DType dtype_;
  const int64_t stride_;
  const Buffer buffer_;
  const MatmulPlan& plan_;
};

// Thread: thread-safe, as far as streams are.
class Linear {
 public:
  // Lifetime: the memories outlive it, it outlives its matrices. Errors: kInternal,
  // kResourceExhausted.
  static Result<std::unique_ptr<Linear>> create(int ordinal,
                                                MemoryResource& fast,
                                                MemoryResource& host);
  ~Linear();
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  // As Ops::pack_matrix.
  Result<std::unique_ptr<PackedMatrix>> pack(int64_t rows,
                                             int64_t cols,
                                             layout::DType dtype,
                                             const RowSource& source);

  // As Ops::enqueue_matmul. Requires: stream.begin().
  void enqueue(TensorRef x,
               const CudaMatrix& w,
               const float* bias,
               bool accumulate,
               TensorRef out,
               CudaStream& stream);

 private:
  Linear(int ordinal, MemoryResource& fast, MemoryResource& host);

  // Fills the buffer of a matrix from its source; blocks until it is filled.
  Status fill(int64_t rows,
              int64_t cols,
              layout::DType dtype,
              int64_t stride,
              const RowSource& source,
              const Buffer& buffer);

  const int ordinal_;
  MemoryResource& fast_;
  MemoryResource& host_;
  cudaStream_t stream_ = nullptr;  // of packing
  std::unique_ptr<CublasLt> lt_;
  std::unique_ptr<MatmulPlanner> planner_;
};

}  // namespace spin::backend::cuda
