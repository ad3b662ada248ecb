// SPDX-License-Identifier: Apache-2.0
// Real checkpoints through the whole engine: create_engine, submit, greedy tokens.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "spin/engine.h"
#include "tests/engine/fake_support.h"
#include "tests/engine/recording_sink.h"
#include "tests/support/test_data.h"

namespace spin {
namespace {

using nlohmann::json;
using testing::expect_clean;
using testing::kReducedCounts;
using testing::Outcome;
using testing::RecordingSink;
using testing::run_request;

std::unique_ptr<Engine> open_engine(EngineOptions options) {
  options.dtype = DTypeChoice::kFloat32;
  auto engine = create_engine(options);
  EXPECT_TRUE(engine.ok()) << engine.status().to_string();
  return engine.ok() ? std::move(*engine) : nullptr;
}

GenerateRequest greedy(std::vector<TokenId> prompt, uint64_t max_tokens) {
  GenerateRequest request;
  request.prompt = std::move(prompt);
  request.sampling.temperature = 0;
  request.sampling.max_tokens = max_tokens;
  return request;
}

void expect_golden_tokens(Engine& engine, const json& golden) {
  for (const json& item : golden.at("cases")) {
    const auto expected = item.at("greedy_ids").get<std::vector<TokenId>>();
    GenerateRequest request =
        greedy(item.at("prompt_ids").get<std::vector<TokenId>>(), expected.size());
    request.sampling.ignore_eos = true;
    const Outcome outcome = run_request(engine, std::move(request));
    ASSERT_TRUE(outcome.choices.count(0)) << outcome.result.status.to_string();
    EXPECT_EQ(outcome.choices.at(0).tokens, expected) << item.at("name");
  }
}

TEST(RealModel, TinyCheckpointsGiveTheReferenceTokens) {
  int checkpoints = 0;
  for (const auto& entry : std::filesystem::directory_iterator(testing::test_data("tiny"))) {
    const json golden = json::parse(testing::read_file(entry.path() / "golden.json"));
    const std::string name = entry.path().filename().string();
    std::vector<std::string> models = {entry.path().string()};
    const auto gguf = entry.path() / (name + ".gguf");
    if (std::filesystem::exists(gguf)) models.push_back(gguf.string());
    for (const std::string& model : models) {
      SCOPED_TRACE(name + (model == models[0] ? "" : " (GGUF)"));
      EngineOptions options;
      options.model = model;
      options.kv_cache_memory_bytes = 8 << 20;
      const auto engine = open_engine(options);
      ASSERT_NE(engine, nullptr);
      EXPECT_EQ(engine->model_info().architecture, name.substr(0, name.find('-')));
      expect_golden_tokens(*engine, golden);
      expect_clean(*engine);
      ++checkpoints;
    }
  }
  EXPECT_GE(checkpoints, 8);
}

TEST(RealModel, PromptLogprobsDoNotDependOnTheChunks) {
  std::vector<std::vector<TokenLogprob>> seen;
  for (const uint32_t step_tokens : {512u, 7u}) {
    EngineOptions options;
    options.model = testing::test_data("tiny/qwen3-default").string();
    options.kv_cache_memory_bytes = 8 << 20;
    options.max_num_seqs = 4;
    options.max_num_batched_tokens = step_tokens;
    const auto engine = open_engine(options);
    ASSERT_NE(engine, nullptr);
    std::vector<TokenId> prompt;
    for (TokenId i = 0; i < 100; ++i) prompt.push_back((i * 37 + 5) % 300);
    GenerateRequest request = greedy(prompt, 2);
    request.sampling.prompt_logprobs = 3;
    const Outcome outcome = run_request(*engine, std::move(request));
    ASSERT_EQ(outcome.prompt_logprobs.size(), 1u);
    ASSERT_EQ(outcome.prompt_logprobs[0].tokens.size(), prompt.size());
    seen.push_back(outcome.prompt_logprobs[0].tokens);
  }
  for (size_t i = 1; i < seen[0].size(); ++i) {
    EXPECT_EQ(seen[0][i].id, seen[1][i].id);
    EXPECT_EQ(seen[0][i].logprob, seen[1][i].logprob) << i;
    ASSERT_EQ(seen[0][i].top.size(), 3u);
    EXPECT_GE(seen[0][i].top[0].logprob, seen[0][i].logprob);
  }
}

struct NeedleItem {
  std::vector<TokenId> prompt;
  std::vector<TokenId> answer;
};

std::vector<NeedleItem> needle_items() {
  const json vectors =
      json::parse(testing::read_file(testing::test_data("needle/vectors_q8_0.json")));
  std::vector<NeedleItem> items;
  for (const json& item : vectors.at("items")) {
    NeedleItem one{item.at("prompt_ids").get<std::vector<TokenId>>(),
                   item.at("answer_ids").get<std::vector<TokenId>>()};
    if (one.prompt.size() < 600) items.push_back(std::move(one));
  }
  return items;
}

EngineOptions needle_options() {
  EngineOptions options;
  options.model = testing::source_path("models/needle-29m").string();
  options.max_model_len = 1024;
  options.max_num_seqs = 16;
  options.kv_cache_memory_bytes = uint64_t{512} << 20;
  return options;
}

// 8 tokens of each answer suffice: they hold the number that the prompt hides.
constexpr uint64_t kNeedleTokens = 8;

std::vector<TokenId> front(const std::vector<TokenId>& ids) {
  return {ids.begin(),
          ids.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(ids.size(), kNeedleTokens))};
}

// Under a sanitizer a whole prompt takes too long; its beginning still shows races.
std::vector<TokenId> prompt_of(const NeedleItem& item) {
  if (!kReducedCounts) return item.prompt;
  return {item.prompt.begin(), item.prompt.begin() + 40};
}

TEST(RealModel, NeedleAnswersSixteenAtOnceAsAlone) {
  const auto engine = open_engine(needle_options());
  ASSERT_NE(engine, nullptr);
  const std::vector<NeedleItem> items = needle_items();
  ASSERT_GE(items.size(), 8u);
  const size_t count = kReducedCounts ? 4 : 16;
  const uint64_t tokens = kReducedCounts ? 3 : kNeedleTokens;
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (size_t i = 0; i < count; ++i) {
    sinks.push_back(std::make_shared<RecordingSink>());
    GenerateRequest request = greedy(prompt_of(items[i % items.size()]), tokens);
    ASSERT_TRUE(engine->submit(std::move(request), sinks.back()).ok());
  }
  for (size_t i = 0; i < count; ++i) {
    const NeedleItem& item = items[i % items.size()];
    const std::vector<TokenId> together = sinks[i]->wait().choices.at(0).tokens;
    // The reference ran each alone, on the same weights; two are also run alone here.
    if (!kReducedCounts) {
      EXPECT_EQ(together, front(item.answer)) << i;
    }
    if (kReducedCounts || i < 2) {
      EXPECT_EQ(run_request(*engine, greedy(prompt_of(item), tokens)).choices.at(0).tokens,
                together);
    }
  }
  expect_clean(*engine);
}

TEST(RealModel, ChunkSizesDoNotChangeTokens) {
  const std::vector<NeedleItem> items = needle_items();
  std::vector<TokenId> expected;
  if (!kReducedCounts) expected = front(items[2].answer);
  for (const uint32_t chunk : {16u, 64u, 512u}) {
    if (kReducedCounts && chunk == 512) continue;
    EngineOptions options = needle_options();
    options.max_num_batched_tokens = chunk;
    const auto engine = open_engine(options);
    ASSERT_NE(engine, nullptr);
    const uint64_t tokens = kReducedCounts ? 3 : kNeedleTokens;
    const Outcome outcome = run_request(*engine, greedy(prompt_of(items[2]), tokens));
    if (expected.empty()) expected = outcome.choices.at(0).tokens;
    EXPECT_EQ(outcome.choices.at(0).tokens, expected) << chunk;
  }
}

TEST(CreateEngine, TellsWhatItLoaded) {
  const auto engine = open_engine(needle_options());
  ASSERT_NE(engine, nullptr);
  const ModelInfo& info = engine->model_info();
  EXPECT_EQ(info.name, "needle-29m");
  EXPECT_EQ(info.architecture, "qwen3");
  EXPECT_EQ(info.dtype, "float32");
  EXPECT_EQ(info.max_model_len, 1024u);
  EXPECT_GE(info.kv_capacity_tokens, 1024u);
  EXPECT_LE(info.kv_cache_bytes, uint64_t{512} << 20);
  EXPECT_GT(info.parameters, 25'000'000u);
  EXPECT_GT(info.weight_bytes, 4 * info.parameters - 1000);
  EXPECT_GT(info.threads, 0u);
  const auto ids = engine->tokenize("A needle.", true);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(*engine->detokenize(*ids, true), "A needle.");
  // No chat template: chat is refused, and the message says what to do.
  const std::vector<ChatMessage> messages = {{"user", "hi"}};
  const auto chat = engine->encode_chat(messages, {});
  EXPECT_EQ(chat.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(chat.status().message().find("--chat-format"), std::string::npos);
}

TEST(CreateEngine, RefusesWithNumbersBeforeLoading) {
  bool loading = false;
  const LoadProgress progress = [&loading](double, std::string_view) {
    loading = true;
    return true;
  };
  EngineOptions options = needle_options();
  options.kv_cache_memory_bytes = uint64_t{1} << 50;
  auto engine = create_engine(options, progress);
  EXPECT_EQ(engine.status().code(), StatusCode::kResourceExhausted);
  for (const char* part : {"need 1073741824.0 MiB", "have ", "reserve "}) {
    EXPECT_NE(engine.status().message().find(part), std::string::npos) << engine.status().message();
  }
  options = needle_options();
  options.max_model_len = 131'073;
  engine = create_engine(options, progress);
  EXPECT_EQ(engine.status().param(), "max_model_len");
  EXPECT_NE(engine.status().message().find("131073"), std::string::npos);
  EXPECT_NE(engine.status().message().find("131072"), std::string::npos);
  options = needle_options();
  options.chat_format = "jinja";
  engine = create_engine(options, progress);
  EXPECT_EQ(engine.status().param(), "chat_format");
  options = needle_options();
  options.tokenizer = testing::test_data("tiny/qwen3-default").string();
  EXPECT_TRUE(create_engine(options, progress).ok());  // fewer tokens than rows: padding
  EXPECT_TRUE(loading);
  loading = false;
  options = needle_options();
  options.model = testing::test_data("tiny/qwen3-default").string();
  options.max_model_len = 64;
  options.tokenizer = testing::source_path("models/needle-29m").string();
  engine = create_engine(options, progress);
  EXPECT_EQ(engine.status().param(), "tokenizer");
  options.model = testing::test_data("no-such-model").string();
  EXPECT_EQ(create_engine(options, progress).status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(loading);
}

TEST(CreateEngine, TakesDefaultsAndEndIdsFromGenerationConfig) {
  const auto source = testing::test_data("tiny/qwen3-default");
  const json golden = json::parse(testing::read_file(source / "golden.json")).at("cases").at(0);
  const auto greedy_ids = golden.at("greedy_ids").get<std::vector<TokenId>>();
  testing::TempDir dir;
  for (const char* file : {"config.json", "model.safetensors", "tokenizer.json"}) {
    dir.write(file, testing::read_file(source / file));
  }
  const json generation = {{"temperature", 0.5},
                           {"top_k", 20},
                           {"top_p", 0.75},
                           {"max_new_tokens", 5},
                           {"eos_token_id", {319, greedy_ids.at(0)}}};
  dir.write("generation_config.json", generation.dump());
  for (const char* choice : {"auto", "vllm"}) {
    const bool from_file = std::string_view(choice) == "auto";
    EngineOptions options;
    options.model = dir.path().string();
    options.kv_cache_memory_bytes = 8 << 20;
    options.generation_config = choice;
    options.served_model_name = "renamed";
    const auto engine = open_engine(options);
    ASSERT_NE(engine, nullptr);
    EXPECT_EQ(engine->model_info().name, "renamed");
    EXPECT_EQ(engine->default_sampling().temperature, from_file ? 0.5f : 1.0f);
    EXPECT_EQ(engine->default_sampling().top_k, from_file ? 20 : 0);
    EXPECT_EQ(engine->default_sampling().top_p, from_file ? 0.75f : 1.0f);
    // Every end id counts, the first token is one here.
    GenerateRequest request = greedy(golden.at("prompt_ids").get<std::vector<TokenId>>(), 8);
    const Outcome ended = run_request(*engine, request);
    EXPECT_EQ(ended.choices.at(0).finish, FinishReason::kStop);
    EXPECT_EQ(ended.choices.at(0).tokens, (std::vector<TokenId>{greedy_ids.at(0)}));
    // The file's output limit holds for requests that name none.
    request.sampling.max_tokens.reset();
    request.sampling.ignore_eos = true;
    const uint64_t left = engine->model_info().max_model_len - request.prompt.size();
    EXPECT_EQ(run_request(*engine, request).result.usage.completion_tokens, from_file ? 5 : left);
  }
}

TEST(CreateEngine, ALoadCanBeCancelled) {
  double last = 0;
  const auto engine = create_engine(needle_options(), [&last](double fraction, std::string_view) {
    last = fraction;
    return fraction < 0.3;
  });
  EXPECT_EQ(engine.status().code(), StatusCode::kCancelled);
  EXPECT_GE(last, 0.3);
  EXPECT_LT(last, 1.0);
}

}  // namespace
}  // namespace spin
