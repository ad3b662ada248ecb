// SPDX-License-Identifier: Apache-2.0
// A mutex that clang's thread-safety analysis understands (libstdc++'s own is not annotated).
// Shared mutable state is declared `T x_ SPIN_GUARDED_BY(mutex_);` and the clang lane of CI builds
// with -Wthread-safety -Werror. Thread: thread-safe by nature.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define SPIN_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define SPIN_THREAD_ATTRIBUTE(x)
#endif

#define SPIN_CAPABILITY(x) SPIN_THREAD_ATTRIBUTE(capability(x))
#define SPIN_SCOPED_CAPABILITY SPIN_THREAD_ATTRIBUTE(scoped_lockable)
#define SPIN_GUARDED_BY(x) SPIN_THREAD_ATTRIBUTE(guarded_by(x))
#define SPIN_PT_GUARDED_BY(x) SPIN_THREAD_ATTRIBUTE(pt_guarded_by(x))
#define SPIN_REQUIRES(...) SPIN_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define SPIN_EXCLUDES(...) SPIN_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define SPIN_ACQUIRE(...) SPIN_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define SPIN_RELEASE(...) SPIN_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define SPIN_NO_THREAD_SAFETY_ANALYSIS SPIN_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace spin::base {

class SPIN_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() SPIN_ACQUIRE() { mutex_.lock(); }
  void unlock() SPIN_RELEASE() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

// Holds a Mutex for a scope.
class SPIN_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) SPIN_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() SPIN_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// A condition variable for Mutex. Write the waiting loop at the call, so that the analysis sees
// the guarded reads: `while (!ready_) condition_.wait(mutex_);`
class CondVar {
 public:
  // Requires: the caller holds `mutex`; it holds it again on return.
  void wait(Mutex& mutex) SPIN_REQUIRES(mutex) { condition_.wait(mutex); }

  // As wait(), at most until `deadline`. Returns false when the deadline passed.
  template <typename Clock, typename Duration>
  bool wait_until(Mutex& mutex, std::chrono::time_point<Clock, Duration> deadline)
      SPIN_REQUIRES(mutex) {
    return condition_.wait_until(mutex, deadline) == std::cv_status::no_timeout;
  }

  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

 private:
  std::condition_variable_any condition_;
};

}  // namespace spin::base
