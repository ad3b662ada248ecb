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
// Thread: engine thread. Lifetime: the store outlives the sequence; no queued work uses it when it
// is destroyed (the destructor waits for its transfers).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/device.h"
#include "backend/kv_ops.h"
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
  // Leases `lease_pages` slots to every head of every layer that is not dense (all pages where it
  // is), flat when that covers all pages; reserves host extents for all of it when there is a host
  // tier and the form is tiered or may become so. All or nothing.
  // Requires: lease_pages >= the mandatory pages. Errors: kResourceExhausted with the numbers
  // needed, free and in all.
  static Result<std::unique_ptr<TieredSequence>> open(PageStore& store,
                                                      const SequenceShape& shape,
                                                      uint64_t lease_pages);
  ~TieredSequence();
  TieredSequence(const TieredSequence&) = delete;
  TieredSequence& operator=(const TieredSequence&) = delete;

  const SequenceShape& shape() const { return shape_; }
  Residence residence() const { return residence_; }
  uint64_t lease_pages() const { return lease_pages_; }
  uint64_t fast_pages() const;   // slots held
  uint64_t table_bytes() const;  // fast memory of look-up tables, stamps, directory
  uint64_t committed_tokens() const { return committed_tokens_; }

  // Prompt. Where layer `layer` goes once `source` holds all of it. `tail_first_token` begins a
  // page; mapped ids start after the sinks and take `mapped_page_ids` of them.
  // Requires: no token is committed; each layer once.
  backend::PlaceItem place_item(uint32_t layer,
                                const layout::PagedTokens& source,
                                uint64_t tail_first_token,
                                const layout::PageMap* map,
                                uint32_t mapped_page_ids,
                                const layout::PageList& pinned);
  // All layers are placed and the work has run: the prompt's tokens count. With a map: how many
  // pages each head used is read from it now, unused extents go back.
  void commit_prompt(uint64_t tokens);

  // Steps. Requires: not demoted, no step in flight, begin_step(): tokens fit max_tokens.
  void begin_step(uint32_t tokens);
  void commit_step();  // its work has run
  void drop_step();    // its work has run or was never queued; its tokens do not count
  uint8_t epoch() const { return epoch_; }

  // The tail of a layer: before the step's tokens; append_item() adds them.
  layout::Tail tail(uint32_t layer) const;
  uint64_t tail_first_token(uint32_t layer) const;
  // The tail's tokens including those of the step. Lifetime: until the step ends.
  layout::PagedTokens tail_tokens(uint32_t layer);
  backend::TailAppendItem append_item(uint32_t layer, uint64_t first_row);
  // The oldest `pages` pages of the tail leave it. At most one of the two per layer and step.
  backend::SealItem seal_item(uint32_t layer, uint32_t pages);
  // The oldest `tokens` tokens leave it for `mapped_page_ids` new ids.
  backend::RepackTailItem repack_item(uint32_t layer,
                                      uint32_t tokens,
                                      const layout::PageMap* map,
                                      uint32_t mapped_page_ids);
  // Fills what the sequence knows of a Retrieve: heads, epoch.
  backend::RetrieveItem retrieve_item(uint32_t layer);

  // Between steps. Requires: no step in flight, no transfer in flight.
  // Another lease. Tiered to flat or larger: needs free slots. Flat to tiered: all sealed pages
  // are on the host (write_through()). Errors: kResourceExhausted; nothing has changed then.
  Status resize(uint64_t lease_pages, backend::StreamRef stream);
  // Begins to write sealed pages that are not yet there to the host, oldest first, at most
  // `most_pages` of them. Requires: a host tier.
  Result<Transfer> write_through(uint64_t most_pages, const WriterEvent& written);
  bool is_written_through() const;
  // Gives up all slots: writes what the host lacks, zones, tail and the open page included, waits
  // for it, releases the slots. Errors: the copy's; the sequence must then be closed.
  Status demote(const WriterEvent& written);
  // Takes slots again and brings back zones and tail (and everything when flat). Same KV, same
  // bits. Errors: kResourceExhausted (nothing has changed), kCorrupt (a host page is not what it
  // was: the sequence must be closed).
  Status resume(uint64_t lease_pages);

  // Adds up what kernels counted since the last call.
  layout::RetrieveCounters take_counters();

 private:
  struct Impl;
  explicit TieredSequence(std::unique_ptr<Impl> impl);
  friend class PageStore;

  std::unique_ptr<Impl> impl_;
  SequenceShape shape_;
  Residence residence_ = Residence::kResident;
  uint64_t lease_pages_ = 0;
  uint64_t committed_tokens_ = 0;
  uint8_t epoch_ = 0;
};

}  // namespace spin::kv
