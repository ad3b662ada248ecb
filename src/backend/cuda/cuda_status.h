// SPDX-License-Identifier: Apache-2.0
// CUDA's error codes as Status. Thread: thread-safe.
#pragma once

#include <string_view>

#include <cuda_runtime_api.h>

#include "spin/status.h"

namespace spin::backend::cuda {

// Ok for cudaSuccess; kResourceExhausted where memory ran out, otherwise kInternal: "DOING: NAME".
Status cuda_status(cudaError_t error, std::string_view doing);

}  // namespace spin::backend::cuda
