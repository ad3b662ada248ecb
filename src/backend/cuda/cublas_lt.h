// SPDX-License-Identifier: Apache-2.0
// cuBLASLt for the one product that Ops has, with the algorithm named by the caller:
//
//   out [m, n] (+)= x [m, k] * w [n, k]^T, row-major, x and w f32 or both bf16, sums and out f32.
//
// f32 products are float products (no TF32). Only algorithms that form each sum in one piece,
// within one thread block, are offered: no reduction, no workspace but a counter. Thread:
// thread-safe. Requires: the GPU is the calling thread's.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <vector>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "layout/dtype.h"
#include "spin/status.h"

namespace spin::backend::cuda {

// What algorithms count their tiles in when there are more than two waves of them. Partial sums do
// not fit.
inline constexpr size_t kGemmWorkspaceBytes = 256;

struct GemmShape {
  int64_t n = 0;
  int64_t k = 0;  // a row of w; its bytes are a multiple of kVectorBytes
  layout::DType dtype = layout::DType::kF32;

  friend auto operator<=>(const GemmShape&, const GemmShape&) = default;
};

// Pointers and strides in bytes are multiples of kVectorBytes; strides are in elements.
struct GemmOperands {
  const void* w = nullptr;  // [n, k], dense
  const void* x = nullptr;  // [m, k]
  int64_t x_stride = 0;
  float* out = nullptr;  // [m, n]; not read unless accumulate
  int64_t out_stride = 0;
  int64_t m = 0;
  bool accumulate = false;
  void* workspace = nullptr;  // kGemmWorkspaceBytes of fast memory
};

class CublasLt {
 public:
  // Errors: kInternal, kResourceExhausted.
  static Result<std::unique_ptr<CublasLt>> create();
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // Algorithms for m rows, the one that should be fastest first; may be empty.
  std::vector<cublasLtMatmulAlgo_t> candidates(const GemmShape& shape, int64_t m) const;
  // Whether `algorithm` takes m rows, with no more workspace than that.
  bool supports(const GemmShape& shape, int64_t m, const cublasLtMatmulAlgo_t& algorithm) const;
  // Enqueues. Errors: kInternal.
  Status multiply(const GemmShape& shape,
                  const GemmOperands& operands,
                  const cublasLtMatmulAlgo_t& algorithm,
                  cudaStream_t stream) const;

 private:
  CublasLt() = default;

  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t operation_ = nullptr;
};

}  // namespace spin::backend::cuda
