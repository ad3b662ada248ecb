// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "backend/sparse_ops.h"
#include "base/bf16.h"
#include "base/counter_rng.h"
#include "sparse/range_algorithm.h"
#include "sparse/registry.h"
#include "sparse/seer_gates.h"

namespace spin::sparse {
namespace {

using ::testing::HasSubstr;

// Weights in memory: what the published files hold.
class MapWeights final : public backend::SideWeights {
 public:
  struct Tensor {
    std::vector<int64_t> shape;
    std::vector<float> values;
  };
  std::map<std::string, Tensor, std::less<>> tensors;
  std::map<std::string, std::string, std::less<>> settings;

  void add(const std::string& name, const std::vector<int64_t>& shape) {
    Tensor tensor{shape, {}};
    int64_t size = 1;
    for (const int64_t n : shape) size *= n;
    for (int64_t i = 0; i < size; ++i) {
      tensor.values.push_back(
          static_cast<float>(base::counter_uniform(17, static_cast<uint32_t>(tensors.size()),
                                                   static_cast<uint64_t>(i)) -
                             0.5));
    }
    tensors[name] = std::move(tensor);
  }

  bool contains(std::string_view name) const override {
    return tensors.find(name) != tensors.end();
  }
  Result<std::vector<float>> read(std::string_view name,
                                  std::span<const int64_t> shape) const override {
    const auto found = tensors.find(name);
    if (found == tensors.end()) {
      return Status(StatusCode::kNotFound, "there is no tensor " + std::string(name));
    }
    if (!std::equal(shape.begin(), shape.end(), found->second.shape.begin(),
                    found->second.shape.end())) {
      return Status(StatusCode::kInvalidArgument, std::string(name) + ": another shape");
    }
    return found->second.values;
  }
  Result<std::string> setting(std::string_view key) const override {
    const auto found = settings.find(key);
    if (found == settings.end()) return Status(StatusCode::kNotFound, "no setting");
    return found->second;
  }
};

class MapSource final : public backend::SideWeightSource {
 public:
  MapWeights weights;
  std::string location;  // the last one opened

  Result<std::unique_ptr<backend::SideWeights>> open(std::string_view where) override {
    location = std::string(where);
    return std::unique_ptr<backend::SideWeights>(std::make_unique<MapWeights>(weights));
  }
};

std::string tensor(uint32_t layer, const std::string& part) {
  return "model.layers." + std::to_string(layer) + ".self_attn.attn_gate.attngate_" + part +
         ".weight";
}

class SeerTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kLayers = 2;
  static constexpr uint32_t kHeads = 2;
  static constexpr uint32_t kGroup = 2;
  static constexpr uint32_t kDim = 64;
  static constexpr uint32_t kBlock = 32;

