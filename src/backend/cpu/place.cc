// SPDX-License-Identifier: Apache-2.0
// Placing first decides which entry each page gets (one head at a time, tables only), then fills
// pages wherever they go (many at a time, tables read only).
#include "backend/cpu/place.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "backend/cpu/kv_pages.h"
#include "base/checked_math.h"
#include "layout/residency.h"

namespace spin::backend::cpu {
namespace {

using layout::HeadPages;
using layout::kNoEntry;
using layout::kNoPage;
using layout::kNoSlot;

constexpr uint64_t kChunkPages = 32;  // that one task fills

Status no_place() {
  return Status(StatusCode::kInternal, "a page has no place in a tier it needs");
}

// One page of a prompt and the tokens of the source that it holds.
struct PlacedPage {
  uint32_t id = 0;
  uint32_t tokens = 0;
  const uint32_t* token_ids = nullptr;  // null: those from first_token on
  uint64_t first_token = 0;
  bool is_tail = false;
};

// The pages of a layer's head by number: in token order, by map, tail.
class HeadPlan {
 public:
  HeadPlan(const PlaceItem& item, uint32_t h, uint32_t page_tokens)
      : item_(item), h_(h), page_tokens_(page_tokens) {
    const uint64_t before_tail = item.tail_first_token / page_tokens;
    const bool mapped = item.map != nullptr;
    ordered_ = mapped ? std::min<uint64_t>(item.sink_pages, before_tail) : before_tail;
    mapped_ = mapped ? item.map->counts[h] : 0;
    tail_ = base::ceil_div(uint64_t{item.tail.tokens}, uint64_t{page_tokens});
  }

  uint64_t ordered() const { return ordered_; }
  uint64_t sinks() const { return std::min<uint64_t>(item_.sink_pages, ordered_); }
  uint64_t tail() const { return tail_; }
  uint64_t pages() const { return ordered_ + mapped_ + tail_; }

  // Ids of pages outside the tail, ascending.
  uint32_t sealed_id(uint64_t i) const {
    return static_cast<uint32_t>(i < ordered_ ? i : item_.first_mapped_page + (i - ordered_));
  }
  uint64_t sealed() const { return ordered_ + mapped_; }

  PlacedPage page(uint64_t i) const {
    PlacedPage page;
    page.tokens = page_tokens_;
    if (i >= sealed()) {
      const uint64_t t = i - sealed();
      page.id = static_cast<uint32_t>(item_.tail.first_page + t);
      page.first_token = item_.tail_first_token + t * page_tokens_;
      page.tokens = static_cast<uint32_t>(
          std::min<uint64_t>(page_tokens_, item_.tail.tokens - t * page_tokens_));
      page.is_tail = true;
      return page;
    }
    page.id = sealed_id(i);
    page.first_token = i * page_tokens_;
    if (i < ordered_) return page;
    const uint32_t* starts =
        item_.map->starts + uint64_t{h_} * item_.map->page_stride + (i - ordered_);
    page.tokens = starts[1] - starts[0];
    page.token_ids = item_.map->token_ids + h_ * item_.map->token_stride + starts[0];
    return page;
  }

