// SPDX-License-Identifier: Apache-2.0
// `spin plan` against what the store really allocates, and its arithmetic on the shapes of large
// models.
#include <algorithm>
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "kv/page_store.h"
#include "kv/table_bytes.h"
#include "kv/tiered_sequence.h"
#include "layout/kv_geometry.h"
#include "sparse/registry.h"
#include "sparse/sparse_sequence.h"
#include "spin/plan.h"
#include "tests/support/test_data.h"

namespace spin {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kContext = 131072;
constexpr uint32_t kBatch = 32;

std::string shape_path(const std::string& name) {
  return (testing::test_data("shapes") / name).string();
}

PlanQuestion question(const std::string& model, const std::string& sparse) {
  PlanQuestion q;
  q.model = shape_path(model);
  q.context_tokens = kContext;
  q.batch = kBatch;
  q.sparse = sparse;
  return q;
}

uint64_t line_bytes(const Plan& plan, const std::string& name) {
  for (const PlanLine& line : plan.lines) {
    if (line.name == name) return line.bytes;
  }
  ADD_FAILURE() << "no line " << name;
  return 0;
}

struct Shape {
  const char* model;
  uint32_t layers;
  uint32_t kv_heads;
};

class PlanOfShape : public ::testing::TestWithParam<Shape> {};

// Opens one sequence of the context in a store whose pages are small (head_dim 8): the tables
// depend on layers, heads and pages only.
uint64_t measured_table_bytes(const Shape& shape, const Plan& plan, const std::string& sparse) {
  auto device = backend::cpu::create_cpu_device({.threads = 1});
  EXPECT_TRUE(device.ok());
  sparse::AlgorithmContext context;
  context.device = device->get();
  context.shape.geometry = {shape.layers, shape.kv_heads, 8, 8, layout::DType::kBF16};
  context.shape.q_heads = shape.kv_heads;
  const auto spec = sparse::parse_sparse_spec(sparse);
  auto algorithm = sparse::create_algorithm(*spec, context);
  EXPECT_TRUE(algorithm.ok()) << algorithm.status().message();
  const kv::SequenceShape needs = sparse::sequence_shape(**algorithm, context.shape, kContext);

  kv::PageStoreOptions options;
  options.geometry = context.shape.geometry;
  options.extent_pages = kv::extent_pages_for(options.geometry.pages_per_head(kContext));
  const uint64_t heads = uint64_t{shape.layers} * shape.kv_heads;
  const uint64_t dense = uint64_t{needs.dense_layers} * shape.kv_heads;
  options.fast_pages = (heads - dense) * plan.lease_pages + dense * needs.max_page_ids;
  const layout::HostExtentLayout extent{options.extent_pages, options.geometry.page_bytes()};
  const uint64_t extents = needs.max_page_ids / options.extent_pages + 1;
  options.host_bytes = extents * heads * extent.bytes();
  options.poison = false;  // address space only: nothing touches the pages
  auto store = kv::PageStore::create(**device, options);
  EXPECT_TRUE(store.ok()) << store.status().message();
  auto sequence = kv::TieredSequence::open(**store, needs, plan.lease_pages);
  EXPECT_TRUE(sequence.ok()) << sequence.status().message();
  return (*sequence)->table_bytes();
}

TEST_P(PlanOfShape, TablesAreThoseOfTheStore) {
  const Shape& shape = GetParam();
  for (const std::string sparse : {"sketch:budget=128", "shadowkv", "retroinfer"}) {
    const Result<Plan> plan = plan_serving(question(shape.model, sparse));
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_EQ(plan->fast_metadata_bytes, kBatch * measured_table_bytes(shape, *plan, sparse))
        << sparse;
  }
}

TEST_P(PlanOfShape, MetadataFollowsWhatIsResident) {
  const Result<Plan> plan = plan_serving(question(GetParam().model, "sketch:budget=128"));
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_LE(plan->fast_metadata_bytes, plan->kv_buffer_bytes / 100);
  EXPECT_GE(plan->flat_worst_bytes, 49 * plan->fast_metadata_bytes);
  EXPECT_GE(plan->flat_plain_bytes, 30 * plan->fast_metadata_bytes);
}

INSTANTIATE_TEST_SUITE_P(Shapes,
                         PlanOfShape,
                         ::testing::Values(Shape{"qwen3-14b", 40, 8},
                                           Shape{"llama-3.1-70b", 80, 8}),
                         [](const auto& shape) {
                           return shape.param.layers == 40 ? "Qwen3_14B" : "Llama_70B";
                         });

TEST(ServingPlan, AddsUpItsLines) {
  const Result<Plan> plan = plan_serving(question("qwen3-14b", "quest"));
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  uint64_t fast = 0;
  uint64_t host = 0;
  for (const PlanLine& line : plan->lines) (line.tier == "fast" ? fast : host) += line.bytes;
  EXPECT_EQ(plan->fast_bytes, fast);
  EXPECT_EQ(plan->host_bytes, host);
  EXPECT_EQ(plan->kv_buffer_bytes,
            line_bytes(*plan, "mandatory pages") + line_bytes(*plan, "buffering pages"));
  // 163,840 B of KV per token (40 layers x 8 heads x 512 B); host pages hold all of it.
  EXPECT_GE(line_bytes(*plan, "host pages"), kBatch * kContext * 163840);
}

TEST(ServingPlan, SaysHowManyRequestsFitInEachTier) {
  PlanQuestion q = question("qwen3-14b", "sketch");
  q.fast_memory_bytes = 48ull << 30;
  q.host_memory_bytes = 96ull << 30;
  const Result<Plan> plan = plan_serving(q);
  ASSERT_TRUE(plan.ok());
  // One 128K request has 20 GiB of KV on the host and 1.34 GiB of sketches in fast memory.
  EXPECT_EQ(plan->batch_by_host, 4u);
  EXPECT_GE(plan->batch_by_fast, 8u);
  EXPECT_LE(plan->batch_by_fast, 12u);
}

TEST(ServingPlan, ADenseContextTakesAllItsPages) {
  const Result<Plan> plan = plan_serving(question("qwen3-14b", "dense"));
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->kv_buffer_bytes, kBatch * kContext * 163840);
  EXPECT_EQ(plan->host_bytes, 0u);
}

