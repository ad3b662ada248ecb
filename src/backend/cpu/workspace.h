// SPDX-License-Identifier: Apache-2.0
// Scratch memory of running operations. Blocks are kept and reused, so that a steady workload
// allocates nothing; there are as many as operations have run at the same time.
// Thread: thread-safe; a Lease belongs to one operation.
#pragma once

#include <utility>
#include <vector>

#include "backend/device.h"
#include "base/mutex.h"

namespace spin::backend::cpu {

class WorkspacePool {
 public:
  // Lifetime: memory outlives the pool.
  explicit WorkspacePool(MemoryResource& memory) : memory_(memory) {}

  // A block that returns to the pool at the end of its life. Lifetime: the pool outlives it.
  class Lease {
   public:
    Lease(WorkspacePool& pool, Buffer buffer) : pool_(&pool), buffer_(std::move(buffer)) {}
    Lease(Lease&&) = default;
    Lease& operator=(Lease&&) = delete;
    ~Lease() {
      if (buffer_.data() != nullptr) pool_->give_back(std::move(buffer_));
    }

    char* data() const { return buffer_.as<char>(); }

   private:
    WorkspacePool* pool_;
    Buffer buffer_;
  };

  // At least `bytes`, aligned to 64. Errors: kResourceExhausted.
  Result<Lease> take(size_t bytes);

 private:
  void give_back(Buffer buffer);

  MemoryResource& memory_;
  base::Mutex mutex_;
  std::vector<Buffer> free_ SPIN_GUARDED_BY(mutex_);
};

}  // namespace spin::backend::cpu
