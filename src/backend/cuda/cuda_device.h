// SPDX-License-Identifier: Apache-2.0
// One NVIDIA GPU (compute capability 8.0 and later). Kernels match the CPU backend in
// tests/backend; what the host queues is launched in order on the caller's stream.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/device.h"

namespace spin::backend::cuda {

struct CudaDeviceOptions {
  int ordinal = 0;
  // Bound of the fast memory that Spin takes, in bytes; 0: what the GPU has.
  uint64_t fast_memory_bytes = 0;
};

// Errors: kUnsupported (no such GPU, no driver, too old a GPU), kResourceExhausted, kInternal.
Result<std::unique_ptr<Device>> create_cuda_device(const CudaDeviceOptions& options);

}  // namespace spin::backend::cuda
