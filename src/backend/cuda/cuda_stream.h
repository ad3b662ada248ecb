// SPDX-License-Identifier: Apache-2.0
// A stream of one GPU. Host work (enqueue_task) runs on the driver's callback thread.
//
// Errors: the first one stays, be it a launch that was refused, a task's, or a fault that a kernel
// found and reported through its KernelFault. Work queued after an error that the host knows of is
// not queued; kernels that follow a kernel's fault run, on memory that stays valid.
// Thread: enqueueing by external synchronisation.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <cuda_runtime_api.h>

#include "backend/device.h"
#include "base/mutex.h"

namespace spin::backend::cuda {

// What a kernel can find wrong with what the engine asked for; the stream's error is kInternal.
enum class KernelFault : uint32_t {
  kNone = 0,
  kListTooLong = 1,    // more pages than the list's stride
  kCacheTooSmall = 2,  // Retrieve: wanted pages do not fit the cache entries
  kTooManyPages = 3,   // a map or a lease has more pages than its arrays
};

class CudaStream final : public Stream {
 public:
  // Errors: kResourceExhausted, kInternal. Lifetime: `fast` outlives it.
  static Result<std::unique_ptr<CudaStream>> create(int ordinal,
                                                    MemoryResource& fast,
                                                    std::string_view name);

  // Waits for what is still queued.
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void enqueue_copy(void* dst, const void* src, size_t bytes) override;
  void enqueue_task(std::function<Status()> work) override;
  Event record_event() override;
  void enqueue_wait(const Event& event) override;
  Status wait_idle() override;

  // For the operations: begin() makes the GPU this thread's and says whether to go on;
  // end(name) takes a launch's error. handle() in between.
  bool begin();
  cudaStream_t handle() const { return handle_; }
  void end(const char* name);
  void fail(Status status);
  // Fast memory for what kernels of one operation hand to each other, aligned to 256 bytes; the
  // next operation on this stream gets the same. Null if there is none left: the stream has failed
  // then.
  void* scratch(size_t bytes);
  // Where kernels report a KernelFault (pinned; report_fault() of kernel_support.cuh).
  uint32_t* fault() const { return fault_; }

 private:
  // Shared with callbacks that may still run.
  struct Error {
    base::Mutex mutex;
    Status status SPIN_GUARDED_BY(mutex);
    std::atomic<bool> failed = false;
    void set(Status new_status);
  };
  struct Task;

  CudaStream(int ordinal, MemoryResource& fast, std::string_view name)
      : ordinal_(ordinal), fast_(fast), name_(name) {}

  const int ordinal_;
  MemoryResource& fast_;
  const std::string name_;
  cudaStream_t handle_ = nullptr;
  uint32_t* fault_ = nullptr;
  Buffer scratch_;
  std::vector<Buffer> outgrown_;  // earlier scratch that queued work may still use
  std::shared_ptr<Error> error_ = std::make_shared<Error>();
};

// The CUDA stream behind a borrowed one. Requires: it is one (decorators are for the CPU backend).
CudaStream& cuda_stream(StreamRef stream);

}  // namespace spin::backend::cuda
