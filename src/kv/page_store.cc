// SPDX-License-Identifier: Apache-2.0
#include "kv/page_store.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/checked_math.h"
#include "kv/tiered_sequence.h"
#include "kv/tiered_state.h"
#include "layout/residency.h"

namespace spin::kv {
namespace {

using layout::HeadPages;
using layout::kNoPage;
using layout::kNoSlot;

Status broken(std::string what) {
  return Status(StatusCode::kInternal, "page store audit: " + std::move(what));
}

}  // namespace

Result<std::unique_ptr<PageStore>> PageStore::create(backend::Device& device,
                                                     const PageStoreOptions& options) {
  std::unique_ptr<PageStore> store(new PageStore(device, options));
  SPIN_ASSIGN_OR_RETURN(store->table_stream_, device.create_stream("kv-tables"));
  PagePoolOptions pool;
  pool.pages = options.fast_pages;
  pool.poison = options.poison && device.properties().unified_memory;
  if (!device.properties().unified_memory) {
    pool.table_memory = &store->table_memory_;
    pool.table_stream = store->table_stream_.get();
  }
  SPIN_ASSIGN_OR_RETURN(store->fast_, PagePool::create(device.memory(backend::MemoryKind::kFast),
                                                       options.geometry, pool));
  if (options.host_bytes > 0) {
    SPIN_ASSIGN_OR_RETURN(
        store->host_, HostPool::create(device.memory(backend::MemoryKind::kHost), options.geometry,
                                       options.extent_pages, options.host_bytes, options.poison));
  }
  SPIN_ASSIGN_OR_RETURN(store->mover_, PageMover::create(device, options.geometry.page_bytes()));
  return store;
}

PageStore::PageStore(backend::Device& device, const PageStoreOptions& options)
    : device_(device),
      options_(options),
      table_memory_(device.memory(backend::MemoryKind::kFast)) {}

PageStore::~PageStore() = default;

backend::TieredPoolRef PageStore::ref() const {
  return {fast_->ref(), host_ ? host_->layout() : layout::HostExtentLayout()};
}

bool PageStore::wants_write_through(bool request_waits) const {
  if (host_ == nullptr) return false;
  const PageCounts& counts = fast_->counts();
  return request_waits || static_cast<double>(counts.in_use()) >=
                              options_.write_through_at * static_cast<double>(counts.total);
}

uint64_t PageStore::take_owners(uint64_t heads) {
  return std::exchange(next_owner_, next_owner_ + heads);
}

// ---- Classes. A head's slots are told apart by what their entries hold.

namespace {

using Impl = TieredSequence::Impl;

enum class SlotClass : uint8_t { kInTransfer, kPinned, kFilling, kDeviceOnly, kCached };

// What tells the slots of one head apart.
struct HeadView {
  HeadView(const Impl& owner, uint32_t at_layer, uint32_t at_head)
      : impl(owner),
        layer(at_layer),
        h(at_head),
        tail(owner.tail(at_layer)),
        tail_end(tail.first_page + base::ceil_div(tail.tokens, owner.geometry.page_tokens)),
        has_open(tail.tokens % owner.geometry.page_tokens != 0),
        flat(owner.is_flat(at_layer)) {}

  // `page` is kNoPage for an empty entry.
  SlotClass class_of(uint32_t page) const {
    if (page == kNoPage) return SlotClass::kCached;
    if (page >= tail.first_page && page < tail_end) {
      return has_open && page == tail_end - 1 ? SlotClass::kFilling : SlotClass::kPinned;
    }
    if (impl.sealed_tokens(layer, h, page) == 0) return SlotClass::kCached;  // not written yet
    const HeadState& state = impl.head(layer, h);
    if (flat && page >= state.on_host && page < state.going) return SlotClass::kInTransfer;
    const bool zone = page < impl.layers[layer].sinks ||
                      std::binary_search(state.zone.begin(), state.zone.end(), page);
    if (zone) return SlotClass::kPinned;
    return flat && page >= state.on_host ? SlotClass::kDeviceOnly : SlotClass::kCached;
  }

