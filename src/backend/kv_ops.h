// SPDX-License-Identifier: Apache-2.0
// Operations on KV pages in two tiers: append, look up and retrieve, seal, place a prompt, resize a
// lease, attend over lists of pages. The host only queues them; kernels find hits and misses,
// choose victims and copy pages by themselves (layout/head_pages.h says what they may touch).
//
// An operation takes a span of items, one per sequence; all share the layer. Everything behind the
// pointers of an item stays alive and unchanged (unless the operation writes it) until the
// operation has run; the items themselves are copied when enqueued.
// Stream: the last parameter. Errors: sticky on the stream for what is the engine's fault; what is
// one sequence's (a bad host copy) is counted in its RetrieveCounters::faults and harms nobody
// else. Numerics: results never depend on which pages were resident, on the lease's size or on
// slots.
#pragma once

#include <cstdint>
#include <span>

#include "backend/device.h"
#include "backend/ops.h"
#include "backend/tensor.h"
#include "layout/head_pages.h"
#include "layout/paged_tokens.h"
#include "layout/reuse.h"

namespace spin::backend {

// Both tiers of a page store.
struct TieredPoolRef {
  KvPoolRef fast;
  layout::HostExtentLayout host;
};

// New tokens of one sequence go to the end of its tail.
struct TailAppendItem {
  layout::HeadPages* heads = nullptr;  // [kv_heads]
  layout::Tail tail;                   // before the append
  uint64_t first_row = 0;              // of k and v
  uint32_t tokens = 0;
  // Out [kv_heads, tail.ring]: slots of the ring from the tail's first page on, written or not;
  // null: not wanted. Tiered heads only.
  uint32_t* tail_slots = nullptr;
};

struct RetrieveItem {
  layout::HeadPages* heads = nullptr;  // [kv_heads]
  layout::PageList wanted;             // ascending, every id valid on the host or resident
  // Out [kv_heads, wanted.stride]: where each page lies now; kNoSlot for one that a flat form has
  // no slot for (a fault).
  uint32_t* slots = nullptr;
  // Out [kv_heads, wanted.stride] positions in `wanted` of the pages fetched, ascending, and their
  // numbers [kv_heads]; null: not wanted. With kValuesOnly: of those that came without keys. Faults
  // are left out.
  uint32_t* fetched = nullptr;
  uint32_t* fetched_counts = nullptr;
  layout::RetrieveCounters* counters = nullptr;  // [kv_heads]
  layout::Planes planes = layout::Planes::kKeysAndValues;
  uint32_t planes_end = layout::kNoPage;  // pages from this id on are fetched with all planes
  layout::ReuseProbe reuse;               // tiered heads only
  uint8_t epoch = 0;
};

// The oldest `pages` pages of a tail become ordinary cached pages: in the tiered form they are
// written to the host with their tags and change places with a cache entry (an empty one, else the
// oldest), the newest of them when there are too few; in the flat form nothing moves. They may be
// evicted in the same step.
struct SealItem {
  layout::HeadPages* heads = nullptr;  // [kv_heads]
  layout::Tail tail;
  uint32_t pages = 0;  // whole pages
  uint8_t epoch = 0;
  layout::ReuseProbe reuse = {};  // tiered heads only
};

// Puts a layer of a prompt into the tiers. Tokens [0, sinks) and those from the tail's first on
// keep token order; the tokens between are in token order (map == nullptr; ids continue) or as
// `map` says (ids from first_mapped_page on, token_ids are positions in the source).
struct PlaceItem {
  layout::HeadPages* heads = nullptr;  // [kv_heads]; extents of all pages are there when tiered
  layout::PagedTokens source;          // source.tokens: the prompt
  const layout::PageMap* map = nullptr;
  uint32_t first_mapped_page = 0;
  // Pages pinned beside sinks: they go to entries from zone_first_entry on, in order.
  layout::PageList pinned;  // counts == nullptr: none
  uint32_t sink_pages = 0;  // ids [0, sink_pages) in entries [0, sink_pages)
  uint32_t zone_first_entry = 0;
  layout::Tail tail;              // as it is afterwards
  uint64_t tail_first_token = 0;  // begins a page of the source
  bool write_host = false;        // all pages outside the tail also go to the host
  uint8_t epoch = 0;
};

// The first tokens of a tail, as many as the map has, leave it for pages in the order of `map` (ids
// from first_mapped_page on; token_ids count from the tail's first token). Written to the host when
// tiered, else to the flat entries first_mapped_page + i. Requires: they fill whole tail pages.
struct RepackTailItem {
  layout::HeadPages* heads = nullptr;
  layout::Tail tail;
  const layout::PageMap* map = nullptr;
  uint32_t first_mapped_page = 0;
  uint8_t epoch = 0;
};

// Moves what is resident under `before` to the arrays of `after`, which are written whole. `after`
// keeps slots of `before`, pinned entries first; `extra` are new slots when it is larger; what it
// does not keep goes to `released` (the oldest pages first, at the end kNoSlot for a flat form's
// holes).
//
// From flat to tiered: all pages it drops are valid on the host; pages that are not count as empty.
// To flat: resident pages keep their slots; the others get the rest in this order: pages that the
// host holds, which are fetched; ids behind the tail; the rest; kNoSlot when there are no more.
struct ResizeItem {
  const layout::HeadPages* before = nullptr;  // [kv_heads]
  layout::HeadPages* after = nullptr;         // [kv_heads]
  const uint32_t* extra = nullptr;            // [kv_heads, extra_count]
  uint32_t extra_count = 0;
  uint32_t* released = nullptr;  // out [kv_heads, before.lease + extra - after.lease]
  uint32_t released_count = 0;   // per head
  layout::Tail tail_before;
  layout::Tail tail_after;
  uint32_t zone_entries = 0;  // pinned entries that are not of the tail: [0, zone_entries)
  // From flat to tiered: the pages that these entries get, [kv_heads, zone_entries], kNoPage for
  // none; null: entry i gets page i.
  const uint32_t* zone_pages = nullptr;
  uint8_t epoch = 0;
};

// One row's attention over the pages of a list.
struct ListAttentionItem {
  uint64_t row = 0;                 // of q and out
  const uint32_t* slots = nullptr;  // [kv_heads, pages.stride], as Retrieve gave them
  layout::PageList pages;           // their valid tokens and numbers
  float* log_sum_exp = nullptr;  // out [q_heads], natural log of the sum of e^(scale q.k); or null
};

// Adds a part computed elsewhere: out = softmax-weighted mean of (out, lse) and (part, part_lse).
struct MergeItem {
  uint64_t row = 0;
  const float* log_sum_exp = nullptr;       // [q_heads] of out
  const float* part = nullptr;              // [q_heads, head_dim]
  const float* part_log_sum_exp = nullptr;  // [q_heads]; -infinity: the part is empty
};

class KvOps {
 public:
  virtual ~KvOps() = default;

