// SPDX-License-Identifier: Apache-2.0
// Tests of what puts tokens into pages: a prompt, new tokens, sealed and repacked tails.
#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "layout/residency.h"
#include "tests/backend/kv_ops_conformance.h"

namespace spin::testing {
namespace {

using layout::DType;
using layout::kNoPage;

const layout::KvGeometry kGeometries[] = {
    {.layers = 1, .kv_heads = 3, .head_dim = 64, .page_tokens = 8, .dtype = DType::kBF16},
    {.layers = 1, .kv_heads = 1, .head_dim = 96, .page_tokens = 16, .dtype = DType::kF32},
    {.layers = 1, .kv_heads = 2, .head_dim = 128, .page_tokens = 32, .dtype = DType::kBF16},
    {.layers = 1, .kv_heads = 2, .head_dim = 24, .page_tokens = 64, .dtype = DType::kF32},
};

std::vector<uint32_t> range(uint32_t first, uint32_t end) {
  std::vector<uint32_t> out(end - first);
  std::iota(out.begin(), out.end(), first);
  return out;
}

TEST_P(KvOpsConformance, AppendedTokensLieInTheTailsPagesInBothForms) {
  for (const layout::KvGeometry& geometry : kGeometries) {
    for (const bool is_flat : {false, true}) {
      SCOPED_TRACE(std::to_string(geometry.page_tokens) + (is_flat ? " flat" : " tiered"));
      make_pool(geometry, 40);
      TieredHeads heads =
          make_heads({.lease = 12, .pinned = is_flat ? 12u : 6u, .is_flat = is_flat}, 12, !is_flat);
      layout::Tail tail{.first_page = 5, .first_entry = 2, .ring = 4};
      const uint32_t page = geometry.page_tokens;
      uint32_t token = 5 * page;
      // Ends of a call in the middle, at the end and beyond the end of a page.
      for (const uint32_t count : {1u, page - 2, 1u, page + 3, page - 3, 0u, 2u}) {
        append_tokens(heads, tail, token, count);
        tail.tokens += count;
        token += count;
      }
      PageContents contents = ordered_contents(token);
      for (auto& pages : contents) pages.erase(pages.begin(), pages.find(5));
      expect_sound(heads, contents);
      if (!is_flat) {
        expect_resident(heads, range(5, 9));
        expect_entry(heads, 2 + 5 % 4, 5);
        expect_entry(heads, 2 + 8 % 4, 8);
        continue;
      }
      // Nothing but the tail's rows was written.
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
        EXPECT_EQ(slot_bytes(heads.slot(h, 4))[0], 0xFF);
        EXPECT_EQ(slot_bytes(heads.slot(h, 9))[0], 0xFF);
        EXPECT_EQ(slot_bytes(heads.slot(h, 8))[2 * geometry.row_bytes()], 0xFF);
        EXPECT_TRUE(holds(slot_bytes(heads.slot(h, 5)), h, contents[h].at(5)));
        EXPECT_TRUE(holds(slot_bytes(heads.slot(h, 8)), h, contents[h].at(8)));
      }
    }
  }
}

// Tokens are appended one by one and pages sealed for a long time, the ring going round; a step
// now and then reads old pages.
TEST_P(KvOpsConformance, ALongTailIsSealedPageByPage) {
  for (const layout::KvGeometry& geometry : kGeometries) {
    SCOPED_TRACE(geometry.page_tokens);
    make_pool(geometry, 40);
    const uint32_t page = geometry.page_tokens;
    const uint32_t pages = 30;
    TieredHeads heads = make_heads({.lease = 9, .pinned = 4}, pages);
    layout::Tail tail{.first_page = 0, .first_entry = 1, .ring = 3};
    std::mt19937 random(page);
    uint8_t epoch = 0;
    for (uint32_t token = 0; token < pages * page; ++token) {
      append_tokens(heads, tail, token, 1);
      ++tail.tokens;
      if (tail.tokens < 3 * page) continue;
      ++epoch;
      const uint32_t sealed = 1 + random() % 2;
      seal(heads, tail, sealed, epoch);
      const PageContents contents = ordered_contents(token + 1);
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
        for (uint32_t p = tail.first_page; p < tail.first_page + sealed; ++p) {
          expect_on_host(heads, h, p, contents[h].at(p));
          EXPECT_TRUE(resident(heads, h).count(p) == 1);
        }
      }
      tail.first_page += sealed;
      tail.tokens -= sealed * page;
      expect_sound(heads, contents);
      if (random() % 2 == 0) continue;
      RetrieveCall call{.heads = &heads, .epoch = epoch};
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
        const auto old_page = static_cast<uint32_t>(random() % tail.first_page);
        const std::vector<uint32_t> wanted = {old_page, tail.first_page};
        call.wanted.push_back(wanted_of(wanted, contents, h));
      }
      const Retrieved found = retrieve(call);
      expect_sound(heads, contents);
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) EXPECT_EQ(found.counters[h].faults, 0u);
    }
  }
}

