// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/backend/cpu_backends.h"
#include "tests/backend/kv_ops_conformance.h"
#include "tests/backend/list_attention_conformance.h"

namespace spin::testing {
namespace {

// Every instruction set has its own attention kernels; those that this processor lacks are skipped.
INSTANTIATE_TEST_SUITE_P(Cpu,
                         ListAttentionConformance,
                         ::testing::ValuesIn(cpu_backends()),
                         backend_name);

// Pages are moved by the same code everywhere.
INSTANTIATE_TEST_SUITE_P(Cpu,
                         KvOpsConformance,
                         ::testing::ValuesIn(cpu_thread_counts()),
                         backend_name);

}  // namespace
}  // namespace spin::testing
