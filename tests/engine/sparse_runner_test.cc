// SPDX-License-Identifier: Apache-2.0
// The runner of real models by itself, where a test can reach into its memory: faults of the host
// tier end the sequence that they belong to and nobody else.
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "backend/device.h"
#include "engine/algorithm_set.h"
#include "engine/decoder_runner.h"
#include "tests/engine/sparse_support.h"

namespace spin::engine {
namespace {

using testing::prompt_of;

// Remembers the largest allocation of host memory: the host tier.
class WatchedMemory final : public backend::MemoryResource {
 public:
  explicit WatchedMemory(backend::MemoryResource& upstream) : upstream_(upstream) {}
  Result<void*> allocate(size_t bytes, size_t alignment) override {
    auto pointer = upstream_.allocate(bytes, alignment);
    if (pointer.ok() && bytes > largest_.second) largest_ = {*pointer, bytes};
    return pointer;
  }
  void deallocate(void* pointer, size_t bytes, size_t alignment) override {
    upstream_.deallocate(pointer, bytes, alignment);
  }
  uint64_t bytes_in_use() const override { return upstream_.bytes_in_use(); }

  void scribble() const { std::memset(largest_.first, 0x5A, largest_.second); }

 private:
  backend::MemoryResource& upstream_;
  std::pair<void*, size_t> largest_{nullptr, 0};
};

class WatchedDevice final : public backend::Device {
 public:
  explicit WatchedDevice(backend::Device& inner)
      : inner_(inner), host_(inner.memory(backend::MemoryKind::kHost)) {}
  const backend::DeviceProperties& properties() const override { return inner_.properties(); }
  backend::MemoryResource& memory(backend::MemoryKind kind) override {
    return kind == backend::MemoryKind::kHost ? host_ : inner_.memory(kind);
  }
  Result<std::unique_ptr<backend::Stream>> create_stream(std::string_view name) override {
    return inner_.create_stream(name);
  }
  backend::Ops& ops() override { return inner_.ops(); }
  backend::KvOps& kv_ops() override { return inner_.kv_ops(); }
  backend::SparseOps& sparse_ops() override { return inner_.sparse_ops(); }
  const WatchedMemory& host() const { return host_; }

 private:
  backend::Device& inner_;
  WatchedMemory host_;
};

// A tiny model of 3 layers with 2 KV heads; 8 tokens a page.
class SparseRunner : public ::testing::Test {
 protected:
  SparseRunner() : SparseRunner({"oracle:budget=32"}, 6 * 200, 0) {}
  SparseRunner(const std::vector<std::string>& specs,
               uint64_t kv_pages,
               std::optional<double> buffer_ratio)
      : cpu_(std::move(*backend::cpu::create_cpu_device({.threads = 2}))), device_(*cpu_) {
    DecoderRunnerOptions options;
    options.kv_pages = kv_pages;
    options.max_logit_rows = 8;
    options.sparse = true;
    options.max_prompt_tokens = 2048;
    options.host_bytes = 16 << 20;
    options.index_bytes = 16 << 20;
    options.buffer_ratio = buffer_ratio;
    auto made = testing::make_tiny_runner(device_, specs, options);
    algorithms_ = std::move(made.algorithms);
    runner_ = std::move(made.runner);
  }

  SequenceHandle open(const std::vector<TokenId>& prompt) {
    SequenceRequest request;
    request.prompt = prompt;
    request.max_tokens = prompt.size() + 64;
    request.algorithm = algorithms_->default_algorithm();
    auto handle = runner_->open_sequence(request);
    EXPECT_TRUE(handle.ok()) << handle.status().to_string();
    return *handle;
  }
  Result<StepOutput> step(const std::vector<SequenceStep>& sequences) {
    StepBatch batch;
    batch.sequences = sequences;
    return runner_->run(batch, [] {});
  }
  // The whole prompt in one step; the logits after it.
  std::vector<float> prefill(SequenceHandle handle, const std::vector<TokenId>& prompt) {
    const auto output = step({{handle, prompt, 1}});
    EXPECT_TRUE(output.ok());
    return {output->logits.row(0).begin(), output->logits.row(0).end()};
  }

