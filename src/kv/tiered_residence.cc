// SPDX-License-Identifier: Apache-2.0
// Transitions of a TieredSequence between its forms. All of them happen at drained points; what
// they copy goes through the store's PageMover.
#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/checked_math.h"
#include "base/memory_guard.h"
#include "kv/tiered_sequence.h"
#include "kv/tiered_state.h"
#include "layout/residency.h"

namespace spin::kv {

using layout::HeadPages;
using layout::kNoPage;
using layout::kNoSlot;

uint32_t TieredSequence::Impl::tail_pages(uint32_t layer) const {
  return base::ceil_div(tail(layer).tokens, geometry.page_tokens);
}

Status TieredSequence::Impl::prepare_form(uint64_t lease) {
  for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
    LayerState& state = layers[layer];
    if (is_flat(layer, lease)) continue;
    if (tail_pages(layer) > shape.tail_pages) {
      return Status(StatusCode::kUnavailable,
                    fmt::format("a tail of {} pages does not fit the {} that are leased for it",
                                tail_pages(layer), shape.tail_pages));
    }
    if (!state.mapped) state.sinks = std::min(shape.sink_pages, state.tail_first_page);
  }
  return ok_status();
}

// ---- To the host.

void TieredSequence::Impl::settle() {
  if (!transfer.is_complete()) return;
  const bool good = transfer.result().ok();
  transfer = Transfer();
  for (HeadState& state : heads) {
    if (good) state.on_host = std::max(state.on_host, state.going);
    state.going = state.on_host;
  }
}

void TieredSequence::Impl::forget_going() {
  for (HeadState& state : heads) state.going = state.on_host;
}

// Sealed pages of flat layers that the host lacks, oldest first; `going` follows.
void TieredSequence::Impl::collect_sealed(uint64_t most_pages, std::vector<PageCopy>& copies) {
  for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
    if (!is_flat(layer)) continue;
    const uint32_t end = sealed_end(layer);
    for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
      HeadState& state = head(layer, h);
      for (state.going = state.on_host; state.going < end; ++state.going) {
        const uint32_t tokens = sealed_tokens(layer, h, state.going);
        if (tokens == 0) continue;
        if (copies.size() >= most_pages) return;
        take_extent(layer, h, state.going);
        copies.push_back(page_copy(layer, h, state.going, tokens, state.slots[state.going].slot));
      }
    }
  }
}

Result<Transfer> TieredSequence::Impl::write_through(uint64_t most_pages,
                                                     const WriterEvent& written) {
  SPIN_CHECK(store.host() != nullptr && !has_step() && committed_tokens > 0);
  SPIN_CHECK(residence != Residence::kDemoted && !spent);
  settle();
  SPIN_CHECK(transfer.is_complete());
  SPIN_RETURN_IF_ERROR(reserve_host());
  auto begun = base::guard_memory("pages were written through", [&]() -> Result<Transfer> {
    std::vector<PageCopy> copies;
    collect_sealed(most_pages, copies);
    return store.mover().begin_to_host(std::move(copies), written);
  });
  if (begun.ok()) {
    transfer = *begun;
  } else {
    forget_going();
  }
  return begun;
}

bool TieredSequence::Impl::is_written_through() const {
  if (residence == Residence::kDemoted) return true;
  for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
    if (!is_flat(layer)) continue;
    const uint32_t end = sealed_end(layer);
    for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
      for (uint32_t page = head(layer, h).on_host; page < end; ++page) {
        if (sealed_tokens(layer, h, page) > 0) return false;
      }
    }
  }
  return true;
}

