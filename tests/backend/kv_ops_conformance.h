// SPDX-License-Identifier: Apache-2.0
// What every backend's KvOps must do. Instantiated like OpsConformance (ops_conformance.h).
//
// A test sees one sequence's layer as TieredHeads: the arrays of all heads on the device and a copy
// of them on the host. Tokens have values that every element type holds exactly, so that a page's
// bytes follow from the tokens it holds.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "backend/kv_ops.h"
#include "layout/head_pages.h"
#include "tests/backend/attention_conformance.h"

namespace spin::testing {

// Arrays of [kv_heads, ...] entries and where they lie on the device.
template <typename T>
struct Mirror {
  std::vector<T> host;
  backend::Buffer device;
};

// The shape of a lease. cache entries: lease - pinned.
struct LeaseShape {
  uint32_t lease = 0;
  uint32_t pinned = 0;
  bool is_flat = false;
};

struct TieredHeads {
  LeaseShape shape;
  uint32_t table_size = 0;
  uint32_t extent_count = 0;
  Mirror<uint32_t> slots;
  Mirror<uint32_t> pages;
  Mirror<uint8_t> stamps;
  Mirror<uint32_t> table;
  Mirror<uint64_t> extents;
  Mirror<layout::HeadPages> heads;  // with device pointers
  uint64_t owner = 0;

  // Head h of the host's copy, for the functions of layout/residency.h.
  layout::HeadPages view(uint32_t h);
  uint32_t slot(uint32_t h, uint32_t entry) const { return slots.host[h * shape.lease + entry]; }
};

// Tokens of each page, by KV head and id.
using PageContents = std::vector<std::map<uint32_t, std::vector<uint32_t>>>;

struct WantedList {
  std::vector<uint32_t> pages;
  std::vector<uint8_t> tokens;
};

class KvOpsConformance : public AttentionConformance {
 protected:
  backend::KvOps& kv_ops() { return device_->kv_ops(); }

  // A pool of `slots` slots full of NaN, and nothing else.
  void make_pool(const layout::KvGeometry& geometry, uint32_t slots, uint32_t extent_pages = 4);

  // A lease of the next free slots of the pool. With a host: extents for pages below `page_ids`.
  TieredHeads make_heads(const LeaseShape& shape, uint32_t page_ids, bool has_host = true);
  std::vector<uint32_t> take_slots(uint32_t count);
  using OpsConformance::download;
  void download(TieredHeads& heads);
  void download_pool();
  template <typename T>
  std::vector<T> read_back(const backend::Buffer& buffer, size_t count) {
    std::vector<T> out(count);
    stream().enqueue_copy(out.data(), buffer.data(), count * sizeof(T));
    EXPECT_TRUE(stream().wait_idle().ok());
    return out;
  }

  // Pages of tokens in order; fill_host(): ids [0, count), put on the host as well.
  PageContents ordered_contents(uint32_t tokens) const;
  PageContents fill_host(TieredHeads& heads, uint32_t count);
  void write_host_page(const TieredHeads& heads,
                       uint32_t h,
                       uint32_t page,
                       const std::vector<uint32_t>& tokens);
  layout::HostPageTag read_tag(const TieredHeads& heads, uint32_t h, uint32_t page);
  void write_tag(const TieredHeads& heads,
                 uint32_t h,
                 uint32_t page,
                 const layout::HostPageTag& tag);

  // Value of an element of a token's key (plane 0) or value (plane 1).
  static float element(uint32_t h, uint64_t token, uint32_t plane, uint32_t d);
  std::vector<unsigned char> row_bytes(uint32_t h, uint64_t token, uint32_t plane) const;
  // Tokens [first, first + count) as rows of k (plane 0) or v (plane 1).
  Matrix token_rows(uint64_t first, int64_t count, uint32_t plane) const;

