// SPDX-License-Identifier: Apache-2.0
// TieredSequence: forms and the transitions between them, page ids, extents, exhaustion.
#include "kv/tiered_sequence.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "kv/gain_curve.h"
#include "kv/page_store.h"
#include "kv/table_bytes.h"
#include "tests/kv/store_rig.h"
#include "tests/support/shuffled_device.h"

namespace spin::kv {
namespace {

using testing::cluster_shape;
using testing::Random;
using testing::range_shape;
using testing::RigOptions;
using testing::RigSequence;
using testing::RigShape;
using testing::StoreRig;

Status audit(StoreRig& rig, const RigSequence& sequence) {
  const TieredSequence* live[] = {&sequence.kv()};
  return rig.store().audit(live);
}

// Steps until the sequence is full, looking at everything on the way.
void run_to_end(StoreRig& rig, RigSequence& sequence, Random& random) {
  while (!sequence.is_full()) {
    ASSERT_EQ(sequence.step(random), "") << "after " << sequence.tokens() << " tokens";
    const Status audited = audit(rig, sequence);
    ASSERT_TRUE(audited.ok()) << audited.to_string();
  }
}

TEST(TieredSequence, ShowsEveryRowInEveryFormAndKind) {
  for (const bool mapped : {false, true}) {
    for (const uint32_t dense_layers : {0u, 1u}) {
      for (const uint64_t prompt : {1, 3, 8, 37}) {
        for (const bool tiered : {false, true}) {
          SCOPED_TRACE(::testing::Message() << "mapped " << mapped << ", dense " << dense_layers
                                            << ", prompt " << prompt << ", tiered " << tiered);
          StoreRig rig;
          Random random(7);
          RigShape shape =
              mapped ? cluster_shape(rig.geometry(), 90) : range_shape(rig.geometry(), 90);
          shape.shape.dense_layers = dense_layers;
          const uint64_t lease =
              tiered ? shape.shape.mandatory_pages(1) + 1 : shape.shape.max_page_ids;
          auto sequence = RigSequence::open(rig, shape, lease, 11);
          ASSERT_NE(sequence, nullptr);
          ASSERT_EQ(sequence->prompt(prompt, random), "");
          ASSERT_TRUE(audit(rig, *sequence).ok()) << audit(rig, *sequence).to_string();
          run_to_end(rig, *sequence, random);
          EXPECT_EQ(sequence->kv().residence(), tiered ? Residence::kTiered : Residence::kResident);
          EXPECT_EQ(sequence->misses() > 0, tiered);
          sequence.reset();
          EXPECT_TRUE(rig.store().audit({}).ok());
          EXPECT_EQ(rig.store().fast().counts().in_use(), 0u);
          EXPECT_EQ(rig.store().host()->counts().free, rig.store().host()->counts().total);
        }
      }
    }
  }
}

// ---- Transitions.

uint64_t smallest_lease(const RigShape& shape) {
  return shape.shape.mandatory_pages(shape.shape.dense_layers);
}

std::unique_ptr<RigSequence> opened(
    StoreRig& rig, const RigShape& shape, uint64_t lease, uint64_t prompt, Random& random) {
  auto sequence = RigSequence::open(rig, shape, lease, 5);
  EXPECT_NE(sequence, nullptr);
  EXPECT_EQ(sequence->prompt(prompt, random), "");
  return sequence;
}

Status write_all_through(StoreRig& rig, TieredSequence& kv) {
  while (!kv.is_written_through()) {
    SPIN_ASSIGN_OR_RETURN(const Transfer transfer,
                          kv.write_through(7, WriterEvent::after(rig.stream())));
    SPIN_RETURN_IF_ERROR(transfer.wait_result());
  }
  return ok_status();
}

TEST(TieredSequence, EveryTransitionInMidDecodeKeepsEveryRow) {
  for (const bool mapped : {false, true}) {
    for (const uint32_t dense_layers : {0u, 1u}) {
      StoreRig rig;
      Random random(3);
      RigShape shape =
          mapped ? cluster_shape(rig.geometry(), 160) : range_shape(rig.geometry(), 160);
      shape.shape.dense_layers = dense_layers;
      const uint64_t all = shape.shape.max_page_ids;
      const uint64_t least = smallest_lease(shape);
      auto sequence = opened(rig, shape, all, 45, random);
      TieredSequence& kv = sequence->kv();
      const auto steps = [&](int count) {
        for (int i = 0; i < count; ++i) ASSERT_EQ(sequence->step(random), "");
        const Status audited = audit(rig, *sequence);
        ASSERT_TRUE(audited.ok()) << audited.to_string();
      };
      const auto ok = [](const Status& status) { ASSERT_TRUE(status.ok()) << status.to_string(); };
      steps(5);
      EXPECT_EQ(kv.resize(least, rig.stream()).code(), StatusCode::kUnavailable);
      ok(write_all_through(rig, kv));
      ok(kv.resize(least + 4, rig.stream()));  // resident to tiered
      EXPECT_EQ(kv.residence(), Residence::kTiered);
      steps(9);
      ok(kv.resize(least, rig.stream()));  // smaller
      EXPECT_EQ(kv.lease_pages(), least);
      steps(9);
      ok(kv.resize(least + 7, rig.stream()));  // larger
      steps(9);
      ok(kv.resize(all, rig.stream()));  // tiered to resident
      EXPECT_EQ(kv.residence(), Residence::kResident);
      steps(9);
      ok(kv.demote(WriterEvent::after(rig.stream())));  // resident to demoted
      EXPECT_EQ(kv.residence(), Residence::kDemoted);
      EXPECT_EQ(kv.fast_pages(), 0u);
      EXPECT_EQ(rig.store().fast().counts().in_use(), 0u);
      ok(audit(rig, *sequence));
      ok(kv.resume(least + 2));
      EXPECT_EQ(kv.residence(), Residence::kTiered);
      steps(9);
      ok(kv.demote(WriterEvent::after(rig.stream())));  // tiered to demoted
      ok(audit(rig, *sequence));
      ok(kv.resume(all));
      EXPECT_EQ(kv.residence(), Residence::kResident);
      steps(9);
      ok(kv.demote(WriterEvent::after(rig.stream())));  // what was written is not written again
      ok(kv.resume(all));
      run_to_end(rig, *sequence, random);
      EXPECT_GT(sequence->hits(), 0u);
      EXPECT_GT(sequence->misses(), 0u);
      EXPECT_GT(sequence->evictions(), 0u);
      EXPECT_GT(rig.store().mover().counters().pages_to_fast, 0u);
      EXPECT_EQ(sequence->faults(), 0u);
    }
  }
}

TEST(TieredSequence, StepsGoOnWhilePagesAreWrittenThrough) {
  auto inner = std::move(*backend::cpu::create_cpu_device({.threads = 1}));
  for (uint64_t seed = 0; seed < 20; ++seed) {
    testing::ShuffledDevice device(*inner, seed);
    device.wait_alone_for("kv-tables");
    StoreRig rig({}, &device);
    Random random(seed);
    const RigShape shape = range_shape(rig.geometry(), 80);
    auto sequence = opened(rig, shape, shape.shape.max_page_ids, 50, random);
    TieredSequence& kv = sequence->kv();
    ASSERT_TRUE(kv.write_through(100, WriterEvent::after(rig.stream())).ok());
    EXPECT_TRUE(kv.has_transfer_in_flight());
    const TieredSequence* live[] = {&kv};
    EXPECT_GT(rig.store().classes(live).in_transfer, 0u);
    for (int i = 0; i < 4; ++i) ASSERT_EQ(sequence->step(random), "");
    rig.store().mover().wait_idle();
    const ClassCounts counts = rig.store().classes(live);
    EXPECT_EQ(counts.in_transfer, 0u);
    ASSERT_TRUE(write_all_through(rig, kv).ok());
    EXPECT_EQ(rig.store().classes(live).device_only, 0u);
    ASSERT_TRUE(kv.resize(smallest_lease(shape), rig.stream()).ok());
    run_to_end(rig, *sequence, random);
  }
}

// B041: pages under a copy are not given to anybody else, neither the slots nor the host's.
TEST(TieredSequence, ClosingWaitsForItsCopies) {
  auto inner = std::move(*backend::cpu::create_cpu_device({.threads = 1}));
  for (uint64_t seed = 0; seed < 50; ++seed) {
    testing::ShuffledDevice device(*inner, seed);
    device.wait_alone_for("kv-tables");
    StoreRig rig({}, &device);
    Random random(seed);
    const RigShape shape = range_shape(rig.geometry(), 60);
    auto first = opened(rig, shape, shape.shape.max_page_ids, 50, random);
    const auto begun = first->kv().write_through(1000, WriterEvent::after(rig.stream()));
    ASSERT_TRUE(begun.ok());
    EXPECT_FALSE(begun->is_complete());
    first.reset();
    EXPECT_TRUE(begun->is_complete()) << "nothing was released before";
    auto second = opened(rig, shape, smallest_lease(shape), 50, random);
    run_to_end(rig, *second, random);
  }
}

// ---- Exhaustion, failures.

TEST(TieredSequence, OpeningIsAllOrNothingInBothTiers) {
  RigOptions options;
  options.fast_pages = 200;
  options.host_extents = 40;
  StoreRig rig(options);
  const RigShape shape = range_shape(rig.geometry(), 100);  // 25 pages, 7 extents per head
  const auto code = [&](uint64_t max_tokens, uint64_t lease) {
    const RigShape other = range_shape(rig.geometry(), max_tokens);
    const auto opened = TieredSequence::open(rig.store(), other.shape, lease);
    return opened.ok() ? StatusCode::kOk : opened.status().code();
  };
  const uint64_t least = smallest_lease(shape);
  auto one = RigSequence::open(rig, shape, least, 1);
  ASSERT_NE(one, nullptr);
  const PageCounts fast = rig.store().fast().counts();
  const HostCounts host = rig.store().host()->counts();
  const uint64_t tables = rig.store().table_memory().bytes_in_use();
  EXPECT_EQ(host.reserved, 28u);
  EXPECT_EQ(code(100, least), StatusCode::kResourceExhausted) << "28 of 40 extents are reserved";
  EXPECT_EQ(code(5000, 5000), StatusCode::kResourceExhausted) << "fast memory";
  const auto refused = TieredSequence::open(rig.store(), shape.shape, least);
  EXPECT_NE(refused.status().message().find("needs 28 extents"), std::string::npos)
      << refused.status().to_string();
  EXPECT_NE(refused.status().message().find("12 of 40 are free"), std::string::npos);
  EXPECT_EQ(rig.store().fast().counts(), fast);
  EXPECT_EQ(rig.store().host()->counts().reserved, host.reserved);
  EXPECT_EQ(rig.store().table_memory().bytes_in_use(), tables) << "nothing is kept";
  // Lengths that a request may name are refused before anything of that size is allocated.
  const auto peak_kib = [] {
    rusage usage = {};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
  };
  const long before = peak_kib();
  SequenceShape absurd = shape.shape;
  absurd.max_tokens = uint64_t{1} << 50;
  absurd.max_page_ids = uint64_t{1} << 48;
  EXPECT_EQ(TieredSequence::open(rig.store(), absurd, absurd.max_page_ids).status().code(),
            StatusCode::kInvalidArgument);
  absurd.max_page_ids = uint64_t{1} << 31;
  absurd.max_tokens = uint64_t{1} << 32;
  EXPECT_EQ(TieredSequence::open(rig.store(), absurd, absurd.max_page_ids).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_LT(peak_kib() - before, 64 << 10);
}

// B055: with all slots in use the newcomer waits; demoting somebody makes room, and he comes back.
TEST(TieredSequence, AFullFastTierIsAnOrdinaryAnswer) {
  RigOptions options;
  options.fast_pages = 4 * 25;
  StoreRig rig(options);
  Random random(1);
  const RigShape shape = range_shape(rig.geometry(), 100);
  auto first = opened(rig, shape, shape.shape.max_page_ids, 60, random);
  EXPECT_EQ(rig.store().fast().counts().free, 0u);
  EXPECT_EQ(RigSequence::open(rig, shape, smallest_lease(shape), 2), nullptr);
  ASSERT_TRUE(first->kv().demote(WriterEvent::after(rig.stream())).ok());
  auto second = opened(rig, shape, smallest_lease(shape), 60, random);
  const Status refused = first->kv().resume(shape.shape.max_page_ids);
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(first->kv().residence(), Residence::kDemoted);
  ASSERT_TRUE(first->kv().resume(smallest_lease(shape)).ok());
  EXPECT_EQ(second->kv().resize(shape.shape.max_page_ids, rig.stream()).code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(second->kv().resize(smallest_lease(shape) + 20, rig.stream()).code(),
            StatusCode::kResourceExhausted);
  while (!first->is_full()) {
    ASSERT_EQ(first->step(random), "");
    ASSERT_EQ(second->step(random), "");
    const TieredSequence* live[] = {&first->kv(), &second->kv()};
    ASSERT_TRUE(rig.store().audit(live).ok()) << rig.store().audit(live).to_string();
  }
}

TEST(TieredSequence, AResidentSequenceReservesHostExtentsWhenThereAreSome) {
  RigOptions options;
  options.host_extents = 40;
  StoreRig rig(options);
  Random random(1);
  const RigShape shape = range_shape(rig.geometry(), 100);
  auto first = opened(rig, shape, shape.shape.max_page_ids, 60, random);
  auto second = opened(rig, shape, shape.shape.max_page_ids, 60, random);
  EXPECT_EQ(first->kv().host_extents(), 28u);
  EXPECT_EQ(second->kv().host_extents(), 0u);
  EXPECT_EQ(second->kv().demote(WriterEvent::after(rig.stream())).code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(second->kv().write_through(9, WriterEvent::after(rig.stream())).status().code(),
            StatusCode::kResourceExhausted);
  ASSERT_EQ(second->step(random), "");
  first.reset();
  ASSERT_TRUE(second->kv().demote(WriterEvent::after(rig.stream())).ok());
  ASSERT_TRUE(second->kv().resume(smallest_lease(shape)).ok());
  run_to_end(rig, *second, random);
}

TEST(TieredSequence, WithoutAHostTierEverythingIsResident) {
  RigOptions options;
  options.host_extents = 0;
  StoreRig rig(options);
  Random random(1);
  const RigShape shape = range_shape(rig.geometry(), 60);
  EXPECT_EQ(rig.store().host(), nullptr);
  EXPECT_FALSE(rig.store().wants_write_through(true));
  EXPECT_EQ(TieredSequence::open(rig.store(), shape.shape, smallest_lease(shape)).status().code(),
            StatusCode::kInvalidArgument);
  auto sequence = opened(rig, shape, shape.shape.max_page_ids, 30, random);
  EXPECT_EQ(sequence->kv().resize(smallest_lease(shape), rig.stream()).code(),
            StatusCode::kUnavailable);
  run_to_end(rig, *sequence, random);
}

// B050: a copy that fails on the way out costs nothing but itself; nothing was given up before.
TEST(TieredSequence, AFailedDemotionLeavesTheSequenceWhereItWas) {
  auto inner = std::move(*backend::cpu::create_cpu_device({.threads = 1}));
  testing::ShuffledDevice device(*inner, 1);
  StoreRig rig({}, &device);
  Random random(1);
  const RigShape shape = range_shape(rig.geometry(), 60);
  auto other = opened(rig, shape, smallest_lease(shape), 30, random);
  auto sequence = opened(rig, shape, shape.shape.max_page_ids, 30, random);
  device.fail_copy(10);
  EXPECT_EQ(sequence->kv().demote(WriterEvent::after(rig.stream())).code(), StatusCode::kIoError);
  EXPECT_EQ(sequence->kv().residence(), Residence::kResident);
  EXPECT_FALSE(sequence->kv().is_written_through());
  ASSERT_EQ(sequence->step(random), "");
  ASSERT_EQ(other->step(random), "");
  ASSERT_TRUE(sequence->kv().demote(WriterEvent::after(rig.stream())).ok());
  device.fail_copy(3);
  EXPECT_EQ(sequence->kv().resume(smallest_lease(shape)).code(), StatusCode::kIoError);
  EXPECT_EQ(sequence->kv().residence(), Residence::kDemoted);
  EXPECT_EQ(sequence->kv().fast_pages(), 0u);
  ASSERT_TRUE(sequence->kv().resume(smallest_lease(shape)).ok());
  while (!sequence->is_full()) ASSERT_EQ(sequence->step(random), "");
  while (!other->is_full()) ASSERT_EQ(other->step(random), "");
}

// B042, B152: what comes back from the host is checked, and is never another page.
TEST(TieredSequence, AHostPageThatIsNotWhatItWasEndsItsSequenceAlone) {
  StoreRig rig;
  Random random(1);
  const RigShape shape = range_shape(rig.geometry(), 60);
  auto victim = opened(rig, shape, smallest_lease(shape), 40, random);
  auto other = opened(rig, shape, smallest_lease(shape), 40, random);
  const backend::TieredPoolRef ref = rig.store().ref();
  ASSERT_TRUE(victim->kv().demote(WriterEvent::after(rig.stream())).ok());
  // A sink of head 0 of layer 0.
  ASSERT_TRUE(victim->kv().resume(smallest_lease(shape)).ok());
  victim->begin_step();
  const uint64_t extent = victim->kv().retrieve_item(0).heads[0].extents[0];
  victim->kv().drop_step();
  ASSERT_NE(extent, 0u);
  ASSERT_TRUE(victim->kv().demote(WriterEvent::after(rig.stream())).ok());
  ref.host.tag(extent, 0)->owner ^= 1;
  EXPECT_EQ(victim->kv().resume(smallest_lease(shape)).code(), StatusCode::kCorrupt);
  EXPECT_EQ(victim->kv().residence(), Residence::kDemoted);
  victim.reset();
  run_to_end(rig, *other, random);
}

TEST(TieredSequence, ADroppedStepIsDoneAgain) {
  StoreRig rig;
  Random random(1);
  const RigShape shape = range_shape(rig.geometry(), 40);
  auto sequence = opened(rig, shape, smallest_lease(shape), 20, random);
  const uint8_t epoch = sequence->kv().epoch();
  sequence->begin_step();
  sequence->kv().drop_step();
  EXPECT_EQ(sequence->tokens(), 20u);
  EXPECT_EQ(sequence->kv().epoch(), epoch + 1);
  run_to_end(rig, *sequence, random);
}

TEST(TieredSequenceDeathTest, AStepWhosePagesLeftTheTailCannotBeTakenBack) {
  StoreRig rig;
  Random random(1);
  const RigShape shape = cluster_shape(rig.geometry(), 40);
  auto sequence = opened(rig, shape, shape.shape.max_page_ids, 3, random);
  while (sequence->kv().tail(0).tokens < 11) ASSERT_EQ(sequence->step(random), "");
  sequence->begin_step();
  for (uint32_t layer = 0; layer < 2; ++layer) sequence->enqueue_layer(layer, random);
  ASSERT_TRUE(rig.stream().wait_idle().ok());
  sequence->kv().drop_step();
  EXPECT_DEATH(sequence->begin_step(), "spent");
}

// ---- Accounts.

TEST(TieredSequence, TablesTakeTheBytesThatThePlanSays) {
  for (const bool mapped : {false, true}) {
    for (const uint32_t dense_layers : {0u, 1u, 2u}) {
      RigOptions options;
      options.fast_pages = 4096;
      StoreRig rig(options);
      RigShape shape =
          mapped ? cluster_shape(rig.geometry(), 333) : range_shape(rig.geometry(), 333);
      shape.shape.dense_layers = dense_layers;
      for (const uint64_t lease : {smallest_lease(shape), shape.shape.max_page_ids}) {
        auto sequence = RigSequence::open(rig, shape, lease, 1);
        ASSERT_NE(sequence, nullptr);
        const uint64_t bytes = table_bytes(rig.geometry(), shape.shape, lease, 4, true).total();
        EXPECT_EQ(sequence->kv().table_bytes(), bytes);
        EXPECT_EQ(rig.store().table_memory().bytes_in_use(), bytes);
      }
    }
  }
}

// Two layers of two heads: with few heads a window is long.
TEST(TieredSequence, MeasuresWhatLargerLeasesWouldSave) {
  StoreRig rig;
  Random random(1);
  RigShape shape = range_shape(rig.geometry(), 900);
  const uint64_t lease = smallest_lease(shape) * 3 / 2;
  auto sequence = opened(rig, shape, lease, 300, random);
  const auto run = [&](uint32_t steps) {
    for (uint32_t i = 0; i < steps; ++i) ASSERT_EQ(sequence->step(random), "");
  };
  run(GainMeter::kWarmSteps);
  EXPECT_FALSE(sequence->kv().gain_curve().measured);
  const uint64_t before = sequence->misses();
  uint32_t steps = 0;
  for (; !sequence->kv().gain_curve().measured && steps < 500; ++steps) run(1);
  const GainCurve curve = sequence->kv().gain_curve();
  ASSERT_TRUE(curve.measured);
  const uint64_t heads = uint64_t{rig.geometry().layers} * rig.geometry().kv_heads;
  EXPECT_EQ(steps, GainMeter::kWindowTurns * layout::kReuseSampling / heads);
  // At the lease that it has: what was really fetched. One step in 16 was counted, 64 numbers from
  // 0 to 3 whose mean has a standard error of at most 0.19.
  const double fetched =
      static_cast<double>(sequence->misses() - before) / static_cast<double>(steps * heads);
  EXPECT_GT(fetched, 0.5);
  EXPECT_NEAR(curve.misses[1], fetched, 2 * 0.19);
  EXPECT_GE(curve.misses[0], curve.misses[1]);
  EXPECT_LT(curve.misses[16], curve.misses[1]);  // some of what was fetched had been given up

  // An empty cache begins anew; the curve stays until there is another.
  EXPECT_EQ(sequence->dropped_step(random), "");
  ASSERT_TRUE(sequence->kv().demote(WriterEvent::after(rig.stream())).ok());
  ASSERT_TRUE(sequence->kv().resume(lease).ok());
  EXPECT_TRUE(sequence->kv().gain_curve().measured);
  run(2);
}

TEST(TieredSequence, WhatAMapDoesNotUseGoesBack) {
  StoreRig rig;
  Random random(1);
  RigShape shape = cluster_shape(rig.geometry(), 200);
  for (const bool tiered : {false, true}) {
    const uint64_t lease = tiered ? smallest_lease(shape) : shape.shape.max_page_ids;
    auto sequence = RigSequence::open(rig, shape, lease, 1);
    ASSERT_NE(sequence, nullptr);
    const uint64_t extents = sequence->kv().host_extents();
    const uint64_t slots = sequence->kv().fast_pages();
    ASSERT_EQ(sequence->prompt(150, random), "");
    EXPECT_LT(sequence->kv().host_extents(), extents);
    EXPECT_EQ(sequence->kv().fast_pages() < slots, !tiered);
    // 36 pages of the prompt are not of the tail, so as many ids of a tail that begins at once are
    // nobody's.
    EXPECT_TRUE(tiered || sequence->kv().fast_pages() <= slots - 4 * 36);
    const uint64_t after_prompt = sequence->kv().host_extents();
    run_to_end(rig, *sequence, random);
    EXPECT_LT(sequence->kv().host_extents(), after_prompt) << "tail pages that were dealt out";
    EXPECT_EQ(rig.store().host()->counts().free + sequence->kv().host_extents(),
              rig.store().host()->counts().total);
  }
}

TEST(PageStore, EverySlotIsInOneClass) {
  StoreRig rig;
  Random random(1);
  const RigShape shape = range_shape(rig.geometry(), 100);
  auto sequence = opened(rig, shape, shape.shape.max_page_ids, 62, random);
  const TieredSequence* live[] = {&sequence->kv()};
  ClassCounts counts = rig.store().classes(live);
  // Per head: 15 full pages, one stays in the tail; one sink, one or two in the zone; one is open.
  EXPECT_EQ(counts.filling, 4u);
  EXPECT_EQ(counts.pinned + counts.device_only, 4u * 15);
  EXPECT_GE(counts.pinned, 4u * 3);
  EXPECT_EQ(counts.cached, 4u * 9) << "leased for pages to come";
  EXPECT_EQ(counts.free, counts.total - 4 * 25);
  ASSERT_TRUE(write_all_through(rig, sequence->kv()).ok());
  counts = rig.store().classes(live);
  EXPECT_EQ(counts.device_only, 0u);
  // A dense sequence in the same pool.
  auto dense = std::move(*SequenceKv::reserve(rig.store().fast(), 40));
  const SequenceKv* others[] = {&dense};
  EXPECT_TRUE(rig.store().audit(live, others).ok()) << rig.store().audit(live, others).to_string();
  EXPECT_FALSE(rig.store().audit(live).ok()) << "its slots belong to nobody then";
  EXPECT_EQ(rig.store().classes(live, others).filling, 4u + 40);
  ASSERT_TRUE(sequence->kv().demote(WriterEvent::after(rig.stream())).ok());
  counts = rig.store().classes(live, others);
  EXPECT_EQ(counts.pinned + counts.cached + counts.device_only, 0u);
  EXPECT_TRUE(rig.store().audit(live, others).ok());
}

TEST(PageStore, WritesThroughFromSeventyPercentOrWhenSomebodyWaits) {
  RigOptions options;
  options.fast_pages = 100;
  StoreRig rig(options);
  std::vector<PageHandle> pages(69);
  ASSERT_TRUE(rig.store().fast().allocate(pages));
  EXPECT_FALSE(rig.store().wants_write_through(false));
  EXPECT_TRUE(rig.store().wants_write_through(true));
  PageHandle one[1];
  ASSERT_TRUE(rig.store().fast().allocate(one));
  EXPECT_TRUE(rig.store().wants_write_through(false));
}

TEST(PageStore, AuditFindsWhatIsNotRight) {
  StoreRig rig;
  Random random(1);
  const RigShape shape = range_shape(rig.geometry(), 60);
  auto sequence = opened(rig, shape, smallest_lease(shape), 40, random);
  ASSERT_TRUE(audit(rig, *sequence).ok());
  EXPECT_EQ(rig.store().audit({}).code(), StatusCode::kInternal) << "a sequence nobody knows";
  sequence->begin_step();
  layout::HeadPages& head = sequence->kv().retrieve_item(1).heads[1];
  sequence->kv().drop_step();
  std::swap(head.pages[0], head.pages[head.lease_pages - 1]);
  EXPECT_FALSE(audit(rig, *sequence).ok()) << "a page that is not found where it lies";
  std::swap(head.pages[0], head.pages[head.lease_pages - 1]);
  const uint32_t slot = std::exchange(head.slots[2], head.slots[3]);
  EXPECT_FALSE(audit(rig, *sequence).ok()) << "a slot in two entries";
  head.slots[2] = slot;
  layout::HostPageTag& tag = *rig.store().ref().host.tag(head.extents[0], 1);
  tag.page = layout::kNoPage;
  EXPECT_FALSE(audit(rig, *sequence).ok()) << "a page that may be evicted and is not on the host";
  tag.page = 1;
  EXPECT_TRUE(audit(rig, *sequence).ok());
}

}  // namespace
}  // namespace spin::kv