TEST_P(KvOpsConformance, ManySequencesAppendAndSealInOneCall) {
  // So many that the work is shared out.
  constexpr uint32_t kSequences = 12;
  make_pool(kGeometries[0], kSequences * 3 * 16);
  std::vector<TieredHeads> sequences;
  std::vector<backend::TailAppendItem> appends;
  std::vector<backend::SealItem> seals;
  for (uint32_t s = 0; s < kSequences; ++s) {
    sequences.push_back(make_heads({.lease = 16, .pinned = 8}, 12));
    layout::Tail tail{.first_page = 0, .first_entry = 0, .ring = 8};
    // Each takes other rows.
    appends.push_back({device_heads(sequences[s]), tail, s, 60});
    tail.tokens = 60;
    seals.push_back({device_heads(sequences[s]), tail, 6, 1});
  }
  const Tensor k = upload_matrix(token_rows(0, 60 + kSequences, 0));
  const Tensor v = upload_matrix(token_rows(0, 60 + kSequences, 1));
  kv_ops().enqueue_tail_append(k.ref, v.ref, appends, tiers_, stream());
  kv_ops().enqueue_seal(seals, tiers_, stream());
  for (uint32_t s = 0; s < kSequences; ++s) {
    PageContents contents(3);
    for (uint32_t h = 0; h < 3; ++h) {
      for (uint32_t t = 0; t < 60; ++t) contents[h][t / 8].push_back(s + t);
    }
    expect_sound(sequences[s], contents);
    expect_resident(sequences[s], range(0, 8));
    for (uint32_t h = 0; h < 3; ++h) {
      for (uint32_t p = 0; p < 6; ++p) expect_on_host(sequences[s], h, p, contents[h].at(p));
    }
  }
}

TEST_P(KvOpsConformance, SealingTakesEmptyEntriesFirstThenTheOldestAndTheyMayLeaveAtOnce) {
  make_pool(kGeometries[0], 40);
  TieredHeads heads = make_heads({.lease = 5, .pinned = 2}, 20);
  PageContents contents = fill_host(heads, 20);
  layout::Tail tail{.first_page = 10, .first_entry = 0, .ring = 2};
  const auto read = [&](std::vector<uint32_t> pages, uint8_t epoch) {
    RetrieveCall call{.heads = &heads, .epoch = epoch};
    for (uint32_t h = 0; h < 3; ++h) call.wanted.push_back(wanted_of(pages, contents, h));
    return retrieve(call);
  };
  read({3, 4}, 1);
  append_tokens(heads, tail, 80, 16);
  tail.tokens = 16;
  seal(heads, tail, 1, 2);
  expect_resident(heads, {3, 4, 10, 11});
  expect_entry(heads, 0, kNoPage);  // that of page 10
  tail = {.first_page = 11, .first_entry = 0, .ring = 2, .tokens = 8};
  read({4, 10}, 3);
  append_tokens(heads, tail, 96, 8);
  tail.tokens = 16;
  const backend::Buffer ghosts = upload<uint32_t>(std::vector<uint32_t>(4, kNoPage));
  const backend::Buffer counts =
      upload<layout::ReuseCounters>(std::vector<layout::ReuseCounters>(3));
  layout::ReuseProbe reuse;
  reuse.counters = counts.as<layout::ReuseCounters>();
  reuse.ghosts = ghosts.as<uint32_t>();
  reuse.ghost_pages = 4;
  seal(heads, tail, 2, 4, reuse);
  expect_resident(heads, {10, 11, 12});  // 3 was the oldest, then the first of those of epoch 3
  // The head that is sampled remembers what had to leave.
  EXPECT_EQ(read_back<uint32_t>(ghosts, 4), (std::vector<uint32_t>{3, 4, kNoPage, kNoPage}));
  // A step that needs the whole cache gets it.
  const Retrieved found = read({1, 2, 3}, 4);
  ASSERT_TRUE(found.status.ok()) << found.status.to_string();
  expect_resident(heads, {1, 2, 3});
  expect_sound(heads, contents);
}

