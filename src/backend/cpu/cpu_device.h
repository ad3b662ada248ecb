// SPDX-License-Identifier: Apache-2.0
// The CPU backend: complete, and the reference for every other one.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/device.h"

namespace spin::backend::cpu {

struct CpuDeviceOptions {
  // Threads that one operation may use; 0: one per usable core (affinity and control group).
  uint32_t threads = 0;
  // Bound of the fast arena in bytes; 0: none beyond the machine's memory.
  uint64_t fast_memory_bytes = 0;
};

// Errors: kResourceExhausted if threads cannot be started, kInvalidArgument for absurd counts.
Result<std::unique_ptr<Device>> create_cpu_device(const CpuDeviceOptions& options);

// Whether this processor multiplies bf16 in hardware.
bool cpu_has_fast_bf16();

}  // namespace spin::backend::cpu
