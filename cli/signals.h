// SPDX-License-Identifier: Apache-2.0
// SIGINT and SIGTERM as events of an ordinary thread: both are blocked in all threads and read from
// a signalfd, so nothing runs in signal context.
//
//   none -> pending (first signal: the handler is called, event_fd() becomes readable)
//   pending -> none (reset())          pending -> process ends with 128 + signal (second signal)
//
// Thread: thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "base/mutex.h"
#include "spin/status.h"

namespace spin::cli {

class SignalWatcher {
 public:
  // Blocks both signals and ignores SIGPIPE (a write then fails with EPIPE).
  // Requires: called before any other thread starts, because threads inherit the mask.
  // Errors: kIoError, kResourceExhausted.
  static Result<std::unique_ptr<SignalWatcher>> start();
  ~SignalWatcher();
  SignalWatcher(const SignalWatcher&) = delete;
  SignalWatcher& operator=(const SignalWatcher&) = delete;

  // Called on the watcher's thread for the first signal; null: nothing. Must not block. After the
  // return no former handler is running.
  void set_handler(std::function<void()> handler);

  // The signal that is pending, 0 for none.
  int pending() const { return pending_.load(std::memory_order_acquire); }

  // Forgets the pending signal. Requires: not called by the handler.
  void reset();

  // Readable (poll) while a signal is pending. Not to be read from.
  int event_fd() const { return event_fd_; }

 private:
  SignalWatcher(int signal_fd, int event_fd, int stop_fd);
  void run();
  void on_signal(int signal);

  const int signal_fd_;
  const int event_fd_;
  const int stop_fd_;
  std::atomic<int> pending_{0};
  base::Mutex mutex_;
  std::function<void()> handler_ SPIN_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace spin::cli