Status TieredSequence::Impl::demote(const WriterEvent& written) {
  SPIN_CHECK(store.host() != nullptr && !has_step() && committed_tokens > 0);
  SPIN_CHECK(residence != Residence::kDemoted && !spent);
  (void)transfer.wait_result();  // a failed write-through leaves its pages to this one
  settle();
  SPIN_RETURN_IF_ERROR(reserve_host());
  auto begun = base::guard_memory("a sequence was demoted", [&]() -> Result<Transfer> {
    SPIN_RETURN_IF_ERROR(tables.fetch(store.table_stream()));
    std::vector<PageCopy> copies;
    collect_sealed(std::numeric_limits<uint64_t>::max(), copies);
    for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
      const layout::Tail at = tail(layer);
      const uint32_t pages = tail_pages(layer);
      take_extents(layer, at.first_page, uint64_t{at.first_page} + pages);
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
        const HeadPages head_pages = tables.view(uint64_t{layer} * geometry.kv_heads + h);
        for (uint32_t t = 0; t < pages; ++t) {
          const uint32_t tokens =
              std::min(geometry.page_tokens, at.tokens - t * geometry.page_tokens);
          copies.push_back(page_copy(layer, h, at.first_page + t, tokens,
                                     head_pages.slots[layout::tail_entry(head_pages, at, t)]));
        }
      }
    }
    return store.mover().begin_to_host(std::move(copies), written);
  });
  tables.drop_image();
  if (!begun.ok()) {
    forget_going();
    return begun.status();
  }
  transfer = *begun;
  const Status copied = transfer.wait_result();
  settle();
  if (!copied.ok()) return copied.with_context("demoting a sequence");
  release_slots();
  tables = LeaseTables();
  dead_slots.clear();
  residence = Residence::kDemoted;
  return ok_status();
}

// ---- To fast memory.

// What head `h` needs beside its slots: everything when flat, otherwise zones and tail.
void TieredSequence::Impl::collect_resumed(uint32_t layer,
                                           uint32_t h,
                                           LeaseTables& made,
                                           std::vector<PageCopy>& out) {
  HeadPages pages = made.view(uint64_t{layer} * geometry.kv_heads + h);
  const auto bring = [&](uint32_t entry, uint32_t page, uint32_t tokens) {
    if (tokens == 0) return;
    if (!pages.is_flat()) layout::set_entry(pages, entry, page);
    out.push_back(page_copy(layer, h, page, tokens, pages.slots[entry]));
  };
  if (pages.is_flat()) {
    for (uint32_t page = 0; page < sealed_end(layer); ++page) {
      bring(page, page, sealed_tokens(layer, h, page));
    }
  } else {
    const uint32_t sinks = layers[layer].sinks;
    for (uint32_t page = 0; page < sinks; ++page) {
      bring(page, page, sealed_tokens(layer, h, page));
    }
    const std::vector<uint32_t>& zone = head(layer, h).zone;
    for (uint32_t i = 0; i < zone.size(); ++i) {
      bring(sinks + i, zone[i], sealed_tokens(layer, h, zone[i]));
    }
  }
  const layout::Tail at = tail(layer);
  for (uint32_t t = 0; t < tail_pages(layer); ++t) {
    bring(layout::tail_entry(pages, at, t), at.first_page + t,
          std::min(geometry.page_tokens, at.tokens - t * geometry.page_tokens));
  }
}

Status TieredSequence::Impl::resume(LeaseTables made) {
  SPIN_RETURN_IF_ERROR(take_slots(made));
  auto begun = base::guard_memory("a sequence was resumed", [&]() -> Result<Transfer> {
    std::vector<PageCopy> copies;
    for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) collect_resumed(layer, h, made, copies);
    }
    return store.mover().begin_to_fast(std::move(copies));
  });
  Status copied = begun.ok() ? begun->wait_result() : begun.status();
  if (copied.ok()) {
    copied = base::guard_memory("a sequence was resumed", [&]() -> Status {
      SPIN_RETURN_IF_ERROR(publish_directory());
      SPIN_RETURN_IF_ERROR(made.publish(store.table_stream()));
      return forget_reuse();
    });
  }
  if (!copied.ok()) {
    release_slots();
    return copied.with_context("resuming a sequence");
  }
  tables = std::move(made);
  const bool tiered =
      shape.dense_layers < geometry.layers && tables.lease_pages() < shape.max_page_ids;
  residence = tiered ? Residence::kTiered : Residence::kResident;
  // In the flat form `on_host` counts from here; in the tiered form all of it is there.
  for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
    for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
      head(layer, h).on_host = head(layer, h).going = sealed_end(layer);
    }
  }
  return ok_status();
}

