// SPDX-License-Identifier: Apache-2.0
#include "cli/progress_bar.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "cli/terminal.h"

namespace spin::cli {
namespace {

constexpr int kBarWidth = 30;
constexpr std::chrono::milliseconds kRedraw{50};
constexpr std::string_view kEraseLine = "\r\x1b[K";

}  // namespace

std::string progress_line(std::string_view label, double fraction) {
  const double part = std::isfinite(fraction) ? std::clamp(fraction, 0.0, 1.0) : 0.0;
  const auto filled = static_cast<size_t>(std::floor(part * kBarWidth));
  return fmt::format("{} [{}{}] {:3.0f} %", label, std::string(filled, '#'),
                     std::string(kBarWidth - filled, '.'), std::floor(part * 100));
}

void ProgressBar::update(std::string_view label, double fraction) {
  if (!enabled_) return;
  const base::MutexLock lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && label == label_ && now - last_ < kRedraw) return;
  label_ = label;
  last_ = now;
  drawn_ = true;
  // A terminal that has gone away is noticed where text is written.
  [[maybe_unused]] const Status ignored =
      write_all(fd_, fmt::format("{}{}", kEraseLine, progress_line(label, fraction)));
}

void ProgressBar::clear() {
  if (!enabled_) return;
  const base::MutexLock lock(mutex_);
  if (!drawn_) return;
  drawn_ = false;
  [[maybe_unused]] const Status ignored = write_all(fd_, kEraseLine);
}

}  // namespace spin::cli
