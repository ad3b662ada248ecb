// SPDX-License-Identifier: Apache-2.0
// Work for one I/O thread from any thread. The first item of a batch wakes the thread, the others
// ride along: one wake-up per engine step however many streams have news.
//
// Thread: thread-safe. Lifetime: outlives its I/O thread; close() makes later posts vanish, so an
// engine may still deliver to requests whose server is gone.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "server/task.h"

namespace spin::server {

class Mailbox {
 public:
  // `wake` is called under the lock, from any thread, when the box stops being empty; it must
  // arrange a call of run_all() on the I/O thread and return at once.
  explicit Mailbox(std::function<void()> wake) : wake_(std::move(wake)) {}

  // Returns false after close(). What `wake` throws is passed on; the box goes on working.
  bool post(Task task) {
    base::MutexLock lock(mutex_);
    if (closed_) return false;
    // Woken first: if the wake-up fails (it allocates), the box is still empty and the next post
    // wakes again; a wake-up without a task is harmless. run_all() cannot come between.
    if (tasks_.empty()) wake_();
    tasks_.push_back(std::move(task));
    return true;
  }

  // Thread: the I/O thread.
  void run_all() {
    std::vector<Task> batch;
    {
      base::MutexLock lock(mutex_);
      batch.swap(tasks_);
    }
    for (Task& task : batch) task();
  }

  // Ensures: `wake` is not called any more; waiting tasks are destroyed unrun.
  void close() {
    std::vector<Task> dropped;
    base::MutexLock lock(mutex_);
    closed_ = true;
    dropped.swap(tasks_);
    wake_ = nullptr;
  }

 private:
  base::Mutex mutex_;
  std::vector<Task> tasks_ SPIN_GUARDED_BY(mutex_);
  std::function<void()> wake_ SPIN_GUARDED_BY(mutex_);
  bool closed_ SPIN_GUARDED_BY(mutex_) = false;
};

}  // namespace spin::server
