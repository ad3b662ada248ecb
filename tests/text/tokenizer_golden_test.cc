// SPDX-License-Identifier: Apache-2.0
// Ids equal those of the `tokenizers` package on 10^5 pseudo-random Unicode strings per
// pre-tokenizer (tools/make_tokenizer_golden.py), and the hand-written pre-tokenizers equal the
// regular expressions that they stand for, as PCRE2 runs them.
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <pcre2.h>

#include "tests/support/test_data.h"
#include "tests/text/random_text.h"
#include "text/pretokenizer.h"
#include "text/tokenizer.h"
#include "text/tokenizer_loader.h"

namespace spin::text {
namespace {

using testing::RandomText;
using testing::read_file;
using testing::source_path;

uint64_t fnv1a(uint64_t hash, TokenId id) {
  for (int shift = 0; shift < 32; shift += 8) {
    hash = (hash ^ ((id >> shift) & 0xFFu)) * 0x100000001B3ull;
  }
  return hash;
}

class TokenizerGoldenIds : public ::testing::TestWithParam<size_t> {};

TEST_P(TokenizerGoldenIds, OfRandomTextEqualTheReference) {
  const auto golden = nlohmann::json::parse(read_file(testing::test_data("tokenizer/golden.json")));
  const auto& entry = golden["cases"].at(GetParam());
  const RandomText random(golden);
  auto tokenizer =
      load_tokenizer_json(read_file(source_path(entry["tokenizer"].get<std::string>())));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
  EncodeOptions options;
  options.parse_special = entry["parse_special"].get<bool>();
  const uint64_t seed = entry["seed"].get<uint64_t>();
  const uint64_t batch = golden["batch"].get<uint64_t>();
  size_t batches = entry["hashes"].size();
  ASSERT_GE(batches, 10u);
#ifdef SPIN_SANITIZED
  batches /= 10;
#endif
  for (size_t b = 0; b < batches; ++b) {
    uint64_t hash = 0xCBF29CE484222325ull;
    for (uint64_t i = 0; i < batch; ++i) {
      const auto ids = (*tokenizer)->encode(random.make(seed, b * batch + i), options);
      ASSERT_TRUE(ids.ok()) << ids.status().to_string();
      for (const TokenId id : *ids) hash = fnv1a(hash, id);
      hash = fnv1a(hash, UINT32_MAX);
    }
    EXPECT_EQ(fmt::format("{:016x}", hash), entry["hashes"][b].get<std::string>()) << "batch " << b;
  }
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, TokenizerGoldenIds, ::testing::Range<size_t>(0, 6));

// The two files of one model: the name of the pre-tokenizer stands for NFC in GGUF.
TEST(TokenizerGolden, GgufAndJsonOfOneModelAgree) {
  const auto golden = nlohmann::json::parse(read_file(testing::test_data("tokenizer/golden.json")));
  const RandomText random(golden);
  const auto folder = open_tokenizer(source_path("models/needle-29m"));
  const auto gguf = open_tokenizer(source_path("models/needle-29m/needle-29m-q8_0.gguf"));
  ASSERT_TRUE(folder.ok()) << folder.status().to_string();
  ASSERT_TRUE(gguf.ok()) << gguf.status().to_string();
  // The GGUF file pads the vocabulary to the rows of the embedding.
  EXPECT_GE(gguf->tokenizer->vocab_size(), folder->tokenizer->vocab_size());
  EXPECT_EQ(folder->tokenizer->eos_id(), gguf->tokenizer->eos_id());
  EncodeOptions options;
  options.parse_special = true;
  for (uint64_t i = 0; i < 2000; ++i) {
    const std::string text = random.make(50, i);
    ASSERT_EQ(*folder->tokenizer->encode(text, options), *gguf->tokenizer->encode(text, options));
  }
}

// The words of `text` by a regular expression: the oracle.
class RegexSplitter {
 public:
  explicit RegexSplitter(const std::string& pattern) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_ = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                          PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr);
    EXPECT_NE(code_, nullptr) << "at " << offset;
    match_ = pcre2_match_data_create_from_pattern(code_, nullptr);
  }
  ~RegexSplitter() {
    pcre2_match_data_free(match_);
    pcre2_code_free(code_);
  }
  RegexSplitter(const RegexSplitter&) = delete;
  RegexSplitter& operator=(const RegexSplitter&) = delete;

