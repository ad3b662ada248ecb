// SPDX-License-Identifier: Apache-2.0
// The model's shape from GGUF metadata: what is understood, what is refused and by which name.
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "io/gguf.h"
#include "model/model_config.h"
#include "tests/support/gguf_builder.h"

namespace spin::model {
namespace {

using testing::GgufBuilder;

// Keys of a good Llama; a test changes or removes some.
struct Metadata {
  std::string architecture = "llama";
  std::vector<std::pair<std::string, uint32_t>> integers = {
      {"block_count", 2},          {"embedding_length", 24},     {"feed_forward_length", 40},
      {"context_length", 128},     {"attention.head_count", 3},  {"attention.head_count_kv", 1},
      {"attention.key_length", 8}, {"attention.value_length", 8}};
  std::vector<std::pair<std::string, float>> numbers = {{"attention.layer_norm_rms_epsilon", 1e-5f},
                                                        {"rope.freq_base", 10000.0f}};
  std::vector<std::pair<std::string, std::string>> texts;
  std::vector<std::pair<std::string, uint32_t>> tokens = {{"bos_token_id", 1}, {"eos_token_id", 2}};
  uint64_t vocab = 16;  // 0: no tensor
};

Result<ModelConfig> config_of(const Metadata& metadata) {
  GgufBuilder builder;
  builder.add_string("general.architecture", metadata.architecture);
  const std::string prefix = metadata.architecture + ".";
  for (const auto& [name, value] : metadata.integers) builder.add_u32(prefix + name, value);
  for (const auto& [name, value] : metadata.numbers) builder.add_f32(prefix + name, value);
  for (const auto& [name, value] : metadata.texts) builder.add_string(prefix + name, value);
  for (const auto& [name, value] : metadata.tokens) {
    builder.add_u32("tokenizer.ggml." + name, value);
  }
  if (metadata.vocab > 0) {
    builder.add_f32_tensor("token_embd.weight", {24, metadata.vocab},
                           std::vector<float>(24 * metadata.vocab));
  }
  const std::string bytes = builder.build();
  auto file =
      io::GgufFile::parse(io::MappedFile::borrow(std::as_bytes(std::span(bytes)), "test.gguf"));
  EXPECT_TRUE(file.ok()) << file.status().to_string();
  return config_from_gguf((*file)->metadata(), **file);
}

template <typename Value>
void put(std::vector<std::pair<std::string, Value>>& list, const std::string& name, Value value) {
  std::erase_if(list, [&](const auto& one) { return one.first == name; });
  list.emplace_back(name, std::move(value));
}

void expect_refused(const Metadata& metadata, StatusCode code, std::string_view named) {
  const Status status = config_of(metadata).status();
  EXPECT_EQ(status.code(), code) << status.to_string();
  EXPECT_NE(status.message().find(named), std::string::npos)
      << "expected '" << named << "' in: " << status.message();
}

TEST(ConfigGguf, ReadsAGoodFile) {
  const auto config = config_of({});
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config->layers, 2u);
  EXPECT_EQ(config->vocab_size, 16u);
  EXPECT_TRUE(config->tie_embeddings);
  EXPECT_EQ(config->bos_id, 1u);
  EXPECT_EQ(config->eos_ids, std::vector<uint32_t>{2});
  EXPECT_EQ(config->rope.scaling, RopeScaling::kNone);
}

TEST(ConfigGguf, EndOfTurnEndsAReplyToo) {
  Metadata metadata;
  put(metadata.tokens, "eot_token_id", 9u);
  put(metadata.tokens, "eom_token_id", 2u);
  EXPECT_EQ(config_of(metadata)->eos_ids, (std::vector<uint32_t>{2, 9}));
  put(metadata.tokens, "eot_token_id", 16u);
  expect_refused(metadata, StatusCode::kInvalidArgument, "eot_token_id");
}

TEST(ConfigGguf, FillsInWhatTheFormatFillsIn) {
  Metadata metadata;
  std::erase_if(metadata.integers, [](const auto& one) {
    return one.first == "attention.head_count_kv" || one.first == "attention.key_length" ||
           one.first == "attention.value_length";
  });
  std::erase_if(metadata.numbers, [](const auto& one) { return one.first == "rope.freq_base"; });
  const auto config = config_of(metadata);
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config->kv_heads, 3u);
  EXPECT_EQ(config->head_dim, 8u);
  EXPECT_EQ(config->rope.theta, 10000.0);
}

