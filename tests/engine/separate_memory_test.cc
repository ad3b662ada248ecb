// SPDX-License-Identifier: Apache-2.0
// Everything above the backend on a device whose fast memory the host cannot touch: the same bits
// as where it can. A forbidden access ends the process. Engines under load: tier_differential_test.
#include "backend/separate_memory.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "engine/create_engine.h"
#include "engine/teacher_forcing.h"
#include "model/load.h"
#include "sparse/registry.h"
#include "tests/engine/fake_support.h"
#include "tests/engine/sparse_support.h"
#include "tests/support/test_data.h"

namespace spin::engine {
namespace {

using spin::testing::TempDir;

// Small budgets, so that pages are evicted and fetched, sealed and clustered anew.
const std::vector<std::string>& settings() {
  static const std::vector<std::string> list = {
      "streaming:sinks=8,budget=48",
      "oracle:budget=32,local=16",
      "quest:budget=32,local=16,dense_layers=1",
      "shadowkv:budget=32,outliers=4",
      "shadowkv-svd:budget=32,rank=16,outliers=4",
      "retroinfer:budget=32,cluster=8,update=16",
      "retroinfer:budget=32,cluster=8,update=16,estimate=0",
      "sketch:budget=16,local=16,offset=32",
      "sketch:budget=16,local=16,offset=32,values=2",
  };
  return list;
}

// The logits of every row, [setting][step].
using Logits = std::map<size_t, std::vector<std::vector<float>>>;

Logits logits_on(backend::Device& device, double fast_fraction) {
  Logits logits;
  auto files = model::open_model(spin::testing::test_data("tiny/llama-linear").string());
  EXPECT_TRUE(files.ok());
  model::LoadOptions load;
  load.max_rows = 24;  // several steps of prefill
  load.weights.dtype = layout::DType::kF32;
  auto decoder = model::load_decoder(*files, device, load);
  EXPECT_TRUE(decoder.ok());
  const auto geometry = files->config.kv_geometry(8, layout::DType::kF32);
  auto forcing = std::move(*TeacherForcing::create(device, std::move(*decoder), geometry));
  sparse::AlgorithmContext context;
  context.device = &device;
  context.shape = forcing->shape();
  std::vector<AlgorithmRef> algorithms;
  for (const std::string& text : settings()) {
    auto made = sparse::create_algorithm(*sparse::parse_sparse_spec(text), context);
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    algorithms.push_back(std::move(*made));
  }
  std::vector<TokenId> tokens;
  for (uint64_t i = 0; i < 150; ++i) tokens.push_back(static_cast<TokenId>(3 + i * 37 % 251));
  std::vector<SettingUse> uses(algorithms.size());
  const Status status = forcing->run(
      tokens, 110, algorithms, fast_fraction, uses,
      [&](size_t setting, uint64_t, std::span<const float> row) {
        logits[setting].emplace_back(row.begin(), row.end());
      },
      [](uint64_t, uint64_t) { return true; });
  EXPECT_TRUE(status.ok()) << status.to_string();
  return logits;
}

TEST(SeparateMemory, EveryAlgorithmGivesTheBitsOfUnifiedMemory) {
  const auto unified = std::move(*backend::cpu::create_cpu_device({.threads = 1}));
  const auto separate = std::move(*spin::testing::separate_memory_device(1));
  for (const double fast_fraction : {0.0, 1.0}) {
    const Logits expected = logits_on(*unified, fast_fraction);
    ASSERT_EQ(expected.size(), settings().size() + 1);
    EXPECT_EQ(logits_on(*separate, fast_fraction), expected) << fast_fraction;
  }
}

TEST(SeparateMemory, SelectionsAreTracedAlike) {
  std::vector<std::string> traces;
  for (const bool separate : {false, true}) {
    TempDir dir;
    EngineOptions options;
    options.model = spin::testing::test_data("tiny/llama-linear").string();
    options.dtype = DTypeChoice::kFloat32;
    options.threads = 1;
    options.max_num_seqs = 1;
    options.sparse = {"oracle:budget=32,local=16"};
    options.selection_trace = (dir.path() / "trace").string();
    EngineTuning tuning;
    if (separate) {
      tuning.make_device = [] { return spin::testing::separate_memory_device(1); };
    }
    auto engine = create_tuned_engine(options, tuning);
    ASSERT_TRUE(engine.ok()) << engine.status().to_string();
    const auto outcome = spin::testing::run_request(
        **engine, spin::testing::greedy(spin::testing::prompt_of(90, 5), 20));
    EXPECT_TRUE(outcome.result.status.ok()) << outcome.result.status.to_string();
    engine->reset();
    traces.push_back(spin::testing::read_file(dir.path() / "trace"));
  }
  EXPECT_GT(traces[0].size(), 1000u);
  EXPECT_EQ(traces[0], traces[1]);
}

// Access outside queued work ends the process: the test device really is what it says.
TEST(SeparateMemoryDeathTest, AHostAccessEndsTheProcess) {
  const auto device = std::move(*spin::testing::separate_memory_device(1));
  auto fast = std::move(
      *backend::Buffer::allocate(device->memory(backend::MemoryKind::kFast), sizeof(uint32_t)));
  const auto stream = std::move(*device->create_stream("test"));
  const uint32_t written = 7;
  uint32_t read = 0;
  stream->enqueue_copy(fast.data(), &written, sizeof(written));
  stream->enqueue_copy(&read, fast.data(), sizeof(read));
  ASSERT_TRUE(stream->wait_idle().ok());
  EXPECT_EQ(read, written);
  EXPECT_DEATH(*static_cast<volatile uint32_t*>(fast.data()) = 8, "");
}

}  // namespace
}  // namespace spin::engine
