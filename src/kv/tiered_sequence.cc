// SPDX-License-Identifier: Apache-2.0
// Opening, prompt and steps; the transitions between forms are in tiered_residence.cc.
#include "kv/tiered_sequence.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/checked_math.h"
#include "base/memory_guard.h"
#include "kv/tiered_state.h"

namespace spin::kv {

using layout::kNoPage;
using layout::kNoSlot;

uint64_t SequenceShape::mandatory_pages(uint32_t layer) const {
  const uint64_t sparse = uint64_t{pinned_pages()} + selected_pages;
  return layer < dense_layers ? max_page_ids : std::min(sparse, max_page_ids);
}

namespace {

// What does not depend on what is free.
Status check_shape(const PageStore& store, const SequenceShape& shape, uint64_t lease_pages) {
  const layout::KvGeometry& geometry = store.geometry();
  SPIN_CHECK(shape.max_tokens > 0 && shape.tail_pages > 0);
  SPIN_CHECK(shape.max_page_ids >= geometry.pages_per_head(shape.max_tokens));
  SPIN_CHECK(geometry.page_tokens < kDeadPage);
  const uint64_t heads = uint64_t{geometry.layers} * geometry.kv_heads;
  if (shape.max_page_ids >= kNoPage || !base::checked_mul<uint64_t>(shape.max_page_ids, heads)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("a KV head has at most {} pages, asked for {}", kNoPage - 1,
                              shape.max_page_ids));
  }
  const bool tiered = shape.dense_layers < geometry.layers && lease_pages < shape.max_page_ids;
  if (!tiered) return ok_status();
  SPIN_CHECK(lease_pages >= uint64_t{shape.pinned_pages()} + shape.selected_pages);
  if (store.host() == nullptr) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("without a host tier a head leases all of its {} pages, not {}",
                              shape.max_page_ids, lease_pages));
  }
  return ok_status();
}

}  // namespace

Result<std::unique_ptr<TieredSequence>> TieredSequence::open(PageStore& store,
                                                             const SequenceShape& shape,
                                                             uint64_t lease_pages) {
  SPIN_RETURN_IF_ERROR(check_shape(store, shape, lease_pages));
  using Opened = Result<std::unique_ptr<TieredSequence>>;
  return base::guard_memory("a sequence was opened", [&]() -> Opened {
    const layout::KvGeometry& geometry = store.geometry();
    auto impl = std::make_unique<Impl>(store, shape);
    const bool tiered = shape.dense_layers < geometry.layers && lease_pages < shape.max_page_ids;
    // Compared before anything of that size is allocated: lengths may come from a request.
    SPIN_RETURN_IF_ERROR(impl->check_slots(impl->slots_needed(lease_pages)));
    if (store.host() != nullptr) {
      const Status reserved = impl->reserve_host();
      if (!reserved.ok() && tiered) return reserved;
    }
    SPIN_RETURN_IF_ERROR(impl->make_shared_memory());
    impl->owner = store.take_owners(impl->head_count());
    SPIN_ASSIGN_OR_RETURN(LeaseTables made, impl->make_tables(lease_pages));
    SPIN_RETURN_IF_ERROR(impl->take_slots(made));
    SPIN_RETURN_IF_ERROR(made.publish(store.table_stream()));
    impl->tables = std::move(made);
    impl->residence = tiered ? Residence::kTiered : Residence::kResident;
    return std::unique_ptr<TieredSequence>(new TieredSequence(std::move(impl)));
  });
}

