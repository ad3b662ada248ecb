// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/cuda_status.h"

#include <string>

namespace spin::backend::cuda {

Status cuda_status(cudaError_t error, std::string_view doing) {
  if (error == cudaSuccess) return ok_status();
  const StatusCode code =
      error == cudaErrorMemoryAllocation ? StatusCode::kResourceExhausted : StatusCode::kInternal;
  return Status(code, std::string(doing) + ": " + cudaGetErrorName(error));
}

}  // namespace spin::backend::cuda
