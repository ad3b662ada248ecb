// SPDX-License-Identifier: Apache-2.0
// Tables, slots, extents and page ids of a TieredSequence.
#include "kv/tiered_state.h"

#include <algorithm>
#include <new>

#include <fmt/format.h>

#include "base/check.h"
#include "base/checked_math.h"
#include "kv/table_bytes.h"
#include "layout/residency.h"

namespace spin::kv {

using layout::HeadPages;
using layout::kNoPage;
using layout::kNoSlot;

TieredSequence::Impl::Impl(PageStore& owner_store, const SequenceShape& sequence_shape)
    : store(owner_store),
      geometry(owner_store.geometry()),
      shape(sequence_shape),
      layers(geometry.layers),
      heads(head_count()) {
  if (store.host() != nullptr) {
    extent_count = static_cast<uint32_t>(
        base::ceil_div<uint64_t>(shape.max_page_ids, store.host()->layout().pages));
    ghost_lists = kv::ghost_lists(geometry, shape);
  }
}

TieredSequence::Impl::~Impl() {
  (void)transfer.wait_result();
  release_slots();
  HostPool* host = store.host();
  if (host == nullptr) return;
  const uint64_t* extents = directory.as<uint64_t>();
  for (uint64_t i = 0; extents != nullptr && i < head_count() * extent_count; ++i) {
    if (extents[i] != 0) host->release(extents[i]);
  }
  host->unreserve(extents_reserved);
}

layout::Tail TieredSequence::Impl::tail(uint32_t layer) const {
  const LayerState& state = layers[layer];
  const uint64_t tokens = committed_tokens + (state.appended ? step_tokens : 0);
  layout::Tail tail;
  tail.first_page = state.tail_first_page;
  tail.first_entry = state.sinks + shape.zone_pages;
  tail.ring = shape.tail_pages;
  tail.tokens = static_cast<uint32_t>(tokens - state.tail_first_token);
  return tail;
}

uint32_t TieredSequence::Impl::sealed_tokens(uint32_t layer, uint32_t h, uint32_t page) const {
  if (!layers[layer].mapped) {
    return page < layers[layer].tail_first_page ? geometry.page_tokens : 0;
  }
  const uint8_t tokens = head(layer, h).page_tokens[page];
  return tokens == kDeadPage ? 0 : tokens;
}

bool TieredSequence::Impl::is_dead(uint32_t layer, uint32_t h, uint32_t page) const {
  return layers[layer].mapped && head(layer, h).page_tokens[page] == kDeadPage;
}

// ---- Tables and slots.

Result<LeaseTables> TieredSequence::Impl::make_tables(uint64_t lease) const {
  const TableBytes bytes = kv::table_bytes(geometry, shape, lease, 1, false);
  LeaseTables made;
  made.lease_pages = std::min(lease, shape.max_page_ids);
  SPIN_ASSIGN_OR_RETURN(made.memory,
                        backend::Buffer::allocate(store.table_memory(), bytes.total()));
  // Largest alignment first, so that no padding is needed.
  auto* at = made.memory.as<std::byte>();
  made.heads = reinterpret_cast<HeadPages*>(at);
  auto* words = reinterpret_cast<uint32_t*>(made.heads + head_count());
  for (uint64_t i = 0; i < head_count(); ++i) {
    const auto layer = static_cast<uint32_t>(i / geometry.kv_heads);
    HeadPages& pages = *new (made.heads + i) HeadPages;
    pages.lease_pages = static_cast<uint32_t>(entries(layer, lease));
    pages.slots = words;
    words += pages.lease_pages;
    std::fill_n(pages.slots, pages.lease_pages, kNoSlot);
    pages.owner = owner + i;
    if (has_host) {
      pages.extents = directory.as<uint64_t>() + i * extent_count;
      pages.extent_count = extent_count;
    }
  }
  for (uint64_t i = 0; i < head_count(); ++i) {
    const auto layer = static_cast<uint32_t>(i / geometry.kv_heads);
    if (is_flat(layer, lease)) continue;
    HeadPages& pages = made.heads[i];
    pages.pinned_entries = pinned_entries(layer);
    pages.pages = words;
    words += pages.lease_pages;
    pages.table = words;
    pages.table_size = static_cast<uint32_t>(layout::residency_table_size(pages.lease_pages));
    words += pages.table_size;
  }
  auto* stamps = reinterpret_cast<uint8_t*>(words);
  for (uint64_t i = 0; i < head_count(); ++i) {
    HeadPages& pages = made.heads[i];
    if (pages.is_flat()) continue;
    pages.stamps = stamps;
    stamps += pages.lease_pages;
    layout::clear_residency(pages, epoch);
  }
  SPIN_CHECK(reinterpret_cast<std::byte*>(stamps) == at + bytes.total());
  return made;
}

uint64_t TieredSequence::Impl::slots_needed(uint64_t lease) const {
  uint64_t needed = 0;
  for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
    for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
      needed += entries(layer, lease);
      if (!is_flat(layer, lease) || !layers[layer].mapped) continue;
      const std::vector<uint8_t>& tokens = head(layer, h).page_tokens;
      needed -= static_cast<uint64_t>(std::count(tokens.begin(), tokens.end(), kDeadPage));
    }
  }
  return needed;
}