  void SetUp() override {
    auto device = backend::cpu::create_cpu_device({.threads = 2});
    ASSERT_TRUE(device.ok());
    device_ = std::move(*device);
    auto stream = device_->create_stream("seer");
    ASSERT_TRUE(stream.ok());
    stream_ = std::move(*stream);
    for (uint32_t i = 0; i < kDim / 2; ++i) {
      inv_freq_.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(i) / kDim));
    }
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      source_.weights.add(tensor(layer, "linear_k"), {kHeads, 3 * kDim, kDim});
      source_.weights.add(tensor(layer, "linear_q"), {kHeads, kGroup, kDim, kDim});
      source_.weights.add(tensor(layer, "knorm"), {kDim});
      source_.weights.add(tensor(layer, "qnorm"), {kDim});
    }
    context_.device = device_.get();
    context_.shape.geometry = {kLayers, kHeads, kDim, 8, layout::DType::kBF16};
    context_.shape.q_heads = kHeads * kGroup;
    context_.shape.scale = 0.125f;
    context_.shape.rope = {inv_freq_, 1.0f};
    context_.side_weights = &source_;
  }

  Result<std::unique_ptr<SparseAlgorithm>> make(const std::string& text) {
    auto spec = parse_sparse_spec(text);
    EXPECT_TRUE(spec.ok()) << spec.status().to_string();
    return create_algorithm(*spec, context_);
  }
  std::unique_ptr<SparseAlgorithm> made(const std::string& text) {
    auto algorithm = make(text);
    EXPECT_TRUE(algorithm.ok()) << algorithm.status().to_string();
    return algorithm.ok() ? std::move(*algorithm) : nullptr;
  }
  Status refused(const std::string& text) { return make(text).status(); }

  // Keys of `tokens` tokens in scattered pages.
  void make_tokens(uint64_t tokens) {
    const layout::KvGeometry& g = context_.shape.geometry;
    pages_ = g.pages_per_head(tokens);
    slots_.resize(pages_ * kHeads);
    std::iota(slots_.begin(), slots_.end(), 0u);
    std::shuffle(slots_.begin(), slots_.end(), std::mt19937(3));
    pool_.resize(slots_.size() * g.page_bytes() / 2);
    for (size_t i = 0; i < pool_.size(); ++i) {
      pool_[i] = base::to_bf16(static_cast<float>(base::counter_uniform(5, 0, i) * 2 - 1));
    }
  }
  // Tokens [first, first + count) as a run of their own; first begins a page.
  layout::PagedTokens tokens(uint64_t first, uint64_t count) const {
    const layout::KvGeometry& g = context_.shape.geometry;
    return {reinterpret_cast<const std::byte*>(pool_.data()), g,
            slots_.data() + first / g.page_tokens, pages_, count};
  }

  std::unique_ptr<SequenceIndex> index(const SparseAlgorithm& algorithm, uint64_t most) {
    auto made = algorithm.create_index(most, device_->memory(backend::MemoryKind::kFast));
    EXPECT_TRUE(made.ok());
    auto& own = static_cast<RangeIndex&>(**made);
    std::memset(own.summaries(), 0, algorithm.needs(most).index_bytes);
    return std::move(*made);
  }

  // A prompt, then token by token up to `end`. Returns the tail's first token.
  uint64_t feed(const SparseAlgorithm& algorithm,
                SequenceIndex& index,
                uint64_t prompt,
                uint64_t end) {
    uint64_t tail_first = algorithm.prompt_tail_first(prompt);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      algorithm.enqueue_finish_prompt(index, layer, tokens(0, prompt), *stream_);
    }
    for (uint64_t now = prompt + 1; now <= end; ++now) {
      layout::Tail tail;
      tail.first_page = static_cast<uint32_t>(tail_first / 8);
      tail.tokens = static_cast<uint32_t>(now - tail_first);
      const SealPlan plan = algorithm.plan_seal(index, 0, tail);
      if (plan.pages == 0) continue;
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        SealItem item{&index, tokens(tail_first, tail.tokens), tail_first, plan.pages * 8,
                      tail.first_page};
        EXPECT_EQ(algorithm.enqueue_seal(item, layer, *stream_), nullptr);
      }
      tail_first += plan.pages * 8;
    }
    EXPECT_TRUE(stream_->wait_idle().ok());
    return tail_first;
  }

  std::vector<std::byte> summaries(const SparseAlgorithm& algorithm,
                                   SequenceIndex& index,
                                   uint64_t most,
                                   uint64_t blocks) {
    (void)algorithm;
    const auto& own = static_cast<RangeIndex&>(index);
    const uint64_t vector = kDim * 2;
    std::vector<std::byte> out;
    for (uint32_t i = 0; i < kLayers * kHeads; ++i) {
      const std::byte* from = own.summaries() + i * (most / kBlock) * vector;
      out.insert(out.end(), from, from + blocks * vector);
    }
    return out;
  }

  struct Selected {
    std::vector<std::vector<uint32_t>> pages;  // per head
    uint64_t attended = 0;
    uint64_t selected = 0;
  };
  // One row of queries at the end of `context` tokens.
  Selected select(const SparseAlgorithm& algorithm,
                  SequenceIndex& index,
                  uint64_t context,
                  uint64_t tail_first) {
    make_query();
    const uint32_t stride = 4096;
    std::vector<uint32_t> pages(kHeads * stride);
    std::vector<uint8_t> counts_of_page(kHeads * stride);
    std::vector<uint32_t> counts(kHeads);
    std::vector<uint64_t> attended(kHeads);
    std::vector<uint64_t> selected(kHeads);
    SelectItem item;
    item.index = &index;
    item.context_tokens = context;
    item.tail_first_page = static_cast<uint32_t>(tail_first / 8);
    item.tail_first_token = tail_first;
    item.list = {pages.data(), counts_of_page.data(), counts.data(), stride};
    item.attended = attended.data();
    item.selected = selected.data();
    algorithm.enqueue_select(query_view(), {&item, 1}, kLayers - 1, *stream_);
    const Status status = stream_->wait_idle();
    EXPECT_TRUE(status.ok()) << status.to_string();
    Selected out;
    for (uint32_t h = 0; h < kHeads; ++h) {
      out.pages.emplace_back(pages.begin() + h * stride, pages.begin() + h * stride + counts[h]);
      out.attended += attended[h];
      out.selected += selected[h];
    }
    return out;
  }

  void make_query() {
    query_.clear();
    for (uint32_t i = 0; i < kHeads * kGroup * kDim; ++i) {
      query_.push_back(static_cast<float>(base::counter_uniform(9, 0, i) * 2 - 1));
    }
  }
  backend::TensorRef query_view() {
    return {query_.data(), layout::DType::kF32, 1, kHeads * kGroup * kDim, kHeads * kGroup * kDim};
  }

  std::unique_ptr<backend::Device> device_;
  std::unique_ptr<backend::Stream> stream_;
  std::vector<float> inv_freq_;
  MapSource source_;
  AlgorithmContext context_;
  std::vector<base::Bf16> pool_;
  std::vector<uint32_t> slots_;
  uint64_t pages_ = 0;
  std::vector<float> query_;
};

