// SPDX-License-Identifier: Apache-2.0
// Not part of a step, so lists and a sort are fine here. Nothing is copied but pages that come from
// the host into a flat form: slots change hands.
#include "backend/cpu/resize.h"

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

class HeadResize {
 public:
  HeadResize(const ResizeItem& item, const TieredPoolRef& pool, uint32_t h)
      : item_(item),
        pool_(pool),
        h_(h),
        before_(item.before[h]),
        after_(item.after[h]),
        tail_pages_(base::ceil_div(item.tail_before.tokens, pool.fast.geometry.page_tokens)),
        kept_(before_.lease_pages, false) {}

  // False if slots are missing.
  bool run() {
    std::fill_n(after_.slots, after_.lease_pages, kNoSlot);
    bool complete = true;
    if (after_.is_flat()) {
      keep_by_id();
      collect_free();
      fill_flat();
    } else {
      layout::clear_residency(after_, item_.epoch);
      keep_zones();
      keep_tail();
      keep_cache();
      collect_free();
      for (uint32_t i = 0; i < after_.lease_pages; ++i) {
        if (after_.slots[i] == kNoSlot) after_.slots[i] = next_free();
        complete = complete && after_.slots[i] != kNoSlot;
      }
    }
    uint32_t* released = item_.released + uint64_t{h_} * item_.released_count;
    for (uint32_t i = 0; i < item_.released_count; ++i) released[i] = next_free();
    return complete && next_free() == kNoSlot;
  }

 private:
  struct Candidate {
    uint32_t entry = 0;
    uint32_t bucket = 0;  // of its age
  };

  uint32_t page_of(uint32_t entry) const {
    return before_.is_flat() ? entry : before_.pages[entry];
  }

  // Entry `from` of `before` becomes entry `to` of a tiered `after`.
  void keep(uint32_t from, uint32_t to) {
    const uint32_t page = page_of(from);
    after_.slots[to] = before_.slots[from];
    kept_[from] = true;
    if (page == kNoPage) return;
    layout::set_entry(after_, to, page);
    if (before_.is_flat()) return;  // stays unused_stamp()
    const uint32_t age = layout::age_bucket(layout::age_of(item_.epoch, before_.stamps[from]));
    after_.stamps[to] = static_cast<uint8_t>(item_.epoch - age);
  }

  void keep_zones() {
    for (uint32_t i = 0; i < item_.zone_entries; ++i) {
      uint32_t from = i;
      if (before_.is_flat() && item_.zone_pages != nullptr) {
        from = item_.zone_pages[uint64_t{h_} * item_.zone_entries + i];
      }
      if (from < before_.lease_pages && before_.slots[from] != kNoSlot) keep(from, i);
    }
  }

  void keep_tail() {
    for (uint32_t t = 0; t < tail_pages_; ++t) {
      keep(layout::tail_entry(before_, item_.tail_before, t),
           layout::tail_entry(after_, item_.tail_after, t));
    }
  }

  // Whether a flat entry holds a page that may go to the cache.
  bool is_page(uint32_t entry) const {
    if (!before_.is_flat()) return before_.pages[entry] != kNoPage;
    return before_.slots[entry] != kNoSlot &&
           host_holds(host_page(after_, pool_.host, entry), after_, entry);
  }

  // The newest pages, in the order of their entries.
  void keep_cache() {
    std::vector<Candidate> candidates;
    for (uint32_t i = before_.is_flat() ? 0 : before_.pinned_entries; i < before_.lease_pages;
         ++i) {
      if (kept_[i] || !is_page(i)) continue;
      const uint32_t age = before_.is_flat() ? 0 : layout::age_of(item_.epoch, before_.stamps[i]);
      candidates.push_back({i, layout::age_bucket(age)});
    }
    const size_t room = after_.lease_pages - after_.pinned_entries;
    if (candidates.size() > room) {
      // As victims go: the oldest bucket first, within a bucket the first entry; flat pages by id.
      std::stable_sort(candidates.begin(), candidates.end(),
                       [](Candidate a, Candidate b) { return a.bucket > b.bucket; });
      const auto first_kept = candidates.end() - static_cast<std::ptrdiff_t>(room);
      for (auto it = candidates.begin(); it != first_kept; ++it) dropped_.push_back(it->entry);
      candidates.erase(candidates.begin(), first_kept);
      std::sort(candidates.begin(), candidates.end(),
                [](Candidate a, Candidate b) { return a.entry < b.entry; });
    }
    uint32_t to = after_.pinned_entries;
    for (const Candidate& candidate : candidates) keep(candidate.entry, to++);
  }

