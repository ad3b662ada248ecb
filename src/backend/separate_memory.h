// SPDX-License-Identifier: Apache-2.0
// A device whose fast memory the host cannot touch, made of one whose memory is unified: a GPU for
// the code above the backend, for tests on machines without one. Fast memory is mapped without
// access; only while queued work runs it is open. Streams run their work at once, so that every
// access from host code outside queued work ends the process with a segmentation fault, at the
// instruction that is wrong.
//
// Host functions in a stream (enqueue_host) count as queued work and are not caught.
// Thread: as backend/device.h, but one host thread at a time uses the device.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "backend/device.h"

namespace spin::backend {

class SeparateMemory;

class SeparateMemoryDevice final : public Device {
 public:
  // Requires: inner's memory is unified. Errors: kResourceExhausted if `fast_memory_bytes` of
  // addresses cannot be reserved.
  static Result<std::unique_ptr<SeparateMemoryDevice>> create(std::unique_ptr<Device> inner,
                                                              uint64_t fast_memory_bytes);
  ~SeparateMemoryDevice() override;

  const DeviceProperties& properties() const override { return properties_; }
  MemoryResource& memory(MemoryKind kind) override;
  Result<std::unique_ptr<Stream>> create_stream(std::string_view name) override;
  Ops& ops() override { return inner_->ops(); }
  KvOps& kv_ops() override { return inner_->kv_ops(); }
  SparseOps& sparse_ops() override { return inner_->sparse_ops(); }

 private:
  SeparateMemoryDevice(std::unique_ptr<Device> inner, std::unique_ptr<SeparateMemory> fast);

  std::unique_ptr<Device> inner_;
  DeviceProperties properties_;
  std::unique_ptr<SeparateMemory> fast_;
};

}  // namespace spin::backend
