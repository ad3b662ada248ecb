// SPDX-License-Identifier: Apache-2.0
// Steps with several sequences: algorithms beside each other, a sequence whose host pages are gone,
// dense layers, contexts below an algorithm's minimum, and the trace of what was selected.
#include "sparse/pipeline.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "kv/tiered_sequence.h"
#include "sparse/selection_trace.h"
#include "tests/sparse/parity_rig.h"
#include "tests/sparse/parity_rows.h"
#include "tests/support/test_data.h"

namespace spin::testing {
namespace {

using sparse::SparseSequence;

constexpr uint64_t kSteps = 12;

class PipelineStep : public ::testing::Test {
 protected:
  PipelineStep() : device_(std::move(*backend::cpu::create_cpu_device({.threads = 2}))) {
    (void)parity_rows();
  }

  static std::unique_ptr<SparseSequence> begin(ParityRig& rig,
                                               const std::string& spec,
                                               const Conversation& conversation,
                                               uint64_t prompt,
                                               const Lease& lease) {
    const auto algorithm = rig.algorithm(spec);
    auto sequence = rig.open(algorithm, conversation.tokens(),
                             lease_pages(*algorithm, rig.model(), conversation.tokens(), lease));
    EXPECT_TRUE(sequence.ok()) << sequence.status().to_string();
    rig.prompt(**sequence, conversation, prompt);
    return std::move(sequence).value();
  }

  // Outputs of one sequence alone.
  Outputs alone(const ParityShape& shape,
                const std::string& spec,
                const Conversation& conversation,
                uint64_t prompt,
                const Lease& lease) {
    ParityRig rig(*device_, shape, rig_options(shape, conversation.tokens()));
    const auto sequence = begin(rig, spec, conversation, prompt, lease);
    Outputs outputs;
    while (sequence->kv().committed_tokens() < conversation.tokens()) {
      ParityRig::Row row{sequence.get(), &conversation, &outputs.emplace_back(), ok_status()};
      rig.step({&row, 1});
      EXPECT_TRUE(row.status.ok()) << row.status.to_string();
    }
    return outputs;
  }