// ---- From one lease to another.

namespace {

using Impl = TieredSequence::Impl;

// Numbers and lists of one layer's resize.
struct LayerResize {
  uint32_t extra = 0;     // per head
  uint32_t released = 0;  // per head
  uint32_t zone_entries = 0;
  uint32_t* extra_slots = nullptr;     // [kv_heads, extra]
  uint32_t* released_slots = nullptr;  // [kv_heads, released]
  uint32_t* zone_pages = nullptr;      // [kv_heads, zone_entries]

  uint64_t words() const { return uint64_t{extra} + released + zone_entries; }  // per head
};

LayerResize plan_layer(const Impl& impl, uint32_t layer, uint64_t lease) {
  LayerResize plan;
  for (uint32_t h = 0; h < impl.geometry.kv_heads; ++h) {
    const std::vector<PageHandle>& slots = impl.head(layer, h).slots;
    const auto live = static_cast<uint64_t>(std::count_if(
        slots.begin(), slots.end(), [](PageHandle page) { return page.slot != kNoSlot; }));
    if (live < lease) plan.extra = std::max(plan.extra, static_cast<uint32_t>(lease - live));
  }
  plan.released = static_cast<uint32_t>(impl.record(layer, 0).lease_pages + plan.extra - lease);
  plan.zone_entries = impl.layers[layer].sinks + impl.shape.zone_pages;
  return plan;
}

// Which pages the pinned entries outside the tail are for.
void fill_zone(const Impl& impl, uint32_t layer, uint32_t h, std::span<uint32_t> zone) {
  const std::vector<uint32_t>& pages = impl.head(layer, h).zone;
  const uint32_t sinks = impl.layers[layer].sinks;
  std::fill(zone.begin(), zone.end(), kNoPage);
  for (uint32_t i = 0; i < sinks; ++i) zone[i] = i;
  std::copy(pages.begin(), pages.end(), zone.begin() + sinks);
}

void enqueue_layer(Impl& impl,
                   uint32_t layer,
                   const LayerResize& plan,
                   HeadPages* after,
                   backend::Stream& stream) {
  backend::ResizeItem item;
  item.before = impl.layer_heads(layer);
  item.after = after;
  item.extra = plan.extra_slots;
  item.extra_count = plan.extra;
  item.released = plan.released_slots;
  item.released_count = plan.released;
  item.tail_before = item.tail_after = impl.tail(layer);
  item.zone_entries = plan.zone_entries;
  item.zone_pages = plan.zone_pages;
  item.epoch = impl.epoch;
  impl.store.device().kv_ops().enqueue_resize(item, impl.store.ref(), stream);
}

}  // namespace