TEST_P(KvOpsConformance, SealingWithoutACacheOnlyWritesToTheHost) {
  make_pool(kGeometries[0], 40);
  TieredHeads heads = make_heads({.lease = 3, .pinned = 3}, 20);
  const layout::Tail tail{.first_page = 4, .first_entry = 0, .ring = 3};
  append_tokens(heads, tail, 32, 20);
  seal(heads, {.first_page = 4, .first_entry = 0, .ring = 3, .tokens = 20}, 2, 1);
  const PageContents contents = ordered_contents(52);
  expect_resident(heads, {6});
  expect_sound(heads, contents);
  for (uint32_t h = 0; h < 3; ++h) {
    expect_on_host(heads, h, 4, contents[h].at(4));
    expect_on_host(heads, h, 5, contents[h].at(5));
  }
}

TEST_P(KvOpsConformance, SealingAFlatFormMovesNothing) {
  make_pool(kGeometries[0], 40);
  TieredHeads heads = make_heads({.lease = 6, .pinned = 6, .is_flat = true}, 20, false);
  const std::vector<uint32_t> slots = heads.slots.host;
  append_tokens(heads, {}, 0, 40);
  seal(heads, {.tokens = 40}, 3, 1);
  expect_sound(heads, ordered_contents(40));
  EXPECT_EQ(heads.slots.host, slots);
}

TEST_P(KvOpsConformance, SealingWithoutAnExtentFailsTheStream) {
  make_pool(kGeometries[0], 40);
  TieredHeads heads = make_heads({.lease = 5, .pinned = 3}, 4);
  const layout::Tail tail{.first_page = 4, .first_entry = 0, .ring = 3};
  append_tokens(heads, tail, 32, 8);
  const backend::SealItem item{device_heads(heads), tail, 1, 1};
  kv_ops().enqueue_seal({&item, 1}, tiers_, stream());
  EXPECT_EQ(stream().wait_idle().code(), StatusCode::kInternal);
}

TEST_P(KvOpsConformance, APromptInTokenOrderFillsZonesTailCacheAndHost) {
  for (const layout::KvGeometry& geometry : kGeometries) {
    for (const uint32_t source_page : {geometry.page_tokens, 16u, 64u}) {
      SCOPED_TRACE(std::to_string(geometry.page_tokens) + " from " + std::to_string(source_page));
      make_pool(geometry, 60);
      const uint32_t page = geometry.page_tokens;
      const uint32_t tokens = 19 * page + page / 2;
      // Entries: 2 sinks, 3 of the zone, 5 of the ring, 6 of the cache.
      TieredHeads heads = make_heads({.lease = 16, .pinned = 10}, 24);
      const Prompt prompt = make_prompt(tokens, source_page);
      std::vector<WantedList> zone;
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
        zone.push_back({{4, 9, 15}, std::vector<uint8_t>(3, static_cast<uint8_t>(page))});
      }
      const List pinned = make_list(zone);
      const layout::Tail tail{
          .first_page = 16, .first_entry = 5, .ring = 5, .tokens = 3 * page + page / 2};
      place({.heads = device_heads(heads),
             .source = prompt.tokens,
             .pinned = pinned.view,
             .sink_pages = 2,
             .zone_first_entry = 2,
             .tail = tail,
             .tail_first_token = 16 * page,
             .write_host = true,
             .epoch = 3});
      PageContents contents = ordered_contents(tokens);
      expect_sound(heads, contents);
      expect_resident(heads, {0, 1, 4, 9, 15, 16, 17, 18, 19, 14, 13, 12, 11, 10, 8});
      expect_entry(heads, 0, 0);
      expect_entry(heads, 1, 1);
      expect_entry(heads, 2, 4);
      expect_entry(heads, 4, 15);
      expect_entry(heads, 5 + 16 % 5, 16);
      expect_entry(heads, 5 + 19 % 5, 19);
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
        for (uint32_t p = 0; p < 16; ++p) expect_on_host(heads, h, p, contents[h].at(p));
        EXPECT_EQ(read_tag(heads, h, 16).page, kNoPage);
      }
      // Decoding goes on in the open page, and a step of the same epoch may use the whole cache.
      append_tokens(heads, tail, tokens, 3);
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
        for (uint32_t t = tokens; t < tokens + 3; ++t) contents[h][t / page].push_back(t);
      }
      RetrieveCall call{.heads = &heads, .epoch = 3};
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
        call.wanted.push_back(wanted_of({2, 3, 4, 5, 6, 7, 10, 19}, contents, h));
      }
      const Retrieved found = retrieve(call);
      ASSERT_TRUE(found.status.ok()) << found.status.to_string();
      expect_sound(heads, contents);
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) EXPECT_EQ(found.counters[h].misses, 5u);
    }
  }
}

