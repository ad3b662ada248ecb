// SPDX-License-Identifier: Apache-2.0
// Cuts text into words, between which BPE never merges. Each known regular expression is a
// hand-written scanner, so there is no backtracking over a user's text: a scan is linear.
//
// Thread: pure functions.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace spin::text {

enum class PreTokenizer {
  kGpt2,    // the expression of GPT-2
  kSmolLm,  // every digit alone, then GPT-2's expression on what lies between
  kQwen2,   // Qwen2, Qwen2.5, Qwen3: digits one by one, contractions in any case
  kLlama3,  // Llama 3: as kQwen2 with digits in groups of up to three
};

// The pre-tokenizer whose regular expression is exactly `regex` (as a "Split" of tokenizer.json).
std::optional<PreTokenizer> pretokenizer_by_regex(std::string_view regex);

// Length in bytes of the word at the front of `text`.
// Requires: `text` is not empty, well-formed UTF-8, and begins where a word begins. For kSmolLm
// the digits look like the end of the text to what stands before them, as in `tokenizers`.
size_t next_word(PreTokenizer kind, std::string_view text);

}  // namespace spin::text
