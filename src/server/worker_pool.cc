// SPDX-License-Identifier: Apache-2.0
#include "server/worker_pool.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/start_thread.h"

namespace spin::server {

WorkerPool::~WorkerPool() { stop(); }

Status WorkerPool::start(uint32_t threads) {
  for (uint32_t i = 0; i < std::max(threads, 1u); ++i) {
    SPIN_RETURN_IF_ERROR(
        base::start_thread(threads_.emplace_back(), "request bodies", [this] { run(); }));
  }
  return ok_status();
}

bool WorkerPool::try_post(Task task) {
  {
    base::MutexLock lock(mutex_);
    if (stopping_ || tasks_.size() >= max_queued_) return false;
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
  return true;
}

void WorkerPool::stop() {
  std::deque<Task> dropped;
  {
    base::MutexLock lock(mutex_);
    stopping_ = true;
    dropped.swap(tasks_);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

uint64_t WorkerPool::queued() const {
  base::MutexLock lock(mutex_);
  return tasks_.size();
}

void WorkerPool::run() {
  for (;;) {
    Task task;
    {
      base::MutexLock lock(mutex_);
      while (tasks_.empty() && !stopping_) wake_.wait(mutex_);
      if (stopping_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    try {
      task();
    } catch (const std::exception&) {  // std::bad_alloc, most likely: others go on being served
    }
  }
}

}  // namespace spin::server