  const Impl& impl;
  const uint32_t layer;
  const uint32_t h;
  const layout::Tail tail;
  const uint32_t tail_end;
  const bool has_open;
  const bool flat;
};

void count_class(SlotClass slot_class, ClassCounts& counts) {
  switch (slot_class) {
    case SlotClass::kInTransfer:
      ++counts.in_transfer;
      break;
    case SlotClass::kPinned:
      ++counts.pinned;
      break;
    case SlotClass::kFilling:
      ++counts.filling;
      break;
    case SlotClass::kDeviceOnly:
      ++counts.device_only;
      break;
    case SlotClass::kCached:
      ++counts.cached;
      break;
  }
}

// Requires: the image of its tables is there, unless it is demoted.
void count_classes(Impl& impl, ClassCounts& counts) {
  impl.settle();
  if (impl.residence == Residence::kDemoted) return;
  for (uint32_t layer = 0; layer < impl.geometry.layers; ++layer) {
    for (uint32_t h = 0; h < impl.geometry.kv_heads; ++h) {
      const HeadPages pages = impl.tables.view(uint64_t{layer} * impl.geometry.kv_heads + h);
      const HeadView view(impl, layer, h);
      for (uint32_t i = 0; i < pages.lease_pages; ++i) {
        if (pages.slots[i] == kNoSlot) continue;
        const uint32_t page = pages.is_flat() ? i : pages.pages[i];
        // Before the prompt is committed nothing counts as written.
        const bool empty = impl.committed_tokens == 0;
        count_class(empty ? SlotClass::kFilling : view.class_of(page), counts);
      }
    }
  }
}

}  // namespace

ClassCounts PageStore::classes(std::span<const TieredSequence* const> live,
                               std::span<const SequenceKv* const> dense) const {
  ClassCounts counts;
  counts.total = fast_->counts().total;
  counts.free = fast_->counts().free;
  for (const TieredSequence* sequence : live) {
    Impl& impl = *sequence->impl_;
    const bool demoted = impl.residence == Residence::kDemoted;
    // What cannot be read is not counted, and the equation does not hold.
    if (!demoted && !impl.tables.fetch(impl.store.table_stream()).ok()) continue;
    count_classes(impl, counts);
    impl.tables.drop_image();
  }
  for (const SequenceKv* sequence : dense) {
    for (const PageHandle& page : sequence->pages()) {
      ++(fast_->state(page.slot) == PageState::kSealed ? counts.device_only : counts.filling);
    }
  }
  return counts;
}

// ---- Audit.

namespace {

// The entries of a head hold exactly its slots, and its table says what they hold.
Status audit_head(Impl& impl, uint32_t layer, uint32_t h, std::vector<bool>& held) {
  const HeadState& state = impl.head(layer, h);
  const HeadPages pages = impl.tables.view(uint64_t{layer} * impl.geometry.kv_heads + h);
  const PagePool& pool = impl.store.fast();
  std::vector<uint32_t> leased;
  for (PageHandle page : state.slots) {
    if (page.slot == kNoSlot) continue;
    if (!pool.is_current(page)) {
      return broken(fmt::format("slot {} is held by a stale handle", page.slot));
    }
    if (held[page.slot]) return broken(fmt::format("slot {} is held twice", page.slot));
    held[page.slot] = true;
    leased.push_back(page.slot);
  }
  std::vector<uint32_t> entries(pages.slots, pages.slots + pages.lease_pages);
  if (pages.is_flat()) std::erase(entries, kNoSlot);
  std::sort(leased.begin(), leased.end());
  std::sort(entries.begin(), entries.end());
  if (leased != entries) {
    return broken(fmt::format("head {} of layer {} leases {} slots, its entries hold {} others", h,
                              layer, leased.size(), entries.size()));
  }
  if (pages.is_flat()) return ok_status();
  uint32_t listed = 0;
  for (uint32_t i = 0; i < pages.table_size; ++i) listed += pages.table[i] != 0;
  uint32_t resident = 0;
  for (uint32_t i = 0; i < pages.lease_pages; ++i) {
    if (pages.pages[i] == kNoPage) continue;
    ++resident;
    if (layout::find_entry(pages, pages.pages[i]) != i) {
      return broken(fmt::format("page {} of head {} of layer {} is not found where it lies",
                                pages.pages[i], h, layer));
    }
  }
  if (listed != resident) {
    return broken(fmt::format("{} entries hold pages, the table lists {}", resident, listed));
  }
  return ok_status();
}

// Every page that only the host has, or that a kernel may evict, is there with its tag.
Status audit_host_pages(const Impl& impl, uint32_t layer, uint32_t h) {
  const bool demoted = impl.residence == Residence::kDemoted;
  if (impl.committed_tokens == 0) return ok_status();
  const layout::HostExtentLayout& host = impl.store.host()->layout();
  const uint64_t owner = impl.owner + uint64_t{layer} * impl.geometry.kv_heads + h;
  const uint32_t end =
      demoted || !impl.is_flat(layer) ? impl.sealed_end(layer) : impl.head(layer, h).on_host;
  for (uint32_t page = 0; page < end; ++page) {
    const uint32_t tokens = impl.sealed_tokens(layer, h, page);
    if (tokens == 0) continue;
    const uint64_t extent = impl.extent_of(layer, h, page);
    if (extent == 0) return broken(fmt::format("page {} has no extent on the host", page));
    const layout::HostPageTag& tag = *host.tag(extent, page);
    if (tag.owner != owner || tag.page != page || tag.tokens != tokens) {
      return broken(
          fmt::format("the host's page {} of head {} of layer {} is tagged page {} with "
                      "{} tokens",
                      page, h, layer, tag.page, tag.tokens));
    }
  }
  return ok_status();
}

Status audit_extents(const Impl& impl, std::vector<uint64_t>& extents) {
  const HostPool* host = impl.store.host();
  uint64_t taken = 0;
  for (const uint64_t extent : impl.extents) {
    if (extent == 0) continue;
    if (!host->is_in_use(extent)) return broken("an extent is held but not in use");
    extents.push_back(extent);
    ++taken;
  }
  if (taken != impl.extents_taken) {
    return broken(
        fmt::format("a sequence holds {} extents and counts {}", taken, impl.extents_taken));
  }
  return ok_status();
}

Status audit_sequence(Impl& impl, std::vector<bool>& held, std::vector<uint64_t>& extents) {
  impl.settle();
  SPIN_RETURN_IF_ERROR(audit_extents(impl, extents));
  if (impl.residence != Residence::kDemoted) {
    SPIN_RETURN_IF_ERROR(impl.tables.fetch(impl.store.table_stream()));
  }
  for (uint32_t layer = 0; layer < impl.geometry.layers; ++layer) {
    for (uint32_t h = 0; h < impl.geometry.kv_heads; ++h) {
      if (impl.residence != Residence::kDemoted) {
        SPIN_RETURN_IF_ERROR(audit_head(impl, layer, h, held));
      }
      if (impl.has_host) SPIN_RETURN_IF_ERROR(audit_host_pages(impl, layer, h));
    }
  }
  return ok_status();
}

}  // namespace

Status PageStore::audit(std::span<const TieredSequence* const> live,
                        std::span<const SequenceKv* const> dense) const {
  SPIN_RETURN_IF_ERROR(fast_->audit());
  std::vector<bool> held(fast_->counts().total);
  std::vector<uint64_t> extents;
  uint64_t reserved = 0;
  for (const TieredSequence* sequence : live) {
    SPIN_RETURN_IF_ERROR(audit_sequence(*sequence->impl_, held, extents));
    reserved += sequence->impl_->extents_reserved;
  }
  for (const SequenceKv* sequence : dense) {
    SPIN_RETURN_IF_ERROR(audit_pages(*fast_, *sequence, held));
  }
  const auto in_use = static_cast<uint64_t>(std::count(held.begin(), held.end(), true));
  if (in_use != fast_->counts().in_use()) {
    return broken(fmt::format("{} slots are in use, {} sequences hold {}", fast_->counts().in_use(),
                              live.size() + dense.size(), in_use));
  }
  if (host_ != nullptr) {
    SPIN_RETURN_IF_ERROR(host_->audit());
    const HostCounts& counts = host_->counts();
    std::sort(extents.begin(), extents.end());
    if (std::adjacent_find(extents.begin(), extents.end()) != extents.end()) {
      return broken("an extent is held twice");
    }
    if (extents.size() != counts.in_use || reserved != counts.reserved) {
      return broken(fmt::format("{} extents are in use and {} reserved, sequences hold {} and {}",
                                counts.in_use, counts.reserved, extents.size(), reserved));
    }
  }
  const ClassCounts counts = classes(live, dense);
  const uint64_t sum = counts.in_transfer + counts.pinned + counts.filling + counts.device_only +
                       counts.cached + counts.free;
  if (sum != counts.total) {
    return broken(fmt::format("the classes add up to {} of {} slots", sum, counts.total));
  }
  const MoverCounters moved = mover_->counters();
  if (moved.dispatched != moved.settled + moved.in_flight) {
    return broken(fmt::format("{} pages were dispatched, {} settled, {} are in flight",
                              moved.dispatched, moved.settled, moved.in_flight));
  }
  return ok_status();
}

}  // namespace spin::kv
