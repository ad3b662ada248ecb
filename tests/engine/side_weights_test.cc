// SPDX-License-Identifier: Apache-2.0
#include "engine/side_weights.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/safetensors_builder.h"
#include "tests/support/test_data.h"

namespace spin::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::SafetensorsBuilder;
using testing::TempDir;

constexpr char kFile[] = "attn_gate_weights.safetensors";

std::string good_file() {
  return SafetensorsBuilder()
      .add_f32("a", {2, 3}, {1, 2, 3, 4, 5, 6})
      .add("half", "BF16", {2}, std::string_view("\x80\x3f\x00\x40", 4))
      .build();
}

Result<std::unique_ptr<backend::SideWeights>> open(const std::string& location,
                                                   const std::string& model = ".") {
  return FileSideWeightSource(model).open(location);
}

TEST(SideWeights, TensorsAndScalarSettingsAreReadAsTheyStand) {
  const TempDir folder;
  folder.write(kFile, good_file());
  folder.write("config.json",
               R"({"kind":"Kmax","size":128,"on":true,"scale":0.5,"none":null,"list":[1],"o":{}})");
  for (const std::string& location : {folder.path().string(), (folder.path() / kFile).string()}) {
    const auto weights = open(location);
    ASSERT_TRUE(weights.ok()) << weights.status().to_string();
    EXPECT_TRUE((*weights)->contains("a"));
    EXPECT_FALSE((*weights)->contains("b"));
    const int64_t shape[] = {2, 3};
    EXPECT_THAT(*(*weights)->read("a", shape), ElementsAre(1, 2, 3, 4, 5, 6));
    const int64_t two[] = {2};
    EXPECT_THAT(*(*weights)->read("half", two), ElementsAre(1, 2));
    EXPECT_EQ(*(*weights)->setting("kind"), "Kmax");
    EXPECT_EQ(*(*weights)->setting("size"), "128");
    EXPECT_EQ(*(*weights)->setting("on"), "true");
    EXPECT_EQ(*(*weights)->setting("scale"), "0.5");
    for (const char* none : {"none", "list", "o", "missing"}) {
      EXPECT_EQ((*weights)->setting(none).status().code(), StatusCode::kNotFound) << none;
    }
  }
}

TEST(SideWeights, LocationsBesideTheModelStartAtItsFolder) {
  const TempDir model;
  std::filesystem::create_directory(model.path() / "gates-b32");
  testing::TempDir elsewhere;
  model.write("gates-b32/" + std::string(kFile), good_file());
  model.write("gates-b32/config.json", "{}");
  EXPECT_TRUE(open("model:gates-b32", model.path().string()).ok());
  EXPECT_EQ(open("model:gates-b64", model.path().string()).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(open("model:gates-b32", elsewhere.path().string()).status().code(),
            StatusCode::kNotFound);
}

TEST(SideWeights, TheModelsOwnGatesHaveThePublishedNamesAndSettings) {
  for (const std::string block : {"32", "64"}) {
    const auto weights =
        open("model:gates-b" + block, testing::source_path("models/needle-29m").string());
    ASSERT_TRUE(weights.ok()) << weights.status().to_string();
    EXPECT_EQ(*(*weights)->setting("seerattn_k_seq_pooling_type"), "Kmaxminavg");
    EXPECT_EQ(*(*weights)->setting("seerattn_use_rope"), "true");
    const int64_t shape[] = {2, 384, 128};
    EXPECT_TRUE((*weights)
                    ->read("model.layers.7.self_attn.attn_gate.attngate_linear_k.weight", shape)
                    .ok());
  }
}

TEST(SideWeights, MissingAndMisshapenTensorsAreNamedWithBothShapes) {
  const TempDir folder;
  folder.write(kFile, good_file());
  folder.write("config.json", "{}");
  const auto weights = open(folder.path().string());
  ASSERT_TRUE(weights.ok());
  const int64_t shape[] = {3, 2};
  const Status missing = (*weights)->read("gate", shape).status();
  EXPECT_EQ(missing.code(), StatusCode::kNotFound);
  EXPECT_THAT(missing.message(), HasSubstr("gate"));
  const Status misshapen = (*weights)->read("a", shape).status();
  EXPECT_EQ(misshapen.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(misshapen.message(), HasSubstr("a: expected shape [3, 2], found [2, 3]"));
  const int64_t flat[] = {6};
  EXPECT_EQ((*weights)->read("a", flat).status().code(), StatusCode::kInvalidArgument);
  const int64_t negative[] = {-2, -3};
  EXPECT_EQ((*weights)->read("a", negative).status().code(), StatusCode::kInvalidArgument);
}

TEST(SideWeights, NumbersThatAreNoneAreRefused) {
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    const TempDir folder;
    folder.write(kFile, SafetensorsBuilder().add_f32("a", {3}, {1, bad, 3}).build());
    folder.write("config.json", "{}");
    const auto weights = open(folder.path().string());
    ASSERT_TRUE(weights.ok());
    const int64_t shape[] = {3};
    const Status status = (*weights)->read("a", shape).status();
    EXPECT_EQ(status.code(), StatusCode::kCorrupt);
    EXPECT_THAT(status.message(), HasSubstr("element 1"));
  }
}

TEST(SideWeights, TypesThatNobodyDecodesAreRefused) {
  const TempDir folder;
  folder.write(kFile,
               SafetensorsBuilder().add("a", "I32", {1}, std::string_view("\1\0\0\0", 4)).build());
  folder.write("config.json", "{}");
  const auto weights = open(folder.path().string());
  ASSERT_TRUE(weights.ok());
  const int64_t shape[] = {1};
  const Status status = (*weights)->read("a", shape).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("a"));
}

