// SPDX-License-Identifier: Apache-2.0
// The KV cache of one sequence whose steps read a selection of its pages: where they lie in both
// tiers, what kernels need to know about that, and the transitions between the forms it can take:
//
//                    resize()                         demote()
//   resident (flat) ---------> tiered (leases) ------------------> demoted (host only)
//          ^                      |   ^                                 |
//          +----- resize() -------+   +------------- resume() ----------+
//
//   resident: every page has a slot; nothing is looked up, nothing need be on the host
//   tiered:   each (layer, KV head) leases some slots; sealed pages outside zones and tail are all
//             valid on the host, the slots cache some of them
//   demoted:  it holds no slots; all pages, the open one included, are valid on the host
//
// A form changes only between steps and never changes a bit of what the sequence computes.
//
// In a step, per layer: append_item() -> seal_item() -> retrieve_item() -> attention; the items are
// built on the host from counts alone, kernels do the rest (backend/kv_ops.h).
//
// Page ids of a layer, the same for all its heads. In token order: page p holds tokens [p * P,
// (p + 1) * P); the tail's pages follow those placed. With a map the tail's ids end the range, so
// that lists in ascending ids end with the tail:
//
//   [0, sinks)  [mapped pages of the prompt) [of each repack) ... unused ... [tail, max_page_ids)
//
// where the tail takes one id per page of the tokens from its first one to max_tokens, and all maps
// together at most max_page_ids - pages of max_tokens - sinks. Ids that a map did not use, or whose
// tokens left the tail for others, are dead: their slots and the extents that only they would need
// go back.
//
// Thread: engine thread. Lifetime: the store outlives the sequence; no queued work uses it when it
// is destroyed (the destructor waits for its transfers).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/device.h"
#include "backend/kv_ops.h"
#include "kv/lease_planner.h"
#include "kv/page_mover.h"
#include "kv/page_store.h"
#include "layout/head_pages.h"
#include "layout/paged_tokens.h"
#include "spin/status.h"

namespace spin::kv {

enum class Residence : uint8_t { kResident, kTiered, kDemoted };

// Pages of one KV head of one layer that a sequence needs; fixed when it is opened.
struct SequenceShape {
  uint64_t max_tokens = 0;      // prompt and output
  uint64_t max_page_ids = 0;    // bound of page ids
  uint32_t sink_pages = 0;      // pinned zone at the start
  uint32_t zone_pages = 0;      // other pinned pages
  uint32_t tail_pages = 0;      // most pages of the tail
  uint32_t selected_pages = 0;  // most others that one step reads
  uint32_t dense_layers = 0;    // the first so many layers read all pages in every step

  uint32_t pinned_pages() const { return sink_pages + zone_pages + tail_pages; }
  // Leased slots of a head without which a step cannot run.
  uint64_t mandatory_pages(uint32_t layer) const;
};

class TieredSequence {
 public:
  struct Impl;  // kv/tiered_state.h, for the sources of kv/ only

  // Leases `lease_pages` slots to every head of every layer that is not dense (all pages where it
  // is), flat when that covers all pages. Host extents for all pages are reserved when there is a
  // host tier; a sequence that is resident may lack them, and then reserves them when it first
  // needs them. All or nothing.
  // Requires: lease_pages >= the mandatory pages. Errors: kResourceExhausted with the numbers
  // needed, free and in all; kInvalidArgument (a lease without a host tier, too many page ids).
  static Result<std::unique_ptr<TieredSequence>> open(PageStore& store,
                                                      const SequenceShape& shape,
                                                      uint64_t lease_pages);
  ~TieredSequence();
  TieredSequence(const TieredSequence&) = delete;
  TieredSequence& operator=(const TieredSequence&) = delete;

  const SequenceShape& shape() const;
  Residence residence() const;
  uint64_t lease_pages() const;   // of heads that are not in dense layers; 0 when demoted
  uint64_t fast_pages() const;    // slots held
  uint64_t host_extents() const;  // taken and reserved
  uint64_t table_bytes() const;   // fast memory of tables, directory, ghosts, tail slots
  uint64_t committed_tokens() const;

