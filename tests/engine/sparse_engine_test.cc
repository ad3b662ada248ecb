// SPDX-License-Identifier: Apache-2.0
// Sparse requests through the whole engine: create_engine with algorithms, two tiers, layer-major
// prefill. Residency, batches and chunks never change a bit of what comes out.
#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "sparse/registry.h"
#include "sparse/selection_trace.h"
#include "spin/engine.h"
#include "tests/engine/fake_support.h"
#include "tests/engine/recording_sink.h"
#include "tests/engine/sparse_support.h"
#include "tests/support/test_data.h"

namespace spin {
namespace {

using testing::expect_clean;
using testing::greedy;
using testing::kReducedCounts;
using testing::open_engine;
using testing::Outcome;
using testing::prompt_of;
using testing::RecordingSink;
using testing::run_request;
using testing::Scored;
using testing::scored;

class SparseEngine : public ::testing::Test {
 protected:
  EngineOptions options(std::string sparse) const {
    EngineOptions options;
    options.model = checkpoint_.dir().path().string();
    options.dtype = DTypeChoice::kFloat32;
    options.max_num_seqs = 8;
    options.kv_cache_memory_bytes = 32 << 20;
    options.sparse = {std::move(sparse)};
    return options;
  }
  // Hardly more fast memory than a step needs, the rest on the host.
  EngineOptions tight(std::string sparse) const {
    EngineOptions options = this->options(std::move(sparse));
    options.host_memory_bytes = 64 << 20;
    options.kv_buffer_ratio = 0;
    return options;
  }