  std::vector<std::string> split(const std::string& text) const {
    std::vector<std::string> words;
    size_t pos = 0;
    while (pos < text.size()) {
      const int found = pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                    pos, PCRE2_ANCHORED, match_, nullptr);
      if (found <= 0) {
        ADD_FAILURE() << "no match at byte " << pos;
        return words;
      }
      const size_t end = pcre2_get_ovector_pointer(match_)[1];
      words.push_back(text.substr(pos, end - pos));
      pos = end;
    }
    return words;
  }

 private:
  pcre2_code* code_ = nullptr;
  pcre2_match_data* match_ = nullptr;
};

std::vector<std::string> scan(PreTokenizer kind, std::string_view text) {
  std::vector<std::string> words;
  while (!text.empty()) {
    const size_t length = next_word(kind, text);
    if (length == 0 || length > text.size()) {
      ADD_FAILURE() << "word of " << length << " bytes";
      return words;
    }
    words.emplace_back(text.substr(0, length));
    text.remove_prefix(length);
  }
  return words;
}

// PCRE2 counts U+180E as white space; the reference engine (and Unicode since 6.3) does not.
constexpr char kSpace[] =
    R"([\x{09}-\x{0D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}])";
constexpr char kNotSpace[] =
    R"([^\x{09}-\x{0D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}])";
constexpr char kOther[] =
    R"([^\x{09}-\x{0D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\p{L}\p{N}])";

std::string gpt2_pattern() {
  return fmt::format(R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?{2}+|{0}+(?!{1})|{0}+)",
                     kSpace, kNotSpace, kOther);
}

std::string qwen2_pattern(std::string_view digits) {
  return fmt::format(
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{3}| ?{2}+[\r\n]*|{0}*[\r\n]+|)"
      R"({0}+(?!{1})|{0}+)",
      kSpace, kNotSpace, kOther, digits);
}

size_t oracle_strings() {
#ifdef SPIN_SANITIZED
  return 1000;
#else
  return 20000;
#endif
}

TEST(PreTokenizer, EqualsTheExpressionsOnRandomText) {
  const auto golden = nlohmann::json::parse(read_file(testing::test_data("tokenizer/golden.json")));
  const RandomText random(golden);
  const RegexSplitter gpt2(gpt2_pattern());
  const RegexSplitter qwen2(qwen2_pattern(R"(\p{N})"));
  const RegexSplitter llama3(qwen2_pattern(R"(\p{N}{1,3})"));
  const RegexSplitter digits(R"(\p{N}|\P{N}+)");
  for (size_t i = 0; i < oracle_strings(); ++i) {
    const std::string text = random.make(77, i);
    ASSERT_EQ(scan(PreTokenizer::kGpt2, text), gpt2.split(text)) << i;
    ASSERT_EQ(scan(PreTokenizer::kQwen2, text), qwen2.split(text)) << i;
    ASSERT_EQ(scan(PreTokenizer::kLlama3, text), llama3.split(text)) << i;
    std::vector<std::string> smollm;
    for (const std::string& part : digits.split(text)) {
      for (std::string& word : gpt2.split(part)) smollm.push_back(std::move(word));
    }
    ASSERT_EQ(scan(PreTokenizer::kSmolLm, text), smollm) << i;
  }
}

TEST(PreTokenizer, SplitsLikeLlama3) {
  using Words = std::vector<std::string>;
  const auto llama = [](std::string_view text) { return scan(PreTokenizer::kLlama3, text); };
  EXPECT_EQ(llama("Hello, y'all! How are you?"),
            (Words{"Hello", ",", " y", "'all", "!", " How", " are", " you", "?"}));
  EXPECT_EQ(llama("I'LL pay 1234567 dollars"),
            (Words{"I", "'LL", " pay", " ", "123", "456", "7", " dollars"}));
  EXPECT_EQ(llama("a\n\n\n b  c\t\td \n"),
            (Words{"a", "\n\n\n", " b", " ", " c", "\t", "\td", " \n"}));
  EXPECT_EQ(llama("if (x==1) {\n\n  return;\r\n}"),
            (Words{"if", " (", "x", "==", "1", ")", " {\n\n", " ", " return", ";\r\n", "}"}));
  EXPECT_EQ(llama("   "), (Words{"   "}));
}

TEST(PreTokenizer, KnowsExactlyItsExpressions) {
  EXPECT_EQ(
      pretokenizer_by_regex(
          R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"),
      PreTokenizer::kQwen2);
  EXPECT_EQ(pretokenizer_by_regex(R"(\p{N}|\s+)"), std::nullopt);
  EXPECT_EQ(pretokenizer_by_regex(""), std::nullopt);
}

}  // namespace
}  // namespace spin::text