TEST_F(SeerTest, IndexOfAPromptEqualsThatOfATokenByTokenSequence) {
  constexpr uint64_t kMost = 512;
  make_tokens(kMost);
  const auto algorithm = made("seer:budget=64");
  ASSERT_NE(algorithm, nullptr);
  EXPECT_TRUE(algorithm->descriptor().prefix_stable);
  for (const uint64_t end : {200u, 223u, 224u, 225u, 500u}) {
    SCOPED_TRACE(end);
    const auto whole = index(*algorithm, kMost);
    const auto grown = index(*algorithm, kMost);
    const uint64_t tail_first = feed(*algorithm, *whole, end, end);
    EXPECT_EQ(feed(*algorithm, *grown, 100, end), tail_first);
    const uint64_t blocks = tail_first / kBlock;
    ASSERT_GT(blocks, 2u);
    EXPECT_EQ(summaries(*algorithm, *whole, kMost, blocks),
              summaries(*algorithm, *grown, kMost, blocks));
  }
}

TEST_F(SeerTest, TheLastPositionIsThatOfThePublishedCodeAndChangesSealedBlocksOnly) {
  constexpr uint64_t kMost = 512;
  make_tokens(kMost);
  const auto first = made("seer:budget=64");
  const auto last = made("seer:budget=64,position=last");
  ASSERT_TRUE(first != nullptr && last != nullptr);
  EXPECT_FALSE(last->descriptor().prefix_stable);
  const auto prompt_first = index(*first, kMost);
  const auto prompt_last = index(*last, kMost);
  const uint64_t blocks = feed(*first, *prompt_first, 300, 300) / kBlock;
  feed(*last, *prompt_last, 300, 300);
  EXPECT_EQ(summaries(*first, *prompt_first, kMost, blocks),
            summaries(*last, *prompt_last, kMost, blocks));
  const auto grown_first = index(*first, kMost);
  const auto grown_last = index(*last, kMost);
  feed(*first, *grown_first, 100, 300);
  feed(*last, *grown_last, 100, 300);
  EXPECT_NE(summaries(*first, *grown_first, kMost, blocks),
            summaries(*last, *grown_last, kMost, blocks));
}

TEST_F(SeerTest, TheBudgetBuysTheBestBlocksBesideTheFirstAndTheNewest) {
  make_tokens(2048);
  const auto algorithm = made("seer:budget=96");
  ASSERT_NE(algorithm, nullptr);
  const auto own = index(*algorithm, 2048);
  const uint64_t tail_first = feed(*algorithm, *own, 2000, 2000);
  EXPECT_EQ(tail_first, 1952u);  // the newest 32 tokens and what is not a whole block
  const Selected found = select(*algorithm, *own, 2001, tail_first);
  EXPECT_EQ(found.selected, kHeads * 3u);
  EXPECT_EQ(found.attended, kHeads * (32u + 96u + 49u));
  for (const auto& pages : found.pages) {
    EXPECT_TRUE(std::is_sorted(pages.begin(), pages.end()));
    for (uint32_t page = 0; page < 4; ++page) EXPECT_EQ(pages[page], page);
    EXPECT_EQ(pages.back(), 250u);
  }
  EXPECT_EQ(algorithm->needs(2048).selected_pages, 12u);
}