  testing::LongTinyCheckpoint checkpoint_;
};

const std::vector<std::string>& algorithms() {
  static const std::vector<std::string> list = {
      "streaming:sinks=8,budget=64",
      "quest:budget=64,local=16,dense_layers=1",
      "shadowkv:budget=64",
      "retroinfer",
      "oracle:budget=64",
      "sketch:budget=64",
  };
  return list;
}

constexpr size_t kPrompt = kReducedCounts ? 1200 : 1500;
constexpr uint64_t kOutput = kReducedCounts ? 24 : 80;

TEST_F(SparseEngine, FastMemoryNeverChangesABit) {
  for (const std::string& spec : algorithms()) {
    SCOPED_TRACE(spec);
    const auto resident = open_engine(options(spec));
    ASSERT_NE(resident, nullptr);
    const Scored expected = scored(run_request(*resident, greedy(prompt_of(kPrompt, 1), kOutput)));
    ASSERT_EQ(expected.size(), kOutput);
    const SparseStats whole = resident->stats().sparse;
    EXPECT_EQ(whole.sequences, 1u);
    EXPECT_GT(whole.selections, 0u);
    EXPECT_GT(whole.attended_tokens, 0u);
    EXPECT_EQ(whole.page_misses + whole.page_evictions + whole.bytes_fetched, 0u);
    EXPECT_EQ(whole.fetch_stall_s, 0.0);
    expect_clean(*resident);

    const auto tiered = open_engine(tight(spec));
    ASSERT_NE(tiered, nullptr);
    EXPECT_EQ(scored(run_request(*tiered, greedy(prompt_of(kPrompt, 1), kOutput))), expected);
    const SparseStats some = tiered->stats().sparse;
    EXPECT_EQ(some.selections, whole.selections);
    EXPECT_EQ(some.attended_tokens, whole.attended_tokens);
    EXPECT_GT(some.bytes_offloaded, 0u);
    EXPECT_EQ(some.page_faults, 0u);
    if (spec.rfind("streaming", 0) != 0) {  // it reads nothing but what is pinned
      EXPECT_GT(some.page_misses, 0u);
      EXPECT_GT(some.page_hits, 0u);
      EXPECT_GT(some.page_evictions, 0u);
      EXPECT_GT(some.bytes_fetched, 0u);
      EXPECT_GT(some.fetch_stall_s, 0.0);
    }
    expect_clean(*tiered);
    const EngineStats after = tiered->stats();
    ASSERT_EQ(after.kv_tiers.size(), 2u);
    for (const TierStats& tier : after.kv_tiers) {
      EXPECT_EQ(tier.pages_in_use, 0u) << tier.name;
      EXPECT_GT(tier.bytes_total, 0u) << tier.name;
    }
    EXPECT_EQ(after.sparse.lease_pages + after.sparse.table_bytes + after.sparse.summary_bytes, 0u);
  }
}

TEST_F(SparseEngine, SelectionsAreRecordedToAFileAndChangeNothing) {
  const auto plain = open_engine(options("quest:budget=64,dense_layers=1"));
  ASSERT_NE(plain, nullptr);
  const Scored expected = scored(run_request(*plain, greedy(prompt_of(kPrompt, 1), kOutput)));
  EngineOptions recorded = options("quest:budget=64,dense_layers=1");
  recorded.selection_trace = (checkpoint_.dir().path() / "trace").string();
  auto engine = open_engine(recorded);
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(scored(run_request(*engine, greedy(prompt_of(kPrompt, 1), kOutput))), expected);
  const uint64_t selections = engine->stats().sparse.selections;
  engine.reset();
  const auto trace = sparse::parse_selection_trace(testing::read_file(recorded.selection_trace));
  ASSERT_TRUE(trace.ok()) << trace.status().to_string();
  EXPECT_EQ(trace->header.settings.rfind("quest:budget=64", 0), 0u) << trace->header.settings;
  EXPECT_EQ(trace->header.layers, 3u);
  EXPECT_EQ(trace->header.page_tokens, 8u);
  uint64_t sparse_records = 0;
  for (const sparse::SelectionRecord& record : trace->records) {
    if (record.layer == 0) continue;  // dense
    ++sparse_records;
    EXPECT_EQ(record.pages.size(), 64u / 8) << record.step;
  }
  EXPECT_EQ(sparse_records, selections);

  recorded.selection_trace = (checkpoint_.dir().path() / "no folder" / "trace").string();
  EXPECT_EQ(create_engine(recorded).status().code(), StatusCode::kIoError);
}

TEST_F(SparseEngine, ABudgetOfTheWholeContextIsDenseAttention) {
  for (const char* spec : {"quest:budget=100%", "oracle:budget=100%", "sketch:budget=100%"}) {
    SCOPED_TRACE(spec);
    EngineOptions both = options(spec);
    both.sparse.push_back("dense");
    const auto engine = open_engine(both);
    ASSERT_NE(engine, nullptr);
    GenerateRequest dense = greedy(prompt_of(kPrompt, 2), kOutput);
    dense.sparse = "dense";
    const Scored expected = scored(run_request(*engine, dense));
    EXPECT_EQ(engine->stats().sparse.sequences, 0u);
    EXPECT_EQ(scored(run_request(*engine, greedy(prompt_of(kPrompt, 2), kOutput))), expected);
    EXPECT_EQ(engine->stats().sparse.sequences, 1u);
    // And a small one is not, else the test shows nothing.
    GenerateRequest little = greedy(prompt_of(kPrompt, 2), kOutput);
    little.sparse = std::string(spec, std::string_view(spec).find(':')) + ":budget=16";
    EXPECT_NE(scored(run_request(*engine, little)), expected);
    expect_clean(*engine);
  }
}

TEST_F(SparseEngine, ABatchOfAllAlgorithmsIsLikeEachAlone) {
  EngineOptions all = tight(algorithms()[0]);
  all.sparse = algorithms();
  all.kv_cache_memory_bytes = 16 << 20;
  all.host_memory_bytes = 128 << 20;
  all.max_num_batched_tokens = 96;
  const auto engine = open_engine(all);
  ASSERT_NE(engine, nullptr);
  const auto request = [&](size_t i) {
    // None below the least length of its algorithm: that of retroinfer is 1,096.
    GenerateRequest one =
        greedy(prompt_of(kPrompt - 30 * i, 10 + static_cast<uint32_t>(i)), kOutput);
    const std::string& spec = algorithms()[i % algorithms().size()];
    one.sparse = i == 2 ? "dense" : spec.substr(0, spec.find(':'));
    return one;
  };
  constexpr size_t kRequests = 7;
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (size_t i = 0; i < kRequests; ++i) {
    sinks.push_back(std::make_shared<RecordingSink>());
    ASSERT_TRUE(engine->submit(request(i), sinks.back()).ok());
  }
  std::vector<Scored> together;
  for (auto& sink : sinks) together.push_back(scored(sink->wait()));
  EXPECT_EQ(engine->stats().sparse.sequences, kRequests - 1);
  for (size_t i = 0; i < kRequests; ++i) {
    EXPECT_EQ(together[i].size(), kOutput) << i;
    EXPECT_EQ(scored(run_request(*engine, request(i))), together[i]) << i;
  }
  expect_clean(*engine);
}

TEST_F(SparseEngine, ChunksOfThePromptDoNotChangeABit) {
  Scored expected;
  for (const uint32_t chunk : {512u, 16u, 61u}) {
    EngineOptions options = tight("sketch:budget=64");
    options.max_num_batched_tokens = chunk;
    const auto engine = open_engine(options);
    ASSERT_NE(engine, nullptr);
    // Beside another one, so that a step has rows of both kinds.
    auto other = std::make_shared<RecordingSink>();
    ASSERT_TRUE(engine->submit(greedy(prompt_of(300, 5), kOutput), other).ok());
    const Scored found = scored(run_request(*engine, greedy(prompt_of(kPrompt, 4), kOutput)));
    ASSERT_EQ(found.size(), kOutput);
    if (expected.empty()) expected = found;
    EXPECT_EQ(found, expected) << chunk;
    EXPECT_EQ(scored(other->wait()).size(), kOutput);
    expect_clean(*engine);
  }
}

TEST_F(SparseEngine, LeasesShrinkForNewcomersAndGrowAgain) {
  EngineOptions options = this->options("oracle:budget=64");
  options.host_memory_bytes = 64 << 20;
  // Two contexts of 1,500 + 80 tokens need 2 x 198 x 6 pages; there are 1.5 of them.
  options.kv_cache_memory_bytes = 300 * 6 * 4096;
  const auto engine = open_engine(options);
  ASSERT_NE(engine, nullptr);
  std::vector<Scored> alone;
  for (uint32_t i = 0; i < 4; ++i) {
    alone.push_back(scored(run_request(*engine, greedy(prompt_of(1500, 20 + i), 80))));
  }
  EXPECT_EQ(engine->stats().sparse.page_misses, 0u);  // each was resident
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (uint32_t i = 0; i < 4; ++i) {
    sinks.push_back(std::make_shared<RecordingSink>());
    ASSERT_TRUE(engine->submit(greedy(prompt_of(1500, 20 + i), 80), sinks.back()).ok());
  }
  for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(scored(sinks[i]->wait()), alone[i]) << i;
  EXPECT_GT(engine->stats().sparse.lease_resizes, 0u);
  EXPECT_GT(engine->stats().sparse.page_misses, 0u);
  expect_clean(*engine);
}

// By the assumed curve a lease of 5 x mandatory gains nothing from more. This request finds that it
// does, since every fetch is for a page that it had before.
TEST_F(SparseEngine, ALoneLeaseGrowsOnceItsGainIsMeasured) {
  const auto roomy = open_engine(this->options("oracle:budget=64"));
  ASSERT_NE(roomy, nullptr);
  EngineOptions options = this->options("oracle:budget=64");
  options.host_memory_bytes = 64 << 20;
  options.kv_cache_memory_bytes = 150 * 6 * 4096;  // of 235
  for (const uint64_t output : {40, 280}) {
    const auto engine = open_engine(options);
    ASSERT_NE(engine, nullptr);
    const GenerateRequest request = greedy(prompt_of(1600, 8), output);
    EXPECT_EQ(scored(run_request(*engine, request)), scored(run_request(*roomy, request)));
    EXPECT_GT(engine->stats().sparse.page_misses, 0u);
    EXPECT_EQ(engine->stats().sparse.lease_resizes > 0, output > 40);
    expect_clean(*engine);
  }
}

// Fast memory for one sequence's steps and a half: the others are suspended in turns.
TEST_F(SparseEngine, SuspendedRequestsResumeWithTheSameTokens) {
  EngineOptions options = tight("oracle:budget=64");
  const size_t prompt = 600;
  const uint64_t output = kReducedCounts ? 300 : 600;
  options.kv_cache_memory_bytes = 30 * 6 * 4096;
  const auto engine = open_engine(options);
  ASSERT_NE(engine, nullptr);
  std::vector<Scored> alone;
  for (uint32_t i = 0; i < 3; ++i) {
    alone.push_back(scored(run_request(*engine, greedy(prompt_of(prompt, 30 + i), output))));
    ASSERT_EQ(alone.back().size(), output);
  }
  EXPECT_EQ(engine->stats().preemptions, 0u);
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (uint32_t i = 0; i < 3; ++i) {
    sinks.push_back(std::make_shared<RecordingSink>());
    ASSERT_TRUE(engine->submit(greedy(prompt_of(prompt, 30 + i), output), sinks.back()).ok());
  }
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(scored(sinks[i]->wait()), alone[i]) << i;
  EXPECT_GT(engine->stats().preemptions, 0u);
  EXPECT_EQ(engine->stats().sparse.sequences_suspended, 0u);
  // One that is cancelled while it is suspended leaves nothing behind.
  std::vector<RequestId> ids;
  sinks.clear();
  for (uint32_t i = 0; i < 3; ++i) {
    sinks.push_back(std::make_shared<RecordingSink>());
    ids.push_back(*engine->submit(greedy(prompt_of(prompt, 30 + i), output), sinks.back()));
  }
  const uint64_t before = engine->stats().preemptions;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (engine->stats().preemptions == before && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (const RequestId id : ids) engine->cancel(id);
  for (const auto& sink : sinks) EXPECT_EQ(sink->wait().ends, 1);
  expect_clean(*engine);
  for (const TierStats& tier : engine->stats().kv_tiers) EXPECT_EQ(tier.pages_in_use, 0u);
}

TEST_F(SparseEngine, AbortsAtAnyMomentLeaveNothingBehind) {
  EngineOptions all = tight(algorithms()[0]);
  all.sparse = algorithms();
  all.kv_cache_memory_bytes = 8 << 20;
  all.max_num_batched_tokens = 64;
  const auto engine = open_engine(all);
  ASSERT_NE(engine, nullptr);
  std::mt19937 random(3);
  const int rounds = kReducedCounts ? 10 : 60;
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::pair<RequestId, std::shared_ptr<RecordingSink>>> live;
    for (int i = 0; i < 3; ++i) {
      GenerateRequest one = greedy(prompt_of(200 + random() % 400, random()), 30);
      const std::string& spec = algorithms()[random() % algorithms().size()];
      one.sparse = random() % 5 == 0 ? "dense" : spec.substr(0, spec.find(':'));
      auto sink = std::make_shared<RecordingSink>();
      const auto id = engine->submit(std::move(one), sink);
      ASSERT_TRUE(id.ok()) << id.status().to_string();
      live.emplace_back(*id, sink);
    }
    for (auto& [id, sink] : live) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
      if (random() % 2 == 0) sink->wait_for_delta();
      engine->cancel(id);
    }
    for (auto& [id, sink] : live) EXPECT_EQ(sink->wait().ends, 1);
  }
  expect_clean(*engine);
  for (const TierStats& tier : engine->stats().kv_tiers) EXPECT_EQ(tier.pages_in_use, 0u);
}

// A clustered sequence reserves more than twice as many pages as a dense one.
TEST_F(SparseEngine, TheDefaultPoolServesAlmostTheWholeContextWithEveryAlgorithm) {
  for (const sparse::RegisteredAlgorithm& algorithm : sparse::algorithms()) {
    SCOPED_TRACE(algorithm.name);
    // Where tests are slow, the one that the comment is about.
    if (kReducedCounts && algorithm.name != "retroinfer") continue;
    EngineOptions options = this->options(std::string(algorithm.name));
    options.kv_cache_memory_bytes = 0;
    options.max_num_seqs = 1;
    if (algorithm.name == "seer") {  // the tiny checkpoint has no gates
      options.model = testing::source_path("models/needle-29m").string();
      options.max_model_len = 4096;
    }
    const auto engine = open_engine(options);
    ASSERT_NE(engine, nullptr);
    const uint64_t length = engine->model_info().max_model_len;
    EXPECT_EQ(length, 4096u);
    const uint64_t prompt = length * 95 / 100;
    const Outcome outcome = run_request(*engine, greedy(prompt_of(prompt, 12), length - prompt));
    EXPECT_TRUE(outcome.result.status.ok()) << outcome.result.status.to_string();
    EXPECT_EQ(scored(outcome).size(), length - prompt);
    EXPECT_EQ(engine->stats().sparse.sequences, 1u);
    EXPECT_EQ(engine->stats().sparse.page_misses, 0u);
    expect_clean(*engine);
  }
}

// Also where the one that needs the most is not the default.
TEST_F(SparseEngine, TheDefaultPoolIsThatOfTheAlgorithmWithTheMostPages) {
  const auto pool = [&](std::vector<std::string> sparse) {
    EngineOptions options = this->options("dense");
    options.kv_cache_memory_bytes = 0;
    options.max_num_seqs = 2;
    options.sparse = std::move(sparse);
    const auto engine = open_engine(options);
    return engine == nullptr ? uint64_t{0} : engine->model_info().kv_cache_bytes;
  };
  const uint64_t dense = pool({});
  EXPECT_EQ(dense, 2 * 4096 / 8 * testing::kTinyColumns * testing::kTinyPageBytes);
  EXPECT_EQ(pool({"quest"}), dense);
  const uint64_t clusters = pool({"retroinfer"});
  EXPECT_GT(clusters, 2 * dense);
  EXPECT_EQ(pool({"quest", "dense", "retroinfer"}), clusters);
}

TEST_F(SparseEngine, AContextLongerThanFastMemoryLivesOnTheHost) {
  EngineOptions options = this->options("oracle:budget=64");
  options.kv_cache_memory_bytes = 64 * 6 * 4096;  // 512 tokens
  options.host_memory_bytes = 64 << 20;
  const auto engine = open_engine(options);
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->model_info().kv_capacity_tokens, 512u);
  EXPECT_GT(engine->model_info().max_model_len, 2000u);
  EXPECT_EQ(engine->model_info().kv_buffer_ratio, "auto");
  const Scored found = scored(run_request(*engine, greedy(prompt_of(1500, 6), 40)));
  ASSERT_EQ(found.size(), 40u);
  const auto large = open_engine(this->options("oracle:budget=64"));
  EXPECT_EQ(found, scored(run_request(*large, greedy(prompt_of(1500, 6), 40))));

