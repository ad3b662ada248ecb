// SPDX-License-Identifier: Apache-2.0
// Tests of what moves pages between tiers and entries.
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
using layout::kNoSlot;

layout::KvGeometry geometry_of(uint32_t kv_heads,
                               uint32_t head_dim,
                               uint32_t page_tokens,
                               DType dtype) {
  return {.layers = 1,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .page_tokens = page_tokens,
          .dtype = dtype};
}

const layout::KvGeometry kGeometries[] = {
    geometry_of(3, 64, 8, DType::kBF16),
    geometry_of(1, 96, 16, DType::kF32),
    geometry_of(2, 128, 32, DType::kBF16),
    geometry_of(2, 64, 64, DType::kF32),
};

std::vector<uint32_t> ids(uint32_t first, uint32_t count) {
  std::vector<uint32_t> out(count);
  std::iota(out.begin(), out.end(), first);
  return out;
}

// The rules of a Retrieve once more, with exact times and a sort.
class CacheModel {
 public:
  CacheModel(uint32_t entries) : pages_(entries, kNoPage), used_(entries, 0) {}

  struct Outcome {
    uint64_t hits = 0;
    std::vector<uint32_t> fetched;  // positions
    uint64_t evictions = 0;
  };
  Outcome retrieve(const std::vector<uint32_t>& wanted, int64_t step) {
    Outcome outcome;
    for (uint32_t i = 0; i < wanted.size(); ++i) {
      const auto found = std::find(pages_.begin(), pages_.end(), wanted[i]);
      if (found == pages_.end()) {
        outcome.fetched.push_back(i);
      } else {
        used_[static_cast<size_t>(found - pages_.begin())] = step;
        ++outcome.hits;
      }
    }
    std::vector<std::pair<int64_t, size_t>> order;
    for (size_t e = 0; e < pages_.size(); ++e) {
      const int64_t age = pages_[e] == kNoPage ? 1000 : std::min<int64_t>(63, step - used_[e]);
      if (age > 0) order.emplace_back(-age, e);
    }
    std::sort(order.begin(), order.end());
    order.resize(outcome.fetched.size());
    std::sort(order.begin(), order.end(),
              [](const auto& a, const auto& b) { return a.second < b.second; });
    for (size_t i = 0; i < order.size(); ++i) {
      const size_t e = order[i].second;
      if (pages_[e] != kNoPage) ++outcome.evictions;
      pages_[e] = wanted[outcome.fetched[i]];
      used_[e] = step;
    }
    return outcome;
  }
  std::set<uint32_t> pages() const {
    std::set<uint32_t> out(pages_.begin(), pages_.end());
    out.erase(kNoPage);
    return out;
  }

 private:
  std::vector<uint32_t> pages_;
  std::vector<int64_t> used_;
};

// What a Retrieve counts for a curve, by the plain functions; only head 0 is sampled.
struct ReuseModel {
  layout::ReuseProbe probe;
  std::vector<uint32_t>* ghosts;
  std::vector<layout::ReuseCounters> counters;

  // `head`: a copy, before the Retrieve.
  void retrieve(const layout::HeadPages& head,
                uint32_t h,
                const std::vector<uint32_t>& pages,
                uint8_t epoch) {
    const auto count = static_cast<uint32_t>(pages.size());
    if (layout::is_turn(h, epoch)) {
      layout::count_turn(head, pages.data(), count, epoch, probe.mandatory, counters[h]);
    }
    if (h > 0) return;
    std::vector<uint32_t> missing;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t entry = layout::find_entry(head, pages[i]);
      if (entry == layout::kNoEntry) {
        missing.push_back(i);
      } else {
        head.stamps[entry] = epoch;
      }
    }
    const auto misses = static_cast<uint32_t>(missing.size());
    std::vector<uint32_t> victims(misses);
    layout::choose_victims(head, epoch, misses, victims.data());
    layout::count_ghosts(head, pages.data(), missing.data(), misses, probe, ghosts->data(),
                         counters[h]);
    layout::give_up(head, victims.data(), misses, ghosts->data(), probe.ghost_pages);
  }
};

