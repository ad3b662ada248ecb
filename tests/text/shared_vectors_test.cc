// SPDX-License-Identifier: Apache-2.0
// The tokenizer vectors of llama.cpp and the full Qwen3 vocabulary. They are not part of the
// repository: these tests exist where shared/data/tokenizers lies beside the checkout, and are not
// registered elsewhere. What must hold everywhere is in tokenizer_golden_test.cc.
#include <filesystem>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/test_data.h"
#include "text/tokenizer_loader.h"

namespace spin::text {
namespace {

namespace fs = std::filesystem;

fs::path shared_tokenizers() {
  return testing::source_path("..").lexically_normal() / "shared/data/tokenizers";
}

struct VectorSet {
  std::string model;    // under shared/data/tokenizers
  std::string vectors;  // likewise, without .inp and .out
};

void PrintTo(const VectorSet& set, std::ostream* out) { *out << set.vectors; }

std::vector<VectorSet> present_sets() {
  const std::vector<VectorSet> all = {
      {"llama.cpp-vocab/ggml-vocab-gpt-2.gguf", "llama.cpp-vocab/ggml-vocab-gpt-2.gguf"},
      {"qwen3", "llama.cpp-vocab/ggml-vocab-qwen2.gguf"},
      {"qwen3", "llama.cpp-vocab/ggml-vocab-deepseek-r1-qwen.gguf"},
  };
  std::error_code ignored;
  return fs::is_directory(shared_tokenizers(), ignored) ? all : std::vector<VectorSet>();
}

std::vector<std::string> split(const std::string& text, const std::string& separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end; (end = text.find(separator, begin)) != std::string::npos;) {
    parts.push_back(text.substr(begin, end - begin));
    begin = end + separator.size();
  }
  parts.push_back(text.substr(begin));
  return parts;
}

class SharedVectors : public ::testing::TestWithParam<VectorSet> {};

TEST_P(SharedVectors, IdsEqualThoseOfLlamaCpp) {
  const auto bundle = open_tokenizer(shared_tokenizers() / GetParam().model);
  ASSERT_TRUE(bundle.ok()) << bundle.status().to_string();
  const std::string base = (shared_tokenizers() / GetParam().vectors).string();
  const auto inputs = split(testing::read_file(base + ".inp"), "\n__ggml_vocab_test__\n");
  const auto outputs = split(testing::read_file(base + ".out"), "\n");
  ASSERT_GE(inputs.size(), 40u);
  ASSERT_GE(outputs.size(), inputs.size());
  EncodeOptions options;
  options.add_special = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::istringstream line(outputs[i]);
    std::vector<TokenId> expected;
    for (TokenId id; line >> id;) expected.push_back(id);
    const auto ids = bundle->tokenizer->encode(inputs[i], options);
    ASSERT_TRUE(ids.ok());
    EXPECT_EQ(*ids, expected) << "case " << i << ": " << inputs[i];
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SharedVectors);
INSTANTIATE_TEST_SUITE_P(Present, SharedVectors, ::testing::ValuesIn(present_sets()));

}  // namespace
}  // namespace spin::text
