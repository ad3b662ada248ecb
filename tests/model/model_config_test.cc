// SPDX-License-Identifier: Apache-2.0
// config.json and generation_config.json: what transformers 4.x and 5.x write is understood, every
// malformed field and every unsupported feature is refused by name.
#include "model/model_config.h"

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "model/model_limits.h"
#include "tests/support/test_data.h"

namespace spin::model {
namespace {

using nlohmann::json;

json llama_config() {
  return json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false,
    "bos_token_id": 1, "eos_token_id": 2, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 100000,
    "tie_word_embeddings": true, "torch_dtype": "bfloat16", "vocab_size": 49152})");
}

json qwen_config(const std::string& type) {
  json config = llama_config();
  config["model_type"] = type;
  config["architectures"] = {type == "qwen2" ? "Qwen2ForCausalLM" : "Qwen3ForCausalLM"};
  return config;
}

Status status_of(const json& config) { return config_from_json(config.dump()).status(); }

ModelConfig parsed(const json& config) {
  auto result = config_from_json(config.dump());
  EXPECT_TRUE(result.ok()) << result.status().to_string();
  return result.ok() ? *result : ModelConfig();
}

void expect_refused(const json& config, StatusCode code, std::string_view named) {
  const Status status = status_of(config);
  EXPECT_EQ(status.code(), code) << status.to_string() << "\n" << config.dump();
  EXPECT_NE(status.message().find(named), std::string::npos)
      << "expected '" << named << "' in: " << status.message();
}

TEST(ModelConfig, ReadsALlamaOfTransformers4) {
  const ModelConfig config = parsed(llama_config());
  EXPECT_EQ(config.architecture, Architecture::kLlama);
  EXPECT_EQ(config.layers, 30u);
  EXPECT_EQ(config.hidden, 576u);
  EXPECT_EQ(config.intermediate, 1536u);
  EXPECT_EQ(config.q_heads, 9u);
  EXPECT_EQ(config.kv_heads, 3u);
  EXPECT_EQ(config.head_dim, 64u);
  EXPECT_EQ(config.vocab_size, 49152u);
  EXPECT_FLOAT_EQ(config.rms_epsilon, 1e-5f);
  EXPECT_EQ(config.rope.theta, 100000.0);
  EXPECT_EQ(config.rope.scaling, RopeScaling::kNone);
  EXPECT_TRUE(config.tie_embeddings);
  EXPECT_FALSE(config.qkv_bias);
  EXPECT_FALSE(config.qk_norm);
  EXPECT_EQ(config.max_positions, 8192u);
  EXPECT_EQ(config.bos_id, 1u);
  EXPECT_EQ(config.eos_ids, std::vector<uint32_t>{2});
  EXPECT_EQ(config.kv_geometry(8, layout::DType::kBF16).token_bytes(), 23040u);
}

TEST(ModelConfig, KnowsWhatQwen2AndQwen3AddToLlama) {
  const ModelConfig qwen2 = parsed(qwen_config("qwen2"));
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.qk_norm);
  const ModelConfig qwen3 = parsed(qwen_config("qwen3"));
  EXPECT_FALSE(qwen3.qkv_bias);
  EXPECT_TRUE(qwen3.qk_norm);
}

TEST(ModelConfig, FillsInWhatTheClassFillsIn) {
  json llama = llama_config();
  for (const char* name : {"head_dim", "num_key_value_heads", "rope_theta", "rope_scaling",
                           "tie_word_embeddings", "bos_token_id", "eos_token_id", "architectures",
                           "hidden_act", "attention_bias", "torch_dtype"}) {
    llama.erase(name);
  }
  const ModelConfig config = parsed(llama);
  EXPECT_EQ(config.head_dim, 64u);
  EXPECT_EQ(config.kv_heads, 9u);
  EXPECT_EQ(config.rope.theta, 10000.0);
  EXPECT_FALSE(config.tie_embeddings);
  EXPECT_FALSE(config.bos_id.has_value());
  EXPECT_TRUE(config.eos_ids.empty());
  json qwen3 = qwen_config("qwen3");
  qwen3.erase("head_dim");
  EXPECT_EQ(parsed(qwen3).head_dim, 128u);
  json by_class = llama_config();
  by_class.erase("model_type");
  EXPECT_EQ(parsed(by_class).architecture, Architecture::kLlama);
}