TEST_P(KvOpsConformance, RetrieveIsTheReferenceModelStepByStep) {
  for (const layout::KvGeometry& geometry : kGeometries) {
    SCOPED_TRACE(geometry.page_tokens);
    make_pool(geometry, 70 * geometry.kv_heads);
    const uint32_t page_ids = 40;
    TieredHeads heads = make_heads({.lease = 12, .pinned = 0}, page_ids);
    const PageContents contents = fill_host(heads, page_ids);
    std::vector<CacheModel> models(geometry.kv_heads, CacheModel(12));
    std::mt19937 random(geometry.page_tokens);
    for (int64_t step = 0; step < 300; step += step % 50 == 49 ? 70 : 1) {
      RetrieveCall call{.heads = &heads, .epoch = static_cast<uint8_t>(step)};
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
        std::vector<uint32_t> pages = ids(0, page_ids);
        std::shuffle(pages.begin(), pages.end(), random);
        // Half of the steps stay with few pages, so that there are hits.
        pages.resize(random() % 9);
        for (uint32_t& page : pages) page = step % 2 == 0 ? page : page % 10;
        std::sort(pages.begin(), pages.end());
        pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
        call.wanted.push_back(wanted_of(pages, contents, h));
      }
      const Retrieved found = retrieve(call);
      ASSERT_TRUE(found.status.ok()) << found.status.to_string();
      download_pool();
      for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
        const WantedList& wanted = call.wanted[h];
        const CacheModel::Outcome expected = models[h].retrieve(wanted.pages, step);
        ASSERT_EQ(found.counters[h].hits, expected.hits) << "step " << step;
        ASSERT_EQ(found.counters[h].misses, expected.fetched.size());
        ASSERT_EQ(found.counters[h].evictions, expected.evictions);
        ASSERT_EQ(found.counters[h].faults, 0u);
        ASSERT_EQ(found.counters[h].bytes, expected.fetched.size() * geometry.page_bytes());
        ASSERT_EQ(found.fetched[h], expected.fetched);
        ASSERT_EQ(resident(heads, h), models[h].pages()) << "step " << step;
        for (size_t i = 0; i < wanted.pages.size(); ++i) {
          ASSERT_TRUE(holds(slot_bytes(found.slots[h][i]), h, contents[h].at(wanted.pages[i])));
        }
      }
      if (step % 10 == 0) expect_sound(heads, contents);
    }
  }
}

