// SPDX-License-Identifier: Apache-2.0
// A queue between two threads that makes the producer wait instead of growing.
// Thread: thread-safe.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <utility>

#include "base/mutex.h"

namespace spin::base {

template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}

  // Blocks while the queue is full. False, and the item is dropped, if it was closed.
  bool push(T item) {
    MutexLock lock(mutex_);
    while (!closed_ && items_.size() >= capacity_) not_full_.wait(mutex_);
    if (closed_) return false;
    items_.push_back(std::move(item));
    not_empty_.notify_one();
    return true;
  }

  // Blocks while the queue is empty. Nothing once it is closed and empty.
  std::optional<T> pop() {
    MutexLock lock(mutex_);
    while (!closed_ && items_.empty()) not_empty_.wait(mutex_);
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    not_full_.notify_one();
    return item;
  }

  // No more items; what is in the queue can still be popped.
  void close() {
    MutexLock lock(mutex_);
    closed_ = true;
    not_full_.notify_all();
    not_empty_.notify_all();
  }

 private:
  const size_t capacity_;
  Mutex mutex_;
  CondVar not_full_;
  CondVar not_empty_;
  std::deque<T> items_ SPIN_GUARDED_BY(mutex_);
  bool closed_ SPIN_GUARDED_BY(mutex_) = false;
};

}  // namespace spin::base
