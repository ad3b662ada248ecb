// SPDX-License-Identifier: Apache-2.0
// TieredSequence: forms and the transitions between them, page ids, extents, exhaustion.
#include "kv/tiered_sequence.h"

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kv/page_store.h"
#include "kv/table_bytes.h"
#include "tests/kv/store_rig.h"

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

}  // namespace
}  // namespace spin::kv