TEST(ModelConfig, ReadsRopeParametersOfTransformers5) {
  json config = llama_config();
  config.erase("rope_theta");
  config.erase("rope_scaling");
  config["dtype"] = "bfloat16";
  config["rope_parameters"] = {
      {"rope_type", "yarn"},      {"factor", 4.0},
      {"rope_theta", 1e6},        {"beta_fast", 8.0},
      {"beta_slow", 0.5},         {"truncate", false},
      {"attention_factor", 1.25}, {"original_max_position_embeddings", 2048}};
  const RopeConfig rope = parsed(config).rope;
  EXPECT_EQ(rope.scaling, RopeScaling::kYarn);
  EXPECT_EQ(rope.theta, 1e6);
  EXPECT_EQ(rope.factor, 4.0);
  EXPECT_EQ(rope.beta_fast, 8.0);
  EXPECT_EQ(rope.beta_slow, 0.5);
  EXPECT_FALSE(rope.truncate);
  EXPECT_EQ(rope.attention_factor, 1.25);
  EXPECT_EQ(rope.original_positions, 2048u);
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5e5}};
  EXPECT_EQ(parsed(config).rope.scaling, RopeScaling::kNone);
  EXPECT_EQ(parsed(config).rope.theta, 5e5);
}

TEST(ModelConfig, ReadsRopeScalingOfTransformers4) {
  json config = llama_config();
  config["rope_scaling"] = {{"type", "linear"}, {"factor", 2}};
  EXPECT_EQ(parsed(config).rope.scaling, RopeScaling::kLinear);
  EXPECT_EQ(parsed(config).rope.factor, 2.0);
  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 8192}};
  EXPECT_EQ(parsed(config).rope.scaling, RopeScaling::kLlama3);
  EXPECT_EQ(parsed(config).rope.original_positions, 8192u);
  config["rope_scaling"] = {{"type", "yarn"}, {"factor", 4.0}, {"beta_fast", nullptr}};
  EXPECT_EQ(parsed(config).rope.original_positions, 8192u) << "falls back to the context length";
  EXPECT_EQ(parsed(config).rope.beta_fast, 32.0);
}

TEST(ModelConfig, ReadsListsOfEndTokens) {
  json config = llama_config();
  config["eos_token_id"] = {2, 7, 9};
  EXPECT_EQ(parsed(config).eos_ids, (std::vector<uint32_t>{2, 7, 9}));
  config["eos_token_id"] = nullptr;
  EXPECT_TRUE(parsed(config).eos_ids.empty());
}

TEST(ModelConfig, NeverFollowsAutoMap) {
  json config = llama_config();
  config["auto_map"] = {{"AutoModelForCausalLM", "evil.py--Model"}};
  config["custom_pipelines"] = {{"text-generation", "x"}};
  EXPECT_EQ(parsed(config).layers, 30u);
}

TEST(ModelConfig, DualChunkAttentionEndsTheContextAtItsThreshold) {
  json config = qwen_config("qwen2");
  config["max_position_embeddings"] = 1010000;
  config["dual_chunk_attention_config"] = {
      {"chunk_size", 262144}, {"local_size", 8192}, {"original_max_position_embeddings", 262144}};
  EXPECT_EQ(parsed(config).max_positions, 262144u);
  config["dual_chunk_attention_config"] = json::object();
  expect_refused(config, StatusCode::kInvalidArgument, "original_max_position_embeddings");
}

