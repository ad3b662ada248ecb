// SPDX-License-Identifier: Apache-2.0
// Which device the options name, and what is said where it is not to be had.
#include "engine/device_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "spin/device_name.h"
#include "spin/engine.h"
#include "spin/evaluation.h"
#include "tests/support/test_data.h"

namespace spin::engine {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

TEST(DeviceName, IsCpuOrCudaWithOrWithoutANumber) {
  const auto parsed = [](std::string_view text) {
    const auto device = parse_device_name(text);
    EXPECT_TRUE(device.ok()) << text;
    return device.ok() ? std::pair(device->kind, device->ordinal) : std::pair(DeviceKind::kCpu, -1);
  };
  EXPECT_EQ(parsed("cpu"), std::pair(DeviceKind::kCpu, 0));
  EXPECT_EQ(parsed("cuda"), std::pair(DeviceKind::kCuda, 0));
  EXPECT_EQ(parsed("cuda:0"), std::pair(DeviceKind::kCuda, 0));
  EXPECT_EQ(parsed("cuda:7"), std::pair(DeviceKind::kCuda, 7));
  EXPECT_EQ(parsed("cuda:1023"), std::pair(DeviceKind::kCuda, 1023));
}

TEST(DeviceName, OtherTextsAreRefusedByName) {
  for (const char* text : {"", "gpu", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda: 1",
                           "cuda:1024", "cuda:18446744073709551616", "cuda:0,1"}) {
    const Status status = parse_device_name(text).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_EQ(status.param(), "device") << text;
    EXPECT_THAT(status.message(), HasSubstr("cpu, cuda or cuda:N")) << text;
  }
}

TEST(DeviceChoice, TheCpuTakesTheThreads) {
  const auto device = create_device("cpu", 1);
  ASSERT_TRUE(device.ok()) << device.status().to_string();
  EXPECT_EQ((*device)->properties().threads, 1u);
  EXPECT_TRUE((*device)->properties().unified_memory);
}

// Without the backend none is found, with it not so many.
TEST(DeviceChoice, AGpuThatIsNotThereIsNamed) {
  const Status status = create_device("cuda:1023", 0).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.param(), "device");
  EXPECT_THAT(status.message(), AnyOf(HasSubstr("no CUDA backend"), HasSubstr("GPU")))
      << status.message();
}

TEST(DeviceChoice, EngineAndEvaluationTakeIt) {
  EngineOptions engine;
  engine.model = testing::test_data("tiny/llama-linear").string();
  EvaluationOptions evaluation;
  evaluation.model = engine.model;
  for (const auto& [name, code] : {std::pair("tpu", StatusCode::kInvalidArgument),
                                   std::pair("cuda:1023", StatusCode::kUnsupported)}) {
    engine.device = evaluation.device = name;
    const Status started = create_engine(engine).status();
    EXPECT_EQ(started.code(), code) << started.to_string();
    EXPECT_EQ(started.param(), "device");
    EXPECT_EQ(evaluate_ruler(evaluation, {}).status(), started);
  }
}

}  // namespace
}  // namespace spin::engine
