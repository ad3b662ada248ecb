// SPDX-License-Identifier: Apache-2.0
// The page store on a GPU beside the trivial model of tests/kv/store_model.h: tables, stamps, pages
// and rows are what the host's model says after every operation. SPIN_MODEL_OPERATIONS sets their
// number. Skips itself where there is no GPU.
#include <cstdint>
#include <cstdlib>
#include <memory>

#include <gtest/gtest.h>

#include "backend/cuda/cuda_device.h"
#include "base/parse_number.h"
#include "tests/kv/store_model.h"

namespace spin::kv {
namespace {

TEST(PageStoreModelOnGpu, AgreesAfterEveryOperation) {
  auto device = backend::cuda::create_cuda_device({});
  if (!device.ok()) GTEST_SKIP() << device.status().to_string();
  const char* text = std::getenv("SPIN_MODEL_OPERATIONS");
  const uint64_t operations = text == nullptr ? 100'000 : base::parse_decimal(text).value_or(0);
  ASSERT_GT(operations, 0u);
  testing::StoreModel model(**device, 1, [] {});
  ASSERT_EQ(model.run(operations), "") << "operation " << model.happened().operations;
  const testing::Happened& happened = model.happened();
  for (const uint64_t count :
       {happened.steps, happened.dropped, happened.resized, happened.became_resident,
        happened.written_through, happened.demoted, happened.resumed, happened.hits,
        happened.misses, happened.evictions}) {
    EXPECT_GT(count, 0u);
  }
  EXPECT_EQ(model.rig().store().fast().counts().in_use(), 0u);
  EXPECT_EQ(model.rig().store().table_memory().bytes_in_use(), 0u);
}

}  // namespace
}  // namespace spin::kv
