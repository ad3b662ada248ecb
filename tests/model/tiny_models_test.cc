// SPDX-License-Identifier: Apache-2.0
// The tiny random checkpoints of tests/data/tiny against fp32 golden logits of transformers
// (tools/make_tiny_checkpoints.py): every architecture and RoPE variant, from both file formats.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "kv/sequence_kv.h"
#include "tests/model/harness.h"
#include "tests/support/test_data.h"

namespace spin::model {
namespace {

using testing::argmax;
using testing::Runner;
using testing::test_data;
using testing::test_device;

struct Case {
  std::string model;
  std::string format;  // "safetensors" or "gguf"
};

void PrintTo(const Case& one, std::ostream* out) { *out << one.model << " from " << one.format; }

class TinyModel : public ::testing::TestWithParam<Case> {
 protected:
  std::filesystem::path path() const {
    const std::filesystem::path folder = test_data("tiny/" + GetParam().model);
    return GetParam().format == "gguf" ? folder / (GetParam().model + ".gguf") : folder;
  }
  std::vector<nlohmann::json> cases() const {
    const nlohmann::json golden = nlohmann::json::parse(
        testing::read_file(test_data("tiny/" + GetParam().model + "/golden.json")));
    EXPECT_EQ(golden["cases"].size(), 2u);
    return golden["cases"].get<std::vector<nlohmann::json>>();
  }
};

// Largest difference to the golden logits as a part of their range.
double worst_difference(std::span<const float> logits, const nlohmann::json& expected) {
  const auto values = expected.get<std::vector<float>>();
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  double worst = 0.0;
  for (size_t i = 0; i < values.size(); ++i) {
    // Written so that a NaN is worst of all.
    const double difference = std::abs(logits[i] - values[i]);
    if (!(difference <= worst)) worst = std::isnan(difference) ? INFINITY : difference;
  }
  return worst / (*high - *low);
}

// Checks the kept rows against the golden ones and every row's argmax that is decided by a margin
// of more than twice the tolerance. Returns the worst difference seen.
double compare_case(Runner& runner, const nlohmann::json& one, double tolerance) {
  runner.restart();
  const auto ids = one["prompt_ids"].get<std::vector<uint32_t>>();
  const std::vector<float> logits = runner.feed(ids, ids.size(), ids.size());
  const size_t vocab = logits.size() / ids.size();
  double worst = 0.0;
  for (size_t i = 0; i < one["positions"].size(); ++i) {
    const size_t row = one["positions"][i].get<size_t>();
    const double difference =
        worst_difference(std::span(logits).subspan(row * vocab, vocab), one["logits"][i]);
    EXPECT_LT(difference, tolerance) << one["name"] << " position " << row;
    worst = std::max(worst, difference);
  }
  const double decided = 2.0 * tolerance * one["logit_range"].get<double>();
  for (size_t row = 0; row < ids.size(); ++row) {
    if (one["argmax_margins"][row].get<double>() < decided) continue;
    EXPECT_EQ(argmax(std::span(logits).subspan(row * vocab, vocab)),
              one["argmax"][row].get<uint32_t>())
        << one["name"] << " position " << row;
  }
  return worst;
}

TEST_P(TinyModel, LogitsEqualTheReferenceInFp32) {
  // Sums of up to 384 terms in another order err by about sqrt(384) * 2^-24 = 1.2e-6 of their
  // size, some ten products deep.
  constexpr double kTolerance = 2e-5;
  Runner runner(test_device(), path(), {});
  double worst = 0.0;
  for (const nlohmann::json& one : cases()) {
    worst = std::max(worst, compare_case(runner, one, kTolerance));
  }
  RecordProperty("worst_difference_per_million", std::to_string(1e6 * worst));
}

TEST_P(TinyModel, GreedyTokensEqualTheReferenceWhateverTheChunks) {
  Runner runner(test_device(), path(), {});
  for (const nlohmann::json& one : cases()) {
    const auto ids = one["prompt_ids"].get<std::vector<uint32_t>>();
    const auto expected = one["greedy_ids"].get<std::vector<uint32_t>>();
    for (size_t chunk : {size_t{1}, size_t{7}, ids.size()}) {
      runner.restart();
      EXPECT_EQ(runner.greedy_from(runner.feed(ids, chunk), expected.size()), expected)
          << one["name"] << " in chunks of " << chunk;
    }
  }
}

TEST_P(TinyModel, BFloat16StaysNearTheReference) {
  // The weights are bf16 numbers already. Each of the 4 L + 1 products rounds its input to 8 bits
  // (2^-9 relative), keys and values too; with L = 3 and errors that add up in the worst way that
  // is 13 * 2^-9 + attention's own share, about 5 % of the logit range.
  constexpr double kTolerance = 0.05;
  Runner runner(test_device(), path(),
                {.dtype = layout::DType::kBF16, .kv_dtype = layout::DType::kBF16});
  double worst = 0.0;
  for (const nlohmann::json& one : cases()) {
    worst = std::max(worst, compare_case(runner, one, kTolerance));
  }
  EXPECT_GT(worst, 1e-4) << "bf16 was not used at all";
  RecordProperty("worst_difference_per_million", std::to_string(1e6 * worst));
}

TEST_P(TinyModel, PageSizeDoesNotChangeAnyBit) {
  const nlohmann::json one = cases()[0];
  const auto ids = one["prompt_ids"].get<std::vector<uint32_t>>();
  std::vector<float> first;
  for (uint32_t page_tokens : {8u, 16u, 64u}) {
    Runner runner(test_device(), path(), {.page_tokens = page_tokens});
    const std::vector<float> logits = runner.feed(ids, 7, 2);
    if (first.empty()) first = logits;
    EXPECT_EQ(logits, first) << "pages of " << page_tokens;
  }
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const char* model : {"llama-default", "llama-linear", "llama-llama3rope", "llama-yarn",
                            "qwen2-bias", "qwen2-yarn", "qwen3-default", "qwen3-yarn"}) {
    cases.push_back({model, "safetensors"});
    cases.push_back({model, "gguf"});
  }
  return cases;
}

std::string case_name(const ::testing::TestParamInfo<Case>& param) {
  std::string name = param.param.model + "_" + param.param.format;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(All, TinyModel, ::testing::ValuesIn(all_cases()), case_name);

// A batch row does not depend on its neighbours: two sequences in one step equal their solo runs.
TEST(Decoder, SequencesOfOneStepDoNotTouchEachOther) {
  backend::Device& device = test_device();
  const auto path = test_data("tiny/qwen3-default");
  const auto golden =
      nlohmann::json::parse(testing::read_file(test_data("tiny/qwen3-default/golden.json")));
  std::vector<std::vector<uint32_t>> prompts;
  std::vector<std::vector<float>> solo;
  for (const auto& one : golden["cases"]) {
    prompts.push_back(one["prompt_ids"].get<std::vector<uint32_t>>());
    solo.push_back(Runner(device, path, {}).feed(prompts.back(), 1000));
  }
  auto files = std::move(*open_model(path.string()));
  auto decoder = std::move(*load_decoder(files, device, {}));
  const layout::KvGeometry geometry = files.config.kv_geometry(8, layout::DType::kF32);
  auto pool = std::move(*kv::PagePool::create(device.memory(backend::MemoryKind::kFast), geometry,
                                              {.pages = geometry.pages_for(300)}));
  std::vector<kv::SequenceKv> sequences;
  std::vector<kv::SequenceKv*> pointers;
  std::vector<uint32_t> ids;
  std::vector<uint32_t> positions;
  std::vector<uint64_t> first_rows;
  std::vector<uint32_t> last_rows;
  sequences.reserve(prompts.size());
  for (const auto& prompt : prompts) {
    sequences.push_back(std::move(*kv::SequenceKv::reserve(*pool, prompt.size())));
    sequences.back().begin_step(prompt.size());
    pointers.push_back(&sequences.back());
    first_rows.push_back(ids.size());
    for (uint32_t i = 0; i < prompt.size(); ++i) positions.push_back(i);
    ids.insert(ids.end(), prompt.begin(), prompt.end());
    last_rows.push_back(static_cast<uint32_t>(ids.size() - 1));
  }
  const int64_t vocab = files.config.vocab_size;
  std::vector<float> logits(prompts.size() * static_cast<size_t>(vocab));
  testing::TestAttention attention(device, *pool);
  attention.set_step(pointers, first_rows);
  auto stream = std::move(*device.create_stream("test"));
  decoder->enqueue_forward({.token_ids = ids.data(),
                            .positions = positions.data(),
                            .rows = static_cast<int64_t>(ids.size()),
                            .logit_rows = last_rows.data(),
                            .logit_count = 2,
                            .logits = {.data = logits.data(),
                                       .dtype = layout::DType::kF32,
                                       .rows = 2,
                                       .cols = vocab,
                                       .row_stride = vocab}},
                           attention, *stream);
  ASSERT_TRUE(stream->wait_idle().ok());
  for (size_t i = 0; i < solo.size(); ++i) {
    const auto begin = logits.begin() + static_cast<ptrdiff_t>(i) * vocab;
    EXPECT_EQ(std::vector<float>(begin, begin + vocab), solo[i]) << "sequence " << i;
  }
}

// A prompt that goes through one layer completely before the next, in chunks of any size, ends with
// the bits of the ordinary pass.
TEST(Decoder, LayerByLayerGivesTheBitsOfTheWholePass) {
  backend::Device& device = test_device();
  for (const char* model : {"qwen3-default", "llama-yarn", "qwen2-bias"}) {
    const auto path = test_data(std::string("tiny/") + model);
    const auto golden = nlohmann::json::parse(testing::read_file(path / "golden.json"))["cases"][0];
    const auto ids = golden["prompt_ids"].get<std::vector<uint32_t>>();
    const std::vector<float> expected = Runner(device, path, {}).feed(ids, ids.size(), 2);
    for (const int64_t chunk : {1, 5, 64}) {
      auto files = std::move(*open_model(path.string()));
      LoadOptions load;
      load.max_rows = chunk;
      auto decoder = std::move(*load_decoder(files, device, load));
      const ModelConfig& config = decoder->config();
      const layout::KvGeometry geometry = config.kv_geometry(8, layout::DType::kF32);
      auto pool =
          std::move(*kv::PagePool::create(device.memory(backend::MemoryKind::kFast), geometry,
                                          {.pages = geometry.pages_for(ids.size())}));
      const auto tokens = static_cast<int64_t>(ids.size());
      std::vector<float> states(ids.size() * config.hidden);
      const backend::TensorRef hidden = {.data = states.data(),
                                         .dtype = layout::DType::kF32,
                                         .rows = tokens,
                                         .cols = config.hidden,
                                         .row_stride = config.hidden};
      std::vector<uint32_t> positions(ids.size());
      for (uint32_t i = 0; i < positions.size(); ++i) positions[i] = i;
      std::vector<float> logits(2 * size_t{config.vocab_size});
      auto stream = std::move(*device.create_stream("test"));
      testing::TestAttention attention(device, *pool);
      for (uint32_t layer = 0; layer < config.layers; ++layer) {
        // Sequences count tokens over all layers; here each layer begins anew on the same pages.
        auto sequence = std::move(*kv::SequenceKv::reserve(*pool, ids.size()));
        kv::SequenceKv* const sequences[] = {&sequence};
        const uint64_t first_rows[] = {0};
        for (int64_t first = 0; first < tokens; first += chunk) {
          const int64_t count = std::min(chunk, tokens - first);
          const backend::TensorRef rows = hidden.row_range(first, count);
          sequence.begin_step(static_cast<uint64_t>(count));
          attention.set_step(sequences, first_rows);
          if (layer == 0) decoder->enqueue_embedding(ids.data() + first, rows, *stream);
          decoder->enqueue_layer(layer, positions.data() + first, rows, attention, *stream);
          ASSERT_TRUE(stream->wait_idle().ok());
          sequence.commit_step();
        }
      }
      const uint32_t last[] = {static_cast<uint32_t>(tokens - 2),
                               static_cast<uint32_t>(tokens - 1)};
      decoder->enqueue_logits(hidden, last,
                              {.data = logits.data(),
                               .dtype = layout::DType::kF32,
                               .rows = 2,
                               .cols = config.vocab_size,
                               .row_stride = config.vocab_size},
                              *stream);
      ASSERT_TRUE(stream->wait_idle().ok());
      EXPECT_EQ(logits, expected) << model << " in chunks of " << chunk;
    }
  }
}

}  // namespace
}  // namespace spin::model