TEST_P(KvOpsConformance, MeasuringReuseCountsWhatTheModelCountsAndChangesNothing) {
  constexpr uint32_t kLease = 12;
  constexpr uint32_t kMandatory = 8;
  constexpr uint32_t kGhosts = 20;
  const uint32_t kv_heads = kGeometries[0].kv_heads;
  make_pool(kGeometries[0], 2 * kLease * kv_heads);
  const uint32_t page_ids = 40;
  TieredHeads plain = make_heads({.lease = kLease, .pinned = 0}, page_ids);
  const PageContents contents = fill_host(plain, page_ids);
  TieredHeads measured = make_heads({.lease = kLease, .pinned = 0}, page_ids);
  fill_host(measured, page_ids);
  std::vector<uint32_t> ghosts(kGhosts, kNoPage);
  const backend::Buffer list = upload<uint32_t>(ghosts);
  const backend::Buffer counts =
      upload<layout::ReuseCounters>(std::vector<layout::ReuseCounters>(kv_heads));
  layout::ReuseProbe probe;
  probe.counters = counts.as<layout::ReuseCounters>();
  probe.ghosts = list.as<uint32_t>();
  probe.ghost_pages = kGhosts;
  probe.mandatory = kMandatory;
  ReuseModel model{probe, &ghosts, std::vector<layout::ReuseCounters>(kv_heads)};
  std::mt19937 random(3);
  for (uint32_t step = 0; step < 100; ++step) {
    const auto epoch = static_cast<uint8_t>(step);
    RetrieveCall call{.heads = &plain, .epoch = epoch};
    download(measured);
    for (uint32_t h = 0; h < kv_heads; ++h) {
      std::vector<uint32_t> pages;
      for (uint32_t i = random() % kMandatory; i < kMandatory; ++i) {
        pages.push_back(random() % 3 == 0 ? random() % page_ids : random() % 14);
      }
      std::sort(pages.begin(), pages.end());
      pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
      call.wanted.push_back(wanted_of(pages, contents, h));
      model.retrieve(measured.view(h), h, pages, epoch);
    }
    RetrieveCall with = call;
    with.heads = &measured;
    with.reuse = probe;
    const std::vector<Retrieved> found = retrieve(std::vector{call, with});
    ASSERT_TRUE(found[0].status.ok() && found[1].status.ok());
    for (uint32_t h = 0; h < kv_heads; ++h) {
      ASSERT_EQ(found[0].counters[h].misses, found[1].counters[h].misses);
      ASSERT_EQ(found[0].fetched[h], found[1].fetched[h]);
      ASSERT_EQ(resident(plain, h), resident(measured, h)) << "step " << step;
    }
    ASSERT_EQ(read_back<uint32_t>(list, kGhosts), ghosts) << "step " << step;
  }
  EXPECT_EQ(plain.stamps.host, measured.stamps.host);
  const auto counted = read_back<layout::ReuseCounters>(counts, kv_heads);
  for (uint32_t h = 0; h < kv_heads; ++h) {
    EXPECT_GT(counted[h].turns, 5u);
    EXPECT_EQ(counted[h].turns, model.counters[h].turns);
    EXPECT_EQ(counted[h].misses, model.counters[h].misses);
    for (uint32_t bin = 0; bin < layout::kReuseBins; ++bin) {
      EXPECT_EQ(counted[h].hits[bin], model.counters[h].hits[bin]) << bin;
      EXPECT_EQ(counted[h].ghosts[bin], model.counters[h].ghosts[bin]) << bin;
    }
  }
}

TEST_P(KvOpsConformance, PagesUnusedForWholeTurnsOfTheEpochStayTheOldest) {
  make_pool(kGeometries[1], 10);
  for (const int64_t steps : {255, 256, 257, 511, 512, 600}) {
    TieredHeads heads = make_heads({.lease = 3, .pinned = 0}, 20);
    const PageContents contents = fill_host(heads, 20);
    const auto read = [&](const std::vector<uint32_t>& pages, int64_t step) {
      return retrieve({.heads = &heads,
                       .wanted = {wanted_of(pages, contents, 0)},
                       .epoch = static_cast<uint8_t>(step)});
    };
    read({0, 1, 2}, 0);
    for (int64_t step = 1; step < steps; ++step) read({1}, step);
    // Both others must go; had their ages wrapped, they would count as used in this step.
    const Retrieved found = read({1, 5, 6}, steps);
    ASSERT_TRUE(found.status.ok()) << steps << ": " << found.status.to_string();
    EXPECT_EQ(found.counters[0].hits, 1u);
    free_slots_ = {0, 1, 2, 3, 4, 5};
  }
}

