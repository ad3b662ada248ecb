// SPDX-License-Identifier: Apache-2.0
#include "backend/separate_memory.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include <sys/mman.h>

#include "backend/device_decorators.h"
#include "base/check.h"
#include "base/checked_math.h"
#include "base/mutex.h"

namespace spin::backend {
namespace {

constexpr size_t kSystemPage = 4096;

}  // namespace

// One reserved range of addresses. Allocations follow one another and are never reused: what was
// freed reads as zeros.
class SeparateMemory final : public MemoryResource {
 public:
  static Result<std::unique_ptr<SeparateMemory>> create(uint64_t bytes) {
    void* base =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
      return Status(StatusCode::kResourceExhausted,
                    "cannot reserve " + std::to_string(bytes) + " bytes of addresses");
    }
    return std::unique_ptr<SeparateMemory>(
        new SeparateMemory(static_cast<std::byte*>(base), static_cast<size_t>(bytes)));
  }
  ~SeparateMemory() override { munmap(base_, size_); }
  SeparateMemory(const SeparateMemory&) = delete;
  SeparateMemory& operator=(const SeparateMemory&) = delete;

  Result<void*> allocate(size_t bytes, size_t alignment) override {
    SPIN_CHECK(alignment <= kSystemPage);
    base::MutexLock lock(mutex_);
    const size_t taken = base::ceil_div(bytes + 1, kSystemPage) * kSystemPage;
    if (taken > size_ - end_) {
      return Status(StatusCode::kResourceExhausted, "cannot allocate " + std::to_string(bytes) +
                                                        " bytes of fast memory; " +
                                                        std::to_string(size_ - end_) + " are left");
    }
    std::byte* pointer = base_ + end_;
    end_ += taken;
    in_use_ += bytes;
    // A gate that is open stays open for what has just been made.
    if (open_ > 0) SPIN_CHECK(mprotect(pointer, taken, PROT_READ | PROT_WRITE) == 0);
    return static_cast<void*>(pointer);
  }

  void deallocate(void* pointer, size_t bytes, size_t) override {
    base::MutexLock lock(mutex_);
    in_use_ -= bytes;
    const size_t taken = base::ceil_div(bytes + 1, kSystemPage) * kSystemPage;
    SPIN_CHECK(madvise(pointer, taken, MADV_DONTNEED) == 0);
  }

  uint64_t bytes_in_use() const override {
    base::MutexLock lock(mutex_);
    return in_use_;
  }
  uint64_t size_bytes() const { return size_; }

  // Work that may touch the memory begins and ends; on any thread.
  void open() {
    base::MutexLock lock(mutex_);
    if (open_++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  void close() {
    base::MutexLock lock(mutex_);
    if (--open_ == 0) protect(PROT_NONE);
  }

 private:
  SeparateMemory(std::byte* base, size_t size) : base_(base), size_(size) {}

  void protect(int access) SPIN_REQUIRES(mutex_) {
    if (end_ > 0) SPIN_CHECK(mprotect(base_, end_, access) == 0);
  }

  mutable base::Mutex mutex_;
  std::byte* const base_;
  const size_t size_;
  size_t end_ SPIN_GUARDED_BY(mutex_) = 0;
  uint64_t in_use_ SPIN_GUARDED_BY(mutex_) = 0;
  int open_ SPIN_GUARDED_BY(mutex_) = 0;
};

namespace {

// Opens the memory around each piece of work and waits for it.
class SeparateMemoryStream final : public StreamDecorator {
 public:
  SeparateMemoryStream(std::unique_ptr<Stream> inner, SeparateMemory& fast)
      : StreamDecorator(std::move(inner)), fast_(fast) {}

  void enqueue_copy(void* dst, const void* src, size_t bytes) override {
    fast_.open();
    inner().enqueue_copy(dst, src, bytes);
    finish();
    fast_.close();
  }
  void enqueue_task(std::function<Status()> work) override {
    fast_.open();
    inner().enqueue_task(std::move(work));
    finish();
    fast_.close();
  }

 private:
  void finish() {
    const Event done = inner().record_event();
    if (done.state() != nullptr) done.state()->wait_complete();
  }

  SeparateMemory& fast_;
};

}  // namespace

Result<std::unique_ptr<SeparateMemoryDevice>> SeparateMemoryDevice::create(
    std::unique_ptr<Device> inner, uint64_t fast_memory_bytes) {
  SPIN_CHECK(inner->properties().unified_memory && fast_memory_bytes % kSystemPage == 0);
  SPIN_ASSIGN_OR_RETURN(auto fast, SeparateMemory::create(fast_memory_bytes));
  return std::unique_ptr<SeparateMemoryDevice>(
      new SeparateMemoryDevice(std::move(inner), std::move(fast)));
}

SeparateMemoryDevice::SeparateMemoryDevice(std::unique_ptr<Device> inner,
                                           std::unique_ptr<SeparateMemory> fast)
    : inner_(std::move(inner)), properties_(inner_->properties()), fast_(std::move(fast)) {
  properties_.unified_memory = false;
  properties_.memory_bytes = std::min(properties_.memory_bytes, fast_->size_bytes());
}

SeparateMemoryDevice::~SeparateMemoryDevice() = default;

MemoryResource& SeparateMemoryDevice::memory(MemoryKind kind) {
  if (kind == MemoryKind::kFast) return *fast_;
  return inner_->memory(kind);
}

Result<std::unique_ptr<Stream>> SeparateMemoryDevice::create_stream(std::string_view name) {
  SPIN_ASSIGN_OR_RETURN(auto stream, inner_->create_stream(name));
  return std::unique_ptr<Stream>(std::make_unique<SeparateMemoryStream>(std::move(stream), *fast_));
}

}  // namespace spin::backend
