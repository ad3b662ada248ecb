// SPDX-License-Identifier: Apache-2.0
// One line on a terminal that shows how far something is. Without a terminal it prints nothing.
// Thread: thread-safe.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "base/mutex.h"

namespace spin::cli {

// "Loading weights [#####.....]  50 %"; `fraction` is clamped to [0, 1].
std::string progress_line(std::string_view label, double fraction);

class ProgressBar {
 public:
  // `fd` is written to only if `enabled`.
  ProgressBar(int fd, bool enabled) : fd_(fd), enabled_(enabled) {}
  ~ProgressBar() { clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // Draws at most 20 times a second; a new label is always drawn.
  void update(std::string_view label, double fraction);
  // Erases the line, if one is drawn.
  void clear();

 private:
  const int fd_;
  const bool enabled_;
  base::Mutex mutex_;
  std::string label_ SPIN_GUARDED_BY(mutex_);
  bool drawn_ SPIN_GUARDED_BY(mutex_) = false;
  std::chrono::steady_clock::time_point last_ SPIN_GUARDED_BY(mutex_);
};

}  // namespace spin::cli
