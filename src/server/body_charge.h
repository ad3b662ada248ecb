// SPDX-License-Identifier: Apache-2.0
// The share that one request body has in the limit on all bodies together. It goes where the body
// goes, so that a body that waits for a worker counts although its client has left long ago.
// Thread: one object by one thread at a time; the total is an atomic.
// Lifetime: the total outlives every charge on it.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace spin::server {

class BodyCharge {
 public:
  BodyCharge() = default;
  explicit BodyCharge(std::atomic<uint64_t>& total) : total_(&total) {}
  BodyCharge(BodyCharge&& other) noexcept
      : total_(std::exchange(other.total_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  BodyCharge& operator=(BodyCharge&& other) noexcept {
    if (this == &other) return *this;
    release();
    total_ = std::exchange(other.total_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }
  BodyCharge(const BodyCharge&) = delete;
  BodyCharge& operator=(const BodyCharge&) = delete;
  ~BodyCharge() { release(); }

  // Returns the new total. Requires: made with a total and not moved from.
  uint64_t add(uint64_t bytes) {
    bytes_ += bytes;
    return total_->fetch_add(bytes, std::memory_order_relaxed) + bytes;
  }
  // Requires: `bytes` of this charge's own.
  void take_back(uint64_t bytes) {
    bytes_ -= bytes;
    total_->fetch_sub(bytes, std::memory_order_relaxed);
  }
  void release() {
    if (total_ != nullptr) total_->fetch_sub(bytes_, std::memory_order_relaxed);
    bytes_ = 0;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  std::atomic<uint64_t>* total_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace spin::server