TEST(ServingPlan, RefusesWhatTheModelCannotHold) {
  PlanQuestion q = question("qwen3-14b", "dense");
  q.context_tokens = kContext + 1;
  EXPECT_THAT(plan_serving(q).status().message(), HasSubstr("131072"));
  EXPECT_EQ(plan_serving(q).status().param(), "context_tokens");
  EXPECT_THAT(plan_serving(question("qwen3-14b", "sketchy")).status().message(),
              HasSubstr("sketchy"));
  EXPECT_THAT(plan_serving(question("qwen3-14b", "sketch:budgets=1")).status().message(),
              HasSubstr("budgets"));
  EXPECT_FALSE(plan_serving(question("nowhere", "dense")).ok());
}

TEST(ServingPlan, RefusesWhat64BitsCannotCount) {
  for (const std::string sparse : {"dense", "sketch", "retroinfer:cluster=1"}) {
    PlanQuestion q = question("llama-3.1-70b", sparse);
    q.batch = 4000000000u;
    EXPECT_EQ(plan_serving(q).status().code(), StatusCode::kInvalidArgument) << sparse;
    EXPECT_EQ(plan_serving(q).status().param(), "batch") << sparse;
    q.batch = 1000000u;
    EXPECT_TRUE(plan_serving(q).ok()) << sparse;
  }
}

TEST(ServingPlan, AStepAttendsToNoMoreThanTheContext) {
  for (const std::string sparse : {"streaming:budget=4294967295", "shadowkv:outliers=65536",
                                   "oracle:sinks=1048576,local=1048576"}) {
    const Result<Plan> plan = plan_serving(question("qwen3-14b", sparse));
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_EQ(plan->attended_tokens, kContext) << sparse;
  }
}

}  // namespace
}  // namespace spin