Status TieredSequence::Impl::resize_tables(LeaseTables made, backend::Stream& stream) {
  const uint32_t kv_heads = geometry.kv_heads;
  std::vector<LayerResize> plans(geometry.layers);
  uint64_t words = 1;
  uint64_t new_slots = 0;
  for (uint32_t layer = shape.dense_layers; layer < geometry.layers; ++layer) {
    plans[layer] = plan_layer(*this, layer, made.lease_pages());
    words += kv_heads * plans[layer].words();
    new_slots += uint64_t{kv_heads} * plans[layer].extra;
  }
  SPIN_ASSIGN_OR_RETURN(backend::Buffer lists,
                        backend::Buffer::allocate(store.device().memory(backend::MemoryKind::kHost),
                                                  words * sizeof(uint32_t)));
  SPIN_RETURN_IF_ERROR(check_slots(new_slots));
  std::vector<PageHandle> extra(new_slots);
  // From here on nothing that a head holds needs memory.
  for (uint32_t layer = shape.dense_layers; layer < geometry.layers; ++layer) {
    for (uint32_t h = 0; h < kv_heads; ++h) {
      std::vector<PageHandle>& slots = head(layer, h).slots;
      slots.reserve(slots.size() + plans[layer].extra);
    }
  }
  const bool allocated = store.fast().allocate(extra);
  SPIN_CHECK(allocated);
  for (uint64_t i = 0; i < uint64_t{shape.dense_layers} * kv_heads; ++i) {
    std::transform(heads[i].slots.begin(), heads[i].slots.end(), made.view(i).slots,
                   [](PageHandle page) { return page.slot; });
  }
  Status ran = base::guard_memory("a lease was resized", [&]() -> Status {
    SPIN_RETURN_IF_ERROR(publish_directory());
    return made.publish(store.table_stream());
  });
  if (!ran.ok()) {
    store.fast().release(extra);
    return ran.with_context("resizing a lease");
  }
  auto* word = lists.as<uint32_t>();
  auto next = extra.begin();
  for (uint32_t layer = shape.dense_layers; layer < geometry.layers; ++layer) {
    LayerResize& plan = plans[layer];
    plan.extra_slots = word;
    plan.released_slots = plan.extra_slots + uint64_t{kv_heads} * plan.extra;
    plan.zone_pages = plan.released_slots + uint64_t{kv_heads} * plan.released;
    word = plan.zone_pages + uint64_t{kv_heads} * plan.zone_entries;
    for (uint32_t h = 0; h < kv_heads; ++h) {
      for (uint32_t i = 0; i < plan.extra; ++i, ++next) {
        plan.extra_slots[uint64_t{h} * plan.extra + i] = next->slot;
        head(layer, h).slots.push_back(*next);
      }
      fill_zone(*this, layer, h,
                {plan.zone_pages + uint64_t{h} * plan.zone_entries, plan.zone_entries});
    }
  }
  const Status queued = base::guard_memory("a lease was resized", [&] {
    for (uint32_t layer = shape.dense_layers; layer < geometry.layers; ++layer) {
      HeadPages* after = made.heads() + uint64_t{layer} * kv_heads;
      enqueue_layer(*this, layer, plans[layer], after, stream);
    }
    return ok_status();
  });
  ran = stream.wait_idle();  // also after a failure: what is queued reads the lists
  if (ran.ok() && !queued.ok()) ran = Status(StatusCode::kInternal, queued.message());
  if (!ran.ok()) {
    spent = true;
    return ran.with_context("resizing a lease");
  }
  spent = true;  // unless all that follows is done
  for (uint32_t layer = shape.dense_layers; layer < geometry.layers; ++layer) {
    const LayerResize& plan = plans[layer];
    for (uint32_t h = 0; h < kv_heads; ++h) {
      give_back(head(layer, h), {plan.released_slots + uint64_t{h} * plan.released, plan.released});
    }
  }
  Status noted = base::guard_memory("reuse was noted", [&] {
    return residence == Residence::kTiered ? remember_dropped(made) : forget_reuse();
  });
  // A measure that lacks a few pages is no reason to end a sequence.
  if (noted.code() == StatusCode::kResourceExhausted) noted = ok_status();
  tables = std::move(made);
  dead_slots.clear();
  residence = Residence::kTiered;
  spent = !noted.ok();
  return noted;
}

// Releases the slots of a head that are on the list; kNoSlot stands for none.
void TieredSequence::Impl::give_back(HeadState& state, std::span<const uint32_t> slots) {
  std::vector<uint32_t> gone(slots.begin(), slots.end());
  std::sort(gone.begin(), gone.end());
  const auto is_gone = [&](PageHandle page) {
    return std::binary_search(gone.begin(), gone.end(), page.slot);
  };
  std::vector<PageHandle> released;
  for (PageHandle page : state.slots) {
    if (page.slot != kNoSlot && is_gone(page)) released.push_back(page);
  }
  std::erase_if(state.slots,
                [&](PageHandle page) { return page.slot == kNoSlot || is_gone(page); });
  store.fast().release(released);
}

