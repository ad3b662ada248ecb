// SPDX-License-Identifier: Apache-2.0
// The memory plan of a device whose fast memory is its own, and how many pages the default pool
// has. (Unified memory alone: admission_test.cc.)
#include "engine/memory_budget.h"

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/engine_impl.h"

namespace spin::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kColumns = 6;

// 1,000 MiB of fast memory, of which 900 MiB may be taken, and 4,000 MiB on the host.
BudgetQuestion separate() {
  BudgetQuestion question;
  question.geometry = {2, 3, 64, 8, layout::DType::kF32};
  question.model_positions = 1000;
  question.unified_memory = false;
  question.memory_bytes = 1000 * kMiB;
  question.host_memory_bytes = 4000 * kMiB;
  question.weight_bytes = 100 * kMiB;
  question.reserve_bytes = 50 * kMiB;
  question.host_reserve_bytes = 500 * kMiB;
  return question;
}

EngineOptions on_gpu(std::vector<std::string> sparse = {}) {
  EngineOptions options;
  options.device = "cuda";
  options.max_num_seqs = 4;
  options.sparse = std::move(sparse);
  return options;
}

TEST(SeparateMemory, HoldsWhatIsNeededBesideWeightsAndReserve) {
  const auto budget = plan_kv_budget(separate(), on_gpu());
  ASSERT_TRUE(budget.ok()) << budget.status().to_string();
  EXPECT_EQ(budget->pages, 4 * 125 * kColumns);
  EXPECT_EQ(budget->max_model_len, 1000u);
  EXPECT_EQ(budget->host_bytes, 0u);
  EXPECT_EQ(budget->index_bytes, 0u);
}

TEST(SeparateMemory, AShareOfFastMemoryIsLeftAlone) {
  BudgetQuestion question = separate();
  EngineOptions options = on_gpu();
  const auto most = [&](double share) {
    options.gpu_memory_utilization = share;
    const auto left = static_cast<uint64_t>(share * 1000) - 150;
    options.kv_cache_memory_bytes = left * kMiB;
    EXPECT_TRUE(plan_kv_budget(question, options).ok()) << share;
    options.kv_cache_memory_bytes += kMiB;
    return plan_kv_budget(question, options).status();
  };
  for (const double share : {0.25, 0.5, 1.0}) {
    const Status refused = most(share);
    EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted) << share;
    EXPECT_EQ(refused.param(), "kv_cache_memory_bytes");
  }
  // The default.
  options.gpu_memory_utilization.reset();
  options.kv_cache_memory_bytes = 750 * kMiB;
  EXPECT_TRUE(plan_kv_budget(question, options).ok());
  options.kv_cache_memory_bytes = 751 * kMiB;
  EXPECT_THAT(plan_kv_budget(question, options).status().message(),
              AllOf(HasSubstr("need 751.0 MiB, have 750.0 MiB"), HasSubstr("fast memory 900.0 MiB"),
                    HasSubstr("gpu_memory_utilization 0.9 of 1000.0 MiB"),
                    HasSubstr("weights 100.0 MiB, reserve 50.0 MiB"), Not(HasSubstr("host"))));
}

TEST(SeparateMemory, TheTiersDoNotTakeFromEachOther) {
  BudgetQuestion question = separate();
  EngineOptions options = on_gpu({"quest"});
  options.kv_cache_memory_bytes = 700 * kMiB;
  options.host_memory_bytes = 3500 * kMiB;  // all but the host's reserve
  const auto budget = plan_kv_budget(question, options);
  ASSERT_TRUE(budget.ok()) << budget.status().to_string();
  EXPECT_EQ(budget->host_bytes, 3500 * kMiB);
  EXPECT_EQ(budget->bytes / kMiB, 699u);  // whole pages for each of six heads
  // The index lies in fast memory, beside the pages.
  const double beside = static_cast<double>(750 * kMiB - budget->bytes);
  EXPECT_EQ(budget->index_bytes, static_cast<uint64_t>(kIndexShare * beside));
}

