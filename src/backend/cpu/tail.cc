// SPDX-License-Identifier: Apache-2.0
// The tail of a sequence's layer: appending to it, sealing its oldest pages, and dealing its oldest
// tokens out to new pages.
#include <algorithm>
#include <atomic>
#include <vector>

#include "backend/cpu/kv_pages.h"
#include "backend/cpu/place.h"
#include "backend/cpu/small_loop.h"
#include "base/bf16.h"
#include "layout/residency.h"
#include "layout/reuse.h"

namespace spin::backend::cpu {
namespace {

using layout::HeadPages;
using layout::kNoPage;

Status no_place() {
  return Status(StatusCode::kInternal, "a tail's page has no place in a tier it needs");
}

void store_row(const float* from, const layout::KvGeometry& geometry, std::byte* to) {
  if (geometry.dtype == layout::DType::kF32) {
    std::memcpy(to, from, geometry.row_bytes());
    return;
  }
  auto* out = reinterpret_cast<base::Bf16*>(to);
  for (uint32_t i = 0; i < geometry.head_dim; ++i) out[i] = base::to_bf16(from[i]);
}

const float* row_of(const TensorRef& tensor, uint64_t row) {
  return static_cast<const float*>(tensor.data) + static_cast<int64_t>(row) * tensor.row_stride;
}

// The rows of one item for one head.
void append_head(const TailAppendItem& item,
                 uint32_t h,
                 const TensorRef& k,
                 const TensorRef& v,
                 const KvPoolRef& pool) {
  const layout::KvGeometry& geometry = pool.geometry;
  HeadPages& head = item.heads[h];
  for (uint32_t i = 0; i < item.tokens; ++i) {
    const uint32_t token = item.tail.tokens + i;
    const uint32_t page = token / geometry.page_tokens;
    const uint32_t entry = layout::tail_entry(head, item.tail, page);
    if (!head.is_flat()) layout::set_entry(head, entry, item.tail.first_page + page);
    std::byte* key = slot_address(pool, head.slots[entry]) +
                     (token % geometry.page_tokens) * geometry.row_bytes();
    const uint64_t column = uint64_t{h} * geometry.head_dim;
    store_row(row_of(k, item.first_row + i) + column, geometry, key);
    store_row(row_of(v, item.first_row + i) + column, geometry, key + geometry.plane_bytes());
  }
  if (item.tail_slots == nullptr) return;
  uint32_t* slots = item.tail_slots + uint64_t{h} * item.tail.ring;
  for (uint32_t t = 0; t < item.tail.ring; ++t) {
    slots[t] = head.slots[layout::tail_entry(head, item.tail, t)];
  }
}

// Writes the pages to the host, then gives those for which there is a cache entry to the cache.
bool seal_head(const SealItem& item, uint32_t h, const TieredPoolRef& pool) {
  const layout::KvGeometry& geometry = pool.fast.geometry;
  HeadPages& head = item.heads[h];
  if (head.is_flat()) return true;
  for (uint32_t t = 0; t < item.pages; ++t) {
    const uint32_t page = item.tail.first_page + t;
    const HostPage host = host_page(head, pool.host, page);
    if (!host) return false;
    const std::byte* from =
        slot_address(pool.fast, head.slots[layout::tail_entry(head, item.tail, t)]);
    write_host_page(host, head.owner, page, geometry.page_tokens,
                    [&](std::byte* to) { std::memcpy(to, from, geometry.page_bytes()); });
  }
  layout::sweep_if_due(head, item.epoch);
  std::vector<uint32_t> victims(item.pages);
  const uint32_t cached = layout::choose_victims(head, item.epoch, item.pages, victims.data());
  if (uint32_t* ghosts = layout::ghosts_of(item.reuse, h); ghosts != nullptr) {
    layout::give_up(head, victims.data(), cached, ghosts, item.reuse.ghost_pages);
  }
  for (uint32_t t = 0; t < item.pages; ++t) {
    const uint32_t from = layout::tail_entry(head, item.tail, t);
    layout::set_entry(head, from, kNoPage);
    // With too few entries the newest pages are cached.
    if (t < item.pages - cached) continue;
    const uint32_t entry = victims[t - (item.pages - cached)];
    layout::set_entry(head, entry, item.tail.first_page + t);
    head.stamps[entry] = layout::unused_stamp(item.epoch);
    std::swap(head.slots[from], head.slots[entry]);
  }
  return true;
}

// Copies the tail's rows that `token_ids` names to a page.
void gather_rows(const RepackTailItem& item,
                 const HeadPages& head,
                 const KvPoolRef& pool,
                 const uint32_t* token_ids,
                 uint32_t count,
                 std::byte* to) {
  const layout::KvGeometry& geometry = pool.geometry;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t entry = layout::tail_entry(head, item.tail, token_ids[i] / geometry.page_tokens);
    const std::byte* key = slot_address(pool, head.slots[entry]) +
                           (token_ids[i] % geometry.page_tokens) * geometry.row_bytes();
    std::memcpy(to + i * geometry.row_bytes(), key, geometry.row_bytes());
    std::memcpy(to + geometry.plane_bytes() + i * geometry.row_bytes(),
                key + geometry.plane_bytes(), geometry.row_bytes());
  }
}

bool repack_head(const RepackTailItem& item, uint32_t h, const TieredPoolRef& pool) {
  const layout::KvGeometry& geometry = pool.fast.geometry;
  HeadPages& head = item.heads[h];
  const layout::PageMap& map = *item.map;
  const uint32_t* starts = map.starts + uint64_t{h} * map.page_stride;
  const uint32_t* token_ids = map.token_ids + h * map.token_stride;
  for (uint32_t i = 0; i < map.counts[h]; ++i) {
    const uint32_t page = item.first_mapped_page + i;
    const uint32_t count = starts[i + 1] - starts[i];
    if (count == 0) continue;
    const auto fill = [&](std::byte* to) {
      gather_rows(item, head, pool.fast, token_ids + starts[i], count, to);
    };
    if (head.is_flat()) {
      if (page >= head.lease_pages || head.slots[page] == layout::kNoSlot) return false;
      fill(slot_address(pool.fast, head.slots[page]));
      continue;
    }
    const HostPage host = host_page(head, pool.host, page);
    if (!host) return false;
    write_host_page(host, head.owner, page, count, fill);
  }
  if (head.is_flat()) return true;
  const uint32_t left = (starts[map.counts[h]] - starts[0]) / geometry.page_tokens;
  for (uint32_t t = 0; t < left; ++t) {
    layout::set_entry(head, layout::tail_entry(head, item.tail, t), kNoPage);
  }
  return true;
}

// Runs body(index) -> bool for every head of every item; whether all were true.
template <typename Body>
Status for_heads(size_t count, bool is_large, base::ThreadPool& threads, const Body& body) {
  std::atomic<bool> failed = false;
  loop(threads, count, is_large, [&](size_t i) {
    if (!body(i)) failed.store(true, std::memory_order_relaxed);
  });
  return failed.load(std::memory_order_relaxed) ? no_place() : ok_status();
}

}  // namespace

