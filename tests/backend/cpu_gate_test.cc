// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/backend/cpu_backends.h"
#include "tests/backend/gate_conformance.h"

namespace spin::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, GateConformance, ::testing::ValuesIn(cpu_backends()), backend_name);

}  // namespace
}  // namespace spin::testing
