// SPDX-License-Identifier: Apache-2.0
// The CPU backend as parameter of the conformance suites. Tests only.
#pragma once

#include <vector>

#include "backend/cpu/cpu_device.h"
#include "tests/backend/ops_conformance.h"

namespace spin::testing {

inline OpsBackend cpu_backend(const char* name, backend::cpu::CpuIsa isa, uint32_t threads) {
  backend::cpu::CpuDeviceOptions options;
  options.isa = isa;
  options.threads = threads;
  return {name, [options] { return backend::cpu::create_cpu_device(options); }};
}

// For operations without kernels of an instruction set's own.
inline std::vector<OpsBackend> cpu_thread_counts() {
  using backend::cpu::CpuIsa;
  return {cpu_backend("best_1_thread", CpuIsa::kBest, 1),
          cpu_backend("best_3_threads", CpuIsa::kBest, 3)};
}

// Every instruction set; those that this processor lacks are skipped.
inline std::vector<OpsBackend> cpu_backends() {
  using backend::cpu::CpuIsa;
  std::vector<OpsBackend> backends = cpu_thread_counts();
  backends.push_back(cpu_backend("portable", CpuIsa::kPortable, 2));
  backends.push_back(cpu_backend("sse4", CpuIsa::kSse4, 2));
  backends.push_back(cpu_backend("avx2", CpuIsa::kAvx2, 2));
  backends.push_back(cpu_backend("avx512", CpuIsa::kAvx512, 2));
  return backends;
}

}  // namespace spin::testing
