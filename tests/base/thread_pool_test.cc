// SPDX-License-Identifier: Apache-2.0
#include "base/thread_pool.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sys/resource.h>

namespace spin::base {
namespace {

TEST(ThreadPool, RunsEveryIndexOnceWithSlotsInRange) {
  auto pool = ThreadPool::create(4);
  ASSERT_TRUE(pool.ok()) << pool.status().to_string();
  for (size_t count : {0, 1, 2, 3, 7, 64, 1000}) {
    std::vector<std::atomic<int>> calls(count);
    std::atomic<bool> slots_good = true;
    (*pool)->parallel_for(count, [&](size_t index, uint32_t slot) {
      calls[index].fetch_add(1);
      if (slot >= 4) slots_good = false;
    });
    for (const auto& call : calls) EXPECT_EQ(call.load(), 1);
    EXPECT_TRUE(slots_good);
  }
}

TEST(ThreadPool, SlotsOfOneLoopAreNotSharedByThreads) {
  auto pool = ThreadPool::create(4);
  ASSERT_TRUE(pool.ok());
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> inside[4] = {};
    std::atomic<bool> overlap = false;
    (*pool)->parallel_for(32, [&](size_t, uint32_t slot) {
      if (inside[slot].fetch_add(1) != 0) overlap = true;
      std::this_thread::yield();
      inside[slot].fetch_sub(1);
    });
    EXPECT_FALSE(overlap);
  }
}

TEST(ThreadPool, LoopsFromManyThreadsAndInsideLoopsFinish) {
  auto pool = ThreadPool::create(3);
  ASSERT_TRUE(pool.ok());
  std::atomic<uint64_t> sum = 0;
  {
    std::vector<std::jthread> callers;
    for (int caller = 0; caller < 4; ++caller) {
      callers.emplace_back([&] {
        for (int round = 0; round < 100; ++round) {
          (*pool)->parallel_for(5, [&](size_t, uint32_t) {
            (*pool)->parallel_for(3, [&](size_t index, uint32_t) { sum += index; });
          });
        }
      });
    }
  }
  EXPECT_EQ(sum.load(), 4u * 100u * 5u * 3u);
}

TEST(ThreadPool, AllThreadsOfALoopRunAtTheSameTime) {
  auto pool = ThreadPool::create(3);
  ASSERT_TRUE(pool.ok());
  std::atomic<int> arrived = 0;
  // Each piece waits for the other two: with fewer than three threads this would never end.
  (*pool)->parallel_for(3, [&](size_t, uint32_t) {
    arrived.fetch_add(1);
    while (arrived.load() < 3) std::this_thread::yield();
  });
  EXPECT_EQ(arrived.load(), 3);
}

TEST(ThreadPool, IdleWorkersTakeNoProcessorTime) {
  auto pool = ThreadPool::create(4);
  ASSERT_TRUE(pool.ok());
  (*pool)->parallel_for(16, [](size_t, uint32_t) {});
  const auto used = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return std::chrono::seconds(usage.ru_utime.tv_sec) +
           std::chrono::microseconds(usage.ru_utime.tv_usec);
  };
  const auto before = used();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  // Three spinning workers would use up to 600 ms.
  EXPECT_LT(used() - before, std::chrono::milliseconds(40));
}

TEST(ThreadPool, RefusesAbsurdCounts) {
  EXPECT_EQ(ThreadPool::create(0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ThreadPool::create(ThreadPool::kMaxThreads + 1).status().code(),
            StatusCode::kInvalidArgument);
}

#ifndef SPIN_SANITIZED  // sanitizers need more address space than this leaves

// Exits with 0 if 1024 threads, whose stacks do not fit into 1 GiB, are refused properly.
[[noreturn]] void create_in_little_memory() {
  rlimit limit{};
  limit.rlim_cur = limit.rlim_max = 1u << 30;
  const bool limited = setrlimit(RLIMIT_AS, &limit) == 0;
  const auto pool = ThreadPool::create(ThreadPool::kMaxThreads);
  std::_Exit(limited && pool.status().code() == StatusCode::kResourceExhausted ? 0 : 1);
}

TEST(ThreadPoolDeathTest, RefusedThreadIsAnErrorAndTheOthersEnd) {
  EXPECT_EXIT(create_in_little_memory(), ::testing::ExitedWithCode(0), "");
}

#endif

}  // namespace
}  // namespace spin::base
