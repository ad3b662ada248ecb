// SPDX-License-Identifier: Apache-2.0
// What a TieredSequence consists of; for the sources of kv/tiered_sequence.h and the audits of
// kv/page_store.h only. Thread: engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "backend/device.h"
#include "kv/gain_curve.h"
#include "kv/lease_tables.h"
#include "kv/page_mover.h"
#include "kv/page_store.h"
#include "kv/table_bytes.h"
#include "kv/tiered_sequence.h"
#include "layout/head_pages.h"
#include "layout/reuse.h"

namespace spin::kv {

// Valid tokens of a page, host-side and only for layers with maps: 0 for none yet.
inline constexpr uint8_t kDeadPage = 0xFF;  // the id will never have a page

// One (layer, KV head).
struct HeadState {
  // Flat: by id, slot kNoSlot for dead ids. Tiered: in any order, as kernels swap them.
  std::vector<PageHandle> slots;
  std::vector<uint8_t> page_tokens;  // [max_page_ids] of pages outside the tail; empty: no map
  std::vector<uint32_t> zone;        // pages pinned beside the sinks, ascending
  std::vector<uint32_t> dead;        // [extent_count] dead ids of each extent; empty: none
  uint32_t on_host = 0;              // ids below are on the host or dead (flat form)
  uint32_t going = 0;                // on_host once the transfer in flight has succeeded
};

// What a kernel says about a map and pinned pages, copied behind it on its stream.
struct CapturedMap {
  bool pending = false;
  uint32_t first_page = 0;
  uint32_t page_ids = 0;
  uint32_t page_stride = 0;
  std::vector<uint32_t> counts;  // [kv_heads]
  std::vector<uint32_t> starts;  // [kv_heads, page_stride]
};

struct CapturedPins {
  uint32_t stride = 0;
  std::vector<uint32_t> counts;  // [kv_heads]
  std::vector<uint32_t> pages;   // [kv_heads, stride]
};

struct LayerState {
  bool placed = false;
  bool mapped = false;
  bool appended = false;   // in the step in flight
  bool left_tail = false;  // something left the tail in it
  uint32_t sinks = 0;      // pinned sinks: those that were placed
  uint32_t tail_first_page = 0;
  uint32_t step_first_page = 0;  // tail_first_page when the step in flight began
  uint32_t next_mapped = 0;
  uint64_t tail_first_token = 0;
  uint64_t placed_tokens = 0;
  uint32_t left_first_page = 0;  // tail ids that die when the captured map has arrived
  uint32_t left_end_page = 0;
  bool directory_changed = false;  // since it was last copied to fast memory
  CapturedMap map;
  CapturedPins pins;
};

struct TieredSequence::Impl {
  Impl(PageStore& owner, const SequenceShape& sequence_shape);
  ~Impl();

  // ---- Sizes (tiered_sequence.cc).
  uint64_t head_count() const { return uint64_t{geometry.layers} * geometry.kv_heads; }
  bool is_flat(uint32_t layer, uint64_t lease) const {
    return layer < shape.dense_layers || lease >= shape.max_page_ids;
  }
  bool is_flat(uint32_t layer) const { return is_flat(layer, tables.lease_pages()); }
  uint64_t entries(uint32_t layer, uint64_t lease) const {
    return is_flat(layer, lease) ? shape.max_page_ids : lease;
  }
  HeadState& head(uint32_t layer, uint32_t h) {
    return heads[uint64_t{layer} * geometry.kv_heads + h];
  }
  const HeadState& head(uint32_t layer, uint32_t h) const {
    return heads[uint64_t{layer} * geometry.kv_heads + h];
  }
  // In fast memory: for kernels.
  layout::HeadPages* layer_heads(uint32_t layer) const {
    return tables.heads() + uint64_t{layer} * geometry.kv_heads;
  }
  const layout::HeadPages& record(uint32_t layer, uint32_t h) const {
    return tables.record(uint64_t{layer} * geometry.kv_heads + h);
  }
  uint32_t pinned_entries(uint32_t layer) const {
    return layers[layer].sinks + shape.zone_pages + shape.tail_pages;
  }
  layout::Tail tail(uint32_t layer) const;
  // End of the ids of maps, where the tail follows: a tail that begins with the first token fits
  // behind it.
  uint32_t mapped_end() const {
    const uint64_t tail = geometry.pages_per_head(shape.max_tokens);
    return static_cast<uint32_t>(shape.max_page_ids - tail);
  }
  // Ids below which every page that is not of the tail lies.
  uint32_t sealed_end(uint32_t layer) const {
    return layers[layer].mapped ? layers[layer].next_mapped : layers[layer].tail_first_page;
  }
  // Valid tokens of a page outside the tail; 0: there is none.
  uint32_t sealed_tokens(uint32_t layer, uint32_t h, uint32_t page) const;
  bool is_dead(uint32_t layer, uint32_t h, uint32_t page) const;
  bool has_step() const { return step_tokens > 0; }
  std::span<layout::ReuseCounters> reuse_counters() const { return {reuse, geometry.kv_heads}; }
  // First head of a layer among those that have a cache. Requires: it is not dense.
  uint64_t cached_head(uint32_t layer) const {
    return uint64_t{layer - shape.dense_layers} * geometry.kv_heads;
  }