Status TieredSequence::Impl::check_slots(uint64_t needed) const {
  const PageCounts& counts = store.fast().counts();
  if (needed <= counts.free) return ok_status();
  return Status(StatusCode::kResourceExhausted,
                fmt::format("a sequence of up to {} tokens needs {} KV pages of fast memory; {} of "
                            "{} are free",
                            shape.max_tokens, needed, counts.free, counts.total));
}

Status TieredSequence::Impl::take_slots(LeaseTables& made) {
  const uint64_t lease = made.lease_pages;
  const uint64_t needed = slots_needed(lease);
  SPIN_RETURN_IF_ERROR(check_slots(needed));
  std::vector<PageHandle> taken(needed);
  const bool allocated = store.fast().allocate(taken);
  SPIN_CHECK(allocated);
  // In runs over all heads, so that a short sequence touches little of what it leases.
  constexpr uint64_t kRunPages = 32;
  for (HeadState& state : heads) state.slots.clear();
  auto next = taken.begin();
  uint64_t longest = 0;
  for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
    longest = std::max(longest, entries(layer, lease));
  }
  for (uint64_t run = 0; run < longest; run += kRunPages) {
    for (uint64_t i = 0; i < heads.size(); ++i) {
      const auto layer = static_cast<uint32_t>(i / geometry.kv_heads);
      const auto h = static_cast<uint32_t>(i % geometry.kv_heads);
      const uint64_t end = std::min(run + kRunPages, entries(layer, lease));
      for (uint64_t entry = run; entry < end; ++entry) {
        PageHandle page{kNoSlot, 0};
        if (!is_flat(layer, lease) || !is_dead(layer, h, static_cast<uint32_t>(entry))) {
          page = *next++;
        }
        heads[i].slots.push_back(page);
        made.heads[i].slots[entry] = page.slot;
      }
    }
  }
  SPIN_CHECK(next == taken.end());
  return ok_status();
}

void TieredSequence::Impl::release_slots() {
  for (HeadState& state : heads) {
    std::erase_if(state.slots, [](PageHandle page) { return page.slot == kNoSlot; });
    store.fast().release(state.slots);
    state.slots = {};
  }
}

Status TieredSequence::Impl::reserve_host() {
  if (has_host) return ok_status();
  HostPool* host = store.host();
  SPIN_CHECK(host != nullptr);
  const uint64_t needed = head_count() * extent_count - extents_dead;
  if (!host->reserve(needed)) {
    const HostCounts& counts = host->counts();
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("a sequence of up to {} tokens needs {} extents of host memory; {} "
                              "of {} are free",
                              shape.max_tokens, needed, counts.free, counts.total));
  }
  extents_reserved = needed;
  has_host = true;
  for (uint64_t i = 0; tables.heads != nullptr && i < head_count(); ++i) {
    tables.heads[i].extents = directory.as<uint64_t>() + i * extent_count;
    tables.heads[i].extent_count = extent_count;
  }
  return ok_status();
}

uint64_t& TieredSequence::Impl::extent_of(uint32_t layer, uint32_t h, uint32_t page) const {
  const uint64_t index = uint64_t{layer} * geometry.kv_heads + h;
  return directory.as<uint64_t>()[index * extent_count + page / store.host()->layout().pages];
}