  // What needs all of it in fast memory is refused at once, with the numbers.
  const auto refusal = [&](GenerateRequest request) {
    return engine->submit(std::move(request), std::make_shared<RecordingSink>()).status();
  };
  GenerateRequest dense = greedy(prompt_of(1500, 6), 40);
  dense.sparse = "dense";
  Status status = refusal(dense);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  for (const char* part : {"1500 tokens", "40 of output", "1158 pages", "are 384 (512 tokens)"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
  GenerateRequest scores = greedy(prompt_of(1500, 6), 40);
  scores.sampling.prompt_logprobs = 1;
  status = refusal(scores);
  EXPECT_EQ(status.param(), "prompt_logprobs");
  EXPECT_NE(status.message().find("dense attention"), std::string::npos) << status.message();
  GenerateRequest needy = greedy(prompt_of(1500, 6), 40);
  needy.sparse = "oracle:budget=1024";
  status = refusal(needy);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("pages of KV cache"), std::string::npos) << status.message();
  expect_clean(*engine);
}

TEST_F(SparseEngine, WhatTheHostCannotHoldIsRefusedOrStaysInFastMemory) {
  EngineOptions options = this->options("oracle:budget=64");
  options.host_memory_bytes = 2 << 20;  // 15 extents of 32 pages: 2 for each of 6 heads
  const auto engine = open_engine(options);
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(scored(run_request(*engine, greedy(prompt_of(1000, 7), 10))).size(), 10u);
  expect_clean(*engine);
  options.kv_cache_memory_bytes = 64 * 6 * 4096;
  const auto small = open_engine(options);
  ASSERT_NE(small, nullptr);
  const Status status =
      small
          ->submit(greedy(prompt_of(small->model_info().max_model_len - 11, 7), 10),
                   std::make_shared<RecordingSink>())
          .status();
  EXPECT_TRUE(status.ok()) << status.to_string();
  options.host_memory_bytes = 1;
  EXPECT_EQ(create_engine(options).status().param(), "host_memory_bytes");
}

TEST_F(SparseEngine, ShortPromptsAndPromptScoresAreDenseAndSaidToBe) {
  EngineOptions options = this->options("quest:budget=64,local=64,sinks=4");
  const auto engine = open_engine(options);
  ASSERT_NE(engine, nullptr);
  GenerateRequest dense = greedy(prompt_of(20, 8), 20);
  dense.sparse = "dense";
  const Scored expected = scored(run_request(*engine, dense));
  EXPECT_EQ(engine->stats().sparse.dense_fallbacks, 0u);
  EXPECT_EQ(scored(run_request(*engine, greedy(prompt_of(20, 8), 20))), expected);
  EXPECT_EQ(engine->stats().sparse.dense_fallbacks, 1u);
  GenerateRequest scores = greedy(prompt_of(900, 8), 4);
  scores.sampling.prompt_logprobs = 0;
  const Outcome outcome = run_request(*engine, scores);
  ASSERT_EQ(outcome.prompt_logprobs.size(), 1u);
  EXPECT_EQ(outcome.prompt_logprobs[0].tokens.size(), 900u);
  EXPECT_EQ(engine->stats().sparse.dense_fallbacks, 2u);
  EXPECT_EQ(engine->stats().sparse.sequences, 0u);
  expect_clean(*engine);
}

TEST_F(SparseEngine, ARequestChoosesAmongTheAlgorithmsOfTheStart) {
  EngineOptions options = this->options("quest:budget=64,local=16");
  options.sparse.push_back("streaming");
  const auto engine = open_engine(options);
  ASSERT_NE(engine, nullptr);
  ASSERT_EQ(engine->model_info().sparse.size(), 2u);
  EXPECT_EQ(engine->model_info().sparse[0].rfind("quest:", 0), 0u);
  EXPECT_NE(engine->model_info().sparse[0].find("local=16"), std::string::npos);
  const auto refusal = [&](std::string spec) {
    GenerateRequest request = greedy(prompt_of(50, 9), 4);
    request.sparse = std::move(spec);
    return engine->submit(std::move(request), std::make_shared<RecordingSink>()).status();
  };
  for (const auto& [spec, part] : std::vector<std::pair<std::string, std::string>>{
           {"oracle", "it has dense, quest, streaming"},
           {"quest:bugdet=3", "bugdet"},
           {"quest:budget=none", "budget"},
           {"quest:budget", ""},
           {"quest:budget=1,budget=2", ""},
           {"dense:budget=1", "no options"},
           {"", ""},
           {std::string(5000, 'a'), ""},
           {"quest:budget=\n", ""}}) {
    const Status status = refusal(spec);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << spec;
    EXPECT_EQ(status.param(), "sparse") << spec;
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
  const auto with = [&](std::string spec) {
    GenerateRequest request = greedy(prompt_of(900, 9), 30);
    if (!spec.empty()) request.sparse = std::move(spec);
    return scored(run_request(*engine, request));
  };
  const Scored usual = with("");
  EXPECT_EQ(with("quest"), usual);
  EXPECT_EQ(with("quest:budget=64"), usual);  // local=16 is the start's
  EXPECT_NE(with("quest:budget=128"), usual);
  EXPECT_NE(with("streaming"), usual);
  // More instances than are kept; each still answers as the first time.
  for (int budget = 16; budget < 16 * 22; budget += 16) {
    EXPECT_EQ(with("quest:budget=" + std::to_string(budget)).size(), 30u);
  }
  EXPECT_EQ(with("quest:budget=64"), usual);
  expect_clean(*engine);
}

TEST_F(SparseEngine, ARequestNamesNoFiles) {
  EngineOptions options = this->options("seer");
  options.model = testing::source_path("models/needle-29m").string();
  options.max_model_len = 2048;
  const auto engine = open_engine(options);
  ASSERT_NE(engine, nullptr);
  for (const char* place : {"models/needle-29m/gates-b64", "/etc", "../gates"}) {
    GenerateRequest request = greedy(prompt_of(50, 9), 4);
    request.sparse = std::string("seer:gates=") + place;
    const Status status =
        engine->submit(std::move(request), std::make_shared<RecordingSink>()).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.param(), "sparse");
    EXPECT_NE(status.message().find("not by a request"), std::string::npos) << status.message();
  }
  // Those of the model are there for the asking.
  GenerateRequest request = greedy(prompt_of(400, 9), 4);
  request.sparse = "seer:block=64";
  EXPECT_TRUE(run_request(*engine, request).result.status.ok());
}

TEST_F(SparseEngine, StartRefusesWhatItCannotDo) {
  for (const auto& [spec, part] : std::vector<std::pair<std::string, std::string>>{
           {"no-such", "no-such"}, {"quest:x=1", "x"}, {"quest:", ""}, {"seer", "gates"}}) {
    const auto engine = create_engine(options(spec));
    EXPECT_FALSE(engine.ok());
    EXPECT_EQ(engine.status().param(), "sparse") << spec;
    EXPECT_NE(engine.status().message().find(part), std::string::npos);
  }
  EngineOptions twice = options("quest");
  twice.sparse.push_back("quest:budget=3");
  EXPECT_EQ(create_engine(twice).status().param(), "sparse");
  EngineOptions alone = options("quest");
  alone.sparse.clear();
  alone.host_memory_bytes = 1 << 20;
  EXPECT_EQ(create_engine(alone).status().param(), "host_memory_bytes");
  alone.host_memory_bytes = 0;
  alone.selection_trace = "trace";
  EXPECT_EQ(create_engine(alone).status().param(), "selection_trace");
  EngineOptions ratio = options("quest");
  ratio.kv_buffer_ratio = -1;
  EXPECT_EQ(create_engine(ratio).status().param(), "kv_buffer_ratio");
  EngineOptions vast = options("quest");
  vast.host_memory_bytes = uint64_t{1} << 50;
  EXPECT_EQ(create_engine(vast).status().param(), "host_memory_bytes");
}

}  // namespace
}  // namespace spin
