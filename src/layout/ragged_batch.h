// SPDX-License-Identifier: Apache-2.0
// How a kernel sees the sequences of one step. Trivially copyable, shared by host and device.
// Thread: plain data.
#pragma once

#include <cstdint>
#include <type_traits>

namespace spin::layout {

// One sequence of a step, for one layer. Its new tokens are rows
// [first_row, first_row + query_tokens) of the step's activations; they are the last
// `query_tokens` of its `context_tokens` tokens (causal attention: row i sees
// context_tokens - query_tokens + i + 1 tokens).
struct SequenceSlice {
  uint64_t first_row = 0;
  uint64_t query_tokens = 0;
  uint64_t context_tokens = 0;
  // Logical page -> slot, [kv_heads, slot_stride]; head h's pages are
  // slots[h * slot_stride + page], page < ceil(context_tokens / page_tokens).
  const uint32_t* slots = nullptr;
  uint64_t slot_stride = 0;
};
static_assert(std::is_trivially_copyable_v<SequenceSlice>);

}  // namespace spin::layout
