// SPDX-License-Identifier: Apache-2.0
// Two phases. Tables: one head at a time, find what is resident and stamp it, choose as many
// victims as pages are missing, check their host tags and give them their entries. Stamping first
// keeps this step's pages out of the victims. Copies: all missing pages of all heads, spread evenly
// over the threads.
#include "backend/cpu/retrieve.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "backend/cpu/kv_pages.h"
#include "backend/cpu/small_loop.h"
#include "base/checked_math.h"
#include "layout/residency.h"
#include "layout/reuse.h"

namespace spin::backend::cpu {
namespace {

using layout::HeadPages;
using layout::kNoEntry;
using layout::kNoPage;
using layout::kNoSlot;

constexpr uint64_t kSmallLists = 512;       // pages that one thread looks up
constexpr uint64_t kChunkBytes = 32 << 10;  // that one task copies

// One page to bring; zeros when `from` is null.
struct Copy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  uint64_t bytes = 0;
};

// What one head of an item works on.
struct HeadCall {
  HeadPages* head = nullptr;
  const uint32_t* pages = nullptr;  // [count]
  const uint8_t* tokens = nullptr;  // [count]
  uint32_t count = 0;
  uint32_t* slots = nullptr;    // out [count]
  uint32_t* fetched = nullptr;  // out [count], positions; or null
  Copy* copies = nullptr;       // out [count]
  uint32_t* missing = nullptr;  // [count], positions
  uint32_t* victims = nullptr;  // [count]
  layout::RetrieveCounters* counters = nullptr;
  const layout::ReuseProbe* reuse = nullptr;  // null: nothing is measured
  uint32_t index = 0;                         // of the head in its layer
  uint32_t keyless_end = 0;                   // pages with lower ids come without keys
  uint8_t epoch = 0;
};

struct HeadResult {
  uint32_t copies = 0;
  uint32_t fetched = 0;
  bool is_too_small = false;
};

// Every page has its slot; a page without one is lost, and attention passes it over.
void find_flat(const HeadCall& call) {
  const HeadPages& head = *call.head;
  for (uint32_t i = 0; i < call.count; ++i) {
    const uint32_t page = call.pages[i];
    const uint32_t slot = page < head.lease_pages ? head.slots[page] : kNoSlot;
    call.slots[i] = slot;
    if (slot == kNoSlot) {
      ++call.counters->faults;
    } else {
      ++call.counters->hits;
    }
  }
}

// How page `page` of `tokens` tokens comes to a slot.
Copy copy_of(const HeadCall& call,
             const TieredPoolRef& pool,
             uint32_t page,
             uint32_t tokens,
             std::byte* to) {
  const layout::KvGeometry& geometry = pool.fast.geometry;
  const HostPage from = host_page(*call.head, pool.host, page);
  if (!host_holds(from, *call.head, page) || from.tag->tokens != tokens) {
    return {to, nullptr, geometry.page_bytes()};
  }
  const uint64_t skipped = page < call.keyless_end ? geometry.plane_bytes() : 0;
  return {to + skipped, from.bytes + skipped, geometry.page_bytes() - skipped};
}

// Gives the missing pages the victims' entries.
HeadResult replace_victims(const HeadCall& call, const TieredPoolRef& pool, uint32_t misses) {
  HeadPages& head = *call.head;
  layout::RetrieveCounters& counters = *call.counters;
  HeadResult result;
  for (uint32_t m = 0; m < misses; ++m) {
    const uint32_t i = call.missing[m];
    const uint32_t page = call.pages[i];
    const uint32_t entry = call.victims[m];
    if (head.pages[entry] != kNoPage) ++counters.evictions;
    call.slots[i] = head.slots[entry];
    const Copy copy =
        copy_of(call, pool, page, call.tokens[i], slot_address(pool.fast, head.slots[entry]));
    const bool good = copy.from != nullptr;
    // What is not the page is not found again either.
    layout::set_entry(head, entry, good ? page : kNoPage);
    head.stamps[entry] = call.epoch;
    call.copies[result.copies++] = copy;
    if (!good) {
      ++counters.faults;
      continue;
    }
    counters.bytes += copy.bytes;
    const bool is_listed = call.keyless_end == 0 || page < call.keyless_end;
    if (is_listed && call.fetched != nullptr) call.fetched[result.fetched++] = i;
  }
  counters.misses += misses;
  return result;
}

// The cache is as the last step left it.
void measure_turn(const HeadCall& call) {
  if (call.reuse == nullptr || !layout::is_turn(call.reuse->first_head + call.index, call.epoch)) {
    return;
  }
  layout::count_turn(*call.head, call.pages, call.count, call.epoch, call.reuse->mandatory,
                     call.reuse->counters[call.index]);
}

// The victims are chosen and still in their entries.
void measure_misses(const HeadCall& call, uint32_t misses) {
  if (call.reuse == nullptr) return;
  const layout::ReuseProbe& probe = *call.reuse;
  uint32_t* ghosts = layout::ghosts_of(probe, call.index);
  if (ghosts == nullptr) return;
  layout::count_ghosts(*call.head, call.pages, call.missing, misses, probe, ghosts,
                       probe.counters[call.index]);
  layout::give_up(*call.head, call.victims, misses, ghosts, probe.ghost_pages);
}

HeadResult update_head(const HeadCall& call, const TieredPoolRef& pool) {
  HeadPages& head = *call.head;
  if (head.is_flat()) {
    find_flat(call);
    return {};
  }
  layout::sweep_if_due(head, call.epoch);
  measure_turn(call);
  uint32_t misses = 0;
  for (uint32_t i = 0; i < call.count; ++i) {
    const uint32_t entry = layout::find_entry(head, call.pages[i]);
    if (entry == kNoEntry) {
      call.missing[misses++] = i;
      continue;
    }
    head.stamps[entry] = call.epoch;
    call.slots[i] = head.slots[entry];
  }
  call.counters->hits += call.count - misses;
  if (misses == 0) return {};
  if (layout::choose_victims(head, call.epoch, misses, call.victims) < misses) {
    return {.is_too_small = true};
  }
  measure_misses(call, misses);
  return replace_victims(call, pool, misses);
}

class Retrieve {
 public:
  Retrieve(std::span<const RetrieveItem> items,
           const TieredPoolRef& pool,
           base::ThreadPool& threads)
      : items_(items),
        pool_(pool),
        threads_(threads),
        kv_heads_(pool.fast.geometry.kv_heads),
        first_copy_(items.size() * kv_heads_ + 1),
        results_(items.size() * kv_heads_) {}

