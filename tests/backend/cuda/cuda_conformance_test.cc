// SPDX-License-Identifier: Apache-2.0
// The CUDA backend does what every backend must do (tests/backend/*_conformance.h).
#include <gtest/gtest.h>

#include "backend/cuda/cuda_device.h"
#include "tests/backend/cluster_conformance.h"
#include "tests/backend/gate_conformance.h"
#include "tests/backend/kv_ops_conformance.h"
#include "tests/backend/list_attention_conformance.h"
#include "tests/backend/lowrank_conformance.h"
#include "tests/backend/ops_conformance.h"
#include "tests/backend/sketch_conformance.h"
#include "tests/backend/sparse_ops_conformance.h"

namespace spin::testing {
namespace {

const auto kGpu =
    ::testing::Values(OpsBackend{"gpu", [] { return backend::cuda::create_cuda_device({}); }});

INSTANTIATE_TEST_SUITE_P(Cuda, OpsConformance, kGpu, backend_name);
INSTANTIATE_TEST_SUITE_P(Cuda, AttentionConformance, kGpu, backend_name);
INSTANTIATE_TEST_SUITE_P(Cuda, KvOpsConformance, kGpu, backend_name);
INSTANTIATE_TEST_SUITE_P(Cuda, ListAttentionConformance, kGpu, backend_name);
INSTANTIATE_TEST_SUITE_P(Cuda, SparseOpsConformance, kGpu, backend_name);
INSTANTIATE_TEST_SUITE_P(Cuda, ScoreConformance, kGpu, backend_name);
INSTANTIATE_TEST_SUITE_P(Cuda, RankConformance, kGpu, backend_name);
INSTANTIATE_TEST_SUITE_P(Cuda, ListConformance, kGpu, backend_name);
INSTANTIATE_TEST_SUITE_P(Cuda, SketchConformance, kGpu, backend_name);
INSTANTIATE_TEST_SUITE_P(Cuda, GateConformance, kGpu, backend_name);
INSTANTIATE_TEST_SUITE_P(Cuda, LowRankConformance, kGpu, backend_name);
INSTANTIATE_TEST_SUITE_P(Cuda, ClusterConformance, kGpu, backend_name);

}  // namespace
}  // namespace spin::testing
