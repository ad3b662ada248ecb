// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "tests/backend/kv_ops_conformance.h"
#include "tests/backend/list_attention_conformance.h"

namespace spin::testing {
namespace {

using backend::cpu::CpuIsa;

OpsBackend cpu_backend(const char* name, CpuIsa isa, uint32_t threads) {
  backend::cpu::CpuDeviceOptions options;
  options.isa = isa;
  options.threads = threads;
  return {name, [options] { return backend::cpu::create_cpu_device(options); }};
}

// Every instruction set has its own attention kernels; those that this processor lacks are skipped.
INSTANTIATE_TEST_SUITE_P(Cpu,
                         ListAttentionConformance,
                         ::testing::Values(cpu_backend("best_1_thread", CpuIsa::kBest, 1),
                                           cpu_backend("best_3_threads", CpuIsa::kBest, 3),
                                           cpu_backend("portable", CpuIsa::kPortable, 2),
                                           cpu_backend("sse4", CpuIsa::kSse4, 2),
                                           cpu_backend("avx2", CpuIsa::kAvx2, 2),
                                           cpu_backend("avx512", CpuIsa::kAvx512, 2)),
                         backend_name);

// Pages are moved by the same code everywhere.
INSTANTIATE_TEST_SUITE_P(Cpu,
                         KvOpsConformance,
                         ::testing::Values(cpu_backend("best_1_thread", CpuIsa::kBest, 1),
                                           cpu_backend("best_3_threads", CpuIsa::kBest, 3)),
                         backend_name);

}  // namespace
}  // namespace spin::testing