TEST_F(SeerTest, ThresholdModeTakesWhatIsAboveItUpToTheCap) {
  make_tokens(2048);
  const auto all = made("seer:budget=2048");
  ASSERT_NE(all, nullptr);
  const auto own = index(*all, 2048);
  const uint64_t tail_first = feed(*all, *own, 2000, 2000);
  const auto blocks = static_cast<uint32_t>(tail_first / kBlock);
  // The softmax over all sealed blocks, from the operation itself.
  make_query();
  std::vector<float> scores(kHeads * blocks);
  auto gates = GateTensors::load(source_.weights, *read_gate_config(source_.weights, kDim),
                                 context_.shape, 0, *device_);
  ASSERT_TRUE(gates.ok());
  backend::GateScoreItem item;
  item.position = 2000;
  item.count = blocks;
  const auto& summaries = static_cast<const RangeIndex&>(*own);
  item.keys = {summaries.summaries() + kHeads * 64 * kDim * 2, layout::DType::kBF16, kDim,
               64 * kDim};
  item.scores = scores.data();
  item.score_stride = blocks;
  device_->sparse_ops().enqueue_gate_scores(query_view(), {&item, 1}, gates->layer(kLayers - 1),
                                            context_.shape.geometry, *stream_);
  ASSERT_TRUE(stream_->wait_idle().ok());
  // Half of head 0's blocks lie above this threshold.
  std::vector<float> sorted(scores.begin() + 1, scores.begin() + blocks);
  std::sort(sorted.begin(), sorted.end());
  const double threshold = std::exp((sorted[30] + sorted[29]) / 2.0);
  uint64_t expected = 0;
  for (uint32_t h = 0; h < kHeads; ++h) {
    for (uint32_t j = 1; j < blocks; ++j) expected += std::exp(scores[h * blocks + j]) > threshold;
  }
  const std::string option = std::to_string(threshold);
  const auto some = made("seer:threshold=" + option + ",cap=2048");
  ASSERT_NE(some, nullptr);
  const uint64_t selected = select(*some, *own, 2001, tail_first).selected;
  EXPECT_NEAR(static_cast<double>(selected), static_cast<double>(expected), 1.0);
  EXPECT_GT(selected, 10u);
  EXPECT_LT(selected, kHeads * (blocks - 1));
  // A cap keeps the best of them.
  const auto capped = made("seer:threshold=" + option + ",cap=128");
  const auto best = made("seer:budget=128");
  ASSERT_TRUE(capped != nullptr && best != nullptr);
  const Selected cut = select(*capped, *own, 2001, tail_first);
  EXPECT_EQ(cut.selected, kHeads * 4u);
  EXPECT_EQ(cut.pages, select(*best, *own, 2001, tail_first).pages);
}

TEST_F(SeerTest, AMeanOfQueriesIsTheProjectionOfTheirSum) {
  // Qavgproj with weights W is Qproj with W / group for every query head.
  MapSource averaged = source_;
  averaged.weights.settings["seerattn_q_head_pooling_type"] = "Qavgproj";
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    averaged.weights.add(tensor(layer, "linear_q"), {kHeads, kDim, kDim});
    auto& query = source_.weights.tensors[tensor(layer, "linear_q")].values;
    const auto& one = averaged.weights.tensors[tensor(layer, "linear_q")].values;
    for (size_t i = 0; i < query.size(); ++i) {
      const size_t head = i / (kGroup * kDim * kDim);
      query[i] = one[head * kDim * kDim + i % (kDim * kDim)] / kGroup;
    }
  }
  make_tokens(2048);
  const auto projected = made("seer:budget=96");
  context_.side_weights = &averaged;
  const auto mean = made("seer:budget=96");
  ASSERT_TRUE(projected != nullptr && mean != nullptr);
  const auto own = index(*projected, 2048);
  const uint64_t tail_first = feed(*projected, *own, 2000, 2000);
  EXPECT_EQ(select(*projected, *own, 2001, tail_first).pages,
            select(*mean, *own, 2001, tail_first).pages);
}

TEST_F(SeerTest, GatesAreLookedForBesideTheModelUnlessTheUserNamesThem) {
  ASSERT_NE(made("seer"), nullptr);
  EXPECT_EQ(source_.location, "model:gates-b32");
  ASSERT_NE(made("seer:block=64"), nullptr);
  EXPECT_EQ(source_.location, "model:gates-b64");
  ASSERT_NE(made("seer:gates=some/folder"), nullptr);
  EXPECT_EQ(source_.location, "some/folder");
  context_.side_weights = nullptr;
  EXPECT_EQ(refused("seer").code(), StatusCode::kNotFound);
}