  // Whether page bytes hold these tokens (only valid rows are looked at).
  bool holds(const unsigned char* page, uint32_t h, const std::vector<uint32_t>& tokens) const;
  const unsigned char* slot_bytes(uint32_t slot) const {
    return &pool_bytes_[slot * geometry_.page_bytes()];
  }
  std::vector<unsigned char> host_bytes(const TieredHeads& heads, uint32_t h, uint32_t page);

  // Tables agree with pages, slots are each once, every resident page has its bytes. Downloads.
  void expect_sound(TieredHeads& heads, const PageContents& contents);
  void expect_on_host(const TieredHeads& heads,
                      uint32_t h,
                      uint32_t page,
                      const std::vector<uint32_t>& tokens);
  std::set<uint32_t> resident(TieredHeads& heads, uint32_t h);

  // A Retrieve of one list for each head; counters and slots are read back.
  struct Retrieved {
    std::vector<std::vector<uint32_t>> slots;    // [kv_heads][list]
    std::vector<std::vector<uint32_t>> fetched;  // [kv_heads] positions
    std::vector<layout::RetrieveCounters> counters;
    Status status;
  };
  struct RetrieveCall {
    TieredHeads* heads = nullptr;
    std::vector<WantedList> wanted = {};  // [kv_heads]
    uint8_t epoch = 0;
    layout::Planes planes = layout::Planes::kKeysAndValues;
    uint32_t planes_end = layout::kNoPage;
    layout::ReuseProbe reuse = {};  // device memory
  };
  std::vector<Retrieved> retrieve(const std::vector<RetrieveCall>& calls);
  Retrieved retrieve(const RetrieveCall& call) { return retrieve(std::vector{call}).front(); }

  WantedList wanted_of(const std::vector<uint32_t>& pages,
                       const PageContents& contents,
                       uint32_t h);

  // Operations on one sequence, waited for.
  void append_tokens(TieredHeads& heads, const layout::Tail& tail, uint64_t first, uint32_t count);
  void place(const backend::PlaceItem& item);
  void seal(TieredHeads& heads,
            const layout::Tail& tail,
            uint32_t pages,
            uint8_t epoch,
            const layout::ReuseProbe& reuse = {});
  void repack(const backend::RepackTailItem& item);
  static layout::HeadPages* device_heads(const TieredHeads& heads) {
    return heads.heads.device.as<layout::HeadPages>();
  }
  // Heads of another shape with the same owner and extents and nothing sensible in their arrays.
  TieredHeads make_successor(const TieredHeads& heads, const LeaseShape& shape);
  // Resizes; checks that every slot of `before`, or new, is in `after` or was released.
  void resize(TieredHeads& before,
              TieredHeads& after,
              const layout::Tail& tail_before,
              const layout::Tail& tail_after,
              const std::vector<uint32_t>& zone_pages,
              uint8_t epoch);
  void expect_resident(TieredHeads& heads, const std::vector<uint32_t>& pages);
  void expect_entry(TieredHeads& heads, uint32_t entry, uint32_t page);

  // The source of a prompt: its tokens in pages of its own pool.
  struct Prompt {
    backend::Buffer bytes;
    backend::Buffer slots;
    layout::PagedTokens tokens;
  };
  Prompt make_prompt(uint32_t tokens, uint32_t page_tokens);

  // A map from lists of tokens, [kv_heads][page].
  struct Map {
    backend::Buffer counts;
    backend::Buffer starts;
    backend::Buffer token_ids;
    layout::PageMap view;
  };
  Map make_map(const std::vector<std::vector<std::vector<uint32_t>>>& pages);

  // A list per head on the device.
  struct List {
    backend::Buffer pages;
    backend::Buffer tokens;
    backend::Buffer counts;
    layout::PageList view;
  };
  List make_list(const std::vector<WantedList>& lists);

  backend::TieredPoolRef tiers_;
  std::vector<uint32_t> free_slots_;
  std::vector<backend::Buffer> host_buffers_;
};

}  // namespace spin::testing
