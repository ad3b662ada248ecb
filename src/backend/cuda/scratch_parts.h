// SPDX-License-Identifier: Apache-2.0
// Arrays of one operation, one behind the other in the stream's scratch (CudaStream::scratch()):
// first all are added, then the memory is taken and each is found by its offset.
// Thread: external synchronisation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spin::backend::cuda {

class ScratchParts {
 public:
  // Offset of `count` elements of T, a multiple of 256 bytes.
  template <typename T>
  size_t add(uint64_t count) {
    const size_t offset = bytes_;
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return offset;
  }
  size_t bytes() const { return bytes_; }

  template <typename T>
  static T* at(void* memory, size_t offset) {
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory) + offset);
  }

 private:
  size_t bytes_ = 0;
};

}  // namespace spin::backend::cuda