TEST_F(SeerTest, GatesRankBlocksOfTheSizeThatTheyWereTrainedFor) {
  source_.weights.settings["seerattn_gate_block_size"] = "64";
  EXPECT_NE(made("seer:block=64"), nullptr);
  const Status other = refused("seer:block=32,gates=some/folder");
  EXPECT_EQ(other.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(other.message(), HasSubstr("seerattn_gate_block_size is 64"));
  EXPECT_THAT(other.message(), HasSubstr("32"));
  source_.weights.settings["seerattn_gate_block_size"] = "none";
  EXPECT_THAT(refused("seer").message(), HasSubstr("seerattn_gate_block_size"));
}

TEST_F(SeerTest, OptionsThatMeanNothingTogetherAreRefused) {
  EXPECT_THAT(refused("seer:threshold=0.004,budget=64").message(), HasSubstr("budget"));
  EXPECT_THAT(refused("seer:budget=64,cap=64").message(), HasSubstr("cap"));
  EXPECT_THAT(refused("seer:block=16").message(), HasSubstr("block"));
  EXPECT_THAT(refused("seer:threshold=2").message(), HasSubstr("threshold"));
  EXPECT_THAT(refused("seer:position=middle").message(), HasSubstr("position"));
}

TEST_F(SeerTest, AMissingOrMisshapenTensorIsNamed) {
  const MapWeights good = source_.weights;
  for (const std::string part : {"linear_k", "linear_q", "knorm", "qnorm"}) {
    SCOPED_TRACE(part);
    source_.weights = good;
    source_.weights.tensors.erase(tensor(1, part));
    const Status missing = refused("seer");
    EXPECT_EQ(missing.code(), StatusCode::kNotFound);
    EXPECT_THAT(missing.message(), HasSubstr(tensor(1, part)));
    source_.weights.add(tensor(1, part), {3, 4});
    const Status misshapen = refused("seer");
    EXPECT_EQ(misshapen.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(misshapen.message(), HasSubstr(tensor(1, part)));
  }
  // Layers that are dense need no gates.
  source_.weights = good;
  source_.weights.tensors.erase(tensor(0, "linear_k"));
  EXPECT_EQ(refused("seer").code(), StatusCode::kNotFound);
  EXPECT_NE(made("seer:dense_layers=1"), nullptr);
  source_.weights.settings["seerattn_start_layer"] = "1";
  const auto later = made("seer");
  ASSERT_NE(later, nullptr);
  EXPECT_EQ(later->descriptor().dense_layers, 1u);
}

TEST_F(SeerTest, ConfigurationsOfOtherGatesAreRefusedByName) {
  const std::pair<const char*, const char*> bad[] = {
      {"seerattn_gate_hidden_size", "72"},
      {"seerattn_gate_hidden_size", "-1"},
      {"seerattn_gate_hidden_size", "4294967296"},
      {"seerattn_gate_hidden_size", "many"},
      {"seerattn_k_seq_pooling_type", "K"},
      {"seerattn_k_seq_pooling_type", "maxmin"},
      {"seerattn_k_seq_pooling_type", "Kmaxmax"},
      {"seerattn_k_seq_pooling_type", "Kmaxminavgmax"},
      {"seerattn_k_seq_pooling_type", "Kmedian"},
      {"seerattn_q_head_pooling_type", "Qmax"},
      {"seerattn_use_qk_norm", "1"},
      {"seerattn_use_rope", "maybe"},
      {"seerattn_start_layer", "0.5"}};
  for (const auto& [key, value] : bad) {
    SCOPED_TRACE(std::string(key) + "=" + value);
    source_.weights.settings.clear();
    source_.weights.settings[key] = value;
    const Status status = refused("seer");
    EXPECT_TRUE(status.code() == StatusCode::kInvalidArgument ||
                status.code() == StatusCode::kUnsupported);
    EXPECT_THAT(status.message(), HasSubstr(key));
  }
  source_.weights.settings = {{"seerattn_gate_hidden_size", "128"}};
  EXPECT_THAT(refused("seer").message(), HasSubstr("must divide"));
}

}  // namespace
}  // namespace spin::sparse