TieredSequence::TieredSequence(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TieredSequence::~TieredSequence() = default;

const SequenceShape& TieredSequence::shape() const { return impl_->shape; }
Residence TieredSequence::residence() const { return impl_->residence; }
uint64_t TieredSequence::lease_pages() const { return impl_->tables.lease_pages(); }
uint64_t TieredSequence::committed_tokens() const { return impl_->committed_tokens; }
uint8_t TieredSequence::epoch() const { return impl_->epoch; }
uint64_t TieredSequence::table_bytes() const {
  return impl_->tables.size_bytes() + impl_->directory.size_bytes();
}
uint64_t TieredSequence::host_extents() const {
  return impl_->extents_reserved + impl_->extents_taken;
}

uint64_t TieredSequence::fast_pages() const {
  uint64_t pages = 0;
  for (const HeadState& state : impl_->heads) {
    pages +=
        static_cast<uint64_t>(std::count_if(state.slots.begin(), state.slots.end(),
                                            [](PageHandle page) { return page.slot != kNoSlot; }));
  }
  return pages;
}

backend::PlaceItem TieredSequence::place_item(uint32_t layer,
                                              const layout::PagedTokens& source,
                                              uint64_t tail_first_token,
                                              const layout::PageMap* map,
                                              uint32_t mapped_page_ids,
                                              const layout::PageList& pinned,
                                              backend::StreamRef stream) {
  Impl& impl = *impl_;
  const uint64_t page_tokens = impl.geometry.page_tokens;
  LayerState& state = impl.layers[layer];
  SPIN_CHECK(impl.committed_tokens == 0 && !state.placed && !impl.spent);
  SPIN_CHECK(source.tokens > 0 && source.tokens <= impl.shape.max_tokens);
  SPIN_CHECK(tail_first_token % page_tokens == 0 && tail_first_token <= source.tokens);
  state.placed = true;
  state.placed_tokens = source.tokens;
  state.tail_first_token = tail_first_token;
  state.sinks = static_cast<uint32_t>(
      std::min<uint64_t>(impl.shape.sink_pages, tail_first_token / page_tokens));
  impl.assign_ids(layer, map, mapped_page_ids, stream);
  impl.capture_pins(layer, pinned, stream);
  backend::PlaceItem item;
  item.heads = impl.layer_heads(layer);
  item.source = source;
  item.map = map;
  item.first_mapped_page = state.sinks;
  item.pinned = pinned;
  item.sink_pages = state.sinks;
  item.zone_first_entry = state.sinks;
  item.tail = impl.tail(layer);
  item.tail.tokens = static_cast<uint32_t>(source.tokens - tail_first_token);
  item.tail_first_token = tail_first_token;
  item.write_host = !impl.is_flat(layer);
  item.epoch = impl.epoch;
  if (!impl.is_flat(layer)) {
    SPIN_CHECK(base::ceil_div<uint64_t>(item.tail.tokens, page_tokens) <= impl.shape.tail_pages);
    impl.take_extents(layer, 0, impl.sealed_end(layer));
    impl.enqueue_directory(layer, stream);
    const uint32_t kv_heads = impl.geometry.kv_heads;
    const uint64_t first = uint64_t{layer} * kv_heads;
    for (layout::HeadPages& record : impl.tables.records().subspan(first, kv_heads)) {
      record.pinned_entries = impl.pinned_entries(layer);
    }
    impl.tables.enqueue_records(first, kv_heads, stream);
  }
  return item;
}

void TieredSequence::commit_prompt(uint64_t tokens) {
  Impl& impl = *impl_;
  SPIN_CHECK(impl.committed_tokens == 0 && tokens > 0);
  for (uint32_t layer = 0; layer < impl.geometry.layers; ++layer) {
    LayerState& state = impl.layers[layer];
    SPIN_CHECK(state.placed && state.placed_tokens == tokens);
    impl.finish_map(layer);
    for (uint32_t h = 0; state.pins.stride > 0 && h < impl.geometry.kv_heads; ++h) {
      const uint32_t count = state.pins.counts[h];
      SPIN_CHECK(count <= state.pins.stride && count <= impl.shape.zone_pages);
      const uint32_t* pages = state.pins.pages.data() + uint64_t{h} * state.pins.stride;
      impl.head(layer, h).zone.assign(pages, pages + count);
    }
    state.pins = CapturedPins();
  }
  impl.publish_buried();
  impl.committed_tokens = tokens;
}

// ---- Steps.

void TieredSequence::begin_step(uint32_t tokens) {
  Impl& impl = *impl_;
  SPIN_CHECK(impl.residence != Residence::kDemoted && !impl.spent && !impl.has_step());
  SPIN_CHECK(impl.committed_tokens > 0 && tokens > 0);
  SPIN_CHECK(tokens <= impl.shape.max_tokens - impl.committed_tokens);
  ++impl.epoch;
  for (LayerState& state : impl.layers) state.step_first_page = state.tail_first_page;
  impl.step_tokens = tokens;
}

void TieredSequence::commit_step() {
  Impl& impl = *impl_;
  SPIN_CHECK(impl.has_step());
  for (uint32_t layer = 0; layer < impl.geometry.layers; ++layer) {
    LayerState& state = impl.layers[layer];
    SPIN_CHECK(state.appended);
    impl.finish_map(layer);
    state.appended = state.left_tail = false;
  }
  impl.publish_buried();
  impl.committed_tokens += std::exchange(impl.step_tokens, 0);
  if (impl.residence == Residence::kTiered) impl.meter.add_step(impl.reuse_counters());
}

void TieredSequence::drop_step() {
  Impl& impl = *impl_;
  SPIN_CHECK(impl.has_step());
  for (LayerState& state : impl.layers) {
    impl.spent = impl.spent || state.left_tail;
    state.appended = state.left_tail = false;
  }
  impl.step_tokens = 0;
  impl.meter.restart(impl.reuse_counters());
}

layout::Tail TieredSequence::tail(uint32_t layer) const { return impl_->tail(layer); }

uint64_t TieredSequence::tail_first_token(uint32_t layer) const {
  return impl_->layers[layer].tail_first_token;
}

uint32_t TieredSequence::next_page_id(uint32_t layer) const {
  return impl_->layers[layer].next_mapped;
}

layout::PagedTokens TieredSequence::tail_tokens(uint32_t layer) const {
  const Impl& impl = *impl_;
  const LayerState& state = impl.layers[layer];
  SPIN_CHECK(impl.has_step() && state.appended);
  layout::PagedTokens tokens;
  tokens.base = static_cast<const std::byte*>(impl.store.ref().fast.base);
  tokens.geometry = impl.geometry;
  tokens.tokens = impl.committed_tokens + impl.step_tokens - state.tail_first_token;
  if (impl.is_flat(layer)) {
    tokens.slots = impl.record(layer, 0).slots + state.tail_first_page;
    tokens.slot_stride = impl.record(layer, 0).lease_pages;
  } else {
    tokens.slots = impl.tail_slots +
                   uint64_t{layer} * impl.geometry.kv_heads * impl.shape.tail_pages +
                   (state.tail_first_page - state.step_first_page);
    tokens.slot_stride = impl.shape.tail_pages;
  }
  return tokens;
}

backend::TailAppendItem TieredSequence::append_item(uint32_t layer, uint64_t first_row) {
  Impl& impl = *impl_;
  LayerState& state = impl.layers[layer];
  SPIN_CHECK(impl.has_step() && !state.appended);
  backend::TailAppendItem item;
  item.heads = impl.layer_heads(layer);
  item.tail = impl.tail(layer);
  item.first_row = first_row;
  item.tokens = impl.step_tokens;
  if (!impl.is_flat(layer)) {
    item.tail_slots =
        impl.tail_slots + uint64_t{layer} * impl.geometry.kv_heads * impl.shape.tail_pages;
  }
  const uint64_t pages =
      base::ceil_div<uint64_t>(uint64_t{item.tail.tokens} + item.tokens, impl.geometry.page_tokens);
  SPIN_CHECK(pages <= impl.shape.tail_pages || impl.is_flat(layer));
  SPIN_CHECK(item.tail.first_page + pages <= impl.shape.max_page_ids);
  state.appended = true;
  return item;
}

backend::SealItem TieredSequence::seal_item(uint32_t layer,
                                            uint32_t pages,
                                            backend::StreamRef stream) {
  Impl& impl = *impl_;
  LayerState& state = impl.layers[layer];
  SPIN_CHECK(state.appended && !state.left_tail && !state.mapped && pages > 0);
  backend::SealItem item;
  item.heads = impl.layer_heads(layer);
  item.tail = impl.tail(layer);
  item.pages = pages;
  item.epoch = impl.epoch;
  item.reuse = impl.reuse_probe(layer);
  const uint64_t tokens = uint64_t{pages} * impl.geometry.page_tokens;
  SPIN_CHECK(tokens <= item.tail.tokens);
  if (!impl.is_flat(layer)) {
    impl.take_extents(layer, item.tail.first_page, uint64_t{item.tail.first_page} + pages);
    impl.enqueue_directory(layer, stream);
  }
  state.left_tail = true;
  state.tail_first_page += pages;
  state.tail_first_token += tokens;
  return item;
}

backend::RepackTailItem TieredSequence::repack_item(uint32_t layer,
                                                    uint32_t tokens,
                                                    const layout::PageMap* map,
                                                    uint32_t mapped_page_ids,
                                                    backend::StreamRef stream) {
  Impl& impl = *impl_;
  LayerState& state = impl.layers[layer];
  SPIN_CHECK(state.appended && !state.left_tail && map != nullptr);
  backend::RepackTailItem item;
  item.heads = impl.layer_heads(layer);
  item.tail = impl.tail(layer);
  item.map = map;
  item.first_mapped_page = state.next_mapped;
  item.epoch = impl.epoch;
  SPIN_CHECK(tokens > 0 && tokens <= item.tail.tokens && tokens % impl.geometry.page_tokens == 0);
  impl.begin_map(layer);
  const bool tail_is_last = state.next_mapped <= state.tail_first_page;
  const uint64_t end = uint64_t{state.next_mapped} + mapped_page_ids;
  SPIN_CHECK(end <= (tail_is_last ? impl.mapped_end() : impl.shape.max_page_ids));
  impl.capture(state.map, *map, mapped_page_ids, stream);
  state.map.first_page = state.next_mapped;
  if (!impl.is_flat(layer)) {
    impl.take_extents(layer, state.next_mapped, end);
    impl.enqueue_directory(layer, stream);
  }
  state.left_tail = true;
  state.left_first_page = state.tail_first_page;
  state.tail_first_page += tokens / impl.geometry.page_tokens;
  state.left_end_page = state.tail_first_page;
  state.tail_first_token += tokens;
  state.next_mapped = static_cast<uint32_t>(end);
  return item;
}

backend::RetrieveItem TieredSequence::retrieve_item(uint32_t layer) {
  Impl& impl = *impl_;
  SPIN_CHECK(impl.has_step());
  backend::RetrieveItem item;
  item.heads = impl.layer_heads(layer);
  item.counters = impl.counters;
  item.reuse = impl.reuse_probe(layer);
  item.epoch = impl.epoch;
  return item;
}

layout::RetrieveCounters TieredSequence::take_counters() {
  layout::RetrieveCounters sum;
  for (uint32_t h = 0; h < impl_->geometry.kv_heads; ++h) {
    layout::RetrieveCounters& one = impl_->counters[h];
    sum.hits += one.hits;
    sum.misses += one.misses;
    sum.evictions += one.evictions;
    sum.bytes += one.bytes;
    sum.stall_ns += one.stall_ns;
    sum.faults += one.faults;
    one = layout::RetrieveCounters();
  }
  return sum;
}

const GainCurve& TieredSequence::gain_curve() const { return impl_->meter.curve(); }

}  // namespace spin::kv