TEST_P(KvOpsConformance, RetrieveOfManySequencesKeepsThemApart) {
  // So many that the work is shared out.
  constexpr uint32_t kSequences = 25;
  make_pool(kGeometries[0], kSequences * 3 * 9);
  std::vector<TieredHeads> sequences;
  for (uint32_t s = 0; s < kSequences; ++s) {
    sequences.push_back(make_heads({.lease = 9, .pinned = 0}, 12));
    fill_host(sequences.back(), 12);
  }
  const PageContents contents = ordered_contents(12 * 8);
  for (uint32_t round = 0; round < 2; ++round) {
    std::vector<RetrieveCall> calls(kSequences);
    for (uint32_t s = 0; s < kSequences; ++s) {
      calls[s] = {.heads = &sequences[s], .epoch = static_cast<uint8_t>(7 * s + round)};
      for (uint32_t h = 0; h < 3; ++h) {
        calls[s].wanted.push_back(wanted_of(ids((s + round) % 3, 9 - h), contents, h));
      }
    }
    const std::vector<Retrieved> found = retrieve(calls);
    for (uint32_t s = 0; s < kSequences; ++s) {
      ASSERT_TRUE(found[s].status.ok());
      expect_sound(sequences[s], contents);
      for (uint32_t h = 0; h < 3; ++h) {
        EXPECT_EQ(found[s].counters[h].hits + found[s].counters[h].misses, 9u - h);
        EXPECT_EQ(found[s].counters[h].faults, 0u);
        for (uint32_t i = 0; i < 9 - h; ++i) {
          EXPECT_TRUE(
              holds(slot_bytes(found[s].slots[h][i]), h, contents[h].at((s + round) % 3 + i)));
        }
      }
    }
  }
}

TEST_P(KvOpsConformance, AFullCacheHoldsExactlyWhatAStepWants) {
  make_pool(kGeometries[1], 40);
  TieredHeads heads = make_heads({.lease = 5, .pinned = 0}, 20);
  const PageContents contents = fill_host(heads, 20);
  for (uint32_t step = 0; step < 4; ++step) {
    const Retrieved found = retrieve({.heads = &heads,
                                      .wanted = {wanted_of(ids(step * 3, 5), contents, 0)},
                                      .epoch = static_cast<uint8_t>(step)});
    ASSERT_TRUE(found.status.ok()) << found.status.to_string();
    EXPECT_EQ(found.counters[0].hits, step == 0 ? 0u : 2u);
  }
  const Retrieved found =
      retrieve({.heads = &heads, .wanted = {wanted_of(ids(0, 6), contents, 0)}, .epoch = 9});
  EXPECT_EQ(found.status.code(), StatusCode::kInternal);
}

TEST_P(KvOpsConformance, ABadHostPageIsAFaultOfItsOwnRequestAndReadsAsZeros) {
  const std::string kinds[] = {"owner", "page", "tokens", "no page", "no extent"};
  for (const std::string& kind : kinds) {
    SCOPED_TRACE(kind);
    make_pool(kGeometries[0], 80);
    TieredHeads bad = make_heads({.lease = 8, .pinned = 0}, 8);
    TieredHeads good = make_heads({.lease = 8, .pinned = 0}, 8);
    PageContents contents = fill_host(bad, 8);
    fill_host(good, 8);
    // Page 5 of head 1.
    layout::HostPageTag tag = read_tag(bad, 1, 5);
    if (kind == "owner") tag.owner = good.owner;
    if (kind == "page") tag.page = 6;
    if (kind == "tokens") tag.tokens = 7;
    if (kind == "no page") tag.page = kNoPage;
    write_tag(bad, 1, 5, tag);
    if (kind == "no extent") {
      const uint64_t nothing = 0;
      stream().enqueue_copy(bad.extents.device.as<uint64_t>() + bad.extent_count + 1, &nothing, 8);
      ASSERT_TRUE(stream().wait_idle().ok());
    }
    const std::vector<uint32_t> wanted = {1, 2, 5};
    for (uint8_t epoch = 1; epoch < 3; ++epoch) {
      std::vector<RetrieveCall> calls(2);
      calls[0] = {.heads = &bad, .epoch = epoch};
      calls[1] = {.heads = &good, .epoch = epoch};
      for (uint32_t h = 0; h < 3; ++h) {
        calls[0].wanted.push_back(wanted_of(wanted, contents, h));
        calls[1].wanted.push_back(wanted_of(wanted, contents, h));
      }
      const std::vector<Retrieved> found = retrieve(calls);
      ASSERT_TRUE(found[0].status.ok()) << found[0].status.to_string();
      expect_sound(bad, contents);
      expect_sound(good, contents);
      for (uint32_t h = 0; h < 3; ++h) {
        EXPECT_EQ(found[0].counters[h].faults, h == 1 ? 1u : 0u);
        EXPECT_EQ(found[1].counters[h].faults, 0u);
        for (size_t i = 0; i < wanted.size(); ++i) {
          const unsigned char* bytes = slot_bytes(found[0].slots[h][i]);
          if (h != 1 || wanted[i] != 5) {
            EXPECT_TRUE(holds(bytes, h, contents[h].at(wanted[i])));
            continue;
          }
          const std::vector<unsigned char> zeros(geometry_.page_bytes(), 0);
          EXPECT_EQ(std::memcmp(bytes, zeros.data(), zeros.size()), 0);
        }
      }
      // It is not taken for resident either.
      EXPECT_EQ(resident(bad, 1), (std::set<uint32_t>{1, 2}));
      EXPECT_EQ(resident(good, 1), (std::set<uint32_t>{1, 2, 5}));
    }
  }
}

