// SPDX-License-Identifier: Apache-2.0
// Threads for work that would hold up an I/O thread (parsing and tokenising megabytes), with a
// bounded queue. Thread: thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "server/task.h"
#include "spin/status.h"

namespace spin::server {

class WorkerPool {
 public:
  explicit WorkerPool(uint32_t max_queued) : max_queued_(max_queued) {}
  ~WorkerPool();  // as stop()
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Once. Errors: kResourceExhausted (stop() ends those that were started).
  Status start(uint32_t threads);

  // False when the queue is full or the pool has stopped; the task is then destroyed. A task that
  // throws ends alone.
  [[nodiscard]] bool try_post(Task task);

  // Drops what waits, finishes what runs; blocks.
  void stop();

  uint64_t queued() const;

 private:
  void run();

  const uint32_t max_queued_;
  mutable base::Mutex mutex_;
  base::CondVar wake_;
  std::deque<Task> tasks_ SPIN_GUARDED_BY(mutex_);
  bool stopping_ SPIN_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace spin::server
