// SPDX-License-Identifier: Apache-2.0
#include "backend/device_decorators.h"

#include <thread>
#include <utility>

namespace spin::backend {

void DelayingStream::enqueue_delay() {
  if (random_() % 2 == 0 || longest_.count() == 0) return;
  const auto bound = static_cast<uint64_t>(longest_.count());
  const std::chrono::microseconds delay(static_cast<int64_t>(random_() % bound + 1));
  inner().enqueue_host([delay] { std::this_thread::sleep_for(delay); });
}

void DelayingStream::enqueue_copy(void* dst, const void* src, size_t bytes) {
  enqueue_delay();
  inner().enqueue_copy(dst, src, bytes);
}

void DelayingStream::enqueue_task(std::function<Status()> work) {
  enqueue_delay();
  inner().enqueue_task(std::move(work));
}

Result<std::unique_ptr<Stream>> DelayingDevice::create_stream(std::string_view name) {
  SPIN_ASSIGN_OR_RETURN(auto stream, inner_.create_stream(name));
  const uint64_t seed = next_seed_.fetch_add(1, std::memory_order_relaxed);
  return std::unique_ptr<Stream>(
      std::make_unique<DelayingStream>(std::move(stream), seed, longest_));
}

void FailingStream::enqueue_copy(void* dst, const void* src, size_t bytes) {
  if (!is_due()) return inner().enqueue_copy(dst, src, bytes);
  inner().enqueue_task([error = error_] { return error; });
}

void FailingStream::enqueue_task(std::function<Status()> work) {
  if (!is_due()) return inner().enqueue_task(std::move(work));
  inner().enqueue_task([error = error_] { return error; });
}

}  // namespace spin::backend
