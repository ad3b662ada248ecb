// SPDX-License-Identifier: Apache-2.0
// Byte-level BPE: text to token ids and back, with the ids that Hugging Face's `tokenizers` gives.
// Made by the loaders of text/tokenizer_loader.h. Everything above this module goes through it.
//
// Thread: immutable after construction; all calls are const and may run on any number of threads.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spin/status.h"
#include "spin/token.h"

namespace spin::text {

// Longest text of one encode() call. One endless word needs about 28 bytes of working memory per
// byte of text, so this also bounds the memory of a call.
inline constexpr size_t kMaxEncodeBytes = 32u << 20;
// Longest token of a vocabulary, and the most tokens of one.
inline constexpr size_t kMaxTokenBytes = 64u << 10;
inline constexpr size_t kMaxVocabulary = 1u << 21;

struct EncodeOptions {
  // Adds what the tokenizer's post-processor adds (BOS for the Llama 3 family, nothing for GPT-2,
  // Qwen and SmolLM).
  bool add_special = true;
  // Whether the text of added tokens ("<|im_end|>", "<think>") becomes that token. Hugging Face's
  // `tokenizers` always does so, which lets a user forge turns of a conversation. Here *no* added
  // token, special or not, is found in the text unless this is set; it is set for the pieces that
  // come from a chat template and never for what a user wrote.
  bool parse_special = false;
};

// A stretch of text and whether added tokens are found in it.
struct TextPiece {
  std::string_view text;
  bool parse_special = false;
};

struct TokenizerParts;  // text/tokenizer_parts.h: what the loaders hand over

class Tokenizer {
 public:
  // Checks the parts against each other. For the loaders; others call text/tokenizer_loader.h.
  static Result<std::unique_ptr<Tokenizer>> create(TokenizerParts parts);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Ensures: equals `tokenizers`' ids (with parse_special for texts that hold added tokens). A
  // byte for which the vocabulary has no token is dropped, as there. Linear in text.size() up to
  // a logarithm of the longest word.
  // Errors: kInvalidArgument for ill-formed UTF-8 or a text over kMaxEncodeBytes.
  Result<std::vector<TokenId>> encode(std::string_view text, EncodeOptions options = {}) const;

  // As encode() of the pieces' concatenation without add_special, but added tokens are found only
  // inside the pieces that allow it: text before and after such a border still forms words
  // together, as in a rendered chat template.
  Result<std::vector<TokenId>> encode_pieces(std::span<const TextPiece> pieces) const;

  // The bytes of all tokens in order: not necessarily UTF-8 (see text/detokenizer.h). Ids without
  // a token (a model's output may be wider than its vocabulary) contribute nothing.
  std::string decode(std::span<const TokenId> ids, bool skip_special) const;

  // The raw bytes of a token; empty for an id without a token. Lifetime: the tokenizer's.
  std::string_view token_bytes(TokenId id) const;

  // A control token: never text of a user, left out by decode(..., skip_special = true).
  bool is_special(TokenId id) const;

  // Whether `id` is in [0, vocab_size()). A GGUF file may pad its vocabulary with tokens without
  // text.
  bool contains(TokenId id) const { return id < vocab_size(); }
  size_t vocab_size() const;

  std::optional<TokenId> bos_id() const;
  std::optional<TokenId> eos_id() const;
  // Whether add_special puts bos_id() in front.
  bool adds_bos() const;

  // The token with exactly these bytes ("<|im_end|>", " the"); the lower id if there are two.
  // Added tokens are found before ordinary ones.
  std::optional<TokenId> find(std::string_view token_text) const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<const Impl> impl);

  std::unique_ptr<const Impl> impl_;
};

}  // namespace spin::text
