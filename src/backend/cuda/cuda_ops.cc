// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/cuda_ops.h"

#include "backend/cuda/cuda_stream.h"
#include "backend/cuda/linear.h"
#include "backend/cuda/tensor_views.h"

namespace spin::backend::cuda {

CudaOps::CudaOps(int ordinal, MemoryResource& fast, MemoryResource& host)
    : ordinal_(ordinal), fast_(fast), host_(host) {}

CudaOps::~CudaOps() = default;

Status CudaOps::initialize() {
  SPIN_ASSIGN_OR_RETURN(linear_, Linear::create(ordinal_, fast_, host_));
  return ok_status();
}

Result<std::unique_ptr<PackedMatrix>> CudaOps::pack_matrix(int64_t rows,
                                                           int64_t cols,
                                                           layout::DType dtype,
                                                           const RowSource& source) {
  return linear_->pack(rows, cols, dtype, source);
}

void CudaOps::enqueue_matmul(TensorRef x,
                             const PackedMatrix& w,
                             const float* bias,
                             bool accumulate,
                             TensorRef out,
                             StreamRef stream_ref) {
  check_f32(x);
  check_f32(out);
  SPIN_CHECK(x.cols == w.cols() && out.cols == w.rows() && x.rows == out.rows);
  CudaStream& stream = cuda_stream(stream_ref);
  if (x.rows == 0 || !stream.begin()) return;
  linear_->enqueue(x, static_cast<const CudaMatrix&>(w), bias, accumulate, out, stream);
}

}  // namespace spin::backend::cuda
