// SPDX-License-Identifier: Apache-2.0
// The page store against a trivial model: random operations on several sequences of both kinds in
// pools that are too small for them, with copies completing in random order, every retrieved row
// compared and everything audited after every operation.
//
// Operations are counted as the store sees them: open, place a layer, commit, append, seal, repack,
// retrieve, resize, write through, demote, resume, close. SPIN_MODEL_OPERATIONS and
// SPIN_MODEL_THREADED_OPERATIONS set their number; docs/testing.md records the longest runs.
//
// Which change of the sources is caught by which test is listed in tools/mutate_kv.py, which makes
// each of them and runs these tests: every event wait, hold, generation and tag check.
#include "tests/kv/store_model.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backend/device_decorators.h"
#include "backend/separate_memory.h"
#include "base/parse_number.h"
#include "tests/support/shuffled_device.h"

namespace spin::kv {
namespace {

using testing::ShuffledDevice;
using testing::StoreModel;

#if defined(SPIN_SANITIZED)
constexpr uint64_t kOperations = 100'000;
#else
constexpr uint64_t kOperations = 1'000'000;
#endif

// `otherwise`, or what the environment says.
uint64_t count_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return otherwise;
  const auto number = base::parse_decimal(text);
  EXPECT_TRUE(number.has_value()) << variable << " is not a number";
  return number.value_or(otherwise);
}

TEST(PageStoreModel, AgreesWithATrivialModelOverAMillionOperations) {
  auto inner = std::move(*backend::cpu::create_cpu_device({.threads = 1}));
  const uint64_t total = count_from("SPIN_MODEL_OPERATIONS", kOperations);
  // Several short lives and one long one, each with its own seed.
  testing::Happened sum;
  const uint64_t part = total / 4;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    ShuffledDevice device(*inner, seed);
    device.wait_alone_for("kv-tables");
    StoreModel model(device, seed, [&] { device.run_some(6); });
    ASSERT_EQ(model.run(part), "")
        << "seed " << seed << ", operation " << model.happened().operations;
    const testing::Happened& happened = model.happened();
    EXPECT_EQ(model.rig().store().fast().counts().in_use(), 0u);
    EXPECT_EQ(model.rig().store().host()->counts().free,
              model.rig().store().host()->counts().total);
    EXPECT_EQ(model.rig().store().table_memory().bytes_in_use(), 0u);
    sum.operations += happened.operations;
    const uint64_t all[] = {happened.refused,
                            happened.closed_in_transfer,
                            happened.dropped,
                            happened.resized,
                            happened.resize_refused,
                            happened.became_resident,
                            happened.written_through,
                            happened.demoted,
                            happened.resumed,
                            happened.resume_refused,
                            happened.hits,
                            happened.misses,
                            happened.evictions};
    for (size_t i = 0; i < std::size(all); ++i) {
      EXPECT_GT(all[i], 0u) << "seed " << seed << ": number " << i << " never happened";
    }
  }
  EXPECT_GE(sum.operations, part * 4);
}

// The same on threads, with streams that sleep at random: what ThreadSanitizer looks at.
TEST(PageStoreModel, AgreesWhenItsStreamsAreDelayedThreads) {
  auto inner = std::move(*backend::cpu::create_cpu_device({.threads = 2}));
  backend::DelayingDevice device(*inner, 1, std::chrono::microseconds(5));
  StoreModel model(device, 1, [] {});
  ASSERT_EQ(model.run(count_from("SPIN_MODEL_THREADED_OPERATIONS", 3000)), "")
      << "operation " << model.happened().operations;
  EXPECT_GT(model.happened().evictions, 0u);
  EXPECT_GT(model.happened().written_through, 0u);
}

// Where the host cannot touch fast memory, as on a GPU (tests/kv/cuda runs the same there).
TEST(PageStoreModel, AgreesWhereTheHostCannotTouchFastMemory) {
  auto inner = std::move(*backend::cpu::create_cpu_device({.threads = 1}));
  auto device =
      std::move(*backend::SeparateMemoryDevice::create(std::move(inner), uint64_t{64} << 30));
  StoreModel model(*device, 3, [] {});
  ASSERT_EQ(model.run(count_from("SPIN_MODEL_SEPARATE_OPERATIONS", 3000)), "")
      << "operation " << model.happened().operations;
  EXPECT_GT(model.happened().evictions, 0u);
  EXPECT_GT(model.happened().resumed, 0u);
}

}  // namespace
}  // namespace spin::kv
