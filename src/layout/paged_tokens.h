// SPDX-License-Identifier: Apache-2.0
// Tokens of one (sequence, layer) that lie in pages, for kernels that read them all: the staging
// buffer of a prompt, a sequence's resident pages, or its tail. Trivially copyable.
// Thread: plain data. Lifetime: memory and slots outlive the operations that read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "layout/host_device.h"
#include "layout/kv_geometry.h"

namespace spin::layout {

struct PagedTokens {
  const std::byte* base = nullptr;  // slot s at base + s * geometry.page_bytes()
  KvGeometry geometry;
  // Page of head h that holds its tokens [p * page_tokens, (p + 1) * page_tokens) lies in slot
  // slots[h * slot_stride + p].
  const uint32_t* slots = nullptr;  // [kv_heads, slot_stride]
  uint64_t slot_stride = 0;
  uint64_t tokens = 0;  // readable ones

  SPIN_HOST_DEVICE const std::byte* key(uint32_t head, uint64_t token) const {
    const uint64_t page = token / geometry.page_tokens;
    return base + slots[head * slot_stride + page] * geometry.page_bytes() +
           (token % geometry.page_tokens) * geometry.row_bytes();
  }
  SPIN_HOST_DEVICE const std::byte* value(uint32_t head, uint64_t token) const {
    return key(head, token) + geometry.plane_bytes();
  }
};
static_assert(std::is_trivially_copyable_v<PagedTokens>);

}  // namespace spin::layout
