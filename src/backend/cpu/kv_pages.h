// SPDX-License-Identifier: Apache-2.0
// Addresses and copies of KV pages in both tiers, for the operations in this folder. A host page
// and its tag are written and read here only, so that their order is right everywhere.
// Thread: functions of the pages given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "backend/kv_ops.h"
#include "layout/head_pages.h"

namespace spin::backend::cpu {

inline std::byte* slot_address(const KvPoolRef& pool, uint32_t slot) {
  return static_cast<std::byte*>(pool.base) + uint64_t{slot} * pool.geometry.page_bytes();
}

// A page's place on the host.
struct HostPage {
  std::byte* bytes = nullptr;
  layout::HostPageTag* tag = nullptr;

  explicit operator bool() const { return bytes != nullptr; }
};

// Nothing where there is no extent for it.
inline HostPage host_page(const layout::HeadPages& head,
                          const layout::HostExtentLayout& host,
                          uint32_t page) {
  const uint32_t index = page / host.pages;
  if (head.extents == nullptr || index >= head.extent_count) return {};
  const uint64_t extent = head.extents[index];
  if (extent == 0) return {};
  return {host.page(extent, page), host.tag(extent, page)};
}

// The tag names no page while the bytes change; its page field comes last.
template <typename Fill>
void write_host_page(
    const HostPage& to, uint64_t owner, uint32_t page, uint32_t tokens, const Fill& fill) {
  __atomic_store_n(&to.tag->page, layout::kNoPage, __ATOMIC_RELEASE);
  fill(to.bytes);
  to.tag->owner = owner;
  to.tag->tokens = tokens;
  __atomic_store_n(&to.tag->page, page, __ATOMIC_RELEASE);
}

// Whether the host holds `page` of this head, whatever its number of tokens.
inline bool host_holds(const HostPage& from, const layout::HeadPages& head, uint32_t page) {
  return from && __atomic_load_n(&from.tag->page, __ATOMIC_ACQUIRE) == page &&
         from.tag->owner == head.owner;
}

}  // namespace spin::backend::cpu
