// SPDX-License-Identifier: Apache-2.0
// A device whose streams run on the calling thread in a random, seeded order: whenever somebody
// waits, or the test says so, the head of any stream that may run is run. Work that lacks an
// ordering between streams then meets every order, without threads and without sleeping, and a
// failure repeats with its seed. Thread: one thread. Lifetime: the inner device outlives it, it
// outlives its streams.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/device.h"
#include "base/check.h"

namespace spin::testing {

class ShuffledDevice final : public backend::Device {
 public:
  ShuffledDevice(backend::Device& inner, uint64_t seed) : inner_(inner), random_(seed) {}

  // Waits of streams of this name are left out from now on: the mistake that tests must see.
  void forget_waits_of(std::string name) { forgetful_ = std::move(name); }
  // Whoever waits for a stream of this name runs its work alone: a wait that comes often and is
  // not what the test is about must not bring the others to their ends.
  void wait_alone_for(std::string name) { alone_ = std::move(name); }
  // The n-th copy from now (counted from 1, over all streams; 0: none) fails.
  void fail_copy(uint64_t n) { failing_copy_ = n; }

  // Runs one piece of queued work of a random stream; false if nothing may run.
  bool run_one() {
    runnable_.clear();
    for (Stream* stream : streams_) {
      if (stream->may_run()) runnable_.push_back(stream);
    }
    if (runnable_.empty()) return false;
    runnable_[random_() % runnable_.size()]->run_head();
    return true;
  }
  void run_some(uint64_t most) {
    for (uint64_t i = random_() % (most + 1); i > 0 && run_one(); --i) {
    }
  }
  uint64_t works_run() const { return works_run_; }

  const backend::DeviceProperties& properties() const override { return inner_.properties(); }
  backend::MemoryResource& memory(backend::MemoryKind kind) override { return inner_.memory(kind); }
  Result<std::unique_ptr<backend::Stream>> create_stream(std::string_view name) override {
    return std::unique_ptr<backend::Stream>(std::make_unique<Stream>(*this, std::string(name)));
  }
  backend::Ops& ops() override { return inner_.ops(); }
  backend::KvOps& kv_ops() override { return inner_.kv_ops(); }
  backend::SparseOps& sparse_ops() override { return inner_.sparse_ops(); }

 private:
  class Event final : public backend::Event::State {
   public:
    explicit Event(ShuffledDevice& device) : device_(device) {}
    bool is_complete() const override { return complete_; }
    void wait_complete() override {
      while (!complete_) SPIN_CHECK(device_.run_one());
    }
    void complete() { complete_ = true; }

   private:
    ShuffledDevice& device_;
    bool complete_ = false;
  };

  class Stream final : public backend::Stream {
   public:
    Stream(ShuffledDevice& device, std::string name) : device_(device), name_(std::move(name)) {
      device_.streams_.push_back(this);
    }
    ~Stream() override {
      (void)wait_idle();
      std::erase(device_.streams_, this);
    }

    void enqueue_copy(void* dst, const void* src, size_t bytes) override {
      const bool fails = device_.failing_copy_ != 0 && --device_.failing_copy_ == 0;
      enqueue_task([dst, src, bytes, fails] {
        if (fails) return Status(StatusCode::kIoError, "a copy that the test makes fail");
        std::memcpy(dst, src, bytes);
        return ok_status();
      });
    }
    void enqueue_task(std::function<Status()> work) override {
      queue_.push_back({std::move(work), {}, false});
    }
    backend::Event record_event() override {
      auto event = std::make_shared<Event>(device_);
      queue_.push_back({[event] {
                          event->complete();
                          return ok_status();
                        },
                        {},
                        true});
      return backend::Event(std::move(event));
    }
    void enqueue_wait(const backend::Event& event) override {
      if (name_ == device_.forgetful_ || backend::is_complete(event)) return;
      queue_.push_back({[] { return ok_status(); }, event, true});
    }
    Status wait_idle() override {
      while (name_ == device_.alone_ && may_run()) run_head();
      while (!queue_.empty()) SPIN_CHECK(device_.run_one());
      return error_;
    }

    bool may_run() const {
      return !running_ && !queue_.empty() && backend::is_complete(queue_.front().wait);
    }
    void run_head() {
      Item item = std::move(queue_.front());
      queue_.pop_front();
      ++device_.works_run_;
      if (!item.always && !error_.ok()) return;
      running_ = true;
      const Status status = item.work();
      running_ = false;
      if (!status.ok() && error_.ok()) error_ = status;
    }

   private:
    struct Item {
      std::function<Status()> work;
      backend::Event wait;
      bool always = false;
    };

    ShuffledDevice& device_;
    std::string name_;
    std::deque<Item> queue_;
    Status error_;
    bool running_ = false;
  };

  backend::Device& inner_;
  std::mt19937_64 random_;
  std::vector<Stream*> streams_;
  std::vector<Stream*> runnable_;
  std::string forgetful_;
  std::string alone_;
  uint64_t failing_copy_ = 0;
  uint64_t works_run_ = 0;
};

}  // namespace spin::testing
