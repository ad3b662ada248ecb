// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "tests/backend/cluster_conformance.h"
#include "tests/backend/cpu_backends.h"

namespace spin::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu,
                         ClusterConformance,
                         ::testing::ValuesIn(cpu_backends()),
                         backend_name);

TEST(CpuClusters, ResultsDoNotDependOnTheNumberOfThreads) {
  const ClusterShape shape{2, 64, 8, layout::DType::kBF16, 8, 1500, 96, 3, 5, 0, 1};
  const Matrix keys = random_matrix(1508, 128, 31);
  const Matrix values = random_matrix(1508, 128, 32);
  ClusterResult first;
  for (const uint32_t threads : {1u, 2u, 5u}) {
    const auto device = backend::cpu::create_cpu_device({.threads = threads});
    ASSERT_TRUE(device.ok()) << device.status().to_string();
    const auto stream = (*device)->create_stream("clusters");
    ASSERT_TRUE(stream.ok()) << stream.status().to_string();
    const ClusterResult found = run_cluster(**device, **stream, shape, keys, values);
    if (threads == 1) first = found;
    EXPECT_TRUE(found == first) << threads << " threads";
  }
}

}  // namespace
}  // namespace spin::testing
