// SPDX-License-Identifier: Apache-2.0
#include "server/access_log.h"

#include <utility>

#include "base/start_thread.h"
#include "server/limits.h"

namespace spin::server {

Status AccessLog::start() {
  if (!write_) return ok_status();
  return base::start_thread(thread_, "the access log", [this] { run(); });
}

AccessLog::~AccessLog() {
  {
    base::MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void AccessLog::add(std::string line) {
  if (!write_) return;
  {
    base::MutexLock lock(mutex_);
    if (lines_.size() >= kMaxAccessLogQueue) {
      ++dropped_;
      return;
    }
    lines_.push_back(std::move(line));
  }
  wake_.notify_one();
}

uint64_t AccessLog::dropped() const {
  base::MutexLock lock(mutex_);
  return dropped_;
}

void AccessLog::run() {
  for (;;) {
    std::vector<std::string> batch;
    {
      base::MutexLock lock(mutex_);
      while (lines_.empty() && !stopping_) wake_.wait(mutex_);
      if (lines_.empty()) return;
      batch.swap(lines_);
    }
    for (const std::string& line : batch) write_(line);
  }
}

}  // namespace spin::server