TEST_P(KvOpsConformance, APromptShorterThanTheLeaseLeavesEntriesEmpty) {
  make_pool(kGeometries[0], 60);
  TieredHeads heads = make_heads({.lease = 16, .pinned = 6}, 24);
  // What an earlier use left in the arrays does not matter.
  std::fill(heads.pages.host.begin(), heads.pages.host.end(), 3u);
  std::fill(heads.table.host.begin(), heads.table.host.end(), 5u);
  stream().enqueue_copy(heads.pages.device.data(), heads.pages.host.data(),
                        heads.pages.device.size_bytes());
  stream().enqueue_copy(heads.table.device.data(), heads.table.host.data(),
                        heads.table.device.size_bytes());
  const Prompt prompt = make_prompt(29, 8);
  place({.heads = device_heads(heads),
         .source = prompt.tokens,
         .pinned = {},
         .sink_pages = 1,
         .tail = {.first_page = 3, .first_entry = 1, .ring = 5, .tokens = 5},
         .tail_first_token = 24,
         .write_host = true,
         .epoch = 0});
  expect_resident(heads, {0, 1, 2, 3});
  expect_sound(heads, ordered_contents(29));
}

TEST_P(KvOpsConformance, AFlatPromptGoesToItsEntriesAndToTheHostOnlyIfAsked) {
  for (const bool write_host : {false, true}) {
    make_pool(kGeometries[2], 60);
    TieredHeads heads = make_heads({.lease = 14, .pinned = 14, .is_flat = true}, 14);
    const Prompt prompt = make_prompt(12 * 32 + 7, 32);
    place({.heads = device_heads(heads),
           .source = prompt.tokens,
           .pinned = {},
           .sink_pages = 1,
           .tail = {.first_page = 10, .tokens = 2 * 32 + 7},
           .tail_first_token = 10 * 32,
           .write_host = write_host});
    const PageContents contents = ordered_contents(12 * 32 + 7);
    expect_sound(heads, contents);
    for (uint32_t h = 0; h < 2; ++h) {
      for (uint32_t p = 0; p < 10; ++p) {
        if (write_host) expect_on_host(heads, h, p, contents[h].at(p));
        if (!write_host) {
          EXPECT_EQ(read_tag(heads, h, p).page, kNoPage);
        }
      }
    }
  }
}

// Tokens [first, end) in random order on pages of 1 to page_tokens of them, others for each head.
std::vector<std::vector<std::vector<uint32_t>>> random_pages(const layout::KvGeometry& geometry,
                                                             uint32_t first,
                                                             uint32_t end) {
  std::mt19937 random(first + end);
  std::vector<std::vector<std::vector<uint32_t>>> out(geometry.kv_heads);
  for (auto& head : out) {
    std::vector<uint32_t> tokens = range(first, end);
    std::shuffle(tokens.begin(), tokens.end(), random);
    while (!tokens.empty()) {
      const size_t count = std::min<size_t>(tokens.size(), 1 + random() % geometry.page_tokens);
      head.emplace_back(tokens.end() - static_cast<std::ptrdiff_t>(count), tokens.end());
      tokens.resize(tokens.size() - count);
    }
  }
  return out;
}

