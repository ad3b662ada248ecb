// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "tests/backend/attention_conformance.h"
#include "tests/backend/ops_conformance.h"

namespace spin::testing {
namespace {

OpsBackend cpu_backend(const char* name, uint32_t threads) {
  backend::cpu::CpuDeviceOptions options;
  options.threads = threads;
  return {name, [options] { return backend::cpu::create_cpu_device(options); }};
}

INSTANTIATE_TEST_SUITE_P(Cpu,
                         OpsConformance,
                         ::testing::Values(cpu_backend("best_1_thread", 1),
                                           cpu_backend("best_3_threads", 3)),
                         backend_name);

INSTANTIATE_TEST_SUITE_P(Cpu,
                         AttentionConformance,
                         ::testing::Values(cpu_backend("best_1_thread", 1),
                                           cpu_backend("best_3_threads", 3)),
                         backend_name);

}  // namespace
}  // namespace spin::testing
