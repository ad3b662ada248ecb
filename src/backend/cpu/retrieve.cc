// SPDX-License-Identifier: Apache-2.0
// One head at a time, in three passes: find what is resident and stamp it, choose as many victims
// as pages are missing, fetch. Stamping first keeps this step's pages out of the victims.
#include "backend/cpu/retrieve.h"

#include <atomic>
#include <cstring>
#include <vector>

#include "backend/cpu/kv_pages.h"
#include "layout/residency.h"

namespace spin::backend::cpu {
namespace {

using layout::HeadPages;
using layout::kNoEntry;
using layout::kNoPage;
using layout::kNoSlot;

// What one head of an item works on.
struct HeadCall {
  HeadPages* head = nullptr;
  const uint32_t* pages = nullptr;  // [count]
  const uint8_t* tokens = nullptr;  // [count]
  uint32_t count = 0;
  uint32_t* slots = nullptr;    // out [count]
  uint32_t* fetched = nullptr;  // out [count], positions; or null
  uint32_t* missing = nullptr;  // [count], positions
  uint32_t* victims = nullptr;  // [count]
  layout::RetrieveCounters* counters = nullptr;
  uint32_t keyless_end = 0;  // pages with lower ids are fetched without keys
  uint8_t epoch = 0;
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

// Brings one page, or zeros when the host does not have it. Returns whether it is the page.
bool fetch(const HeadCall& call, const TieredPoolRef& pool, uint32_t i, std::byte* to) {
  const layout::KvGeometry& geometry = pool.fast.geometry;
  const uint32_t page = call.pages[i];
  const HostPage from = host_page(*call.head, pool.host, page);
  if (!host_holds(from, *call.head, page) || from.tag->tokens != call.tokens[i]) {
    std::memset(to, 0, geometry.page_bytes());
    return false;
  }
  const uint64_t skipped = page < call.keyless_end ? geometry.plane_bytes() : 0;
  std::memcpy(to + skipped, from.bytes + skipped, geometry.page_bytes() - skipped);
  call.counters->bytes += geometry.page_bytes() - skipped;
  return true;
}

// Brings the missing pages to the victims' slots. Returns how many are in `fetched`.
uint32_t fetch_all(const HeadCall& call, const TieredPoolRef& pool, uint32_t misses) {
  HeadPages& head = *call.head;
  uint32_t fetched = 0;
  for (uint32_t m = 0; m < misses; ++m) {
    const uint32_t i = call.missing[m];
    const uint32_t page = call.pages[i];
    const uint32_t entry = call.victims[m];
    if (head.pages[entry] != kNoPage) ++call.counters->evictions;
    call.slots[i] = head.slots[entry];
    const bool good = fetch(call, pool, i, slot_address(pool.fast, head.slots[entry]));
    // What is not the page is not found again either.
    layout::set_entry(head, entry, good ? page : kNoPage);
    head.stamps[entry] = call.epoch;
    if (!good) ++call.counters->faults;
    const bool is_listed = good && (call.keyless_end == 0 || page < call.keyless_end);
    if (is_listed && call.fetched != nullptr) call.fetched[fetched++] = i;
  }
  call.counters->misses += misses;
  return fetched;
}

// Returns how many pages are in `fetched`, or -1 if the cache is too small for what is wanted.
int64_t retrieve_head(const HeadCall& call, const TieredPoolRef& pool) {
  HeadPages& head = *call.head;
  if (head.is_flat()) {
    find_flat(call);
    return 0;
  }
  layout::sweep_if_due(head, call.epoch);
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
  if (misses == 0) return 0;
  if (layout::choose_victims(head, call.epoch, misses, call.victims) < misses) return -1;
  return fetch_all(call, pool, misses);
}

HeadCall head_call(const RetrieveItem& item, uint32_t h, std::vector<uint32_t>& scratch) {
  const uint64_t first = uint64_t{h} * item.wanted.stride;
  HeadCall call;
  call.head = item.heads + h;
  call.pages = item.wanted.pages + first;
  call.tokens = item.wanted.tokens + first;
  call.count = item.wanted.counts[h];
  call.slots = item.slots + first;
  if (scratch.size() < 2 * uint64_t{call.count}) scratch.resize(2 * uint64_t{call.count});
  call.victims = scratch.data();
  call.missing = scratch.data() + call.count;
  call.fetched = item.fetched != nullptr ? item.fetched + first : nullptr;
  call.counters = item.counters + h;
  if (item.planes == layout::Planes::kValuesOnly) call.keyless_end = item.planes_end;
  call.epoch = item.epoch;
  return call;
}

}  // namespace

Status run_retrieve(std::span<const RetrieveItem> items,
                    const TieredPoolRef& pool,
                    base::ThreadPool& threads) {
  const uint32_t kv_heads = pool.fast.geometry.kv_heads;
  std::vector<std::vector<uint32_t>> scratch(threads.threads());
  std::atomic<bool> too_small = false;
  threads.parallel_for(items.size() * kv_heads, [&](size_t index, uint32_t thread) {
    const RetrieveItem& item = items[index / kv_heads];
    const auto h = static_cast<uint32_t>(index % kv_heads);
    const int64_t fetched = retrieve_head(head_call(item, h, scratch[thread]), pool);
    if (fetched < 0) {
      too_small.store(true, std::memory_order_relaxed);
    } else if (item.fetched_counts != nullptr) {
      item.fetched_counts[h] = static_cast<uint32_t>(fetched);
    }
  });
  if (too_small.load(std::memory_order_relaxed)) {
    return Status(StatusCode::kInternal,
                  "a head's cached slots cannot hold all pages that a step wants");
  }
  return ok_status();
}

}  // namespace spin::backend::cpu
