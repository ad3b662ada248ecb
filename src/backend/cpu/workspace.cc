// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/workspace.h"

#include <algorithm>
#include <new>

namespace spin::backend::cpu {

Result<WorkspacePool::Lease> WorkspacePool::take(size_t bytes) {
  Buffer buffer;
  {
    base::MutexLock lock(mutex_);
    if (!free_.empty()) {
      buffer = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (buffer.data() == nullptr || buffer.size_bytes() < bytes) {
    // A little more than asked, so that slowly growing contexts do not allocate each time. The old
    // block goes first: both at once would be the peak.
    const size_t wanted = std::max<size_t>(bytes + bytes / 4, 4096);
    buffer = Buffer();
    SPIN_ASSIGN_OR_RETURN(buffer, Buffer::allocate(memory_, wanted, 64));
  }
  return Lease(*this, std::move(buffer));
}

void WorkspacePool::give_back(Buffer buffer) {
  base::MutexLock lock(mutex_);
  try {
    free_.push_back(std::move(buffer));
  } catch (const std::bad_alloc&) {  // called by destructors: without a place it is freed
  }
}

}  // namespace spin::backend::cpu
