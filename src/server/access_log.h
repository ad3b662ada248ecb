// SPDX-License-Identifier: Apache-2.0
// Lines for a slow reader (a terminal, a full disk) without ever holding up an I/O thread.
// Thread: thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "spin/status.h"

namespace spin::server {

class AccessLog {
 public:
  // `write` is called on the log's own thread; null: nothing is logged.
  explicit AccessLog(std::function<void(std::string_view)> write) : write_(std::move(write)) {}
  ~AccessLog();  // writes what is queued
  AccessLog(const AccessLog&) = delete;
  AccessLog& operator=(const AccessLog&) = delete;

  // Once, before the first line. Errors: kResourceExhausted.
  Status start();

  bool enabled() const { return write_ != nullptr; }
  // Drops the line, and counts it, when the queue is full.
  void add(std::string line);
  uint64_t dropped() const;

 private:
  void run();

  const std::function<void(std::string_view)> write_;
  mutable base::Mutex mutex_;
  base::CondVar wake_;
  std::vector<std::string> lines_ SPIN_GUARDED_BY(mutex_);
  uint64_t dropped_ SPIN_GUARDED_BY(mutex_) = 0;
  bool stopping_ SPIN_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace spin::server
