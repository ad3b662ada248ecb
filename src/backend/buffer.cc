// SPDX-License-Identifier: Apache-2.0
#include "backend/device.h"

namespace spin::backend {

Result<Buffer> Buffer::allocate(MemoryResource& resource, size_t bytes, size_t alignment) {
  SPIN_ASSIGN_OR_RETURN(void* data, resource.allocate(bytes, alignment));
  Buffer buffer;
  buffer.resource_ = &resource;
  buffer.data_ = data;
  buffer.bytes_ = bytes;
  buffer.alignment_ = alignment;
  return buffer;
}

Buffer::~Buffer() {
  if (data_ != nullptr) resource_->deallocate(data_, bytes_, alignment_);
}

}  // namespace spin::backend