TEST(ModelConfig, WindowsThatAreNotInUseDoNotMatter) {
  json config = qwen_config("qwen2");
  config["sliding_window"] = 4096;
  config["max_window_layers"] = 10;
  config["use_sliding_window"] = false;
  EXPECT_TRUE(status_of(config).ok());
  config["use_sliding_window"] = true;
  expect_refused(config, StatusCode::kUnsupported, "use_sliding_window");
  config["max_window_layers"] = 30;
  EXPECT_TRUE(status_of(config).ok()) << "no layer has the window";
  config["max_window_layers"] = 10;
  config["sliding_window"] = 8192;
  EXPECT_TRUE(status_of(config).ok()) << "the window covers the context";
}

// Every field the decoder depends on: missing, of the wrong type, zero, negative, huge.
TEST(ModelConfig, RefusesMalformedFieldsByName) {
  struct Field {
    const char* name;
    bool required;
  };
  constexpr Field kIntegers[] = {{"hidden_size", true},
                                 {"intermediate_size", true},
                                 {"max_position_embeddings", true},
                                 {"num_attention_heads", true},
                                 {"num_hidden_layers", true},
                                 {"vocab_size", true},
                                 {"head_dim", false},
                                 {"num_key_value_heads", false}};
  for (const Field& field : kIntegers) {
    SCOPED_TRACE(field.name);
    json config = llama_config();
    config.erase(field.name);
    if (field.required) expect_refused(config, StatusCode::kInvalidArgument, field.name);
    const std::vector<json> bad = {0,
                                   -1,
                                   1.5,
                                   "64",
                                   true,
                                   json::array({1}),
                                   json::object(),
                                   4294967297ull,
                                   18446744073709551615ull,
                                   1e30};
    for (const json& value : bad) {
      config = llama_config();
      config[field.name] = value;
      expect_refused(config, StatusCode::kInvalidArgument, field.name);
    }
  }
  for (const char* name : {"rms_norm_eps", "rope_theta"}) {
    SCOPED_TRACE(name);
    for (const json& value : std::vector<json>{0, -1e-5, 1e300, "1e-5", false, json::array()}) {
      json config = llama_config();
      config[name] = value;
      expect_refused(config, StatusCode::kInvalidArgument, name);
    }
  }
  json no_eps = llama_config();
  no_eps.erase("rms_norm_eps");
  expect_refused(no_eps, StatusCode::kInvalidArgument, "rms_norm_eps");
  json qwen = qwen_config("qwen3");
  qwen.erase("num_key_value_heads");
  expect_refused(qwen, StatusCode::kInvalidArgument, "num_key_value_heads");
}

TEST(ModelConfig, RefusesOtherTypesThanExpected) {
  const std::vector<std::pair<const char*, json>> kBad = {{"tie_word_embeddings", 1},
                                                          {"attention_bias", "no"},
                                                          {"hidden_act", 3},
                                                          {"model_type", 7},
                                                          {"architectures", "Llama"},
                                                          {"architectures", json::array()},
                                                          {"architectures", {1}},
                                                          {"bos_token_id", "1"},
                                                          {"bos_token_id", -1},
                                                          {"bos_token_id", 49152},
                                                          {"eos_token_id", {2, 49152}},
                                                          {"eos_token_id", {2, "3"}},
                                                          {"eos_token_id", 1.0},
                                                          {"rope_scaling", 4},
                                                          {"rope_scaling", "yarn"},
                                                          {"rope_parameters", json::array({1})},
                                                          {"mlp_bias", 0},
                                                          {"partial_rotary_factor", "half"}};
  for (const auto& [name, value] : kBad) {
    json config = llama_config();
    config[name] = value;
    expect_refused(config, StatusCode::kInvalidArgument, name);
  }
  json many = llama_config();
  many["eos_token_id"] = std::vector<int>(kMaxStopIds + 1, 2);
  expect_refused(many, StatusCode::kInvalidArgument, "eos_token_id");
}