TEST_P(KvOpsConformance, AMappedPromptPutsEachTokenWhereTheMapSays) {
  for (const layout::KvGeometry& geometry : kGeometries) {
    for (const bool is_flat : {false, true}) {
      SCOPED_TRACE(std::to_string(geometry.page_tokens) + (is_flat ? " flat" : " tiered"));
      const uint32_t page = geometry.page_tokens;
      // Tokens: 2 pages of sinks, 10 pages that are dealt out, a tail of 1 1/2 pages.
      const auto pages = random_pages(geometry, 2 * page, 12 * page);
      uint32_t most = 0;
      for (const auto& head : pages) most = std::max(most, static_cast<uint32_t>(head.size()));
      const uint32_t first_tail_page = 2 + most + 7;  // ids behind the map's, with a gap
      const uint32_t page_ids = first_tail_page + 6;
      const LeaseShape shape{
          .lease = is_flat ? page_ids : 20, .pinned = is_flat ? page_ids : 6, .is_flat = is_flat};
      make_pool(geometry, shape.lease * geometry.kv_heads);
      TieredHeads heads = make_heads(shape, page_ids);
      const Prompt prompt = make_prompt(13 * page + page / 2, 16);
      const Map map = make_map(pages);
      const layout::Tail tail{
          .first_page = first_tail_page, .first_entry = 2, .ring = 4, .tokens = page + page / 2};
      place({.heads = device_heads(heads),
             .source = prompt.tokens,
             .map = &map.view,
             .first_mapped_page = 2,
             .pinned = {},
             .sink_pages = 2,
             .zone_first_entry = 2,
             .tail = tail,
             .tail_first_token = 12 * page,
             .write_host = !is_flat,
             .epoch = 9});
      PageContents contents(geometry.kv_heads);
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
        contents[h][0] = range(0, page);
        contents[h][1] = range(page, 2 * page);
        for (uint32_t p = 0; p < pages[h].size(); ++p) contents[h][2 + p] = pages[h][p];
        contents[h][first_tail_page] = range(12 * page, 13 * page);
        contents[h][first_tail_page + 1] = range(13 * page, 13 * page + page / 2);
      }
      expect_sound(heads, contents);
      for (uint32_t h = 0; h < geometry.kv_heads && !is_flat; ++h) {
        const auto count = static_cast<uint32_t>(pages[h].size());
        for (uint32_t p = 0; p < 2 + count; ++p) expect_on_host(heads, h, p, contents[h].at(p));
        std::set<uint32_t> expected = {0, 1, first_tail_page, first_tail_page + 1};
        for (uint32_t i = 0; i < std::min(14u, count); ++i) expected.insert(2 + count - 1 - i);
        EXPECT_EQ(resident(heads, h), expected);
      }
    }
  }
}

TEST_P(KvOpsConformance, ARepackedTailLeavesForPagesInTheMapsOrder) {
  for (const layout::KvGeometry& geometry : kGeometries) {
    for (const bool is_flat : {false, true}) {
      SCOPED_TRACE(std::to_string(geometry.page_tokens) + (is_flat ? " flat" : " tiered"));
      const uint32_t page = geometry.page_tokens;
      const auto pages = random_pages(geometry, 0, 4 * page);  // of the tail's tokens
      uint32_t most = 0;
      for (const auto& head : pages) most = std::max(most, static_cast<uint32_t>(head.size()));
      const uint32_t first_new = 9;
      const uint32_t page_ids = first_new + most;
      const LeaseShape shape{
          .lease = is_flat ? page_ids : 9, .pinned = is_flat ? page_ids : 7, .is_flat = is_flat};
      make_pool(geometry, shape.lease * geometry.kv_heads);
      TieredHeads heads = make_heads(shape, page_ids);
      layout::Tail tail{.first_page = 3, .first_entry = 0, .ring = 7};
      append_tokens(heads, tail, 3 * page, 5 * page + 2);
      tail.tokens = 5 * page + 2;
      const Map map = make_map(pages);
      repack({device_heads(heads), tail, &map.view, first_new, 4});
      PageContents contents(geometry.kv_heads);
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
        contents[h][7] = range(7 * page, 8 * page);
        contents[h][8] = range(8 * page, 8 * page + 2);
        for (uint32_t p = 0; p < pages[h].size(); ++p) {
          for (const uint32_t t : pages[h][p]) contents[h][first_new + p].push_back(3 * page + t);
        }
      }
      expect_sound(heads, contents);
      if (is_flat) continue;
      expect_resident(heads, {7, 8});
      RetrieveCall call{.heads = &heads, .epoch = 4};
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
        for (uint32_t p = 0; p < pages[h].size(); ++p) {
          expect_on_host(heads, h, first_new + p, contents[h].at(first_new + p));
        }
        call.wanted.push_back(wanted_of({7, 8, first_new, first_new + 1}, contents, h));
      }
      const Retrieved found = retrieve(call);
      expect_sound(heads, contents);
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) EXPECT_EQ(found.counters[h].faults, 0u);
    }
  }
}

}  // namespace
}  // namespace spin::testing