  // Prompt. Where layer `layer` goes once `source` holds all of it. `tail_first_token` begins a
  // page; mapped ids start after the sinks and take `mapped_page_ids` of them.
  // Stream: copies of what `map` and `pinned` will say are queued, so the item is queued on the
  // same stream before anything that changes them. Requires: no token is committed; each layer
  // once.
  backend::PlaceItem place_item(uint32_t layer,
                                const layout::PagedTokens& source,
                                uint64_t tail_first_token,
                                const layout::PageMap* map,
                                uint32_t mapped_page_ids,
                                const layout::PageList& pinned,
                                backend::StreamRef stream);
  // All layers are placed and the work has run: the prompt's tokens count. Slots and extents of
  // pages that a map did not need go back.
  void commit_prompt(uint64_t tokens);

  // Steps. Requires: not demoted, no step in flight, begin_step(): tokens fit max_tokens.
  void begin_step(uint32_t tokens);
  void commit_step();  // its work has run
  // Its work has run or was never queued; its tokens do not count. If anything left the tail in it,
  // the sequence can only be closed.
  void drop_step();
  uint8_t epoch() const;

  // The tail of a layer; the step's tokens belong to it once append_item() was called.
  layout::Tail tail(uint32_t layer) const;
  uint64_t tail_first_token(uint32_t layer) const;
  // The tail's tokens, those of the step included, once append_item() is queued.
  // Lifetime: until the step ends.
  layout::PagedTokens tail_tokens(uint32_t layer) const;
  backend::TailAppendItem append_item(uint32_t layer, uint64_t first_row);
  // The oldest `pages` pages of the tail leave it. At most one of the two per layer and step; a
  // layer that has a map never seals in token order. Stream: the item is queued on it next.
  backend::SealItem seal_item(uint32_t layer, uint32_t pages, backend::StreamRef stream);
  // First of the ids that the next repack gets.
  uint32_t next_page_id(uint32_t layer) const;
  // The oldest `tokens` tokens (whole pages) leave it for `mapped_page_ids` new ids. Stream: as
  // place_item().
  backend::RepackTailItem repack_item(uint32_t layer,
                                      uint32_t tokens,
                                      const layout::PageMap* map,
                                      uint32_t mapped_page_ids,
                                      backend::StreamRef stream);
  // Fills what the sequence knows of a Retrieve: heads, epoch, counters.
  backend::RetrieveItem retrieve_item(uint32_t layer);

  // Between steps. Requires: the prompt is committed, no step and no transfer in flight.
  // Another lease; waits for its work. Flat to tiered: all sealed pages are on the host
  // (write_through()). Errors: kResourceExhausted, kUnavailable (not written through): nothing has
  // changed then; those of demote() and resume() when it becomes flat.
  Status resize(uint64_t lease_pages, backend::StreamRef stream);
  // Begins to write sealed pages that are not yet there to the host, oldest first, at most
  // `most_pages` of them; steps may run meanwhile. Requires: a host tier, no other transfer in
  // flight. Errors: kResourceExhausted (no extents are left to reserve).
  Result<Transfer> write_through(uint64_t most_pages, const WriterEvent& written);
  bool is_written_through() const;
  bool has_transfer_in_flight() const;
  // Gives up all slots: writes what the host lacks, zones, tail and the open page included, waits
  // for it, releases the slots. Errors: kResourceExhausted (no extents are left to reserve), the
  // copy's; it holds its slots as before then.
  Status demote(const WriterEvent& written);
  // Takes slots again and brings back zones and tail (and everything when flat). Same KV, same
  // bits. Errors: kResourceExhausted, kCorrupt (a host page is not what it was: the sequence must
  // be closed); it stays demoted then.
  Status resume(uint64_t lease_pages);

  // Adds up what kernels counted since the last call. Requires: their work has run.
  layout::RetrieveCounters take_counters();
  // Fetches per head and step by size of the lease, measured over the last few hundred steps in
  // which it was tiered (kv/gain_curve.h). Sizes are those of LeaseRequest with the mandatory
  // pages of layers that are not dense.
  const GainCurve& gain_curve() const;

 private:
  explicit TieredSequence(std::unique_ptr<Impl> impl);
  friend class PageStore;

  std::unique_ptr<Impl> impl_;
};

}  // namespace spin::kv
