// SPDX-License-Identifier: Apache-2.0
// What a loader knows about a byte-level BPE tokenizer, in one form for tokenizer.json and GGUF,
// and the step from the files' strings to token numbers and bytes.
//
// Thread: plain data and pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spin/status.h"
#include "spin/token.h"
#include "text/pretokenizer.h"

namespace spin::text {

inline constexpr TokenId kNoToken = UINT32_MAX;

struct Merge {
  TokenId left = 0;
  TokenId right = 0;
  TokenId merged = 0;
};

struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool special = false;
  // Looked for in the normalized text, after the others were found in the text as given.
  bool normalized = false;
};

struct TokenizerParts {
  std::vector<std::string> tokens;  // by id: bytes, at most kMaxTokenBytes each
  std::vector<bool> ordinary;       // by id: made of byte characters, i.e. reachable by merging
  std::array<TokenId, 256> byte_tokens = {};  // kNoToken: the vocabulary lacks this byte
  std::vector<Merge> merges;                  // in order of rank
  std::vector<AddedToken> added;
  std::vector<TokenId> special_ids;  // beside the special ones of `added`
  PreTokenizer pre_tokenizer = PreTokenizer::kGpt2;
  bool nfc = false;
  bool ignore_merges = false;
  std::vector<TokenId> prefix;  // put around the text by add_special
  std::vector<TokenId> suffix;
  std::optional<TokenId> bos;
  std::optional<TokenId> eos;
};

// GPT-2's alphabet maps each byte to a printable character. The bytes of `token`, or nothing if a
// character is not of that alphabet.
std::optional<std::string> decode_byte_characters(std::string_view token);

// A vocabulary as files spell it: tokens and merges in byte characters.
// Lifetime: views into the file.
struct VocabularySource {
  std::vector<std::string_view> tokens;  // by id; empty view: no ordinary token with this id
  std::vector<std::pair<std::string_view, std::string_view>> merges;
};

// Fills tokens, ordinary, byte_tokens and merges of `parts`.
// Errors: kCorrupt for a token over kMaxTokenBytes or a merge of unknown tokens.
Status resolve_vocabulary(const VocabularySource& source, TokenizerParts& parts);

// Makes `added.content` the bytes of its id and remembers it.
// Errors: kCorrupt for an id outside the vocabulary, an empty or oversized content.
Status add_added_token(AddedToken added, TokenizerParts& parts);

}  // namespace spin::text