  Status run() {
    for (size_t i = 0; i < results_.size(); ++i) {
      first_copy_[i + 1] = first_copy_[i] + items_[i / kv_heads_].wanted.counts[i % kv_heads_];
    }
    const uint64_t wanted = first_copy_.back();
    copies_.resize(wanted);
    scratch_.resize(2 * wanted);
    loop(threads_, results_.size(), wanted > kSmallLists,
         [this](size_t i) { results_[i] = update_head(head_call(i), pool_); });
    for (size_t i = 0; i < results_.size(); ++i) {
      const RetrieveItem& item = items_[i / kv_heads_];
      if (results_[i].is_too_small) {
        return Status(StatusCode::kInternal,
                      "a head's cached slots cannot hold all pages that a step wants");
      }
      if (item.fetched_counts != nullptr) {
        item.fetched_counts[i % kv_heads_] = results_[i].fetched;
      }
    }
    const auto begin = std::chrono::steady_clock::now();
    copy_all();
    add_stall(std::chrono::steady_clock::now() - begin);
    return ok_status();
  }

 private:
  HeadCall head_call(size_t index) {
    const RetrieveItem& item = items_[index / kv_heads_];
    const uint64_t h = index % kv_heads_;
    const uint64_t first = h * item.wanted.stride;
    HeadCall call;
    call.head = item.heads + h;
    call.pages = item.wanted.pages + first;
    call.tokens = item.wanted.tokens + first;
    call.count = item.wanted.counts[h];
    call.slots = item.slots + first;
    call.fetched = item.fetched != nullptr ? item.fetched + first : nullptr;
    call.copies = copies_.data() + first_copy_[index];
    call.missing = scratch_.data() + 2 * first_copy_[index];
    call.victims = call.missing + call.count;
    call.counters = item.counters + h;
    call.reuse = item.reuse.counters != nullptr ? &item.reuse : nullptr;
    call.index = static_cast<uint32_t>(h);
    call.keyless_end = item.planes == layout::Planes::kValuesOnly ? item.planes_end : 0;
    call.epoch = item.epoch;
    return call;
  }

  void copy_all() {
    uint64_t count = 0;  // copies of all heads, moved up to one list
    for (size_t i = 0; i < results_.size(); ++i) {
      const auto from = copies_.begin() + static_cast<std::ptrdiff_t>(first_copy_[i]);
      std::copy(from, from + results_[i].copies,
                copies_.begin() + static_cast<std::ptrdiff_t>(count));
      count += results_[i].copies;
    }
    const uint64_t page_bytes = pool_.fast.geometry.page_bytes();
    const uint64_t chunk = std::max<uint64_t>(1, kChunkBytes / page_bytes);
    loop(threads_, base::ceil_div(count, chunk), count * page_bytes > kSmallBytes, [&](size_t c) {
      const uint64_t end = std::min(count, (c + 1) * chunk);
      for (uint64_t i = c * chunk; i < end; ++i) {
        const Copy& copy = copies_[i];
        if (copy.from == nullptr) {
          std::memset(copy.to, 0, copy.bytes);
        } else {
          std::memcpy(copy.to, copy.from, copy.bytes);
        }
      }
    });
  }

  // The step waits for all copies: each item's share by what it fetched.
  void add_stall(std::chrono::nanoseconds stall) {
    uint64_t all = 0;
    for (const HeadResult& result : results_) all += result.copies;
    if (all == 0) return;
    for (size_t i = 0; i < results_.size(); ++i) {
      items_[i / kv_heads_].counters[0].stall_ns +=
          static_cast<uint64_t>(stall.count()) * results_[i].copies / all;
    }
  }

  std::span<const RetrieveItem> items_;
  const TieredPoolRef& pool_;
  base::ThreadPool& threads_;
  const uint32_t kv_heads_;
  std::vector<uint64_t> first_copy_;  // [heads of all items + 1]
  std::vector<HeadResult> results_;
  std::vector<Copy> copies_;
  std::vector<uint32_t> scratch_;
};

}  // namespace

Status run_retrieve(std::span<const RetrieveItem> items,
                    const TieredPoolRef& pool,
                    base::ThreadPool& threads) {
  return Retrieve(items, pool, threads).run();
}

}  // namespace spin::backend::cpu
