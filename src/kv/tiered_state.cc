// SPDX-License-Identifier: Apache-2.0
// Tables, slots, extents and page ids of a TieredSequence.
#include "kv/tiered_state.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/checked_math.h"
#include "base/memory_guard.h"
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
  (void)store.table_stream().wait_idle();  // its copies may read what goes now
  release_slots();
  HostPool* host = store.host();
  if (host == nullptr) return;
  for (const uint64_t extent : extents) {
    if (extent != 0) host->release(extent);
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

Status TieredSequence::Impl::make_shared_memory() {
  if (store.host() != nullptr) {
    extents.resize(head_count() * extent_count);
    const uint64_t directory_bytes = extents.size() * sizeof(uint64_t);
    const uint64_t tail_bytes = head_count() * shape.tail_pages * sizeof(uint32_t);
    const uint64_t bytes = directory_bytes + ghost_lists.bytes() + tail_bytes;
    SPIN_ASSIGN_OR_RETURN(directory, backend::Buffer::allocate(store.table_memory(), bytes));
    ghosts = reinterpret_cast<uint32_t*>(directory.as<std::byte>() + directory_bytes);
    tail_slots = ghosts + ghost_lists.heads * ghost_lists.pages;
    SPIN_RETURN_IF_ERROR(
        copy_now(directory.data(), extents.data(), directory_bytes, store.table_stream()));
  }
  const uint64_t counter_bytes =
      geometry.kv_heads * (sizeof(layout::RetrieveCounters) + sizeof(layout::ReuseCounters));
  SPIN_ASSIGN_OR_RETURN(
      shared,
      backend::Buffer::allocate(store.device().memory(backend::MemoryKind::kHost), counter_bytes));
  counters = shared.as<layout::RetrieveCounters>();
  std::fill_n(counters, geometry.kv_heads, layout::RetrieveCounters());
  reuse = reinterpret_cast<layout::ReuseCounters*>(counters + geometry.kv_heads);
  return forget_reuse();
}

Result<LeaseTables> TieredSequence::Impl::make_tables(uint64_t lease) const {
  const TableBytes bytes = kv::table_bytes(geometry, shape, lease, 1, false);
  std::vector<HeadPages> records(head_count());
  for (uint64_t i = 0; i < head_count(); ++i) {
    const auto layer = static_cast<uint32_t>(i / geometry.kv_heads);
    HeadPages& pages = records[i];
    pages.lease_pages = static_cast<uint32_t>(entries(layer, lease));
    pages.owner = owner + i;
    if (has_host) {
      pages.extents = directory.as<uint64_t>() + i * extent_count;
      pages.extent_count = extent_count;
    }
    if (is_flat(layer, lease)) continue;
    pages.pinned_entries = pinned_entries(layer);
    pages.table_size = static_cast<uint32_t>(layout::residency_table_size(pages.lease_pages));
  }
  return LeaseTables::create(store.table_memory(), bytes.total(), std::move(records),
                             std::min(lease, shape.max_page_ids), epoch);
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
  const uint64_t lease = made.lease_pages();
  const uint64_t needed = slots_needed(lease);
  SPIN_RETURN_IF_ERROR(check_slots(needed));
  std::vector<PageHandle> taken(needed);
  // Nothing after the slots are taken needs memory.
  for (uint64_t i = 0; i < heads.size(); ++i) {
    heads[i].slots.clear();
    heads[i].slots.reserve(entries(static_cast<uint32_t>(i / geometry.kv_heads), lease));
  }
  const bool allocated = store.fast().allocate(taken);
  SPIN_CHECK(allocated);
  // In runs over all heads, so that a short sequence touches little of what it leases.
  constexpr uint64_t kRunPages = 32;
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
      uint32_t* slots = made.view(i).slots;
      for (uint64_t entry = run; entry < end; ++entry) {
        PageHandle page{kNoSlot, 0};
        if (!is_flat(layer, lease) || !is_dead(layer, h, static_cast<uint32_t>(entry))) {
          page = *next++;
        }
        heads[i].slots.push_back(page);
        slots[entry] = page.slot;
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
  const Status shown = base::guard_memory("host pages were reserved", [&] {
    if (!tables.exists()) return ok_status();
    for (uint64_t i = 0; i < head_count(); ++i) {
      HeadPages& record = tables.records()[i];
      record.extents = directory.as<uint64_t>() + i * extent_count;
      record.extent_count = extent_count;
    }
    tables.enqueue_records(0, head_count(), store.table_stream());
    return store.table_stream().wait_idle();
  });
  if (!shown.ok()) {
    host->unreserve(needed);
    return shown;
  }
  extents_reserved = needed;
  has_host = true;
  return ok_status();
}

uint64_t TieredSequence::Impl::extent_index(uint32_t layer, uint32_t h, uint32_t page) const {
  const uint64_t index = uint64_t{layer} * geometry.kv_heads + h;
  return index * extent_count + page / store.host()->layout().pages;
}

void TieredSequence::Impl::take_extent(uint32_t layer, uint32_t h, uint32_t page) {
  uint64_t& extent = extents[extent_index(layer, h, page)];
  if (extent != 0) return;
  SPIN_CHECK(extents_reserved > 0);
  extent = store.host()->take();
  layers[layer].directory_changed = true;
  --extents_reserved;
  ++extents_taken;
}

void TieredSequence::Impl::enqueue_directory(uint32_t layer, backend::Stream& stream) {
  if (!layers[layer].directory_changed) return;
  const uint64_t count = uint64_t{geometry.kv_heads} * extent_count;
  stream.enqueue_copy(directory.as<uint64_t>() + layer * count, extents.data() + layer * count,
                      count * sizeof(uint64_t));
  layers[layer].directory_changed = false;
}

Status TieredSequence::Impl::publish_directory() {
  const bool changed = std::any_of(layers.begin(), layers.end(),
                                   [](const LayerState& state) { return state.directory_changed; });
  if (!changed) return ok_status();
  for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
    enqueue_directory(layer, store.table_stream());
  }
  return store.table_stream().wait_idle();
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
  if (first >= end) return;
  HeadState& state = head(layer, h);
  HostPool* host = store.host();
  const bool flat = is_flat(layer);
  if (flat) dead_slots.push_back({record(layer, h).slots + first, end - first});
  for (uint32_t page = first; page < end; ++page) {
    state.page_tokens[page] = kDeadPage;
    if (flat) {
      store.fast().release({&state.slots[page], 1});
      state.slots[page] = {kNoSlot, 0};
    }
    if (host == nullptr) continue;
    const uint32_t per_extent = host->layout().pages;
    const uint32_t e = page / per_extent;
    if (state.dead.empty()) state.dead.resize(extent_count);
    uint64_t& extent = extents[extent_index(layer, h, page)];
    if (extent != 0) host->layout().tag(extent, page)->page = kNoPage;
    const uint64_t in_extent =
        std::min<uint64_t>(per_extent, shape.max_page_ids - uint64_t{e} * per_extent);
    if (++state.dead[e] < in_extent) continue;
    ++extents_dead;
    if (extent != 0) {
      host->release(extent);
      extent = 0;
      layers[layer].directory_changed = true;
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

// No kernel asks for an id that died, so what fails for want of memory is done after the next step;
// any other failure is the device's, whose next work reports it.
void TieredSequence::Impl::publish_buried() {
  (void)base::guard_memory("dead pages were noted", [&] {
    SPIN_RETURN_IF_ERROR(publish_directory());
    if (dead_slots.empty()) return ok_status();
    uint64_t longest = 0;
    for (const SlotRange& range : dead_slots) longest = std::max(longest, range.count);
    backend::Stream& stream = store.table_stream();
    SPIN_RETURN_IF_ERROR(stream.wait_idle());  // of an earlier try that was cut short
    no_slots.assign(longest, kNoSlot);
    for (const SlotRange& range : dead_slots) {
      stream.enqueue_copy(range.slots, no_slots.data(), range.count * sizeof(uint32_t));
    }
    SPIN_RETURN_IF_ERROR(stream.wait_idle());
    dead_slots.clear();
    return ok_status();
  });
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

Status TieredSequence::Impl::forget_reuse() {
  meter.restart(reuse_counters());
  const uint64_t words = ghost_lists.heads * ghost_lists.pages;
  if (words == 0) return ok_status();
  std::vector<uint32_t> none(words);
  layout::clear_ghosts(none.data(), static_cast<uint32_t>(words));
  return copy_now(ghosts, none.data(), ghost_lists.bytes(), store.table_stream());
}

Status TieredSequence::Impl::remember_dropped(LeaseTables& made) {
  if (ghost_lists.pages == 0) return ok_status();
  backend::Stream& stream = store.table_stream();
  std::vector<uint32_t> lists(ghost_lists.heads * ghost_lists.pages);
  SPIN_RETURN_IF_ERROR(copy_now(lists.data(), ghosts, ghost_lists.bytes(), stream));
  SPIN_RETURN_IF_ERROR(tables.fetch(stream));
  SPIN_RETURN_IF_ERROR(made.fetch(stream));
  const uint64_t first = uint64_t{shape.dense_layers} * geometry.kv_heads;
  for (uint64_t i = first; i < head_count(); ++i) {
    if (!layout::is_sampled_head(i - first)) continue;
    uint32_t* list = lists.data() + layout::sampled_heads(i - first) * ghost_lists.pages;
    layout::give_up_dropped(tables.view(i), made.view(i), epoch, list, ghost_lists.pages);
  }
  made.drop_image();
  return copy_now(ghosts, lists.data(), ghost_lists.bytes(), stream);
}

}  // namespace spin::kv