  std::unique_ptr<backend::Device> cpu_;
  WatchedDevice device_;
  std::unique_ptr<AlgorithmSet> algorithms_;
  std::unique_ptr<ModelRunner> runner_;
};

TEST_F(SparseRunner, ADamagedHostPageEndsItsOwnSequenceOnly) {
  const auto first = prompt_of(900, 1);
  const auto second = prompt_of(700, 2);
  const auto said = prompt_of(40, 3);
  // What the second one computes when it is alone.
  std::vector<std::vector<float>> expected;
  SequenceHandle alone = open(second);
  prefill(alone, second);
  for (const TokenId& id : said) {
    const auto output = step({{alone, {&id, 1}, 1}});
    ASSERT_TRUE(output.ok());
    expected.emplace_back(output->logits.row(0).begin(), output->logits.row(0).end());
  }
  runner_->close_sequence(alone);

  const SequenceHandle damaged = open(first);
  prefill(damaged, first);
  device_.host().scribble();
  const SequenceHandle sound = open(second);
  prefill(sound, second);
  bool faulted = false;
  for (size_t i = 0; i < said.size(); ++i) {
    std::vector<SequenceStep> work = {{sound, {&said[i], 1}, 1}};
    if (!faulted) work.insert(work.begin(), {damaged, {&said[i], 1}, 1});
    const auto output = step(work);
    ASSERT_TRUE(output.ok()) << output.status().to_string();
    if (!faulted && !output->faults.empty()) {
      ASSERT_EQ(output->faults.size(), 1u);
      EXPECT_EQ(output->faults[0].index, 0u);
      EXPECT_EQ(output->faults[0].status.code(), StatusCode::kInternal);
      EXPECT_NE(output->faults[0].status.message().find("host memory"), std::string::npos);
      faulted = true;
      runner_->close_sequence(damaged);
    } else {
      EXPECT_TRUE(output->faults.empty());
    }
    const auto row = output->logits.row(work.size() - 1);
    EXPECT_EQ(std::vector<float>(row.begin(), row.end()), expected[i]) << i;
  }
  EXPECT_TRUE(faulted);
  EngineStats stats;
  runner_->add_stats(stats);
  EXPECT_GT(stats.sparse.page_faults, 0u);
  runner_->close_sequence(sound);
  EXPECT_EQ(runner_->pages_in_use(), 0u);
  const Status audit = runner_->audit();
  EXPECT_TRUE(audit.ok()) << audit.to_string();
}

TEST_F(SparseRunner, SlicesOfAPromptMayStandAnywhereInTheBatch) {
  const auto prompt = prompt_of(500, 4);
  const auto other = prompt_of(20, 5);
  SequenceHandle handle = open(prompt);
  const std::vector<float> expected = prefill(handle, prompt);
  runner_->close_sequence(handle);
  // The last slice between two dense prompts, each with logits of its own.
  SequenceRequest dense;
  dense.prompt = other;
  dense.max_tokens = 40;
  const SequenceHandle before = *runner_->open_sequence(dense);
  const SequenceHandle after = *runner_->open_sequence(dense);
  handle = open(prompt);
  const std::span<const TokenId> ids = prompt;
  for (size_t i = 0; i < 450; i += 45) {
    ASSERT_TRUE(step({{handle, ids.subspan(i, 45), 0}}).ok());
  }
  const auto output = step({{before, other, 2}, {handle, ids.subspan(450), 1}, {after, other, 2}});
  ASSERT_TRUE(output.ok());
  ASSERT_EQ(output->logits.rows, 5u);
  const auto row = [&](uint64_t i) {
    return std::vector<float>(output->logits.row(i).begin(), output->logits.row(i).end());
  };
  EXPECT_EQ(row(2), expected);
  EXPECT_EQ(row(0), row(3));
  EXPECT_EQ(row(1), row(4));
  EXPECT_NE(row(0), row(1));
  for (const SequenceHandle one : {before, handle, after}) runner_->close_sequence(one);
  EXPECT_TRUE(runner_->audit().ok());
}

TEST_F(SparseRunner, APromptGivenUpHalfwayFreesTheStagingBuffer) {
  const auto prompt = prompt_of(500, 4);
  const std::span<const TokenId> ids = prompt;
  SequenceHandle handle = open(prompt);
  const std::vector<float> expected = prefill(handle, prompt);
  runner_->close_sequence(handle);
  handle = open(prompt_of(300, 9));
  ASSERT_TRUE(step({{handle, ids.subspan(0, 100), 0}}).ok());
  runner_->close_sequence(handle);
  EXPECT_EQ(runner_->pages_in_use(), 0u);
  EXPECT_TRUE(runner_->audit().ok());
  handle = open(prompt);
  EXPECT_EQ(prefill(handle, prompt), expected);
  runner_->close_sequence(handle);
  EXPECT_TRUE(runner_->audit().ok());
}

// Clusters with a budget of everything: the mandatory pages are those of the worst clustering, the
// ones that a flat sequence keeps those of the one found. 6 columns.
class ClusteredRunner : public SparseRunner {
 protected:
  ClusteredRunner()
      : SparseRunner({"retroinfer:budget=100%,cluster=8,update=64"}, 6 * 400, std::nullopt) {}

