// SPDX-License-Identifier: Apache-2.0
// The CPU backend: complete, and the reference for every other one.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/device.h"

namespace spin::backend::cpu {

// Instruction sets that kernels exist for. Results of different sets agree within rounding only.
enum class CpuIsa : uint8_t {
  kBest,        // the last of these that the processor has
  kPortable,    // what every x86-64 processor has
  kSse4,        // SSE4.2 with AES and CLMUL
  kAvx2,        // AVX2 with FMA
  kAvx512,      // AVX-512 F, BW, CD, DQ, VL
  kAvx512Bf16,  // the same with the bf16 dot product
};

struct CpuDeviceOptions {
  // Threads that one operation may use; 0: one per usable core (affinity and control group).
  uint32_t threads = 0;
  // Bound of the fast arena in bytes; 0: none beyond the machine's memory.
  uint64_t fast_memory_bytes = 0;
  // For equal results on different machines, and for tests.
  CpuIsa isa = CpuIsa::kBest;
};

// Errors: kResourceExhausted if threads cannot be started, kInvalidArgument for absurd counts,
// kUnsupported if the processor lacks `isa`.
Result<std::unique_ptr<Device>> create_cpu_device(const CpuDeviceOptions& options);

// Whether this processor multiplies bf16 in hardware.
bool cpu_has_fast_bf16();

}  // namespace spin::backend::cpu
