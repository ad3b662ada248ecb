// SPDX-License-Identifier: Apache-2.0
// Streams and devices around others, which make mistakes in ordering and error handling show:
// delays that change who comes first, and work that fails. The decorated object outlives its
// decorator unless it is owned. Thread: as the interfaces say.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <string>

#include "backend/device.h"

namespace spin::backend {

// Passes everything on; what the others build on.
class StreamDecorator : public Stream {
 public:
  explicit StreamDecorator(std::unique_ptr<Stream> inner) : inner_(std::move(inner)) {}

  void enqueue_copy(void* dst, const void* src, size_t bytes) override {
    inner_->enqueue_copy(dst, src, bytes);
  }
  void enqueue_task(std::function<Status()> work) override {
    inner_->enqueue_task(std::move(work));
  }
  Event record_event() override { return inner_->record_event(); }
  void enqueue_wait(const Event& event) override { inner_->enqueue_wait(event); }
  Status wait_idle() override { return inner_->wait_idle(); }

 protected:
  Stream& inner() { return *inner_; }

 private:
  std::unique_ptr<Stream> inner_;
};

// Sleeps on the stream before some copies and tasks, by a seeded schedule: about half of them, up
// to `longest`. Two streams with different seeds drift apart, so that a forgotten enqueue_wait()
// reads data that is not there yet.
class DelayingStream final : public StreamDecorator {
 public:
  DelayingStream(std::unique_ptr<Stream> inner, uint64_t seed, std::chrono::microseconds longest)
      : StreamDecorator(std::move(inner)), random_(seed), longest_(longest) {}

  void enqueue_copy(void* dst, const void* src, size_t bytes) override;
  void enqueue_task(std::function<Status()> work) override;

 private:
  void enqueue_delay();

  std::mt19937_64 random_;
  const std::chrono::microseconds longest_;
};

// Gives DelayingStreams; the n-th stream's schedule comes from seed + n.
class DelayingDevice final : public Device {
 public:
  // Lifetime: inner outlives this object and its streams.
  DelayingDevice(Device& inner, uint64_t seed, std::chrono::microseconds longest)
      : inner_(inner), next_seed_(seed), longest_(longest) {}

  const DeviceProperties& properties() const override { return inner_.properties(); }
  MemoryResource& memory(MemoryKind kind) override { return inner_.memory(kind); }
  Result<std::unique_ptr<Stream>> create_stream(std::string_view name) override;
  Ops& ops() override { return inner_.ops(); }
  KvOps& kv_ops() override { return inner_.kv_ops(); }
  SparseOps& sparse_ops() override { return inner_.sparse_ops(); }

 private:
  Device& inner_;
  std::atomic<uint64_t> next_seed_;
  const std::chrono::microseconds longest_;
};

// Replaces the `fail_at`-th copy or task from now (counted from 1; 0: none) by an error, which then
// is the stream's.
class FailingStream final : public StreamDecorator {
 public:
  FailingStream(std::unique_ptr<Stream> inner, uint64_t fail_at, Status error)
      : StreamDecorator(std::move(inner)), countdown_(fail_at), error_(std::move(error)) {}

  void enqueue_copy(void* dst, const void* src, size_t bytes) override;
  void enqueue_task(std::function<Status()> work) override;

 private:
  bool is_due() { return countdown_ != 0 && --countdown_ == 0; }

  uint64_t countdown_;
  const Status error_;
};

}  // namespace spin::backend