void TieredSequence::Impl::take_extent(uint32_t layer, uint32_t h, uint32_t page) {
  uint64_t& extent = extent_of(layer, h, page);
  if (extent != 0) return;
  SPIN_CHECK(extents_reserved > 0);
  extent = store.host()->take();
  --extents_reserved;
  ++extents_taken;
}

void TieredSequence::Impl::take_extents(uint32_t layer, uint64_t first, uint64_t end) {
  const uint64_t pages = store.host()->layout().pages;
  for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
    for (uint64_t page = first; page < end; page = (page / pages + 1) * pages) {
      take_extent(layer, h, static_cast<uint32_t>(page));
    }
  }
}

PageCopy TieredSequence::Impl::page_copy(
    uint32_t layer, uint32_t h, uint32_t page, uint32_t tokens, uint32_t slot) {
  const layout::HostExtentLayout& host = store.host()->layout();
  const uint64_t extent = extent_of(layer, h, page);
  SPIN_CHECK(extent != 0);
  const uint64_t index = uint64_t{layer} * geometry.kv_heads + h;
  return {store.fast().page_address(slot),
          host.page(extent, page),
          host.tag(extent, page),
          {.owner = owner + index, .page = page, .tokens = tokens}};
}

// ---- Ids.

void TieredSequence::Impl::begin_map(uint32_t layer) {
  LayerState& state = layers[layer];
  if (state.mapped) return;
  for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
    std::vector<uint8_t>& tokens = head(layer, h).page_tokens;
    tokens.assign(shape.max_page_ids, 0);
    std::fill_n(tokens.begin(), state.tail_first_page, static_cast<uint8_t>(geometry.page_tokens));
  }
  state.mapped = true;
}

void TieredSequence::Impl::bury(uint32_t layer, uint32_t h, uint32_t first, uint32_t end) {
  HeadState& state = head(layer, h);
  HeadPages& pages = layer_heads(layer)[h];
  HostPool* host = store.host();
  for (uint32_t page = first; page < end; ++page) {
    state.page_tokens[page] = kDeadPage;
    if (pages.is_flat()) {
      store.fast().release({&state.slots[page], 1});
      state.slots[page] = {kNoSlot, 0};
      pages.slots[page] = kNoSlot;
    }
    if (host == nullptr) continue;
    const uint32_t per_extent = host->layout().pages;
    const uint32_t e = page / per_extent;
    if (state.dead.empty()) state.dead.resize(extent_count);
    uint64_t& extent = extent_of(layer, h, page);
    if (extent != 0) host->layout().tag(extent, page)->page = kNoPage;
    const uint64_t in_extent =
        std::min<uint64_t>(per_extent, shape.max_page_ids - uint64_t{e} * per_extent);
    if (++state.dead[e] < in_extent) continue;
    ++extents_dead;
    if (extent != 0) {
      host->release(extent);
      extent = 0;
      --extents_taken;
    } else if (has_host) {
      host->unreserve(1);
      --extents_reserved;
    }
  }
}

void TieredSequence::Impl::capture(CapturedMap& to,
                                   const layout::PageMap& map,
                                   uint32_t page_ids,
                                   backend::Stream& stream) {
  to.pending = true;
  to.page_ids = page_ids;
  to.page_stride = map.page_stride;
  to.counts.resize(geometry.kv_heads);
  to.starts.resize(uint64_t{geometry.kv_heads} * map.page_stride);
  stream.enqueue_copy(to.counts.data(), map.counts, to.counts.size() * sizeof(uint32_t));
  stream.enqueue_copy(to.starts.data(), map.starts, to.starts.size() * sizeof(uint32_t));
}

void TieredSequence::Impl::capture_pins(uint32_t layer,
                                        const layout::PageList& pinned,
                                        backend::Stream& stream) {
  if (pinned.counts == nullptr || pinned.stride == 0) return;
  CapturedPins& pins = layers[layer].pins;
  pins.stride = pinned.stride;
  pins.counts.resize(geometry.kv_heads);
  pins.pages.resize(uint64_t{geometry.kv_heads} * pinned.stride);
  stream.enqueue_copy(pins.counts.data(), pinned.counts, pins.counts.size() * sizeof(uint32_t));
  stream.enqueue_copy(pins.pages.data(), pinned.pages, pins.pages.size() * sizeof(uint32_t));
}

