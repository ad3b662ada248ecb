// SPDX-License-Identifier: Apache-2.0
// A stream of the CPU backend: one thread that runs queued work in order. Compute operations go
// through enqueue_task() like any other work, so decorated streams see all of it.
// Thread: enqueueing by external synchronisation; the queue itself is thread-safe.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string_view>
#include <thread>

#include "backend/device.h"
#include "base/mutex.h"

namespace spin::backend::cpu {

class CpuStream final : public Stream {
 public:
  // Errors: kResourceExhausted if the system refuses the thread.
  static Result<std::unique_ptr<CpuStream>> create(std::string_view name);

  // Runs what is still queued, then ends the thread.
  ~CpuStream() override;
  CpuStream(const CpuStream&) = delete;
  CpuStream& operator=(const CpuStream&) = delete;

  void enqueue_copy(void* dst, const void* src, size_t bytes) override;
  void enqueue_task(std::function<Status()> work) override;
  Event record_event() override;
  void enqueue_wait(const Event& event) override;
  Status wait_idle() override;

 private:
  struct Item {
    std::function<Status()> work;
    bool always = false;  // events and waits run after an error too, so that nobody hangs
  };

  CpuStream() = default;
  void push(Item item);
  void worker_loop();

  base::Mutex mutex_;
  base::CondVar pushed_;
  base::CondVar idle_;
  std::deque<Item> queue_ SPIN_GUARDED_BY(mutex_);
  Status error_ SPIN_GUARDED_BY(mutex_);
  bool busy_ SPIN_GUARDED_BY(mutex_) = false;
  bool worker_sleeps_ SPIN_GUARDED_BY(mutex_) = false;
  bool stopping_ SPIN_GUARDED_BY(mutex_) = false;
  std::atomic<bool> has_work_ = false;  // what the spinning worker watches
  std::jthread worker_;                 // last member: joined before the rest goes
};

}  // namespace spin::backend::cpu
