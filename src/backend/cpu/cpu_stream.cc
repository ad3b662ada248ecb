// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_stream.h"

#include <cstring>
#include <string>
#include <utility>

#include <pthread.h>

#include "base/memory_guard.h"
#include "base/start_thread.h"
#include "base/thread_pool.h"

namespace spin::backend::cpu {
namespace {

class CpuEvent final : public Event::State {
 public:
  bool is_complete() const override { return complete_.load(std::memory_order_acquire); }

  void wait_complete() override {
    if (base::spin_until([this] { return is_complete(); }, base::ThreadPool::kSpinTime)) return;
    base::MutexLock lock(mutex_);
    while (!is_complete()) completed_.wait(mutex_);
  }

  void complete() {
    base::MutexLock lock(mutex_);
    complete_.store(true, std::memory_order_release);
    completed_.notify_all();
  }

 private:
  std::atomic<bool> complete_ = false;
  base::Mutex mutex_;
  base::CondVar completed_;
};

}  // namespace

Result<std::unique_ptr<CpuStream>> CpuStream::create(std::string_view name) {
  std::unique_ptr<CpuStream> stream(new CpuStream);
  SPIN_RETURN_IF_ERROR(base::start_thread(stream->worker_, "stream " + std::string(name),
                                          [raw = stream.get()] { raw->worker_loop(); }));
  // The kernel takes at most 15 characters; a refused name does no harm.
  (void)pthread_setname_np(stream->worker_.native_handle(),
                           std::string(name.substr(0, 15)).c_str());
  return stream;
}

CpuStream::~CpuStream() {
  base::MutexLock lock(mutex_);
  stopping_ = true;
  has_work_.store(true, std::memory_order_release);
  pushed_.notify_one();
}

void CpuStream::push(Item item) {
  base::MutexLock lock(mutex_);
  queue_.push_back(std::move(item));
  has_work_.store(true, std::memory_order_release);
  if (worker_sleeps_) pushed_.notify_one();
}

void CpuStream::enqueue_copy(void* dst, const void* src, size_t bytes) {
  enqueue_host([dst, src, bytes] {
    if (bytes != 0) std::memcpy(dst, src, bytes);
  });
}

void CpuStream::enqueue_task(std::function<Status()> work) { push({std::move(work), false}); }

Event CpuStream::record_event() {
  auto state = std::make_shared<CpuEvent>();
  push({[state] {
          state->complete();
          return ok_status();
        },
        true});
  return Event(std::move(state));
}

void CpuStream::enqueue_wait(const Event& event) {
  if (is_complete(event)) return;
  push({[state = event.state()] {
          state->wait_complete();
          return ok_status();
        },
        true});
}

Status CpuStream::wait_idle() {
  base::MutexLock lock(mutex_);
  while (busy_ || !queue_.empty()) idle_.wait(mutex_);
  return error_;
}

void CpuStream::worker_loop() {
  while (true) {
    base::spin_until([this] { return has_work_.load(std::memory_order_acquire); },
                     base::ThreadPool::kSpinTime);
    Item item;
    bool skip = false;
    {
      base::MutexLock lock(mutex_);
      while (queue_.empty() && !stopping_) {
        worker_sleeps_ = true;
        pushed_.wait(mutex_);
        worker_sleeps_ = false;
      }
      if (queue_.empty()) return;
      item = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      skip = !item.always && !error_.ok();
      has_work_.store(!queue_.empty() || stopping_, std::memory_order_release);
    }
    Status status =
        skip ? ok_status() : base::guard_memory("queued work ran", [&] { return item.work(); });
    item = Item();  // what the work owns is gone before the stream reports idle
    base::MutexLock lock(mutex_);
    if (!status.ok() && error_.ok()) error_ = std::move(status);
    busy_ = false;
    if (queue_.empty()) idle_.notify_all();
  }
}

}  // namespace spin::backend::cpu