struct Folder {
  std::string what;
  std::vector<std::pair<std::string, std::string>> files;
  StatusCode code;
};

TEST(SideWeights, HostileFoldersAreRefusedOnOpening) {
  std::string deep;
  for (int i = 0; i < 100; ++i) deep += "[";
  const std::string good = good_file();
  const Folder folders[] = {
      {"nothing in it", {}, StatusCode::kNotFound},
      {"no configuration", {{kFile, good}}, StatusCode::kNotFound},
      {"no weights", {{"config.json", "{}"}}, StatusCode::kNotFound},
      {"pickle", {{"attn_gate_weights.pth", "x"}, {"config.json", "{}"}}, StatusCode::kUnsupported},
      {"two candidates",
       {{"a.safetensors", good}, {"b.safetensors", good}, {"config.json", "{}"}},
       StatusCode::kInvalidArgument},
      {"gguf", {{"gates.gguf", "GGUF"}, {"config.json", "{}"}}, StatusCode::kUnsupported},
      {"a list", {{kFile, good}, {"config.json", "[]"}}, StatusCode::kInvalidArgument},
      {"broken json", {{kFile, good}, {"config.json", "{\"a\":"}}, StatusCode::kInvalidArgument},
      {"a key twice",
       {{kFile, good}, {"config.json", "{\"a\":1,\"a\":2}"}},
       StatusCode::kInvalidArgument},
      {"deep json", {{kFile, good}, {"config.json", deep}}, StatusCode::kResourceExhausted},
      {"huge json",
       {{kFile, good}, {"config.json", std::string(3 << 20, ' ')}},
       StatusCode::kResourceExhausted},
      {"cut off",
       {{kFile, good.substr(0, good.size() - 1)}, {"config.json", "{}"}},
       StatusCode::kCorrupt},
      {"empty file", {{kFile, ""}, {"config.json", "{}"}}, StatusCode::kCorrupt},
      {"header beyond the file",
       {{kFile, std::string("\xff\xff\xff\xff\xff\xff\xff\x7f", 8)}, {"config.json", "{}"}},
       StatusCode::kCorrupt}};
  for (const Folder& folder : folders) {
    SCOPED_TRACE(folder.what);
    const TempDir place;
    for (const auto& [name, content] : folder.files) place.write(name, content);
    const Status status = open(place.path().string()).status();
    EXPECT_EQ(status.code(), folder.code) << status.to_string();
    EXPECT_THAT(status.message(), ::testing::Not(HasSubstr(place.path().string())));
  }
}

}  // namespace
}  // namespace spin::engine