  // ---- Tables and slots. What lies in fast memory is reached through store.table_stream().
  // Requires: what it is for was compared with what is free; lengths may come from a request.
  Status make_shared_memory();
  // The image of what it makes is there, for take_slots() and more; publish() ends that.
  Result<LeaseTables> make_tables(uint64_t lease) const;
  // Slots that a lease takes over all heads; dead ids take none.
  uint64_t slots_needed(uint64_t lease) const;
  Status check_slots(uint64_t needed) const;
  // Takes slots for the entries of `made` and writes them to its image.
  // Errors: kResourceExhausted.
  Status take_slots(LeaseTables& made);
  void release_slots();
  Status reserve_host();
  // Address of the extent that `page` belongs to; 0: none yet.
  uint64_t extent_of(uint32_t layer, uint32_t h, uint32_t page) const {
    return extents[extent_index(layer, h, page)];
  }
  uint64_t extent_index(uint32_t layer, uint32_t h, uint32_t page) const;
  // Requires: host extents are reserved; the page is not dead.
  void take_extent(uint32_t layer, uint32_t h, uint32_t page);
  void take_extents(uint32_t layer, uint64_t first, uint64_t end);  // of all heads
  // Kernels see the layer's extents as they are now. Stream: the copy is queued; the extents of
  // the layer stay as they are until it has run.
  void enqueue_directory(uint32_t layer, backend::Stream& stream);
  Status publish_directory();  // of all layers; blocks
  PageCopy page_copy(uint32_t layer, uint32_t h, uint32_t page, uint32_t tokens, uint32_t slot);

  // ---- Ids.
  void begin_map(uint32_t layer);  // page_tokens of what was in token order so far
  void bury(uint32_t layer, uint32_t h, uint32_t first, uint32_t end);
  // Kernels see neither slots nor extents of ids that died.
  void publish_buried();
  void finish_map(uint32_t layer);
  void capture(CapturedMap& to, const layout::PageMap& map, uint32_t page_ids, backend::Stream&);
  void capture_pins(uint32_t layer, const layout::PageList& pinned, backend::Stream& stream);
  void assign_ids(uint32_t layer,
                  const layout::PageMap* map,
                  uint32_t mapped_page_ids,
                  backend::Stream& stream);
  layout::ReuseProbe reuse_probe(uint32_t layer) const;

  // ---- Transitions (tiered_residence.cc).
  uint32_t tail_pages(uint32_t layer) const;
  // Sinks that are outside the tail by now are pinned in the next tiered form.
  Status prepare_form(uint64_t lease);
  // Takes note of a transfer that has come to its end.
  void settle();
  // No transfer began: what was collected for it is not under way.
  void forget_going();
  void collect_sealed(uint64_t most_pages, std::vector<PageCopy>& copies);
  Result<Transfer> write_through(uint64_t most_pages, const WriterEvent& written);
  bool is_written_through() const;
  Status demote(const WriterEvent& written);
  Status resume(LeaseTables made);
  void collect_resumed(uint32_t layer, uint32_t h, LeaseTables& made, std::vector<PageCopy>& out);
  Status resize_tables(LeaseTables made, backend::Stream& stream);
  void give_back(HeadState& state, std::span<const uint32_t> slots);
  // What the caches held is gone.
  Status forget_reuse();
  // Caches went from `tables` to `made`: what was dropped is remembered where that is measured.
  Status remember_dropped(LeaseTables& made);

  PageStore& store;
  const layout::KvGeometry geometry;
  const SequenceShape shape;
  uint32_t extent_count = 0;  // per head; 0 without a host tier
  uint64_t owner = 0;         // of head 0 of layer 0; the others follow
  Residence residence = Residence::kResident;
  uint64_t committed_tokens = 0;
  uint32_t step_tokens = 0;  // 0: no step in flight
  uint8_t epoch = 0;
  bool spent = false;  // can only be closed
  std::vector<LayerState> layers;
  std::vector<HeadState> heads;
  LeaseTables tables;
  // Addresses of host extents, 0 for none; the directory is a copy of it.
  std::vector<uint64_t> extents;  // [layers, kv_heads, extent_count]
  // Fast memory, with a host tier: the directory, the ghosts, the tails' slots.
  backend::Buffer directory;
  GhostLists ghost_lists;
  uint32_t* ghosts = nullptr;      // [ghost_lists.heads, ghost_lists.pages]
  uint32_t* tail_slots = nullptr;  // [layers, kv_heads, tail_pages]
  // Slots in flat tables that ids which died have lost.
  struct SlotRange {
    uint32_t* slots = nullptr;  // in fast memory
    uint64_t count = 0;
  };
  std::vector<SlotRange> dead_slots;
  std::vector<uint32_t> no_slots;  // what is copied there
  // Host memory that kernels use: both counters [kv_heads].
  backend::Buffer shared;
  layout::RetrieveCounters* counters = nullptr;
  layout::ReuseCounters* reuse = nullptr;
  GainMeter meter;
  bool has_host = false;  // extents are reserved
  uint64_t extents_reserved = 0;
  uint64_t extents_taken = 0;
  uint64_t extents_dead = 0;
  Transfer transfer;
};

}  // namespace spin::kv