  // k, v: f32 [rows, kv_heads * head_dim], keys after RoPE, rounded to the pool's type.
  virtual void enqueue_tail_append(TensorRef k,
                                   TensorRef v,
                                   std::span<const TailAppendItem> items,
                                   const TieredPoolRef& pool,
                                   StreamRef stream) = 0;

  // Makes the wanted pages resident: look-up, victims by bucketed LRU (never a page stamped in
  // this epoch or a pinned one), copies, table update. Requires: the cache entries of each head
  // hold all wanted pages that are not pinned (else the stream fails: kInternal).
  virtual void enqueue_retrieve(std::span<const RetrieveItem> items,
                                const TieredPoolRef& pool,
                                StreamRef stream) = 0;

  virtual void enqueue_seal(std::span<const SealItem> items,
                            const TieredPoolRef& pool,
                            StreamRef stream) = 0;

  virtual void enqueue_place(const PlaceItem& item,
                             const TieredPoolRef& pool,
                             StreamRef stream) = 0;

  virtual void enqueue_repack_tail(const RepackTailItem& item,
                                   const TieredPoolRef& pool,
                                   StreamRef stream) = 0;

  virtual void enqueue_resize(const ResizeItem& item,
                              const TieredPoolRef& pool,
                              StreamRef stream) = 0;

  // out[row, h, :] = softmax over the list's tokens, in list order, of scale * q . k, times v.
  // Tokens are packed in list order into blocks and splits as paged attention has them, so a list
  // of all pages of a sequence gives the bits of enqueue_paged_attention. An empty list gives zeros
  // and a log-sum-exp of -infinity.
  virtual void enqueue_list_attention(TensorRef q,
                                      std::span<const ListAttentionItem> items,
                                      const KvPoolRef& pool,
                                      float scale,
                                      TensorRef out,
                                      StreamRef stream) = 0;

  virtual void enqueue_merge(std::span<const MergeItem> items,
                             int64_t q_heads,
                             int64_t head_dim,
                             TensorRef out,
                             StreamRef stream) = 0;
};

}  // namespace spin::backend
