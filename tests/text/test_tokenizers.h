// SPDX-License-Identifier: Apache-2.0
// The tokenizers that most text tests use. Tests only.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "tests/support/test_data.h"
#include "text/tokenizer_loader.h"

namespace spin::testing {

// From a tokenizer.json; `path` is relative to the repository's root.
inline std::unique_ptr<text::Tokenizer> load_tokenizer(const std::string& path) {
  auto tokenizer = text::load_tokenizer_json(read_file(source_path(path)));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
  return std::move(tokenizer).value();
}

// Qwen3's, cut to 8,192 ids.
inline std::unique_ptr<text::Tokenizer> qwen() {
  return load_tokenizer("models/needle-29m/tokenizer.json");
}

// Llama-3's pre-tokenizer and ignore_merges over a small vocabulary.
inline std::unique_ptr<text::Tokenizer> llama() {
  return load_tokenizer("tests/data/tokenizer/llama3.json");
}

}  // namespace spin::testing