TEST_P(KvOpsConformance, ValuesOnlyLeavesTheKeysOfPagesBelowTheBound) {
  for (const layout::KvGeometry& geometry : kGeometries) {
    make_pool(geometry, 20 * geometry.kv_heads);
    TieredHeads heads = make_heads({.lease = 10, .pinned = 0}, 20);
    const PageContents contents = fill_host(heads, 20);
    RetrieveCall call{
        .heads = &heads, .epoch = 3, .planes = layout::Planes::kValuesOnly, .planes_end = 12};
    const std::vector<uint32_t> wanted = {4, 9, 11, 12, 19};
    for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
      call.wanted.push_back(wanted_of(wanted, contents, h));
    }
    const Retrieved found = retrieve(call);
    ASSERT_TRUE(found.status.ok());
    download_pool();
    for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
      EXPECT_EQ(found.fetched[h], (std::vector<uint32_t>{0, 1, 2}));
      EXPECT_EQ(found.counters[h].misses, 5u);
      EXPECT_EQ(found.counters[h].bytes, 7 * geometry.plane_bytes());
      for (size_t i = 0; i < wanted.size(); ++i) {
        const unsigned char* bytes = slot_bytes(found.slots[h][i]);
        const std::vector<unsigned char> value = row_bytes(h, contents[h].at(wanted[i])[2], 1);
        EXPECT_EQ(std::memcmp(bytes + geometry.plane_bytes() + 2 * geometry.row_bytes(),
                              value.data(), value.size()),
                  0);
        EXPECT_EQ(holds(bytes, h, contents[h].at(wanted[i])), wanted[i] >= 12);
        if (wanted[i] < 12) {
          EXPECT_EQ(bytes[3], 0xFF);  // as the slot was
        }
      }
    }
  }
}

TEST_P(KvOpsConformance, AFlatFormLooksNothingUp) {
  make_pool(kGeometries[0], 40);
  TieredHeads heads = make_heads({.lease = 10, .pinned = 10, .is_flat = true}, 10, false);
  const PageContents contents = ordered_contents(80);
  heads.slots.host[10 + 4] = kNoSlot;  // a hole in head 1
  stream().enqueue_copy(heads.slots.device.data(), heads.slots.host.data(), 4 * 30);
  RetrieveCall call{.heads = &heads, .epoch = 3};
  const std::vector<uint32_t> wanted = {0, 4, 9};
  for (uint32_t h = 0; h < 3; ++h) call.wanted.push_back(wanted_of(wanted, contents, h));
  const Retrieved found = retrieve(call);
  ASSERT_TRUE(found.status.ok());
  for (uint32_t h = 0; h < 3; ++h) {
    EXPECT_EQ(found.counters[h].hits, h == 1 ? 2u : 3u);
    EXPECT_EQ(found.counters[h].faults, h == 1 ? 1u : 0u);
    EXPECT_EQ(found.counters[h].misses, 0u);
    EXPECT_TRUE(found.fetched[h].empty());
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(found.slots[h][i], heads.slot(h, wanted[i]));
  }
}

}  // namespace
}  // namespace spin::testing
