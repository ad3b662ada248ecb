// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/cuda_device.h"

#include <string>
#include <utility>

#include <cuda_runtime_api.h>

#include "backend/chunked_memory.h"
#include "backend/cuda/cuda_kv_ops.h"
#include "backend/cuda/cuda_memory.h"
#include "backend/cuda/cuda_ops.h"
#include "backend/cuda/cuda_sparse_ops.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/cuda_stream.h"
#include "base/machine.h"

namespace spin::backend::cuda {
namespace {

constexpr int kLeastMajor = 8;
constexpr size_t kFastChunk = size_t{64} << 20;
constexpr size_t kPinnedChunk = size_t{16} << 20;

class CudaDevice final : public Device {
 public:
  CudaDevice(int ordinal, uint64_t fast_memory_bytes, DeviceProperties properties)
      : ordinal_(ordinal),
        properties_(std::move(properties)),
        device_memory_(ordinal, fast_memory_bytes),
        pinned_memory_(ordinal),
        fast_(device_memory_, kFastChunk),
        host_(pinned_memory_, kPinnedChunk),
        ops_(ordinal, fast_, host_),
        kv_ops_(ordinal, fast_),
        sparse_ops_(ordinal, fast_) {}

  Status initialize() { return ops_.initialize(); }

  const DeviceProperties& properties() const override { return properties_; }
  MemoryResource& memory(MemoryKind kind) override {
    return kind == MemoryKind::kFast ? fast_ : host_;
  }
  Result<std::unique_ptr<Stream>> create_stream(std::string_view name) override {
    SPIN_ASSIGN_OR_RETURN(auto stream, CudaStream::create(ordinal_, fast_, name));
    return std::unique_ptr<Stream>(std::move(stream));
  }
  Ops& ops() override { return ops_; }
  KvOps& kv_ops() override { return kv_ops_; }
  SparseOps& sparse_ops() override { return sparse_ops_; }

 private:
  const int ordinal_;
  const DeviceProperties properties_;
  DeviceMemory device_memory_;
  PinnedMemory pinned_memory_;
  ChunkedMemoryResource fast_;
  ChunkedMemoryResource host_;
  CudaOps ops_;
  CudaKvOps kv_ops_;
  CudaSparseOps sparse_ops_;
};

}  // namespace

Result<std::unique_ptr<Device>> create_cuda_device(const CudaDeviceOptions& options) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || options.ordinal < 0 || options.ordinal >= count) {
    (void)cudaGetLastError();
    return Status(StatusCode::kUnsupported,
                  error == cudaSuccess
                      ? "there is no GPU " + std::to_string(options.ordinal) + " among " +
                            std::to_string(count)
                      : std::string("no GPU can be used: ") + cudaGetErrorName(error));
  }
  cudaDeviceProp gpu = {};
  SPIN_RETURN_IF_ERROR(
      cuda_status(cudaGetDeviceProperties(&gpu, options.ordinal), "read the GPU's properties"));
  if (gpu.major < kLeastMajor) {
    return Status(StatusCode::kUnsupported,
                  "the GPU has compute capability " + std::to_string(gpu.major) + "." +
                      std::to_string(gpu.minor) + ", expected 8.0 or later");
  }
  DeviceProperties properties;
  properties.name = gpu.name;
  properties.threads = static_cast<uint32_t>(gpu.multiProcessorCount);
  properties.fast_bf16 = true;
  properties.memory_bytes = gpu.totalGlobalMem;
  properties.host_memory_bytes = base::usable_memory_bytes();
  properties.unified_memory = false;
  auto device = std::make_unique<CudaDevice>(options.ordinal, options.fast_memory_bytes,
                                             std::move(properties));
  SPIN_RETURN_IF_ERROR(device->initialize());
  return std::unique_ptr<Device>(std::move(device));
}

}  // namespace spin::backend::cuda
