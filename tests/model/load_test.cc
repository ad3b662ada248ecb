// SPDX-License-Identifier: Apache-2.0
// Opening a checkpoint: which files are read, and what is said when they do not fit.
#include "model/load.h"

#include <filesystem>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/model/harness.h"
#include "tests/support/test_data.h"

namespace spin::model {
namespace {

using nlohmann::json;
using testing::TempDir;
using testing::test_data;

// A copy of a tiny checkpoint whose files a test changes.
class Checkpoint {
 public:
  explicit Checkpoint(const std::string& name) {
    for (const char* file : {"config.json", "model.safetensors"}) {
      std::filesystem::copy(test_data("tiny/" + name) / file, dir_.path() / file);
    }
    config_ = json::parse(testing::read_file(dir_.path() / "config.json"));
  }
  void set(const std::string& field, const json& value) {
    config_[field] = value;
    dir_.write("config.json", config_.dump());
  }
  const TempDir& dir() const { return dir_; }
  Status open() const { return open_model(dir_.path().string()).status(); }

 private:
  TempDir dir_;
  json config_;
};

TEST(OpenModel, ReadsADirectoryAndItsGgufTwinAlike) {
  for (const char* name : {"llama-default", "llama-linear", "llama-yarn", "qwen2-bias",
                           "qwen2-yarn", "qwen3-default", "qwen3-yarn"}) {
    SCOPED_TRACE(name);
    const auto folder = test_data(std::string("tiny/") + name);
    const auto directory = open_model(folder.string());
    const auto gguf = open_model((folder / (std::string(name) + ".gguf")).string());
    ASSERT_TRUE(directory.ok()) << directory.status().to_string();
    ASSERT_TRUE(gguf.ok()) << gguf.status().to_string();
    const ModelConfig& a = directory->config;
    const ModelConfig& b = gguf->config;
    EXPECT_EQ(a.architecture, b.architecture);
    EXPECT_EQ(a.layers, b.layers);
    EXPECT_EQ(a.hidden, b.hidden);
    EXPECT_EQ(a.intermediate, b.intermediate);
    EXPECT_EQ(a.q_heads, b.q_heads);
    EXPECT_EQ(a.kv_heads, b.kv_heads);
    EXPECT_EQ(a.head_dim, b.head_dim);
    EXPECT_EQ(a.vocab_size, b.vocab_size);
    EXPECT_EQ(a.rms_epsilon, b.rms_epsilon);
    EXPECT_EQ(a.tie_embeddings, b.tie_embeddings);
    EXPECT_EQ(a.max_positions, b.max_positions);
    EXPECT_EQ(a.bos_id, b.bos_id);
    EXPECT_EQ(a.eos_ids, b.eos_ids);
    EXPECT_EQ(a.rope.scaling, b.rope.scaling);
    EXPECT_EQ(a.rope.theta, b.rope.theta);
    EXPECT_EQ(a.rope.factor, b.rope.factor);
    EXPECT_EQ(a.rope.original_positions, b.rope.original_positions);
  }
}

TEST(OpenModel, EndTokensOfTheGenerationConfigCountToo) {
  Checkpoint checkpoint("qwen3-default");
  checkpoint.dir().write("generation_config.json",
                         R"({"eos_token_id": [319, 317], "temperature": 0.6})");
  auto files = open_model(checkpoint.dir().path().string());
  ASSERT_TRUE(files.ok()) << files.status().to_string();
  EXPECT_EQ(files->config.eos_ids, (std::vector<uint32_t>{319, 317}));
  EXPECT_FLOAT_EQ(files->generation.temperature.value(), 0.6f);
  checkpoint.dir().write("generation_config.json", R"({"eos_token_id": 320})");
  EXPECT_EQ(checkpoint.open().code(), StatusCode::kInvalidArgument);
  checkpoint.dir().write("generation_config.json", "{");
  EXPECT_EQ(checkpoint.open().code(), StatusCode::kInvalidArgument);
}

TEST(OpenModel, AConfigThatDoesNotFitItsTensorsIsRefused) {
  const std::pair<const char*, int> kChanges[] = {
      {"num_hidden_layers", 1}, {"num_hidden_layers", 3},  {"hidden_size", 40},
      {"vocab_size", 321},      {"intermediate_size", 56}, {"num_key_value_heads", 2},
      {"head_dim", 72},         {"num_attention_heads", 4}};
  for (const auto& [field, value] : kChanges) {
    Checkpoint checkpoint("qwen3-default");
    ASSERT_TRUE(checkpoint.open().ok());
    checkpoint.set(field, value);
    const Status status = checkpoint.open();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << field << status.to_string();
    EXPECT_NE(status.message().find("tensor"), std::string::npos) << status.to_string();
  }
  Checkpoint untied("qwen3-default");
  untied.set("tie_word_embeddings", false);
  EXPECT_NE(untied.open().message().find("lm_head.weight"), std::string::npos);
  Checkpoint other("qwen3-default");
  other.set("model_type", "qwen2");
  other.set("architectures", {"Qwen2ForCausalLM"});
  EXPECT_NE(other.open().message().find("q_proj.bias"), std::string::npos)
      << "a Qwen2 without biases";
}

TEST(OpenModel, SaysWhatIsMissing) {
  EXPECT_EQ(open_model("no/such/path").status().code(), StatusCode::kNotFound);
  Checkpoint checkpoint("qwen3-default");
  std::filesystem::remove(checkpoint.dir().path() / "config.json");
  const Status status = checkpoint.open();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_NE(status.message().find("config.json"), std::string::npos) << status.to_string();
}

TEST(LoadDecoder, RefusesStepsOfImpossibleSize) {
  auto files = std::move(*open_model(test_data("tiny/qwen3-default").string()));
  for (int64_t rows : {int64_t{0}, int64_t{-1}, int64_t{1} << 40}) {
    const auto decoder =
        load_decoder(files, testing::test_device(), {.weights = {}, .max_rows = rows});
    EXPECT_EQ(decoder.status().code(), StatusCode::kInvalidArgument) << rows;
  }
}

TEST(LoadDecoder, LoadsTwiceFromOneOpenedCheckpoint) {
  auto files = std::move(*open_model(test_data("tiny/llama-default").string()));
  const auto first = load_decoder(files, testing::test_device(), {});
  const auto second = load_decoder(files, testing::test_device(), {});
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(second.ok()) << "dropped pages are read again";
}

}  // namespace
}  // namespace spin::model
