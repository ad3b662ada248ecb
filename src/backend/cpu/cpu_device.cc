// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_device.h"

#include <string>
#include <utility>

#include "backend/cpu/cpu_kv_ops.h"
#include "backend/cpu/cpu_ops.h"
#include "backend/cpu/cpu_sparse_ops.h"
#include "backend/cpu/cpu_stream.h"
#include "backend/cpu/host_memory.h"
#include "base/machine.h"
#include "base/thread_pool.h"

namespace spin::backend::cpu {
namespace {

class CpuDevice final : public Device {
 public:
  CpuDevice(DeviceProperties properties,
            uint64_t fast_memory_bytes,
            std::unique_ptr<base::ThreadPool> pool,
            const KernelSet& kernels)
      : properties_(std::move(properties)),
        fast_("fast", fast_memory_bytes),
        host_("host", properties_.memory_bytes),
        pool_(std::move(pool)),
        ops_(kernels, *pool_, fast_, host_),
        kv_ops_(kernels, *pool_, host_),
        sparse_ops_(kernels, *pool_, host_) {}

  const DeviceProperties& properties() const override { return properties_; }

  MemoryResource& memory(MemoryKind kind) override {
    return kind == MemoryKind::kFast ? fast_ : host_;
  }

  Result<std::unique_ptr<Stream>> create_stream(std::string_view name) override {
    SPIN_ASSIGN_OR_RETURN(auto stream, CpuStream::create(name));
    return std::unique_ptr<Stream>(std::move(stream));
  }

  Ops& ops() override { return ops_; }
  KvOps& kv_ops() override { return kv_ops_; }
  SparseOps& sparse_ops() override { return sparse_ops_; }

 private:
  const DeviceProperties properties_;
  HostMemory fast_;
  HostMemory host_;
  const std::unique_ptr<base::ThreadPool> pool_;
  CpuOps ops_;
  CpuKvOps kv_ops_;
  CpuSparseOps sparse_ops_;
};

}  // namespace

Result<std::unique_ptr<Device>> create_cpu_device(const CpuDeviceOptions& options) {
  const uint32_t threads = options.threads != 0 ? options.threads : base::usable_cpus();
  SPIN_ASSIGN_OR_RETURN(const KernelSet kernels, select_kernels(options.isa));
  SPIN_ASSIGN_OR_RETURN(auto pool, base::ThreadPool::create(threads));
  DeviceProperties properties;
  properties.threads = threads;
  properties.fast_bf16 = kernels.has_fast_bf16;
  properties.memory_bytes = properties.host_memory_bytes = base::usable_memory_bytes();
  properties.name = base::cpu_model_name() + ", " + std::to_string(threads) +
                    (threads == 1 ? " thread, " : " threads, ") + kernels.name;
  const uint64_t fast_bytes =
      options.fast_memory_bytes != 0 ? options.fast_memory_bytes : properties.memory_bytes;
  return std::unique_ptr<Device>(
      std::make_unique<CpuDevice>(std::move(properties), fast_bytes, std::move(pool), kernels));
}

}  // namespace spin::backend::cpu
