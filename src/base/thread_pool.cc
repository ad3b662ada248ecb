// SPDX-License-Identifier: Apache-2.0
#include "base/thread_pool.h"

#include <string>

#include "base/start_thread.h"

namespace spin::base {

Result<std::unique_ptr<ThreadPool>> ThreadPool::create(uint32_t threads) {
  if (threads == 0 || threads > kMaxThreads) {
    return Status(StatusCode::kInvalidArgument, "expected 1 to " + std::to_string(kMaxThreads) +
                                                    " threads, found " + std::to_string(threads));
  }
  std::unique_ptr<ThreadPool> pool(new ThreadPool);
  pool->workers_.reserve(threads - 1);
  for (uint32_t i = 1; i < threads; ++i) {
    SPIN_RETURN_IF_ERROR(
        start_thread(pool->workers_.emplace_back(),
                     "compute (" + std::to_string(i) + " of " + std::to_string(threads) + ")",
                     [raw = pool.get()] { raw->worker_loop(); }));
  }
  return pool;
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    signals_.fetch_add(1, std::memory_order_release);
  }
  work_.notify_all();
}

void ThreadPool::run(Job& job) {
  if (job.count <= 1 || workers_.empty()) {
    work_on(job, 0);
    return;
  }
  bool wake = false;
  {
    MutexLock lock(mutex_);
    job.following = jobs_;
    job.listed = true;
    jobs_ = &job;
    signals_.fetch_add(1, std::memory_order_release);
    wake = sleeping_workers_ > 0;
  }
  if (wake) {
    if (job.count == 2) {
      work_.notify_one();
    } else {
      work_.notify_all();
    }
  }
  work_on(job, 0);
  {
    MutexLock lock(mutex_);
    if (job.listed) unlist(job);
  }
  const auto all_left = [&job] { return job.helpers.load(std::memory_order_acquire) == 0; };
  if (spin_until(all_left, kSpinTime)) return;
  MutexLock lock(mutex_);
  ++sleeping_callers_;
  while (!all_left()) done_.wait(mutex_);
  --sleeping_callers_;
}

void ThreadPool::work_on(Job& job, uint32_t slot) {
  while (true) {
    const size_t index = job.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= job.count) return;
    job.call(job.body, index, slot);
  }
}

void ThreadPool::unlist(Job& job) {
  for (Job** link = &jobs_; *link != nullptr; link = &(*link)->following) {
    if (*link != &job) continue;
    *link = job.following;
    break;
  }
  job.listed = false;
  signals_.fetch_sub(1, std::memory_order_release);
}

// Jobs whose indices are all claimed leave the list here, so that nobody spins on them while their
// last pieces run.
ThreadPool::Job* ThreadPool::first_open_job() {
  while (jobs_ != nullptr && jobs_->next.load(std::memory_order_relaxed) >= jobs_->count) {
    unlist(*jobs_);
  }
  return jobs_;
}

void ThreadPool::worker_loop() {
  while (true) {
    spin_until([this] { return signals_.load(std::memory_order_acquire) != 0; }, kSpinTime);
    Job* job = nullptr;
    uint32_t slot = 0;
    {
      MutexLock lock(mutex_);
      while (!stopping_ && (job = first_open_job()) == nullptr) {
        ++sleeping_workers_;
        work_.wait(mutex_);
        --sleeping_workers_;
      }
      if (job == nullptr) return;
      slot = job->slots++;
      job->helpers.fetch_add(1, std::memory_order_relaxed);
    }
    work_on(*job, slot);
    MutexLock lock(mutex_);
    if (job->listed) unlist(*job);
    // The caller may return as soon as it reads 0: nothing touches the job after this line.
    job->helpers.fetch_sub(1, std::memory_order_release);
    if (sleeping_callers_ > 0) done_.notify_all();
  }
}

}  // namespace spin::base