// ---- The public face.

Status TieredSequence::resize(uint64_t lease_pages, backend::StreamRef stream) {
  Impl& impl = *impl_;
  SPIN_CHECK(!impl.has_step() && !impl.spent && impl.committed_tokens > 0);
  SPIN_CHECK(impl.residence != Residence::kDemoted);
  impl.settle();
  SPIN_CHECK(impl.transfer.is_complete());
  const uint64_t lease = std::min(lease_pages, impl.shape.max_page_ids);
  const bool all_flat =
      lease == impl.shape.max_page_ids || impl.shape.dense_layers >= impl.geometry.layers;
  if (lease == impl.tables.lease_pages()) return ok_status();
  if (all_flat && impl.residence == Residence::kResident) return ok_status();
  Status resized = base::guard_memory("a lease was resized", [&]() -> Status {
    impl.publish_buried();
    if (!impl.dead_slots.empty()) {
      return Status(StatusCode::kUnavailable, "a lease whose dead pages are not noted yet");
    }
    if (impl.residence == Residence::kResident) {
      if (impl.store.host() == nullptr || !impl.has_host || !impl.is_written_through()) {
        return Status(StatusCode::kUnavailable,
                      "not all pages of a sequence are on the host; it keeps them all in fast "
                      "memory until they are");
      }
      SPIN_RETURN_IF_ERROR(impl.prepare_form(lease));
    }
    SPIN_CHECK(all_flat ||
               lease >= uint64_t{impl.shape.pinned_pages()} + impl.shape.selected_pages);
    SPIN_ASSIGN_OR_RETURN(LeaseTables made, impl.make_tables(lease));
    if (!all_flat) return impl.resize_tables(std::move(made), stream);
    // Everything comes back from the host; what is there now is written first.
    const uint64_t needed = impl.slots_needed(lease);
    const PageCounts& counts = impl.store.fast().counts();
    if (needed > counts.free + fast_pages()) {
      return Status(StatusCode::kResourceExhausted,
                    fmt::format("all of a sequence takes {} KV pages of fast memory, it holds {}; "
                                "{} of {} are free",
                                needed, fast_pages(), counts.free, counts.total));
    }
    SPIN_RETURN_IF_ERROR(impl.demote(WriterEvent::after(stream)));
    return impl.resume(std::move(made));
  });
  // Not one of the errors after which nothing has changed.
  if (impl.spent && resized.code() == StatusCode::kResourceExhausted) {
    return Status(StatusCode::kInternal, resized.message());
  }
  return resized;
}

Result<Transfer> TieredSequence::write_through(uint64_t most_pages, const WriterEvent& written) {
  return impl_->write_through(most_pages, written);
}

bool TieredSequence::is_written_through() const {
  impl_->settle();
  return impl_->is_written_through();
}

bool TieredSequence::has_transfer_in_flight() const { return !impl_->transfer.is_complete(); }

Status TieredSequence::demote(const WriterEvent& written) { return impl_->demote(written); }

Status TieredSequence::resume(uint64_t lease_pages) {
  Impl& impl = *impl_;
  SPIN_CHECK(impl.residence == Residence::kDemoted);
  const uint64_t lease = std::min(lease_pages, impl.shape.max_page_ids);
  SPIN_CHECK(impl.shape.dense_layers >= impl.geometry.layers || lease == impl.shape.max_page_ids ||
             lease >= uint64_t{impl.shape.pinned_pages()} + impl.shape.selected_pages);
  return base::guard_memory("a sequence was resumed", [&]() -> Status {
    SPIN_RETURN_IF_ERROR(impl.prepare_form(lease));
    SPIN_ASSIGN_OR_RETURN(LeaseTables made, impl.make_tables(lease));
    return impl.resume(std::move(made));
  });
}

}  // namespace spin::kv