  std::unique_ptr<backend::Device> device_;
};

// Every host copy of the head's pages names another owner, or no page at all.
void spoil_host_pages(kv::PageStore& store, SparseSequence& sequence, bool missing) {
  sequence.kv().begin_step(1);  // a step that will not be
  const backend::RetrieveItem item = sequence.kv().retrieve_item(0);
  sequence.kv().drop_step();
  const layout::HostExtentLayout& layout = store.ref().host;
  for (uint32_t head = 0; head < store.geometry().kv_heads; ++head) {
    const layout::HeadPages& pages = item.heads[head];
    for (uint32_t e = 0; e < pages.extent_count; ++e) {
      if (pages.extents[e] == 0) continue;
      for (uint32_t p = 0; p < layout.pages; ++p) {
        layout::HostPageTag* tag = layout.tag(pages.extents[e], p);
        if (missing) {
          tag->page = layout::kNoPage;
        } else {
          tag->owner += 1;
        }
      }
    }
  }
}

TEST_F(PipelineStep, AlgorithmsBesideEachOtherGiveWhatEachGivesAlone) {
  const ParityShape shape{.layers = 2, .kv_heads = 2, .group = 2};
  const auto rows = parity_rows();
  for (size_t i = 0; i < rows.size(); ++i) {
    // Each with the toy, so that the count grows with the algorithms and not with their pairs.
    const std::string specs[] = {rows[i].small_spec(), "strided:stride=3,recent=16"};
    SCOPED_TRACE(specs[0]);
    const uint64_t prompts[] = {std::max<uint64_t>(rows[i].least_tokens + 61, 250), 203};
    const Conversation conversations[] = {Conversation(shape, prompts[0] + kSteps, 5),
                                          Conversation(shape, prompts[1] + kSteps, 6)};
    Outputs expected[2];
    for (int s = 0; s < 2; ++s) {
      expected[s] = alone(shape, specs[s], conversations[s], prompts[s], {false, 2});
    }
    ParityRig rig(*device_, shape, rig_options(shape, conversations[0].tokens()));
    std::unique_ptr<SparseSequence> sequences[2];
    for (int s = 0; s < 2; ++s) {
      sequences[s] = begin(rig, specs[s], conversations[s], prompts[s], {false, 2});
    }
    for (uint64_t step = 0; step < kSteps; ++step) {
      std::vector<float> outs[2];
      // The order of rows changes from step to step.
      const size_t first = step % 2;
      ParityRig::Row step_rows[2];
      for (size_t r = 0; r < 2; ++r) {
        const size_t s = (first + r) % 2;
        step_rows[r] = {sequences[s].get(), &conversations[s], &outs[s], ok_status()};
      }
      rig.step(step_rows);
      for (size_t s = 0; s < 2; ++s) ASSERT_EQ(outs[s], expected[s][step]) << step;
    }
  }
}

TEST_F(PipelineStep, ABadHostPageEndsItsSequenceAndNoOther) {
  const ParityShape shape{.kv_heads = 2, .group = 4, .dtype = layout::DType::kBF16};
  for (const bool missing : {false, true}) {
    for (const ParityRow& row : parity_rows()) {
      if (!row.retrieves) continue;
      SCOPED_TRACE(row.small_spec());
      const uint64_t prompt = std::max<uint64_t>(row.least_tokens + 61, 301);
      const Conversation bad(shape, prompt + kSteps, 7);
      const Conversation good(shape, prompt + kSteps, 8);
      const Outputs expected = alone(shape, row.small_spec(), good, prompt, {false, 0});
      ParityRig rig(*device_, shape, rig_options(shape, good.tokens()));
      auto spoilt = begin(rig, row.small_spec(), bad, prompt, {false, 0});
      const auto sequence = begin(rig, row.small_spec(), good, prompt, {false, 0});
      bool ended = false;
      for (uint64_t step = 0; step < kSteps; ++step) {
        if (step == 3) spoil_host_pages(rig.store(), *spoilt, missing);
        std::vector<float> out;
        std::vector<ParityRig::Row> rows;
        if (!ended) rows.push_back({spoilt.get(), &bad, nullptr, ok_status()});
        rows.push_back({sequence.get(), &good, &out, ok_status()});
        rig.step(rows);
        ASSERT_TRUE(rows.back().status.ok()) << rows.back().status.to_string();
        ASSERT_EQ(out, expected[step]) << step;
        if (ended) continue;
        ASSERT_TRUE(step >= 3 || rows[0].status.ok()) << rows[0].status.to_string();
        if (rows[0].status.ok()) continue;
        EXPECT_EQ(rows[0].status.code(), StatusCode::kCorrupt);
        EXPECT_GT(spoilt->counters().retrieve.faults, 0u);
        ended = true;
        spoilt.reset();  // its pages go back while the other goes on
      }
      EXPECT_TRUE(ended);
      EXPECT_EQ(sequence->counters().retrieve.faults, 0u);
      const kv::TieredSequence* live[] = {&sequence->kv()};
      const Status audit = rig.store().audit(live);
      EXPECT_TRUE(audit.ok()) << audit.to_string();
    }
  }
}

TEST_F(PipelineStep, TheTraceHoldsWhatEveryStepSelected) {
  const ParityShape shape{.layers = 2, .kv_heads = 2, .group = 1};
  TempDir folder;
  const uint64_t prompt = 200;
  const Conversation conversation(shape, prompt + kSteps, 9);
  RigOptions options = rig_options(shape, conversation.tokens());
  options.trace_path = (folder.path() / "trace").string();
  ParityRig rig(*device_, shape, options);
  const auto sequence = begin(rig, "strided:stride=4,recent=32", conversation, prompt, {false, 1});
  std::vector<std::vector<uint32_t>> lists;
  while (sequence->kv().committed_tokens() < conversation.tokens()) {
    ParityRig::Row row{sequence.get(), &conversation, nullptr, ok_status()};
    rig.step({&row, 1}, [&](uint32_t) {
      const layout::PageList& list = sequence->list();
      for (uint32_t head = 0; head < shape.kv_heads; ++head) {
        std::vector<uint32_t>& selected = lists.emplace_back();
        for (uint32_t i = 0; i < list.counts[head]; ++i) {
          const uint32_t page = list.pages[uint64_t{head} * list.stride + i];
          // Neither the sink page nor the tail.
          if (page >= 1 && page < sequence->kv().tail(0).first_page) selected.push_back(page);
        }
      }
    });
  }
  ASSERT_TRUE(rig.trace()->close().ok());
  const auto trace = sparse::parse_selection_trace(read_file(options.trace_path));
  ASSERT_TRUE(trace.ok()) << trace.status().to_string();
  ASSERT_EQ(trace->records.size(), lists.size());
  for (size_t i = 0; i < lists.size(); ++i) {
    EXPECT_EQ(trace->records[i].pages, lists[i]);
    EXPECT_EQ(trace->records[i].step, i / 4);
    EXPECT_EQ(trace->records[i].layer, i / 2 % 2);
    EXPECT_EQ(trace->records[i].kv_head, i % 2);
    EXPECT_EQ(trace->records[i].sequence, 1u);
  }
}

TEST_F(PipelineStep, DenseLayersAttendToEverythingAndAreCounted) {
  const ParityShape shape{.layers = 3, .kv_heads = 2, .group = 2};
  const uint64_t prompt = 300;
  const Conversation conversation(shape, prompt + kSteps, 11);
  const Outputs dense = dense_outputs(*device_, shape, conversation, prompt);
  const uint64_t columns = uint64_t{shape.q_heads()} * shape.head_dim;
  for (const bool resident : {true, false}) {
    ParityRig rig(*device_, shape, rig_options(shape, conversation.tokens()));
    const auto sequence =
        begin(rig, "quest:budget=32,local=32,dense_layers=1", conversation, prompt, {resident, 0});
    for (uint64_t step = 0; step < kSteps; ++step) {
      std::vector<float> out;
      ParityRig::Row row{sequence.get(), &conversation, &out, ok_status()};
      rig.step({&row, 1});
      const std::vector<float> first(out.begin(), out.begin() + static_cast<ptrdiff_t>(columns));
      const std::vector<float> wanted(dense[step].begin(),
                                      dense[step].begin() + static_cast<ptrdiff_t>(columns));
      EXPECT_EQ(first, wanted) << step;
      EXPECT_NE(out, dense[step]) << step;
    }
    EXPECT_EQ(sequence->counters().dense, kSteps * shape.kv_heads);
    EXPECT_EQ(sequence->counters().selections, 2 * kSteps * shape.kv_heads);
    EXPECT_EQ(sequence->counters().retrieve.misses > 0, !resident);
  }
}

TEST_F(PipelineStep, AContextBelowTheMinimumIsDenseAndAnIndexIsThereWhenItGrows) {
  const ParityShape shape{.kv_heads = 2, .group = 2};
  // Sinks, window and budget cover 8 + 64 + 192 tokens.
  const std::string spec = "oracle:budget=192,sinks=4,local=64";
  const uint64_t minimum = 264;
  const uint64_t prompt = minimum - 6;
  const Conversation conversation(shape, minimum + 40, 12);
  const Outputs dense = dense_outputs(*device_, shape, conversation, prompt);
  for (const bool resident : {true, false}) {
    ParityRig rig(*device_, shape, rig_options(shape, conversation.tokens()));
    const auto sequence = begin(rig, spec, conversation, prompt, {resident, 0});
    ASSERT_EQ(sequence->algorithm().descriptor().minimum_tokens, minimum);
    bool differs = false;
    for (uint64_t step = 0; step < dense.size(); ++step) {
      std::vector<float> out;
      ParityRig::Row row{sequence.get(), &conversation, &out, ok_status()};
      rig.step({&row, 1});
      const bool is_dense = prompt + step + 1 < minimum;
      EXPECT_TRUE(!is_dense || out == dense[step]) << step;
      differs |= out != dense[step];
    }
    EXPECT_EQ(sequence->counters().dense, 5u * shape.kv_heads);
    EXPECT_EQ(sequence->counters().selections, (dense.size() - 5) * shape.kv_heads);
    EXPECT_TRUE(differs);  // the budget does not cover the context any more
  }
}

TEST_F(PipelineStep, AnEstimatedPartIsMergedWithTheExactOne) {
  // Equal keys are one cluster, with more pages than may be retrieved, so it is estimated; and an
  // estimate of equal keys is exact. Without the merge the step is a mean over the zones.
  const ParityShape shape{.kv_heads = 2, .group = 2};
  const uint64_t prompt = 1000;
  const Conversation conversation(shape, prompt + kSteps, 13, Conversation::Kind::kEqualKeys);
  const Outputs dense = dense_outputs(*device_, shape, conversation, prompt);
  const Outputs merged =
      alone(shape, "retroinfer:budget=32,update=16", conversation, prompt, {false, 0});
  // Equal keys give equal weights, so dense attention is a mean of n values below 1. Sums of n
  // floats are off by n u; scores through centroids (sums of n keys below 2, then products with
  // queries below 5) by n u times their magnitude, and weights by twice that.
  const double n = static_cast<double>(conversation.tokens());
  const double score = n / (1 << 24) * shape.head_dim * 2 * 5 / 8;  // scale is 1/8
  const double tolerance = std::expm1(2 * score) + 4 * n / (1 << 24);
  for (size_t step = 0; step < dense.size(); ++step) {
    for (size_t i = 0; i < dense[step].size(); ++i) {
      ASSERT_NEAR(merged[step][i], dense[step][i], tolerance) << step << " " << i;
    }
  }
  // The bound tells the two apart.
  const Outputs streamed =
      alone(shape, "streaming:budget=96,sinks=8", conversation, prompt, {false, 0});
  double difference = 0;
  for (size_t i = 0; i < dense[0].size(); ++i) {
    difference = std::max<double>(difference, std::abs(streamed[0][i] - dense[0][i]));
  }
  EXPECT_GT(difference, 4 * tolerance);
}

TEST_F(PipelineStep, ADroppedStepLeavesNoTrace) {
  const ParityShape shape;
  const uint64_t prompt = 150;
  const Conversation conversation(shape, prompt + 2, 10);
  const Outputs expected = alone(shape, "strided:stride=2", conversation, prompt, {});
  ParityRig rig(*device_, shape, rig_options(shape, conversation.tokens()));
  const auto sequence = begin(rig, "strided:stride=2", conversation, prompt, {});
  sequence->begin_step();
  sequence->drop_step();
  EXPECT_EQ(sequence->counters().steps, 0u);
  for (const std::vector<float>& wanted : expected) {
    std::vector<float> out;
    ParityRig::Row row{sequence.get(), &conversation, &out, ok_status()};
    rig.step({&row, 1});
    EXPECT_EQ(out, wanted);
  }
  EXPECT_EQ(sequence->counters().steps, 2u);
}

}  // namespace
}  // namespace spin::testing