// Ids of a prompt's layer whose sinks and first tail token are known.
void TieredSequence::Impl::assign_ids(uint32_t layer,
                                      const layout::PageMap* map,
                                      uint32_t mapped_page_ids,
                                      backend::Stream& stream) {
  LayerState& state = layers[layer];
  const uint64_t page_tokens = geometry.page_tokens;
  if (map == nullptr) {
    state.tail_first_page = static_cast<uint32_t>(state.tail_first_token / page_tokens);
    state.next_mapped = static_cast<uint32_t>(geometry.pages_per_head(shape.max_tokens));
    return;
  }
  const uint64_t tail_ids = base::ceil_div(shape.max_tokens - state.tail_first_token, page_tokens);
  SPIN_CHECK(state.sinks == shape.sink_pages);
  SPIN_CHECK(uint64_t{state.sinks} + mapped_page_ids <= mapped_end());
  state.tail_first_page = state.sinks;  // what is in token order, for begin_map()
  begin_map(layer);
  state.tail_first_page = static_cast<uint32_t>(shape.max_page_ids - tail_ids);
  state.next_mapped = state.sinks + mapped_page_ids;
  capture(state.map, *map, mapped_page_ids, stream);
  state.map.first_page = state.sinks;
  // The prompt's tail begins late: the ids between are nobody's.
  state.left_first_page = mapped_end();
  state.left_end_page = state.tail_first_page;
}

// The captured map has arrived: pages that it made count, ids that it left over are dead.
void TieredSequence::Impl::finish_map(uint32_t layer) {
  LayerState& state = layers[layer];
  CapturedMap& map = state.map;
  if (!map.pending) return;
  for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
    const uint32_t count = map.counts[h];
    SPIN_CHECK(count <= map.page_ids && count < std::max(map.page_stride, 1u));
    const uint32_t* starts = map.starts.data() + uint64_t{h} * map.page_stride;
    HeadState& pages = head(layer, h);
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t tokens = starts[i + 1] - starts[i];
      SPIN_CHECK(tokens > 0 && tokens <= geometry.page_tokens);
      pages.page_tokens[map.first_page + i] = static_cast<uint8_t>(tokens);
    }
    bury(layer, h, map.first_page + count, map.first_page + map.page_ids);
    bury(layer, h, state.left_first_page, state.left_end_page);
  }
  state.left_first_page = state.left_end_page = 0;
  map = CapturedMap();
}

// Kernels swap slots between ring and cache inside a step, the host does not see it: the slots of
// the tail are read while nothing runs.
void TieredSequence::Impl::fill_tail_slots() {
  for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
    layers[layer].step_first_page = layers[layer].tail_first_page;
    if (is_flat(layer)) continue;
    const layout::Tail at = tail(layer);
    for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
      const HeadPages& pages = layer_heads(layer)[h];
      uint32_t* out = tail_slots + (uint64_t{layer} * geometry.kv_heads + h) * shape.tail_pages;
      for (uint32_t t = 0; t < shape.tail_pages; ++t) {
        out[t] = pages.slots[layout::tail_entry(pages, at, t)];
      }
    }
  }
}

// Only tiered layers have caches to measure.
layout::ReuseProbe TieredSequence::Impl::reuse_probe(uint32_t layer) const {
  layout::ReuseProbe probe;
  if (is_flat(layer)) return probe;
  probe.counters = reuse;
  probe.ghosts = ghosts;
  probe.ghost_pages = ghost_lists.pages;
  probe.first_head = static_cast<uint32_t>(cached_head(layer));
  probe.mandatory = static_cast<uint32_t>(shape.mandatory_pages(layer));
  return probe;
}

void TieredSequence::Impl::forget_reuse() {
  for (uint64_t i = 0; i < ghost_lists.heads; ++i) {
    layout::clear_ghosts(ghosts + i * ghost_lists.pages, ghost_lists.pages);
  }
  meter.restart(reuse_counters());
}

void TieredSequence::Impl::remember_dropped(const LeaseTables& made) {
  const uint64_t first = uint64_t{shape.dense_layers} * geometry.kv_heads;
  for (uint64_t i = first; i < head_count(); ++i) {
    if (!layout::is_sampled_head(i - first) || ghost_lists.pages == 0) continue;
    layout::give_up_dropped(tables.heads[i], made.heads[i], epoch, ghosts_of(i - first),
                            ghost_lists.pages);
  }
}

}  // namespace spin::kv
