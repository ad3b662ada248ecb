// SPDX-License-Identifier: Apache-2.0
// A small pool for loops over independent pieces of work. The calling thread works too, so a pool
// of N threads owns N - 1 workers, and any number of threads may run loops at once.
//
// Idle workers spin for kSpinTime and then sleep: a chain of short loops does not pay a wake-up
// each time, and an idle process takes no CPU from its neighbours.
// Thread: thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "spin/status.h"

namespace spin::base {

// Pauses until `ready()` or until `limit` has passed; returns ready().
template <typename Ready>
bool spin_until(const Ready& ready, std::chrono::nanoseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return ready();
}

class ThreadPool {
 public:
  // About the gap between two operations of a decode step; a futex wake-up costs 5 to 50 us.
  static constexpr std::chrono::nanoseconds kSpinTime = std::chrono::microseconds(20);
  static constexpr uint32_t kMaxThreads = 1024;

  // Errors: kInvalidArgument for 0 or more than kMaxThreads threads, kResourceExhausted if the
  // system refuses a thread.
  static Result<std::unique_ptr<ThreadPool>> create(uint32_t threads);

  // Requires: no loop is running.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  uint32_t threads() const { return static_cast<uint32_t>(workers_.size()) + 1; }

  // Calls body(index, slot) once for every index < count and returns when all calls are done.
  // Indices are claimed in ascending order. slot < threads() names the thread within this loop, for
  // scratch memory; the caller has slot 0. `body` must not throw; it may run loops itself.
  template <typename Body>
  void parallel_for(size_t count, const Body& body) {
    Job job;
    job.body = &body;
    job.call = [](const void* context, size_t index, uint32_t slot) {
      (*static_cast<const Body*>(context))(index, slot);
    };
    job.count = count;
    run(job);
  }

 private:
  struct Job {
    const void* body = nullptr;
    void (*call)(const void* body, size_t index, uint32_t slot) = nullptr;
    size_t count = 0;
    std::atomic<size_t> next = 0;       // first index nobody has claimed
    std::atomic<uint32_t> helpers = 0;  // workers inside; changed under mutex_
    uint32_t slots = 1;                 // slots given out; under mutex_
    bool listed = false;                // under mutex_
    Job* following = nullptr;           // under mutex_
  };

  ThreadPool() = default;
  void run(Job& job);
  static void work_on(Job& job, uint32_t slot);
  void worker_loop();
  void unlist(Job& job) SPIN_REQUIRES(mutex_);
  Job* first_open_job() SPIN_REQUIRES(mutex_);

  Mutex mutex_;
  CondVar work_;  // a job was listed, or stopping_
  CondVar done_;  // a helper left a job
  Job* jobs_ SPIN_GUARDED_BY(mutex_) = nullptr;
  uint32_t sleeping_workers_ SPIN_GUARDED_BY(mutex_) = 0;
  uint32_t sleeping_callers_ SPIN_GUARDED_BY(mutex_) = 0;
  bool stopping_ SPIN_GUARDED_BY(mutex_) = false;
  std::atomic<uint32_t> signals_ = 0;  // jobs listed, plus one when stopping: what spinners watch
  std::vector<std::jthread> workers_;  // last member: joined before the rest goes
};

}  // namespace spin::base