  // Slots that nothing was kept in: empty ones, new ones, dropped pages from the oldest on.
  void collect_free() {
    std::vector<bool> used = kept_;
    for (const uint32_t entry : dropped_) used[entry] = true;
    for (uint32_t i = 0; i < before_.lease_pages; ++i) {
      if (!used[i] && before_.slots[i] != kNoSlot) free_.push_back(before_.slots[i]);
    }
    const uint32_t* extra = item_.extra + uint64_t{h_} * item_.extra_count;
    free_.insert(free_.end(), extra, extra + item_.extra_count);
    for (const uint32_t entry : dropped_) free_.push_back(before_.slots[entry]);
  }

  uint32_t next_free() { return next_ < free_.size() ? free_[next_++] : kNoSlot; }

  void keep_by_id() {
    for (uint32_t id = 0; id < after_.lease_pages; ++id) {
      uint32_t from = id;
      if (!before_.is_flat()) from = layout::find_entry(before_, id);
      if (from == kNoEntry || from >= before_.lease_pages) continue;
      if (before_.slots[from] == kNoSlot) continue;
      after_.slots[id] = before_.slots[from];
      kept_[from] = true;
    }
  }

  void fill_flat() {
    const HeadPages& host_head = after_.extents != nullptr ? after_ : before_;
    for (uint32_t id = 0; id < after_.lease_pages; ++id) {
      if (after_.slots[id] != kNoSlot) continue;
      const HostPage from = host_page(host_head, pool_.host, id);
      if (!host_holds(from, host_head, id)) continue;
      after_.slots[id] = next_free();
      if (after_.slots[id] == kNoSlot) return;
      std::memcpy(slot_address(pool_.fast, after_.slots[id]), from.bytes,
                  pool_.fast.geometry.page_bytes());
    }
    const uint32_t behind_tail = std::min(item_.tail_after.first_page, after_.lease_pages);
    for (uint32_t id = behind_tail; id < after_.lease_pages; ++id) give_slot(id);
    for (uint32_t id = 0; id < behind_tail; ++id) give_slot(id);
  }

  void give_slot(uint32_t id) {
    if (after_.slots[id] == kNoSlot) after_.slots[id] = next_free();
  }

  const ResizeItem& item_;
  const TieredPoolRef& pool_;
  const uint32_t h_;
  const HeadPages& before_;
  HeadPages& after_;
  const uint32_t tail_pages_;
  std::vector<bool> kept_;         // entries of `before` whose slots `after` has
  std::vector<uint32_t> dropped_;  // entries of `before`, the oldest first
  std::vector<uint32_t> free_;     // slots
  size_t next_ = 0;
};

}  // namespace

Status run_resize(const ResizeItem& item, const TieredPoolRef& pool, base::ThreadPool& threads) {
  std::atomic<bool> failed = false;
  threads.parallel_for(pool.fast.geometry.kv_heads, [&](size_t h, uint32_t) {
    if (!HeadResize(item, pool, static_cast<uint32_t>(h)).run()) {
      failed.store(true, std::memory_order_relaxed);
    }
  });
  if (!failed.load(std::memory_order_relaxed)) return ok_status();
  return Status(StatusCode::kInternal, "a resized lease and its slots do not add up");
}

}  // namespace spin::backend::cpu
