// SPDX-License-Identifier: Apache-2.0
// Where the pages of one (sequence, layer, KV head) are, as a step's kernels see it: which are
// resident in which slot, and where all of them lie on the host.
//
// A page has an id, unique in its head and never reused: for algorithms over token ranges page p
// holds tokens [p * P, (p + 1) * P); clusters take ranges of ids of their own.
//
// The host leases the head `lease_pages` slots. Entry i of the lease stands for slots[i]:
//
//   entries [0, pinned_entries)             zones and the tail; the host says what is in them
//   entries [pinned_entries, lease_pages)   cache; kernels decide what is in them
//
// Flat form (table == nullptr): every page is resident, entry i holds page i, nothing is looked up,
// aged or evicted. Tiered form: pages[i] names the page of entry i, `table` finds the entry of a
// page by open addressing at load <= 0.5, stamps[i] is the epoch of its last use.
//
// Time: one byte per entry. epoch = step number mod 256; age = (epoch - stamp) mod 256, counted in
// 64 buckets, ages of 63 and more in the last. A sweep at least every 128 epochs rewrites older
// stamps to age 63, so that ages never wrap.
//
// Thread: single writer by phase. While a step's work is queued or runs, kernels own all arrays;
// at drained points the host does. Lifetime: owned by kv::TieredSequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "layout/host_device.h"

namespace spin::layout {

inline constexpr uint32_t kNoPage = 0xFFFF'FFFF;
inline constexpr uint32_t kNoSlot = 0xFFFF'FFFF;
inline constexpr uint32_t kAgeBuckets = 64;
inline constexpr uint32_t kSweepEpochs = 128;

struct HeadPages {
  uint32_t* slots = nullptr;  // [lease_pages] pool slot; kNoSlot only in the flat form (hole)
  uint32_t* pages = nullptr;  // [lease_pages] page id or kNoPage; null when flat
  uint8_t* stamps = nullptr;  // [lease_pages]; null when flat
  uint32_t* table = nullptr;  // [table_size] entry + 1, or 0 for none; null when flat
  // Host address of extent e (pages [e * S, (e + 1) * S)), 0 where there is none; null when the
  // sequence has no host pages.
  uint64_t* extents = nullptr;  // [extent_count]
  uint64_t owner = 0;           // written into and checked against host page tags
  uint32_t lease_pages = 0;
  uint32_t pinned_entries = 0;
  uint32_t table_size = 0;  // twice the lease at least (residency_table_size)
  uint32_t extent_count = 0;
  uint8_t swept_epoch = 0;

  SPIN_HOST_DEVICE bool is_flat() const { return table == nullptr; }
};
static_assert(std::is_trivially_copyable_v<HeadPages>);

// The tail of a sequence's layer: its newest tokens, whose pages are pinned until they are sealed.
// Page t of the tail (id first_page + t) lies in entry  first_page + t  when flat, otherwise
// first_entry + (first_page + t) % ring.
struct Tail {
  uint32_t first_page = 0;   // id of its first page
  uint32_t first_entry = 0;  // of the ring
  uint32_t ring = 0;         // entries of the ring
  uint32_t tokens = 0;       // committed tokens in it; its first token begins a page
};

// Which planes of a page are fetched.
enum class Planes : uint8_t { kKeysAndValues, kValuesOnly };

// Host memory of S pages: the pages in order, then their tags. A page and its tag move together.
struct HostPageTag {
  uint64_t owner = 0;       // HeadPages::owner
  uint32_t page = kNoPage;  // id; written last, after the page's bytes
  uint32_t tokens = 0;      // valid ones
};
static_assert(sizeof(HostPageTag) == 16);

struct HostExtentLayout {
  uint32_t pages = 32;      // S
  uint64_t page_bytes = 0;  // of KvGeometry

  SPIN_HOST_DEVICE constexpr uint64_t bytes() const {
    return pages * (page_bytes + sizeof(HostPageTag));
  }
  SPIN_HOST_DEVICE std::byte* page(uint64_t extent, uint32_t page_id) const {
    return reinterpret_cast<std::byte*>(extent) + (page_id % pages) * page_bytes;
  }
  SPIN_HOST_DEVICE HostPageTag* tag(uint64_t extent, uint32_t page_id) const {
    return reinterpret_cast<HostPageTag*>(reinterpret_cast<std::byte*>(extent) +
                                          pages * page_bytes) +
           page_id % pages;
  }
};

// Pages per KV head of one (sequence, layer): head h has counts[h] entries from h * stride on,
// ascending ids, each once. `tokens` are the valid ones of each page (its first ones).
struct PageList {
  uint32_t* pages = nullptr;   // [kv_heads, stride]
  uint8_t* tokens = nullptr;   // [kv_heads, stride], 1 .. page_tokens
  uint32_t* counts = nullptr;  // [kv_heads]
  uint32_t stride = 0;
};
static_assert(std::is_trivially_copyable_v<PageList>);

// How tokens are dealt out to pages when they are not in token order (clusters). Page i of head h
// (id first_page + i) holds tokens token_ids[h * token_stride + starts[h * page_stride + i]] up to
// that of starts[... i + 1].
struct PageMap {
  const uint32_t* counts = nullptr;     // [kv_heads] pages
  const uint32_t* starts = nullptr;     // [kv_heads, page_stride], page_stride > most pages
  const uint32_t* token_ids = nullptr;  // [kv_heads, token_stride] positions in the source
  uint32_t page_stride = 0;
  uint64_t token_stride = 0;
};

// What a Retrieve did for one KV head. Added to, never cleared, by the kernels.
struct RetrieveCounters {
  uint64_t hits = 0;    // wanted pages that were resident
  uint64_t misses = 0;  // fetched from the host
  uint64_t evictions = 0;
  uint64_t bytes = 0;  // fetched
  // Nanoseconds that the step waited for its fetches; of all heads, in the first one's counters.
  uint64_t stall_ns = 0;
  uint64_t faults = 0;  // host pages missing or with a wrong tag: their request fails
};

}  // namespace spin::layout
