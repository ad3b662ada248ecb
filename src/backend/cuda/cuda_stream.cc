// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/cuda_stream.h"

#include <algorithm>
#include <utility>

#include "backend/cuda/cuda_status.h"
#include "base/check.h"
#include "base/memory_guard.h"

namespace spin::backend::cuda {
namespace {

class CudaEvent final : public Event::State {
 public:
  static std::shared_ptr<CudaEvent> create() {
    cudaEvent_t handle = nullptr;
    if (cudaEventCreateWithFlags(&handle, cudaEventDisableTiming) != cudaSuccess) return nullptr;
    return std::make_shared<CudaEvent>(handle);
  }
  explicit CudaEvent(cudaEvent_t handle) : handle_(handle) {}
  ~CudaEvent() override { (void)cudaEventDestroy(handle_); }

  // An error counts as complete: nothing will run any more, and the stream reports it.
  bool is_complete() const override { return cudaEventQuery(handle_) != cudaErrorNotReady; }
  void wait_complete() override { (void)cudaEventSynchronize(handle_); }

  cudaEvent_t handle() const { return handle_; }

 private:
  const cudaEvent_t handle_;
};

const char* describe(KernelFault fault) {
  switch (fault) {
    case KernelFault::kListTooLong:
      return "a list of pages is longer than its stride";
    case KernelFault::kCacheTooSmall:
      return "wanted pages do not fit the cache entries";
    case KernelFault::kTooManyPages:
      return "more pages than the arrays hold";
    case KernelFault::kNone:
      break;
  }
  return "an unknown fault";
}

}  // namespace

void CudaStream::Error::set(Status new_status) {
  base::MutexLock lock(mutex);
  if (status.ok()) status = std::move(new_status);
  failed.store(true, std::memory_order_release);
}

Result<std::unique_ptr<CudaStream>> CudaStream::create(int ordinal,
                                                       MemoryResource& fast,
                                                       std::string_view name) {
  std::unique_ptr<CudaStream> stream(new CudaStream(ordinal, fast, name));
  const std::string what = "create stream " + stream->name_;
  SPIN_RETURN_IF_ERROR(cuda_status(cudaSetDevice(ordinal), what));
  SPIN_RETURN_IF_ERROR(
      cuda_status(cudaStreamCreateWithFlags(&stream->handle_, cudaStreamNonBlocking), what));
  void* fault = nullptr;
  SPIN_RETURN_IF_ERROR(cuda_status(
      cudaHostAlloc(&fault, sizeof(uint32_t), cudaHostAllocPortable | cudaHostAllocMapped), what));
  stream->fault_ = static_cast<uint32_t*>(fault);
  *stream->fault_ = 0;
  return stream;
}

CudaStream::~CudaStream() {
  (void)cudaSetDevice(ordinal_);
  if (handle_ != nullptr) {
    (void)cudaStreamSynchronize(handle_);
    (void)cudaStreamDestroy(handle_);
  }
  if (fault_ != nullptr) (void)cudaFreeHost(fault_);
}

void CudaStream::fail(Status status) {
  if (!status.ok()) error_->set(std::move(status).with_context("stream " + name_));
}

bool CudaStream::begin() {
  if (error_->failed.load(std::memory_order_acquire)) return false;
  fail(cuda_status(cudaSetDevice(ordinal_), "select the GPU"));
  return !error_->failed.load(std::memory_order_acquire);
}

void CudaStream::end(const char* name) { fail(cuda_status(cudaGetLastError(), name)); }

void* CudaStream::scratch(size_t bytes) {
  if (bytes <= scratch_.size_bytes()) return scratch_.data();
  // Grows by doubling: few sizes are ever taken.
  auto larger = Buffer::allocate(fast_, std::max(bytes, 2 * scratch_.size_bytes()), 256);
  if (!larger.ok()) larger = Buffer::allocate(fast_, bytes, 256);
  if (!larger.ok()) {
    fail(larger.status().with_context("scratch"));
    return nullptr;
  }
  if (scratch_.size_bytes() > 0) outgrown_.push_back(std::move(scratch_));
  scratch_ = std::move(larger).value();
  return scratch_.data();
}

void CudaStream::enqueue_copy(void* dst, const void* src, size_t bytes) {
  if (bytes == 0 || !begin()) return;
  fail(cuda_status(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, handle_), "copy"));
}

struct CudaStream::Task {
  std::function<Status()> work;
  std::shared_ptr<Error> error;

  static void run(void* pointer) {
    const std::unique_ptr<Task> task(static_cast<Task*>(pointer));
    if (task->error->failed.load(std::memory_order_acquire)) return;
    Status status = base::guard_memory("queued work ran", [&] { return task->work(); });
    if (!status.ok()) task->error->set(std::move(status));
  }
};

void CudaStream::enqueue_task(std::function<Status()> work) {
  if (!begin()) return;
  auto task = std::make_unique<Task>(Task{std::move(work), error_});
  const cudaError_t error = cudaLaunchHostFunc(handle_, Task::run, task.get());
  if (error == cudaSuccess) (void)task.release();  // run() frees it
  fail(cuda_status(error, "queue a task"));
}

Event CudaStream::record_event() {
  // After an error too: waiting for what was queued before it is right.
  (void)cudaSetDevice(ordinal_);
  auto event = CudaEvent::create();
  if (event == nullptr || cudaEventRecord(event->handle(), handle_) != cudaSuccess) {
    fail(Status(StatusCode::kInternal, "an event could not be recorded"));
    return Event();
  }
  return Event(std::move(event));
}

void CudaStream::enqueue_wait(const Event& event) {
  if (event.state() == nullptr || !begin()) return;
  const auto* state = dynamic_cast<const CudaEvent*>(event.state().get());
  SPIN_CHECK(state != nullptr);
  fail(cuda_status(cudaStreamWaitEvent(handle_, state->handle(), 0), "wait for an event"));
}

Status CudaStream::wait_idle() {
  (void)cudaSetDevice(ordinal_);
  fail(cuda_status(cudaStreamSynchronize(handle_), "run queued work"));
  outgrown_.clear();
  // Kernels wrote it, if at all, before the stream was idle.
  const uint32_t fault = std::atomic_ref<uint32_t>(*fault_).load(std::memory_order_acquire);
  if (fault != 0) fail(Status(StatusCode::kInternal, describe(static_cast<KernelFault>(fault))));
  base::MutexLock lock(error_->mutex);
  return error_->status;
}

CudaStream& cuda_stream(StreamRef stream) {
  auto* const found = dynamic_cast<CudaStream*>(&stream);
  SPIN_CHECK(found != nullptr);
  return *found;
}

}  // namespace spin::backend::cuda
