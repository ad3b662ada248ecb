// SPDX-License-Identifier: Apache-2.0
#include "io/checkpoint.h"

#include <filesystem>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/gguf_builder.h"
#include "tests/support/safetensors_builder.h"
#include "tests/support/test_data.h"

namespace spin::io {
namespace {

using testing::GgufBuilder;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::SafetensorsBuilder;
using testing::TempDir;

std::string safetensors_with(std::string_view name) {
  return SafetensorsBuilder().add_f32(name, {1}, {1}).build();
}
std::string gguf_with(std::string_view name) {
  return GgufBuilder().add_f32_tensor(name, {1}, {1}).build();
}

std::string first_tensor(const std::string& path) {
  const auto opened = open_checkpoint(path);
  if (!opened.ok()) return opened.status().to_string();
  return (*opened)->tensors().empty() ? "none" : (*opened)->tensors()[0].name;
}

TEST(Checkpoint, OpensAFileOfEitherFormat) {
  TempDir dir;
  EXPECT_EQ(first_tensor(dir.write("x.gguf", gguf_with("g")).string()), "g");
  EXPECT_EQ(first_tensor(dir.write("x.safetensors", safetensors_with("s")).string()), "s");
  const auto located = locate_checkpoint((dir.path() / "x.gguf").string());
  ASSERT_TRUE(located.ok());
  EXPECT_EQ(located->kind, CheckpointKind::kGguf);
  EXPECT_EQ(located->directory, dir.path().string());
}

TEST(Checkpoint, OnlyAGgufFileThatWasNamedItselfHasItsTokenizerInside) {
  TempDir dir;
  const std::string path = dir.path().string();
  dir.write("x.gguf", gguf_with("gguf"));
  EXPECT_EQ(locate_checkpoint(path + "/x.gguf")->tokenizer, path + "/x.gguf");
  EXPECT_EQ(locate_checkpoint(path)->tokenizer, path);
  dir.write("model.safetensors", safetensors_with("single"));
  EXPECT_EQ(locate_checkpoint(path)->tokenizer, path);
  EXPECT_EQ(locate_checkpoint(path + "/model.safetensors")->tokenizer, path);
}

TEST(Checkpoint, PrefersTheIndexThenTheSingleFileThenTheOnlyOne) {
  TempDir dir;
  const std::string path = dir.path().string();
  dir.write("config.json", "{}");
  dir.write("q8.gguf", gguf_with("gguf"));
  EXPECT_EQ(first_tensor(path), "gguf");
  dir.write("other.safetensors", safetensors_with("other"));
  EXPECT_EQ(first_tensor(path), "other");
  dir.write("model.safetensors", safetensors_with("single"));
  EXPECT_EQ(first_tensor(path), "single");
  dir.write("model.safetensors.index.json", R"({"weight_map":{"other":"other.safetensors"}})");
  EXPECT_EQ(first_tensor(path), "other");
  EXPECT_EQ(locate_checkpoint(path)->kind, CheckpointKind::kSafetensorsIndex);
  EXPECT_EQ(first_tensor(path + "/model.safetensors.index.json"), "other");
}

TEST(Checkpoint, AsksForTheFileWhenThereAreSeveral) {
  TempDir dir;
  dir.write("a.gguf", gguf_with("a"));
  dir.write("b.gguf", gguf_with("b"));
  const auto opened = open_checkpoint(dir.path().string());
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(opened.status().message(), HasSubstr("expected one .gguf file, found 2"));
}

// S26: pickle is refused by name and never opened; Python files beside a checkpoint are ignored.
TEST(Checkpoint, RefusesPickleFilesAndIgnoresCode) {
  for (const std::string name :
       {"pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "m.pkl"}) {
    TempDir dir;
    dir.write("config.json", R"({"auto_map":{"AutoModel":"evil.Model"}})");
    dir.write("evil.py", "raise SystemExit");
    const auto path = dir.write(name, "\x80\x02}q\x00.");
    for (const std::string& where : {dir.path().string(), path.string()}) {
      const auto opened = open_checkpoint(where);
      ASSERT_FALSE(opened.ok());
      EXPECT_EQ(opened.status().code(), StatusCode::kUnsupported);
      EXPECT_THAT(opened.status().message(), HasSubstr("found '" + name + "'"));
      EXPECT_THAT(opened.status().message(), HasSubstr("pickle"));
    }
    dir.write("model.safetensors", safetensors_with("s"));
    EXPECT_EQ(first_tensor(dir.path().string()), "s");
  }
}

TEST(Checkpoint, SaysWhatIsMissingWithoutTheMachinesPaths) {
  TempDir dir;
  dir.write("config.json", "{}");
  const auto empty = open_checkpoint(dir.path().string());
  EXPECT_EQ(empty.status().code(), StatusCode::kNotFound);
  EXPECT_THAT(empty.status().message(), HasSubstr("found none of them among 1 entries"));
  const auto missing = open_checkpoint((dir.path() / "no-such-model").string());
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_THAT(missing.status().message(), HasSubstr("no-such-model"));
  EXPECT_EQ(open_checkpoint((dir.path() / "config.json").string()).status().code(),
            StatusCode::kUnsupported);
  EXPECT_EQ(open_checkpoint("/dev/null").status().code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(open_checkpoint("").ok());
  for (const Status& status : {empty.status(), missing.status()}) {
    EXPECT_THAT(status.message(), Not(HasSubstr(dir.path().parent_path().string() + "/")));
  }
}

}  // namespace
}  // namespace spin::io
