// SPDX-License-Identifier: Apache-2.0
// A device with its memory, streams and events. Upper layers see only these interfaces; the CPU
// backend imitates them (a stream is a FIFO worker), so that ordering mistakes show up under the
// sanitizers without a GPU.
//
// A function whose name begins with enqueue_ only queues work; one that begins with wait_ blocks.
// Errors of queued work are sticky: the stream keeps the first one, later work on it is skipped,
// and wait_idle() reports it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "spin/status.h"

namespace spin::backend {

class KvOps;
class Ops;
class SparseOps;
class Stream;

// Which tier of memory. On the CPU both lie in host memory; the fast arena can be bounded.
enum class MemoryKind : uint8_t { kFast, kHost };

// Allocates raw memory. Thread: thread-safe. Decorators (backend/memory_decorators.h) limit, count
// and fail.
class MemoryResource {
 public:
  virtual ~MemoryResource() = default;

  // Requires: alignment is a power of two. Memory is not initialised.
  // Errors: kResourceExhausted with the bytes asked for and, where known, the bytes left.
  virtual Result<void*> allocate(size_t bytes, size_t alignment) = 0;

  // Requires: `pointer` came from allocate(bytes, alignment) of this resource and no queued work
  // uses it.
  virtual void deallocate(void* pointer, size_t bytes, size_t alignment) = 0;

  // Bytes handed out and not yet returned.
  virtual uint64_t bytes_in_use() const = 0;
};

// Owns one allocation. Move-only. Lifetime: the resource outlives the buffer.
class Buffer {
 public:
  Buffer() = default;
  static Result<Buffer> allocate(MemoryResource& resource, size_t bytes, size_t alignment = 64);
  ~Buffer();
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer taken(std::move(other));
    swap(taken);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  size_t size_bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(resource_, other.resource_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(alignment_, other.alignment_);
  }

  MemoryResource* resource_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  size_t alignment_ = 0;
};

// A point in a stream's work. Copies are cheap and refer to the same point. A default-made event
// is complete. Thread: thread-safe.
class Event {
 public:
  class State;  // defined by the backend

  Event() = default;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
};

// What a backend's event can do.
class Event::State {
 public:
  virtual ~State() = default;
  virtual bool is_complete() const = 0;
  virtual void wait_complete() = 0;
};

inline bool is_complete(const Event& event) {
  return event.state() == nullptr || event.state()->is_complete();
}

// In-order queue of device work. Thread: external synchronisation (one host thread enqueues).
class Stream {
 public:
  virtual ~Stream() = default;

  // Copies `bytes` from src to dst, any memory kinds; the ranges do not overlap.
  // Lifetime: both ends stay alive until the copy is done.
  virtual void enqueue_copy(void* dst, const void* src, size_t bytes) = 0;

  // Runs `work` in stream order on a host thread; an error it returns becomes the stream's, and a
  // std::bad_alloc kResourceExhausted. `work` must not enqueue on or wait for this stream.
  virtual void enqueue_task(std::function<Status()> work) = 0;

  // As enqueue_task(), for work that cannot fail.
  void enqueue_host(std::function<void()> work) {
    enqueue_task([work = std::move(work)] {
      work();
      return ok_status();
    });
  }

  // Completes when all work queued so far is done.
  virtual Event record_event() = 0;

  // Later work on this stream starts after `event`.
  virtual void enqueue_wait(const Event& event) = 0;

  // Blocks until everything queued is done; the first error of any of it.
  virtual Status wait_idle() = 0;
};

// Borrowed stream, always the last parameter of what enqueues on it.
using StreamRef = Stream&;

struct DeviceProperties {
  std::string name;                // "AMD EPYC ..., 2 threads, avx512_bf16"
  uint32_t threads = 1;            // workers that one operation may use
  bool fast_bf16 = false;          // bf16 products run in hardware; dtype "auto" picks bf16 then
  uint64_t memory_bytes = 0;       // fast memory this process may use
  uint64_t host_memory_bytes = 0;  // host memory it may use (of the machine or its control group)
  // Fast memory is host memory: the host may read and write it while no queued work does, and both
  // sizes are one.
  bool unified_memory = true;
};

// Thread: thread-safe unless a member says otherwise. Lifetime: outlives its streams and buffers.
class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceProperties& properties() const = 0;
  virtual MemoryResource& memory(MemoryKind kind) = 0;
  virtual Result<std::unique_ptr<Stream>> create_stream(std::string_view name) = 0;
  // What the device can compute: the model's layers, KV pages in two tiers, sparse selection.
  virtual Ops& ops() = 0;
  virtual KvOps& kv_ops() = 0;
  virtual SparseOps& sparse_ops() = 0;
};

}  // namespace spin::backend