TEST(ModelConfig, RefusesPartsThatDoNotFitEachOther) {
  json config = llama_config();
  config["num_key_value_heads"] = 4;  // 9 query heads
  expect_refused(config, StatusCode::kInvalidArgument, "multiple of the number of KV heads");
  config = llama_config();
  config["head_dim"] = 60;
  expect_refused(config, StatusCode::kInvalidArgument, "multiple of 8");
  config = llama_config();
  config.erase("head_dim");
  config["hidden_size"] = 577;
  expect_refused(config, StatusCode::kInvalidArgument, "num_attention_heads");
  config = llama_config();
  config["num_attention_heads"] = 9;
  config["num_key_value_heads"] = 1;
  expect_refused(config, StatusCode::kUnsupported, "share a KV head");
}

TEST(ModelConfig, RefusesUnsupportedFeaturesByName) {
  const std::vector<std::pair<json, const char*>> kFeatures = {
      {{{"quantization_config", {{"bits", 4}}}}, "quantization_config"},
      {{{"hidden_act", "gelu"}}, "hidden_act"},
      {{{"attention_bias", true}}, "attention_bias"},
      {{{"mlp_bias", true}}, "mlp_bias"},
      {{{"num_experts", 8}}, "num_experts"},
      {{{"num_local_experts", 8}}, "num_local_experts"},
      {{{"n_routed_experts", 8}}, "n_routed_experts"},
      {{{"partial_rotary_factor", 0.5}}, "partial_rotary_factor"},
      {{{"rope_parameters", {{"rope_type", "default"}, {"partial_rotary_factor", 0.5}}}},
       "partial_rotary_factor"},
      {{{"layer_types", {"full_attention", "sliding_attention"}}}, "layer_types"},
      {{{"rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}}}, "dynamic"},
      {{{"rope_scaling", {{"rope_type", "longrope"}, {"factor", 2.0}}}}, "longrope"},
      {{{"rope_scaling", {{"type", "mrope"}, {"mrope_section", {16, 24, 24}}}}}, "mrope"},
      {{{"rope_scaling", {{"type", "default"}, {"mrope_section", {16, 24, 24}}}}}, "mrope"},
      {{{"rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}}},
       "differs between layers"},
      {{{"model_type", "mistral"}, {"architectures", {"MistralForCausalLM"}}}, "mistral"},
      {{{"model_type", "qwen3_moe"}, {"architectures", {"Qwen3MoeForCausalLM"}}}, "qwen3_moe"},
      {{{"architectures", {"LlamaForSequenceClassification"}}}, "LlamaForSequenceClassification"},
      {{{"model_type", "qwen3"}}, "LlamaForCausalLM"},
  };
  for (const auto& [change, named] : kFeatures) {
    json config = llama_config();
    config.update(change);
    expect_refused(config, StatusCode::kUnsupported, named);
  }
}

TEST(ModelConfig, RefusesRopeParametersOutOfRange) {
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}};
  const json yarn = {
      {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 2048}};
  struct Row {
    json base;
    const char* name;
    json value;
  };
  const std::vector<Row> rows = {
      {llama3, "factor", nullptr},
      {llama3, "factor", 0.5},
      {llama3, "factor", 1e9},
      {llama3, "low_freq_factor", nullptr},
      {llama3, "low_freq_factor", 0},
      {llama3, "low_freq_factor", 4.0},
      {llama3, "high_freq_factor", "4"},
      {llama3, "original_max_position_embeddings", 0},
      {llama3, "original_max_position_embeddings", 8192.5},
      {yarn, "factor", nullptr},
      {yarn, "factor", -4},
      {yarn, "beta_fast", 1.0},
      {yarn, "beta_slow", 64},
      {yarn, "attention_factor", 0},
      {yarn, "attention_factor", 1e6},
      {yarn, "mscale", -1},
      {yarn, "truncate", "yes"},
      {yarn, "rope_theta", 0},
      {yarn, "rope_type", 3},
  };
  for (const Row& row : rows) {
    json config = llama_config();
    config["rope_scaling"] = row.base;
    config["rope_scaling"][row.name] = row.value;
    expect_refused(config, StatusCode::kInvalidArgument, row.name);
  }
}

TEST(ModelConfig, RefusesTextThatIsNotAConfig) {
  for (const char* text : {"", "{", "[]", "null", "3", "\"x\"", "{\"model_type\": NaN}",
                           "{\"a\":1,\"a\":2}", "{\"hidden_size\": 1e999}"}) {
    EXPECT_EQ(config_from_json(text).status().code(), StatusCode::kInvalidArgument) << text;
  }
  EXPECT_EQ(status_of(json::object()).code(), StatusCode::kInvalidArgument);
  const std::string deep = std::string(100, '[') + std::string(100, ']');
  EXPECT_EQ(config_from_json("{\"x\":" + deep + "}").status().code(),
            StatusCode::kResourceExhausted);
  const std::string big = "{\"x\":\"" + std::string(kMaxConfigBytes, 'a') + "\"}";
  EXPECT_EQ(config_from_json(big).status().code(), StatusCode::kResourceExhausted);
}

TEST(ModelConfig, ReadsTheRetrievalModelsConfig) {
  auto config =
      config_from_json(testing::read_file(testing::source_path("models/needle-29m/config.json")));
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config->architecture, Architecture::kQwen3);
  EXPECT_EQ(config->vocab_size, 8256u);
  EXPECT_EQ(config->eos_ids, std::vector<uint32_t>{8194});
}

TEST(GenerationConfig, ReadsRecommendedSampling) {
  auto config = generation_config_from_json(R"({
    "bos_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643],
    "pad_token_id": 151643, "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20,
    "top_p": 0.8, "min_p": 0.05, "max_new_tokens": 2048, "transformers_version": "4.37.0"})");
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config->do_sample, true);
  EXPECT_FLOAT_EQ(config->temperature.value(), 0.7f);
  EXPECT_FLOAT_EQ(config->top_p.value(), 0.8f);
  EXPECT_FLOAT_EQ(config->min_p.value(), 0.05f);
  EXPECT_FLOAT_EQ(config->repetition_penalty.value(), 1.05f);
  EXPECT_EQ(config->top_k, 20);
  EXPECT_EQ(config->max_new_tokens, 2048u);
  EXPECT_EQ(config->bos_id, 151643u);
  EXPECT_EQ(config->eos_ids, (std::vector<uint32_t>{151645, 151643}));
}

TEST(GenerationConfig, EverythingIsOptional) {
  auto config = generation_config_from_json("{}");
  ASSERT_TRUE(config.ok());
  EXPECT_FALSE(config->temperature.has_value());
  EXPECT_TRUE(config->eos_ids.empty());
}

TEST(GenerationConfig, RefusesValuesThatSamplingCannotTake) {
  const std::vector<std::pair<const char*, json>> kBad = {{"temperature", -0.1},
                                                          {"temperature", 2.5},
                                                          {"temperature", "hot"},
                                                          {"top_p", 0},
                                                          {"top_p", 1.1},
                                                          {"top_k", -5},
                                                          {"top_k", 1.5},
                                                          {"min_p", -1},
                                                          {"repetition_penalty", 0},
                                                          {"max_new_tokens", 0},
                                                          {"eos_token_id", {1, -2}},
                                                          {"do_sample", "yes"},
                                                          {"bos_token_id", 1e9},
                                                          {"repetition_penalty", 1e300},
                                                          {"eos_token_id", {{"a", 1}}}};
  for (const auto& [name, value] : kBad) {
    const Status status = generation_config_from_json(json{{name, value}}.dump()).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << name << " " << value;
    EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
  }
}

}  // namespace
}  // namespace spin::model
