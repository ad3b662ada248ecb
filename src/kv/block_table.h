// SPDX-License-Identifier: Apache-2.0
// Logical page -> slot for one sequence: a flat array [layers, kv_heads, pages_per_head] of u32,
// the form in which kernels read it (layout::SequenceSlice points into it). Where kernels cannot
// read the process's memory they get a copy of it in theirs.
//
// Thread: external synchronisation; const members may be called from any thread in between.
// Lifetime: rows handed to kernels live as long as the table (moving it keeps them).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/device.h"
#include "spin/status.h"

namespace spin::kv {

class BlockTable {
 public:
  BlockTable(uint32_t layers, uint32_t kv_heads, uint64_t pages_per_head)
      : kv_heads_(kv_heads),
        pages_per_head_(pages_per_head),
        slots_(uint64_t{layers} * kv_heads * pages_per_head) {}

  uint64_t pages_per_head() const { return pages_per_head_; }

  // Place of (layer, kv head, logical page) in slots(). Requires: all in range.
  uint64_t index(uint32_t layer, uint32_t kv_head, uint64_t page) const {
    return (uint64_t{layer} * kv_heads_ + kv_head) * pages_per_head_ + page;
  }

  std::span<uint32_t> slots() { return slots_; }
  std::span<const uint32_t> slots() const { return slots_; }

  // From now on kernels get a copy in `memory`; slots() does not change any more. Blocks.
  // Errors: kResourceExhausted, the stream's.
  Status publish(backend::MemoryResource& memory, backend::Stream& stream) {
    const uint64_t bytes = slots_.size() * sizeof(uint32_t);
    SPIN_ASSIGN_OR_RETURN(copy_, backend::Buffer::allocate(memory, bytes));
    stream.enqueue_copy(copy_.data(), slots_.data(), bytes);
    return stream.wait_idle();
  }

  // [kv_heads, pages_per_head] of one layer, for kernels.
  const uint32_t* layer_slots(uint32_t layer) const {
    const uint32_t* slots = copy_.data() != nullptr ? copy_.as<uint32_t>() : slots_.data();
    return slots + index(layer, 0, 0);
  }

 private:
  uint32_t kv_heads_ = 0;
  uint64_t pages_per_head_ = 0;
  std::vector<uint32_t> slots_;
  backend::Buffer copy_;  // empty: there is none
};

}  // namespace spin::kv
