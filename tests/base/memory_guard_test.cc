// SPDX-License-Identifier: Apache-2.0
#include "base/memory_guard.h"

#include <new>

#include <gtest/gtest.h>

namespace spin::base {
namespace {

TEST(MemoryGuard, PassesResultsAndErrorsOn) {
  EXPECT_EQ(guard_memory("testing", [] { return Result<int>(7); }).value(), 7);
  const Status error(StatusCode::kNotFound, "nothing");
  EXPECT_EQ(guard_memory("testing", [&] { return error; }), error);
}

TEST(MemoryGuard, MemoryThatRunsOutIsAnErrorThatSaysWhen) {
  const Result<size_t> result =
      guard_memory("testing", []() -> Result<size_t> { throw std::bad_alloc(); });
  EXPECT_EQ(result.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(result.status().message(), "out of memory while testing");
}

}  // namespace
}  // namespace spin::base
