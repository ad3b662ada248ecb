// SPDX-License-Identifier: Apache-2.0
// The largest allocation and the peak of a piece of code. Tests only; replaces operator new of this
// executable. Thread: counts the calling thread only.
#pragma once

#include <cstddef>

namespace spin::testing {

class AllocationWatch {
 public:
  AllocationWatch();
  ~AllocationWatch();
  AllocationWatch(const AllocationWatch&) = delete;
  AllocationWatch& operator=(const AllocationWatch&) = delete;

  // Bytes of the largest operator new call of this thread since construction.
  size_t largest() const;
  // Most bytes alive at once that this thread allocated since construction.
  size_t peak() const;
};

}  // namespace spin::testing