TEST(SeparateMemory, ARefusalNamesTheMemoryThatIsShort) {
  BudgetQuestion question = separate();
  question.model_positions = 1'000'000;
  EngineOptions options = on_gpu({"quest"});
  options.host_memory_bytes = 3501 * kMiB;
  const Status host = plan_kv_budget(question, options).status();
  EXPECT_EQ(host.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(host.param(), "host_memory_bytes");
  EXPECT_THAT(host.message(), AllOf(HasSubstr("need 3501.0 MiB, have 3500.0 MiB"),
                                    HasSubstr("(host memory 4000.0 MiB, reserve 500.0 MiB)")));

  options = on_gpu();
  options.max_model_len = 500'000;
  const Status context = plan_kv_budget(question, options).status();
  EXPECT_EQ(context.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(context.param(), "max_model_len");
  EXPECT_THAT(context.message(), HasSubstr("(fast memory 900.0 MiB"));

  question.weight_bytes = 900 * kMiB;
  EXPECT_THAT(
      plan_kv_budget(question, on_gpu()).status().message(),
      AllOf(HasSubstr("the model does not fit"), HasSubstr("have 900.0 MiB of fast memory")));
  // A host that is too small for its reserve has nothing for a tier, and dense requests need none.
  question = separate();
  question.host_memory_bytes = 400 * kMiB;
  EXPECT_TRUE(plan_kv_budget(question, on_gpu()).ok());
  options = on_gpu({"quest"});
  options.host_memory_bytes = kMiB;
  EXPECT_THAT(plan_kv_budget(question, options).status().message(), HasSubstr("have 0.0 MiB"));
}

// A host tier does not stand in for slots in fast memory.
TEST(MemoryBudget, APoolWithoutAPageForEachHeadIsRefused) {
  EngineOptions options = on_gpu({"quest"});
  options.host_memory_bytes = 1000 * kMiB;
  const BudgetQuestion question = separate();
  for (const uint64_t bytes : {uint64_t{1}, kColumns * question.geometry.page_bytes() - 1}) {
    options.kv_cache_memory_bytes = bytes;
    const auto budget = plan_kv_budget(question, options);
    ASSERT_EQ(budget.status().code(), StatusCode::kResourceExhausted) << bytes;
    EXPECT_EQ(budget.status().param(), "kv_cache_memory_bytes");
    EXPECT_THAT(budget.status().message(), HasSubstr("a page for each of 6 heads"));
  }
  options.kv_cache_memory_bytes = kColumns * question.geometry.page_bytes();
  const auto budget = plan_kv_budget(question, options);
  ASSERT_TRUE(budget.ok()) << budget.status().to_string();
  EXPECT_EQ(budget->pages, kColumns);
  // Nobody set a size: the length is what does not fit.
  BudgetQuestion tight = question;
  tight.weight_bytes = 900 * kMiB - tight.reserve_bytes - 1;
  EXPECT_EQ(plan_kv_budget(tight, on_gpu()).status().param(), "max_model_len");
}

TEST(SeparateMemory, TheShareIsAboveZeroAndUpToOneAndOfAGpu) {
  EngineOptions options = on_gpu();
  for (const double share : {0.0, -0.5, 1.01, std::numeric_limits<double>::quiet_NaN()}) {
    options.gpu_memory_utilization = share;
    const Status status = check_engine_options(options);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << share;
    EXPECT_EQ(status.param(), "gpu_memory_utilization") << share;
    EXPECT_THAT(status.message(), HasSubstr("(0, 1]"));
  }
  options.gpu_memory_utilization = 1;
  EXPECT_TRUE(check_engine_options(options).ok());
  options.device = "cpu";
  const Status status = check_engine_options(options);
  EXPECT_EQ(status.param(), "gpu_memory_utilization");
  EXPECT_THAT(status.message(), HasSubstr("needs a GPU"));
}

// Clusters fill their pages in part, so that a sequence reserves more of them than a dense one.
TEST(DefaultPool, IsThatOfTheAttentionWithTheMostPages) {
  BudgetQuestion question = separate();
  question.unified_memory = true;
  EngineOptions options = on_gpu({"retroinfer"});
  const auto pages = [&](uint64_t sparse_pages) {
    question.sparse_pages_per_head = sparse_pages;
    const auto budget = plan_kv_budget(question, options);
    EXPECT_TRUE(budget.ok()) << budget.status().to_string();
    return budget.ok() ? budget->pages : 0;
  };
  EXPECT_EQ(pages(0), 4 * 125 * kColumns);
  EXPECT_EQ(pages(100), 4 * 125 * kColumns);
  EXPECT_EQ(pages(300), 4 * 300 * kColumns);
  // Never more than its share, and not more than was asked for.
  EXPECT_LE(pages(1'000'000) * question.geometry.page_bytes(), 350 * kMiB * 6 / 10);
  options.kv_cache_memory_bytes = 10 * kMiB;
  EXPECT_LE(pages(300) * question.geometry.page_bytes(), 10 * kMiB);
}

TEST(FitsShare, EachKindHasItsOwnMemoryOrBothShareOne) {
  backend::DeviceProperties properties;
  properties.memory_bytes = 1000;
  properties.host_memory_bytes = 4000;
  EXPECT_TRUE(fits_share({300, 200}, 0.5, properties));
  EXPECT_FALSE(fits_share({300, 201}, 0.5, properties));
  properties.unified_memory = false;
  EXPECT_TRUE(fits_share({500, 2000}, 0.5, properties));
  EXPECT_FALSE(fits_share({501, 0}, 0.5, properties));
  EXPECT_FALSE(fits_share({0, 2001}, 0.5, properties));
}

}  // namespace
}  // namespace spin::engine