Status run_tail_append(const TensorRef& k,
                       const TensorRef& v,
                       std::span<const TailAppendItem> items,
                       const TieredPoolRef& pool,
                       base::ThreadPool& threads) {
  const uint32_t heads = pool.fast.geometry.kv_heads;
  uint64_t tokens = 0;
  for (const TailAppendItem& item : items) tokens += item.tokens;
  const bool is_large = tokens * heads * 2 * pool.fast.geometry.row_bytes() > kSmallBytes;
  loop(threads, items.size() * heads, is_large, [&](size_t i) {
    append_head(items[i / heads], static_cast<uint32_t>(i % heads), k, v, pool.fast);
  });
  return ok_status();
}

Status run_seal(std::span<const SealItem> items,
                const TieredPoolRef& pool,
                base::ThreadPool& threads) {
  const uint32_t heads = pool.fast.geometry.kv_heads;
  uint64_t pages = 0;
  for (const SealItem& item : items) pages += item.pages;
  const bool is_large = pages * heads * pool.fast.geometry.page_bytes() > kSmallBytes;
  return for_heads(items.size() * heads, is_large, threads, [&](size_t i) {
    return seal_head(items[i / heads], static_cast<uint32_t>(i % heads), pool);
  });
}

Status run_repack_tail(const RepackTailItem& item,
                       const TieredPoolRef& pool,
                       base::ThreadPool& threads) {
  return for_heads(pool.fast.geometry.kv_heads, true, threads,
                   [&](size_t h) { return repack_head(item, static_cast<uint32_t>(h), pool); });
}

}  // namespace spin::backend::cpu
