// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer_loader.h"

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "io/gguf.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/test_data.h"

namespace spin::text {
namespace {

using nlohmann::json;
using testing::GgufBuilder;
using testing::read_file;
using testing::test_data;

json gpt2_json() { return json::parse(read_file(test_data("tokenizer/gpt2.json"))); }
json llama_json() { return json::parse(read_file(test_data("tokenizer/llama3.json"))); }

StatusCode code_of(const json& document) {
  return load_tokenizer_json(document.dump()).status().code();
}

TEST(TokenizerJson, LoadsTheSmallVocabularies) {
  for (const std::string name : {"gpt2", "smollm", "llama3"}) {
    const auto tokenizer = load_tokenizer_json(read_file(test_data("tokenizer/" + name + ".json")));
    ASSERT_TRUE(tokenizer.ok()) << name << ": " << tokenizer.status().to_string();
    EXPECT_GT((*tokenizer)->vocab_size(), 1000u);
  }
}

struct BadJson {
  const char* name;
  StatusCode code;
  std::function<void(json&)> spoil;
};

std::vector<BadJson> bad_files() {
  constexpr StatusCode kCorrupt = StatusCode::kCorrupt;
  constexpr StatusCode kUnsupported = StatusCode::kUnsupported;
  const auto split = [](const char* regex) {
    return json{{"type", "Split"},
                {"pattern", {{"Regex", regex}}},
                {"behavior", "Isolated"},
                {"invert", false}};
  };
  const json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  return {
      {"no model", kCorrupt, [](json& d) { d.erase("model"); }},
      {"WordPiece", kUnsupported, [](json& d) { d["model"]["type"] = "WordPiece"; }},
      {"vocabulary is a list", kCorrupt, [](json& d) { d["model"]["vocab"] = json::array(); }},
      {"negative id", kCorrupt, [](json& d) { d["model"]["vocab"]["zz9"] = -1; }},
      {"huge id", kCorrupt, [](json& d) { d["model"]["vocab"]["zz9"] = 4000000000u; }},
      {"fractional id", kCorrupt, [](json& d) { d["model"]["vocab"]["zz9"] = 1.5; }},
      {"gap of ids", kCorrupt, [](json& d) { d["model"]["vocab"]["zz9"] = 100000; }},
      {"id twice", kCorrupt, [](json& d) { d["model"]["vocab"]["zz9"] = 5; }},
      {"token over 64 KiB", kCorrupt,
       [](json& d) {
         d["model"]["vocab"][std::string(kMaxTokenBytes + 1, 'x')] = d["model"]["vocab"].size();
       }},
      {"no merges", kCorrupt, [](json& d) { d["model"].erase("merges"); }},
      {"merge of unknown tokens", kCorrupt,
       [](json& d) { d["model"]["merges"].push_back("zzz9 q"); }},
      {"merge without a space", kCorrupt, [](json& d) { d["model"]["merges"].push_back("ab"); }},
      {"merge with two spaces", kCorrupt, [](json& d) { d["model"]["merges"].push_back("a b c"); }},
      {"merge of three", kCorrupt,
       [](json& d) {
         d["model"]["merges"].push_back(json{"a", "b", "c"});
       }},
      {"merge is a number", kCorrupt, [](json& d) { d["model"]["merges"].push_back(7); }},
      {"empty merge", kCorrupt, [](json& d) { d["model"]["merges"].push_back(" "); }},
      {"dropout", kUnsupported, [](json& d) { d["model"]["dropout"] = 0.1; }},
      {"byte fallback", kUnsupported, [](json& d) { d["model"]["byte_fallback"] = true; }},
      {"subword prefix", kUnsupported,
       [](json& d) { d["model"]["continuing_subword_prefix"] = "##"; }},
      {"added lstrip", kUnsupported, [](json& d) { d["added_tokens"][0]["lstrip"] = true; }},
      {"added rstrip", kUnsupported, [](json& d) { d["added_tokens"][0]["rstrip"] = true; }},
      {"added single word", kUnsupported,
       [](json& d) { d["added_tokens"][0]["single_word"] = true; }},
      {"added flag of another type", kCorrupt,
       [](json& d) { d["added_tokens"][0]["special"] = "yes"; }},
      {"added without id", kCorrupt, [](json& d) { d["added_tokens"][0].erase("id"); }},
      {"added with huge id", kCorrupt, [](json& d) { d["added_tokens"][0]["id"] = 1u << 30; }},
      {"added empty", kCorrupt, [](json& d) { d["added_tokens"][0]["content"] = ""; }},
      {"added twice", kCorrupt, [](json& d) { d["added_tokens"].push_back(d["added_tokens"][0]); }},
      {"added over another token", kCorrupt, [](json& d) { d["added_tokens"][0]["id"] = 9; }},
      {"lower-casing", kUnsupported,
       [](json& d) {
         d["normalizer"] = {{"type", "Lowercase"}};
       }},
      {"no pre-tokenizer", kCorrupt, [](json& d) { d["pre_tokenizer"] = nullptr; }},
      {"whitespace", kUnsupported,
       [](json& d) {
         d["pre_tokenizer"] = {{"type", "Whitespace"}};
       }},
      {"prefix space", kUnsupported,
       [](json& d) { d["pre_tokenizer"]["add_prefix_space"] = true; }},
      {"no words at all", kUnsupported, [](json& d) { d["pre_tokenizer"]["use_regex"] = false; }},
      {"unknown expression", kUnsupported,
       [=](json& d) {
         d["pre_tokenizer"] = {{"type", "Sequence"},
                               {"pretokenizers", {split("\\p{N}|.+"), bytes}}};
       }},
      {"three steps", kUnsupported,
       [=](json& d) {
         d["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {bytes, bytes, bytes}}};
       }},
      {"grouped digits", kUnsupported,
       [](json& d) {
         const json digits = {{"type", "Digits"}, {"individual_digits", false}};
         d["pre_tokenizer"] = {{"type", "Sequence"},
                               {"pretokenizers", {digits, d["pre_tokenizer"]}}};
       }},
      {"other decoder", kUnsupported,
       [](json& d) {
         d["decoder"] = {{"type", "WordPiece"}};
       }},
      {"other post-processor", kUnsupported,
       [](json& d) {
         d["post_processor"] = {{"type", "RobertaProcessing"}};
       }},
  };
}

TEST(TokenizerJson, RefusesWhatItDoesNotRun) {
  for (const BadJson& bad : bad_files()) {
    json document = gpt2_json();
    bad.spoil(document);
    const auto tokenizer = load_tokenizer_json(document.dump());
    ASSERT_FALSE(tokenizer.ok()) << bad.name;
    EXPECT_EQ(tokenizer.status().code(), bad.code)
        << bad.name << ": " << tokenizer.status().message();
  }
}

TEST(TokenizerJson, RefusesBytesThatAreNoJson) {
  const std::string good = read_file(test_data("tokenizer/gpt2.json"));
  EXPECT_EQ(load_tokenizer_json("").status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(load_tokenizer_json("[]").status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(load_tokenizer_json(good.substr(0, good.size() / 2)).status().code(),
            StatusCode::kCorrupt);
  EXPECT_EQ(load_tokenizer_json("{\"a\":\"\xFF\"}").status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(load_tokenizer_json(std::string(100000, '[')).status().code(), StatusCode::kCorrupt);
}

TEST(TokenizerJson, ChecksTheTemplateOfThePostProcessor) {
  json outside = llama_json();
  auto& processor = outside["post_processor"]["processors"][1];
  processor["special_tokens"]["<|begin_of_text|>"]["ids"] = {1000000};
  EXPECT_EQ(code_of(outside), StatusCode::kCorrupt);
  json unknown = llama_json();
  unknown["post_processor"]["processors"][1]["special_tokens"] = json::object();
  EXPECT_EQ(code_of(unknown), StatusCode::kCorrupt);
  json twice = llama_json();
  auto& single = twice["post_processor"]["processors"][1]["single"];
  single.push_back(single[1]);
  EXPECT_EQ(code_of(twice), StatusCode::kUnsupported);
}

TEST(TokenizerJson, UnknownTokenNeedsAllBytes) {
  json all = gpt2_json();
  all["model"]["unk_token"] = "<|endoftext|>";
  EXPECT_EQ(code_of(all), StatusCode::kOk);
  json some = json::parse(read_file(test_data("tokenizer/smollm.json")));
  some["model"]["unk_token"] = "<|endoftext|>";
  EXPECT_EQ(code_of(some), StatusCode::kUnsupported);
}

// As `tokenizers`: tokens with "normalized" are looked for in the normalized text, after the
// others.
TEST(TokenizerJson, FindsNormalizedAddedTokensAfterNormalization) {
  json document = gpt2_json();
  document["normalizer"] = {{"type", "NFC"}};
  const size_t count = document["model"]["vocab"].size();
  document["added_tokens"].push_back(
      {{"id", count}, {"content", "<caf\u00e9>"}, {"special", false}, {"normalized", true}});
  const auto tokenizer = load_tokenizer_json(document.dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
  EncodeOptions options;
  options.parse_special = true;
  const std::vector<TokenId> only = {static_cast<TokenId>(count)};
  EXPECT_EQ(*(*tokenizer)->encode("<cafe\u0301>", options), only);
  EXPECT_NE(*(*tokenizer)->encode("<caf\u00e9>"), only);
  EXPECT_FALSE((*tokenizer)->is_special(only[0]));
}

TEST(TokenizerConfig, NamesBosAndEos) {
  const auto config = parse_tokenizer_config(
      R"({"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|endoftext|>",
          "add_bos_token": true, "chat_template": [{"name": "tool_use", "template": "T"},
          {"name": "default", "template": "D"}]})");
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->chat_template, "D");
  const auto tokenizer = load_tokenizer_json(gpt2_json().dump(), *config);
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_TRUE((*tokenizer)->adds_bos());
  EXPECT_EQ((*tokenizer)->eos_id(), (*tokenizer)->find("<|endoftext|>"));

  TokenizerConfig none;
  none.add_bos_token = false;
  EXPECT_FALSE((*load_tokenizer_json(llama_json().dump(), none))->adds_bos());
  TokenizerConfig unknown;
  unknown.eos_token = "<nowhere>";
  EXPECT_EQ(load_tokenizer_json(gpt2_json().dump(), unknown).status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(parse_tokenizer_config("nope").status().code(), StatusCode::kCorrupt);
}

// The small GPT-2 style vocabulary as a GGUF file.
struct GgufVocabulary {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::vector<std::string> merges;
  std::string model = "gpt2";
  std::string pre = "gpt-2";
  uint32_t bos = 0;

  GgufVocabulary() {
    const json document = gpt2_json();
    const json& vocab = document["model"]["vocab"];
    tokens.resize(vocab.size());
    types.assign(vocab.size(), 1);
    for (const auto& [text, id] : vocab.items()) tokens[id.get<size_t>()] = text;
    types[0] = 3;  // <|endoftext|>
    merges = document["model"]["merges"].get<std::vector<std::string>>();
  }

  std::string build() const {
    GgufBuilder builder;
    builder.add_string("tokenizer.ggml.model", model);
    if (!pre.empty()) builder.add_string("tokenizer.ggml.pre", pre);
    builder.add_strings("tokenizer.ggml.tokens", tokens);
    builder.add_i32s("tokenizer.ggml.token_type", types);
    builder.add_strings("tokenizer.ggml.merges", merges);
    builder.add_u32("tokenizer.ggml.bos_token_id", bos);
    builder.add_u32("tokenizer.ggml.eos_token_id", 0);
    builder.add_string("tokenizer.chat_template", "the template");
    return builder.build();
  }

  Result<std::unique_ptr<Tokenizer>> load() const {
    const std::string bytes = build();
    auto file =
        io::GgufFile::parse(io::MappedFile::borrow(std::as_bytes(std::span(bytes)), "test.gguf"));
    if (!file.ok()) return file.status();
    return load_tokenizer_gguf(**file);
  }
};

TEST(TokenizerGguf, GivesTheIdsOfTheSameVocabularyInJson) {
  const auto from_gguf = GgufVocabulary().load();
  ASSERT_TRUE(from_gguf.ok()) << from_gguf.status().to_string();
  const auto from_json = load_tokenizer_json(gpt2_json().dump());
  ASSERT_TRUE(from_json.ok());
  EncodeOptions options;
  options.parse_special = true;
  for (const std::string text :
       {"Hello world, it's 1234 tests!<|endoftext|>\n\n  x", "\u00e9\u4f60 \U0001f600"}) {
    EXPECT_EQ(*(*from_gguf)->encode(text, options), *(*from_json)->encode(text, options));
  }
  EXPECT_EQ((*from_gguf)->eos_id(), 0u);
  EXPECT_TRUE((*from_gguf)->is_special(0));
}

TEST(TokenizerGguf, RefusesAnUnknownPreTokenizer) {
  for (const std::string pre : {"", "default", "qwen3000", "GPT-2"}) {
    GgufVocabulary vocabulary;
    vocabulary.pre = pre;
    EXPECT_EQ(vocabulary.load().status().code(), StatusCode::kUnsupported) << pre;
  }
  for (const std::string pre : {"smollm", "qwen2", "deepseek-r1-qwen", "llama-bpe", "llama3"}) {
    GgufVocabulary vocabulary;
    vocabulary.pre = pre;
    EXPECT_TRUE(vocabulary.load().ok()) << pre;
  }
  GgufVocabulary other;
  other.model = "llama";
  EXPECT_EQ(other.load().status().code(), StatusCode::kUnsupported);
}

// A message goes to terminals and logs: nothing of the file gets there as it is.
TEST(TokenizerGguf, WhatItQuotesFromTheFileIsOneHarmlessLine) {
  const std::string hostile = "\x1b]0;owned\a\n\xff" + std::string(100'000, 'x');
  GgufVocabulary pre;
  pre.pre = hostile;
  GgufVocabulary model;
  model.model = hostile;
  json document = gpt2_json();
  document["decoder"]["type"] = "\x1b]0;owned\a\n" + std::string(100'000, 'x');
  for (const Status& status : {pre.load().status(), model.load().status(),
                               load_tokenizer_json(document.dump()).status()}) {
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_NE(status.message().find("'?]0;owned??"), std::string::npos) << status.message();
    EXPECT_LT(status.message().size(), 500u);
  }
}

TEST(TokenizerGguf, KnowsWhatAPreTokenizerNameImplies) {
  GgufVocabulary vocabulary;
  vocabulary.pre = "llama-bpe";
  EXPECT_TRUE((*vocabulary.load())->adds_bos());
  vocabulary.pre = "qwen2";
  EXPECT_FALSE((*vocabulary.load())->adds_bos());
  const auto qwen = vocabulary.load();
  EXPECT_EQ(*(*qwen)->encode("e\u0301"), *(*qwen)->encode("\u00e9"));  // NFC
}

// S20: the byte of a token is read only from its exact spelling.
TEST(TokenizerGguf, ByteTokensAreSpelledExactly) {
  GgufVocabulary vocabulary;
  vocabulary.tokens.push_back("<0xE9>");
  vocabulary.types.push_back(6);
  const auto tokenizer = vocabulary.load();
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
  EXPECT_EQ((*tokenizer)->token_bytes(static_cast<TokenId>(vocabulary.tokens.size() - 1)), "\xE9");
  for (const std::string name :
       {"<0x-1>", "<0xe9>", "<0x9>", "<0x1FF>", "<0xZZ>", "0xE9", "<0xE9", ""}) {
    vocabulary.tokens.back() = name;
    EXPECT_EQ(vocabulary.load().status().code(), StatusCode::kCorrupt) << name;
  }
}

TEST(TokenizerGguf, RefusesContradictions) {
  GgufVocabulary types;
  types.types.pop_back();
  EXPECT_EQ(types.load().status().code(), StatusCode::kCorrupt);
  GgufVocabulary type;
  type.types[3] = 9;
  EXPECT_EQ(type.load().status().code(), StatusCode::kCorrupt);
  GgufVocabulary bos;
  bos.bos = 1u << 30;
  EXPECT_EQ(bos.load().status().code(), StatusCode::kCorrupt);
  GgufVocabulary merge;
  merge.merges.push_back("nowhere q");
  EXPECT_EQ(merge.load().status().code(), StatusCode::kCorrupt);
  GgufVocabulary space;
  space.merges.push_back("ab");
  EXPECT_EQ(space.load().status().code(), StatusCode::kCorrupt);
  GgufVocabulary empty;
  empty.tokens.clear();
  empty.types.clear();
  empty.merges.clear();
  EXPECT_EQ(empty.load().status().code(), StatusCode::kCorrupt);
  // S04: a token longer than 64 KiB is refused, by the reader or by the loader.
  GgufVocabulary token;
  token.tokens[7] = std::string(kMaxTokenBytes + 1, 'x');
  EXPECT_FALSE(token.load().ok());
}

TEST(TokenizerGguf, OfTwoEqualTokensTheLowerIdIsUsed) {
  GgufVocabulary vocabulary;
  const TokenId first = static_cast<TokenId>(vocabulary.tokens.size());
  vocabulary.tokens.insert(vocabulary.tokens.end(), {"twice", "twice"});
  vocabulary.types.insert(vocabulary.types.end(), {1, 1});
  const auto tokenizer = vocabulary.load();
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
  EXPECT_EQ((*tokenizer)->find("twice"), first);
  EXPECT_EQ((*tokenizer)->token_bytes(first + 1), "twice");
}

TEST(TokenizerGguf, PaddingTokensHaveNoText) {
  GgufVocabulary vocabulary;
  vocabulary.tokens.push_back("[PAD9]");
  vocabulary.types.push_back(5);
  const auto tokenizer = vocabulary.load();
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_EQ((*tokenizer)->find("[PAD9]"), std::nullopt);
  EXPECT_EQ((*tokenizer)->token_bytes(static_cast<TokenId>(vocabulary.tokens.size() - 1)), "");
}

TEST(OpenTokenizer, FindsTheTokenizerOfAModel) {
  testing::TempDir folder;
  EXPECT_EQ(open_tokenizer(folder.path()).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(open_tokenizer(folder.path() / "none.gguf").status().code(), StatusCode::kNotFound);
  const auto gguf = folder.write("model.gguf", GgufVocabulary().build());
  const auto from_file = open_tokenizer(gguf);
  ASSERT_TRUE(from_file.ok()) << from_file.status().to_string();
  EXPECT_EQ(from_file->chat_template, "the template");
  EXPECT_TRUE(open_tokenizer(folder.path()).ok());  // the only .gguf
  folder.write("other.gguf", "x");
  EXPECT_EQ(open_tokenizer(folder.path()).status().code(), StatusCode::kNotFound);
  folder.write("tokenizer.json", gpt2_json().dump());
  EXPECT_EQ(open_tokenizer(folder.path())->chat_template, std::nullopt);
  folder.write("tokenizer_config.json", R"({"eos_token": "<|endoftext|>", "chat_template": "A"})");
  EXPECT_EQ(open_tokenizer(folder.path())->chat_template, "A");
  EXPECT_TRUE(open_tokenizer(folder.path())->tokenizer->eos_id().has_value());
  folder.write("chat_template.jinja", "B");
  EXPECT_EQ(open_tokenizer(folder.path())->chat_template, "B");
  const auto weights = folder.write("model.safetensors", "");
  EXPECT_TRUE(open_tokenizer(weights).ok());
  EXPECT_FALSE(open_tokenizer(folder.path() / "other.gguf").ok());
}

}  // namespace
}  // namespace spin::text
