// SPDX-License-Identifier: Apache-2.0
// Tests of leases that change their size or form: what stays, what leaves, and that no slot is
// lost.
#include <string>

#include "layout/residency.h"
#include "tests/backend/kv_ops_conformance.h"

namespace spin::testing {
namespace {

using layout::kNoSlot;

constexpr layout::KvGeometry kGeometry{
    .layers = 1, .kv_heads = 2, .head_dim = 24, .page_tokens = 8, .dtype = layout::DType::kBF16};

// A prompt of 20 pages and 5 tokens: a sink, a zone of pages 4 and 9, a tail from page 17 on.
constexpr uint32_t kTokens = 165;
constexpr uint32_t kPages = 21;
constexpr uint32_t kTailFirst = 17;
constexpr uint32_t kTailPages = kPages - kTailFirst;
constexpr uint32_t kPageIds = 24;
const std::vector<uint32_t> kZone = {0, 4, 9};
const std::vector<uint32_t> kZoneOfBothHeads = {0, 4, 9, 0, 4, 9};
constexpr uint32_t kZoneEntries = 3;

LeaseShape tiered(uint32_t cache, uint32_t ring = 5) {
  return {.lease = kZoneEntries + ring + cache, .pinned = kZoneEntries + ring};
}
LeaseShape flat(uint32_t pages = kPageIds) {
  return {.lease = pages, .pinned = pages, .is_flat = true};
}

layout::Tail tail_in(const LeaseShape& shape) {
  layout::Tail tail{.first_page = kTailFirst, .tokens = kTokens - kTailFirst * 8};
  if (shape.is_flat) return tail;
  tail.first_entry = kZoneEntries;
  tail.ring = shape.pinned - kZoneEntries;
  return tail;
}

struct Resize {
  std::string name;
  LeaseShape before;
  LeaseShape after;
  std::set<uint32_t> cached;  // afterwards, in a tiered form
};

// The prompt is placed with the pages below the tail cached from the newest on; then a step reads
// pages 2, 3 and 16.
const Resize kResizes[] = {
    {"the same", tiered(6), tiered(6), {2, 3, 16, 13, 14, 15}},
    {"smaller", tiered(8), tiered(3), {2, 3, 16}},
    {"no cache left", tiered(8), tiered(0), {}},
    {"larger", tiered(3), tiered(9), {2, 3, 16}},
    {"larger ring", tiered(6), tiered(6, 7), {2, 3, 16, 13, 14, 15}},
    {"smaller ring", tiered(6), tiered(4, 4), {2, 3, 16, 15}},
    {"flat to tiered", flat(), tiered(6), {16, 15, 14, 13, 12, 11}},
    {"flat to tiered with room for all",
     flat(),
     tiered(16),
     {1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16}},
    {"tiered to flat", tiered(6), flat(), {}},
    {"flat to larger flat", flat(22), flat(), {}},
    {"flat to smaller flat", flat(), flat(21), {}},
};

TEST_P(KvOpsConformance, ResizingKeepsWhatItCanAndLosesNoSlot) {
  const PageContents contents = [&] {
    make_pool(kGeometry, 1);
    return ordered_contents(kTokens);
  }();
  for (const Resize& resize_case : kResizes) {
    const auto& [name, shape, new_shape, cached] = resize_case;
    SCOPED_TRACE(name);
    make_pool(kGeometry, 100);
    TieredHeads before = make_heads(shape, kPageIds);
    const Prompt prompt = make_prompt(kTokens, 8);
    const List pinned = make_list({2, WantedList{{4, 9}, {8, 8}}});
    place({.heads = device_heads(before),
           .source = prompt.tokens,
           .pinned = pinned.view,
           .sink_pages = 1,
           .zone_first_entry = 1,
           .tail = tail_in(shape),
           .tail_first_token = kTailFirst * 8,
           .write_host = true,
           .epoch = 20});
    const auto read = [&](TieredHeads& heads, const std::vector<uint32_t>& pages, uint8_t epoch) {
      RetrieveCall call{.heads = &heads, .epoch = epoch};
      for (uint32_t h = 0; h < 2; ++h) call.wanted.push_back(wanted_of(pages, contents, h));
      const Retrieved found = retrieve(call);
      ASSERT_TRUE(found.status.ok()) << found.status.to_string();
      download_pool();
      for (uint32_t h = 0; h < 2; ++h) {
        EXPECT_EQ(found.counters[h].faults, 0u);
        for (size_t i = 0; i < pages.size(); ++i) {
          EXPECT_TRUE(holds(slot_bytes(found.slots[h][i]), h, contents[h].at(pages[i])));
        }
      }
    };
    read(before, {2, 3, 16}, 21);
    expect_sound(before, contents);

    TieredHeads after = make_successor(before, new_shape);
    resize(before, after, tail_in(shape), tail_in(new_shape), kZoneOfBothHeads, 22);
    expect_sound(after, contents);
    if (new_shape.is_flat) {
      for (const uint32_t slot : after.slots.host) EXPECT_NE(slot, kNoSlot);
      std::vector<uint32_t> all(kPages);
      std::iota(all.begin(), all.end(), 0u);
      read(after, all, 23);
      continue;
    }
    std::vector<uint32_t> expected(cached.begin(), cached.end());
    for (uint32_t e = 0; e < kZoneEntries; ++e) {
      expected.push_back(kZone[e]);
      expect_entry(after, e, kZone[e]);
    }
    for (uint32_t t = 0; t < kTailPages; ++t) {
      expected.push_back(kTailFirst + t);
      expect_entry(after, layout::tail_entry(after.view(0), tail_in(new_shape), t), kTailFirst + t);
    }
    expect_resident(after, expected);
    read(after, new_shape.lease == new_shape.pinned ? kZone : std::vector<uint32_t>{0, 7, 9}, 23);
    expect_sound(after, contents);
  }
}

TEST_P(KvOpsConformance, ResizingKeepsTheOrderOfAges) {
  make_pool(kGeometry, 60);
  TieredHeads before = make_heads({.lease = 6, .pinned = 0}, 20);
  const PageContents contents = fill_host(before, 20);
  const auto read = [&](TieredHeads& heads, const std::vector<uint32_t>& pages, uint8_t epoch) {
    RetrieveCall call{.heads = &heads, .epoch = epoch};
    for (uint32_t h = 0; h < 2; ++h) call.wanted.push_back(wanted_of(pages, contents, h));
    ASSERT_TRUE(retrieve(call).status.ok());
  };
  read(before, {0, 1, 2, 3, 4, 5}, 249);  // entries by id, ages against them
  for (uint32_t i = 0; i < 6; ++i) read(before, {(i * 5) % 6}, static_cast<uint8_t>(250 + i));
  // Oldest first: 0, 5, 4, 3, 2, 1.
  TieredHeads after = make_successor(before, {.lease = 4, .pinned = 0});
  resize(before, after, {.ring = 1}, {.ring = 1}, {}, 0);
  expect_resident(after, {4, 3, 2, 1});
  read(after, {7}, 50);
  expect_resident(after, {7, 3, 2, 1});
  read(after, {8, 9}, 51);
  expect_resident(after, {7, 8, 9, 1});
  expect_sound(after, contents);
}

// With fewer slots than ids: resident pages, then those that the host has, then ids behind the
// tail.
TEST_P(KvOpsConformance, AFlatFormWithFewSlotsServesRealPagesFirst) {
  make_pool(kGeometry, 80);
  TieredHeads before = make_heads({.lease = 8, .pinned = 2}, 16);
  PageContents contents = fill_host(before, 9);
  RetrieveCall call{.heads = &before, .epoch = 1};
  for (uint32_t h = 0; h < 2; ++h) call.wanted.push_back(wanted_of({1, 8}, contents, h));
  ASSERT_TRUE(retrieve(call).status.ok());
  // The tail: page 11; ids 9 and 10 were never pages.
  const layout::Tail tail{.first_page = 11, .first_entry = 0, .ring = 2, .tokens = 0};
  append_tokens(before, tail, 88, 3);
  for (uint32_t h = 0; h < 2; ++h) contents[h][11] = {88, 89, 90};
  const layout::Tail grown{.first_page = 11, .first_entry = 0, .ring = 2, .tokens = 3};
  // 16 ids and 8 + 6 slots.
  TieredHeads after = make_successor(before, flat(16));
  const backend::Buffer extra = upload<uint32_t>(take_slots(2 * 6));
  const backend::ResizeItem item{.before = device_heads(before),
                                 .after = device_heads(after),
                                 .extra = extra.as<uint32_t>(),
                                 .extra_count = 6,
                                 .tail_before = grown,
                                 .tail_after = {.first_page = 11, .tokens = 3}};
  kv_ops().enqueue_resize(item, tiers_, stream());
  expect_sound(after, contents);
  for (uint32_t h = 0; h < 2; ++h) {
    for (uint32_t id = 0; id < 16; ++id) {
      EXPECT_EQ(after.slot(h, id) == kNoSlot, id == 9 || id == 10) << id;
    }
  }
}

TEST_P(KvOpsConformance, AFlatFormsHolesStayHolesAndPagesMissingOnTheHostAreNotCached) {
  make_pool(kGeometry, 80);
  TieredHeads before = make_heads(flat(12), 12);
  PageContents contents = fill_host(before, 12);
  // Page 6 is a hole in the flat form and was never a page; 7 was never written.
  for (uint32_t h = 0; h < 2; ++h) {
    before.slots.host[h * 12 + 6] = kNoSlot;
    for (const uint32_t page : {6u, 7u}) {
      write_tag(before, h, page, {});
      contents[h].erase(page);
    }
  }
  stream().enqueue_copy(before.slots.device.data(), before.slots.host.data(), 4 * 24);
  const Prompt prompt = make_prompt(12 * 8, 8);
  place({.heads = device_heads(before),
         .source = prompt.tokens,
         .map = nullptr,
         .pinned = {},
         .tail = {.first_page = 6},
         .tail_first_token = 6 * 8});
  TieredHeads after = make_successor(before, {.lease = 8, .pinned = 2});
  const layout::Tail tail_before{.first_page = 12};
  const layout::Tail tail_after{.first_page = 12, .first_entry = 0, .ring = 2};
  const std::vector<uint32_t> none = {layout::kNoPage, layout::kNoPage};
  resize(before, after, tail_before, tail_after, none, 1);
  download(after);
  for (uint32_t h = 0; h < 2; ++h) {
    EXPECT_EQ(resident(after, h), (std::set<uint32_t>{4, 5, 8, 9, 10, 11}));
  }
}

}  // namespace
}  // namespace spin::testing