 private:
  const PlaceItem& item_;
  uint32_t h_;
  uint32_t page_tokens_;
  uint64_t ordered_ = 0;
  uint64_t mapped_ = 0;
  uint64_t tail_ = 0;
};

// Copies rows [first, first + count) of the source, which lie in as many pages as they do.
void copy_range(const layout::PagedTokens& source,
                const layout::KvGeometry& to_geometry,
                uint32_t head,
                uint64_t first,
                uint32_t count,
                std::byte* to) {
  const uint64_t row_bytes = to_geometry.row_bytes();
  uint32_t done = 0;
  while (done < count) {
    const uint64_t token = first + done;
    const auto in_page = static_cast<uint32_t>(token % source.geometry.page_tokens);
    const uint32_t run = std::min(count - done, source.geometry.page_tokens - in_page);
    const std::byte* key = source.key(head, token);
    std::memcpy(to + done * row_bytes, key, run * row_bytes);
    std::memcpy(to + to_geometry.plane_bytes() + done * row_bytes,
                key + source.geometry.plane_bytes(), run * row_bytes);
    done += run;
  }
}

void fill_page(const PlacedPage& page,
               const layout::PagedTokens& source,
               const layout::KvGeometry& to_geometry,
               uint32_t head,
               std::byte* to) {
  if (page.token_ids == nullptr) {
    copy_range(source, to_geometry, head, page.first_token, page.tokens, to);
    return;
  }
  for (uint32_t i = 0; i < page.tokens; ++i) {
    copy_range(source, to_geometry, head, page.token_ids[i], 1, to + i * to_geometry.row_bytes());
  }
}

// Entries of a tiered head: zones and tail where the host wants them, the cache filled with the
// newest of the other pages.
void assign_entries(const PlaceItem& item, const HeadPlan& plan, uint32_t h) {
  HeadPages& head = item.heads[h];
  layout::clear_residency(head, item.epoch);
  for (uint32_t i = 0; i < plan.sinks(); ++i) layout::set_entry(head, i, i);
  if (item.pinned.counts != nullptr) {
    const uint32_t* pinned = item.pinned.pages + uint64_t{h} * item.pinned.stride;
    for (uint32_t i = 0; i < item.pinned.counts[h]; ++i) {
      layout::set_entry(head, item.zone_first_entry + i, pinned[i]);
    }
  }
  for (uint32_t t = 0; t < plan.tail(); ++t) {
    layout::set_entry(head, layout::tail_entry(head, item.tail, t), item.tail.first_page + t);
  }
  uint32_t entry = head.lease_pages;
  for (uint64_t i = plan.sealed(); i > 0 && entry > head.pinned_entries; --i) {
    const uint32_t id = plan.sealed_id(i - 1);
    if (layout::find_entry(head, id) == kNoEntry) layout::set_entry(head, --entry, id);
  }
}

// Slot of a page after assign_entries(); kNoSlot: it is not resident.
uint32_t placed_slot(const HeadPages& head, uint32_t id) {
  if (head.is_flat()) return id < head.lease_pages ? head.slots[id] : kNoSlot;
  const uint32_t entry = layout::find_entry(head, id);
  return entry == kNoEntry ? kNoSlot : head.slots[entry];
}

// Fills a page in the tiers it belongs to; false if it has no place.
bool place_page(const PlaceItem& item,
                const TieredPoolRef& pool,
                const PlacedPage& page,
                uint32_t h) {
  if (page.tokens == 0) return true;
  const HeadPages& head = item.heads[h];
  const layout::KvGeometry& geometry = pool.fast.geometry;
  const uint32_t slot = placed_slot(head, page.id);
  if (slot != kNoSlot) {
    fill_page(page, item.source, geometry, h, slot_address(pool.fast, slot));
  }
  if (!item.write_host || page.is_tail) return slot != kNoSlot;
  const HostPage host = host_page(head, pool.host, page.id);
  if (!host) return false;
  write_host_page(host, head.owner, page.id, page.tokens,
                  [&](std::byte* to) { fill_page(page, item.source, geometry, h, to); });
  return slot != kNoSlot || !head.is_flat();
}

// Pages [first, last) of head `head`.
struct Chunk {
  uint32_t head = 0;
  uint64_t first = 0;
  uint64_t last = 0;
};

void add_chunks(uint32_t head, uint64_t pages, std::vector<Chunk>& chunks) {
  for (uint64_t first = 0; first < pages; first += kChunkPages) {
    chunks.push_back({head, first, std::min(first + kChunkPages, pages)});
  }
}

// Runs body(head, page) -> bool over all chunks; whether all were true.
template <typename Body>
Status for_pages(const std::vector<Chunk>& chunks, base::ThreadPool& threads, const Body& body) {
  std::atomic<bool> failed = false;
  threads.parallel_for(chunks.size(), [&](size_t c, uint32_t) {
    for (uint64_t i = chunks[c].first; i < chunks[c].last; ++i) {
      if (!body(chunks[c].head, i)) failed.store(true, std::memory_order_relaxed);
    }
  });
  return failed.load(std::memory_order_relaxed) ? no_place() : ok_status();
}

}  // namespace

Status run_place(const PlaceItem& item, const TieredPoolRef& pool, base::ThreadPool& threads) {
  const layout::KvGeometry& geometry = pool.fast.geometry;
  std::vector<HeadPlan> plans;
  std::vector<Chunk> chunks;
  for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
    plans.emplace_back(item, h, geometry.page_tokens);
    add_chunks(h, plans[h].pages(), chunks);
  }
  threads.parallel_for(geometry.kv_heads, [&](size_t h, uint32_t) {
    if (!item.heads[h].is_flat()) assign_entries(item, plans[h], static_cast<uint32_t>(h));
  });
  return for_pages(chunks, threads, [&](uint32_t h, uint64_t i) {
    return place_page(item, pool, plans[h].page(i), h);
  });
}

}  // namespace spin::backend::cpu