  // A dense sequence that leaves `pages` of the pool free.
  SequenceHandle fill_but(uint64_t pages, const std::vector<TokenId>& prompt) {
    SequenceRequest request;
    request.prompt = prompt;
    request.max_tokens = (runner_->pages_total() - runner_->pages_in_use() - pages) / 6 * 8;
    auto handle = runner_->open_sequence(request);
    EXPECT_TRUE(handle.ok()) << handle.status().to_string();
    return *handle;
  }
};

TEST_F(ClusteredRunner, AFlatSequenceMayHoldFewerPagesThanAStepOfTheTieredFormNeeds) {
  const auto prompt = prompt_of(400, 4);
  const auto little = prompt_of(8, 5);
  const auto said = prompt_of(70, 6);
  const SequenceHandle clustered = open(prompt);
  prefill(clustered, prompt);
  SequenceRequest request;
  request.prompt = prompt;
  request.max_tokens = prompt.size() + 64;
  request.algorithm = algorithms_->default_algorithm();
  ASSERT_LT(runner_->pages_in_use(), runner_->need(request).memory.pages);
  const SequenceHandle rest = fill_but(6, little);
  ASSERT_LE(runner_->free_memory().pages, 12u);
  for (size_t i = 0; i < 40; ++i) {  // leases are dealt out anew every 32 steps
    const auto output = step({{clustered, {&said[i], 1}, 1}});
    ASSERT_TRUE(output.ok()) << output.status().to_string();
    ASSERT_TRUE(output->faults.empty());
  }
  // What is free can be taken as it stands.
  SequenceRequest dense;
  dense.prompt = little;
  dense.max_tokens = 8;
  const auto small = runner_->open_sequence(dense);
  ASSERT_TRUE(small.ok()) << small.status().to_string();
  EXPECT_TRUE(runner_->audit().ok());
  for (const SequenceHandle handle : {clustered, rest, *small}) runner_->close_sequence(handle);
  EXPECT_EQ(runner_->pages_in_use(), 0u);
}

class GreedyRunner : public SparseRunner {
 protected:
  GreedyRunner() : SparseRunner({"oracle:budget=32"}, 6 * 200, std::nullopt) {}
};

// A buffer is what nobody else was promised, whether all of the sequence would fit or not.
TEST_F(GreedyRunner, ABufferLeavesThePagesThatOthersWerePromised) {
  for (const size_t length : {900u, 1800u}) {
    const auto prompt = prompt_of(length, 7);
    const auto other = prompt_of(8, 8);
    SequenceRequest sparse;
    sparse.prompt = prompt;
    sparse.max_tokens = prompt.size() + 64;
    sparse.algorithm = algorithms_->default_algorithm();
    const uint64_t least = runner_->need(sparse).memory.pages;
    SequenceRequest dense;
    dense.prompt = other;
    dense.max_tokens = (runner_->pages_total() - least) / 6 * 8;
    sparse.promised_pages = runner_->need(dense).memory.pages;
    const auto first = runner_->open_sequence(sparse);
    ASSERT_TRUE(first.ok()) << first.status().to_string();
    const auto second = runner_->open_sequence(dense);
    ASSERT_TRUE(second.ok()) << second.status().to_string();
    EXPECT_TRUE(runner_->audit().ok());
    runner_->close_sequence(*first);
    runner_->close_sequence(*second);
  }
}

}  // namespace
}  // namespace spin::engine