TEST(ConfigGguf, ReadsRopeScaling) {
  Metadata metadata;
  put(metadata.numbers, "rope.scaling.factor", 4.0f);
  EXPECT_EQ(config_of(metadata)->rope.scaling, RopeScaling::kLinear) << "linear without a type";
  put(metadata.texts, "rope.scaling.type", std::string("yarn"));
  put(metadata.integers, "rope.scaling.original_context_length", 32u);
  put(metadata.numbers, "rope.scaling.attn_factor", 2.0f);
  const auto yarn = config_of(metadata);
  ASSERT_TRUE(yarn.ok()) << yarn.status().to_string();
  EXPECT_EQ(yarn->rope.scaling, RopeScaling::kYarn);
  EXPECT_EQ(yarn->rope.original_positions, 32u);
  EXPECT_NEAR(yarn->rope.attention_factor.value(), 2 * 1.13862943611, 1e-9);
  put(metadata.texts, "rope.scaling.type", std::string("none"));
  EXPECT_EQ(config_of(metadata)->rope.scaling, RopeScaling::kNone);
  put(metadata.texts, "rope.scaling.type", std::string("longrope"));
  expect_refused(metadata, StatusCode::kUnsupported, "longrope");
  Metadata old;
  put(old.numbers, "rope.scale_linear", 8.0f);
  EXPECT_EQ(config_of(old)->rope.factor, 8.0);
}

TEST(ConfigGguf, RefusesMissingAndImpossibleNumbersByName) {
  for (const auto& [name, good] : Metadata().integers) {
    SCOPED_TRACE(name);
    const bool optional = name == "attention.head_count_kv" || name == "attention.key_length" ||
                          name == "attention.value_length";
    const std::string key = name;
    Metadata metadata;
    if (!optional) {
      std::erase_if(metadata.integers, [&](const auto& one) { return one.first == key; });
      EXPECT_FALSE(config_of(metadata).ok());
      EXPECT_NE(config_of(metadata).status().message().find(key), std::string::npos);
    }
    for (uint32_t bad : {0u, 0xFFFFFFFFu}) {
      metadata = {};
      put(metadata.integers, key, bad);
      expect_refused(metadata, StatusCode::kInvalidArgument, key);
    }
    metadata = {};
    std::erase_if(metadata.integers, [&](const auto& one) { return one.first == key; });
    put(metadata.texts, key, std::string("8"));
    EXPECT_EQ(config_of(metadata).status().code(), StatusCode::kInvalidArgument);
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (float bad : {nan, -1.0f, 0.0f, std::numeric_limits<float>::infinity()}) {
    Metadata metadata;
    put(metadata.numbers, "attention.layer_norm_rms_epsilon", bad);
    EXPECT_EQ(config_of(metadata).status().code(), StatusCode::kInvalidArgument) << bad;
    metadata = {};
    put(metadata.numbers, "rope.freq_base", bad);
    expect_refused(metadata, StatusCode::kInvalidArgument, "rope.freq_base");
  }
  Metadata without_epsilon;
  std::erase_if(without_epsilon.numbers,
                [](const auto& one) { return one.first != "rope.freq_base"; });
  expect_refused(without_epsilon, StatusCode::kInvalidArgument, "layer_norm_rms_epsilon");
}

TEST(ConfigGguf, RefusesUnsupportedFeaturesByName) {
  Metadata metadata;
  metadata.architecture = "gemma2";
  expect_refused(metadata, StatusCode::kUnsupported, "gemma2");
  const std::pair<const char*, uint32_t> kIntegers[] = {{"expert_count", 8},
                                                        {"attention.sliding_window", 64},
                                                        {"attention.value_length", 16},
                                                        {"rope.dimension_count", 4}};
  const char* kNames[] = {"expert_count", "sliding_window", "value size", "part of the head"};
  for (size_t i = 0; i < 4; ++i) {
    metadata = {};
    put(metadata.integers, kIntegers[i].first, kIntegers[i].second);
    expect_refused(metadata, StatusCode::kUnsupported, kNames[i]);
  }
  metadata = {};
  put(metadata.integers, "expert_count", 0u);
  put(metadata.integers, "attention.sliding_window", 0u);
  EXPECT_TRUE(config_of(metadata).ok()) << "0 says that there is none";
  metadata = {};
  put(metadata.texts, "rope.scaling.type", std::string("yarn"));
  put(metadata.numbers, "rope.scaling.factor", 4.0f);
  put(metadata.numbers, "rope.scaling.yarn_log_multiplier", 0.1f);
  expect_refused(metadata, StatusCode::kUnsupported, "yarn_log_multiplier");
}

TEST(ConfigGguf, AVocabularyAloneCannotGenerate) {
  Metadata metadata;
  metadata.vocab = 0;
  expect_refused(metadata, StatusCode::kUnsupported, "vocabulary");
}

}  // namespace
}  // namespace spin::model
