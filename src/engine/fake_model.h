// SPDX-License-Identifier: Apache-2.0
// A deterministic model for tests of the engine and the server; no user can choose it.
//
// It writes a record of (token, position, layer, head) into the KV pages of every token and
// computes logits from what it *reads back* from the sequence's pages, so a lost, stale or foreign
// page changes the output. Its vocabulary: 256 byte tokens, some tokens of several bytes (halves of
// an emoji among them), and control tokens.
//
// What it says: letters, words, emoji cut anywhere, now and then an invalid byte, an end token with
// `end_percent` per cent. With "say" in the prompt it says exactly the tokens between kFakeSay and
// kFakeEnd and then ends; kFakeNan among them stands for a row of logits that is not a number.
// Thread: as ModelRunner.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "engine/model_runner.h"
#include "spin/options.h"
#include "spin/status.h"
#include "spin/token.h"
#include "text/tokenizer.h"

namespace spin::engine {

// Ids below 256 are bytes.
inline constexpr TokenId kFakeWordStop = 256;       // "stop"
inline constexpr TokenId kFakeWordUser = 257;       // "\nUser"
inline constexpr TokenId kFakeEmojiFront = 258;     // "ab" and the first half of U+1F600
inline constexpr TokenId kFakeEmojiBack = 259;      // its second half and "!"
inline constexpr TokenId kFakeBos = 260;            // <|bos|>
inline constexpr TokenId kFakeEos = 261;            // <|endoftext|>, ends
inline constexpr TokenId kFakeTurnStart = 262;      // <|im_start|>
inline constexpr TokenId kFakeTurnEnd = 263;        // <|im_end|>, ends as well
inline constexpr TokenId kFakeSay = 264;            // <|fake:say|>
inline constexpr TokenId kFakeEnd = 265;            // <|fake:end|>
inline constexpr TokenId kFakeNan = 266;            // <|fake:nan|>
inline constexpr uint32_t kFakeVocabulary = 267;    // known ids
inline constexpr uint32_t kFakeLogitColumns = 272;  // with padding, as real checkpoints have

struct FakeModelOptions {
  uint64_t max_model_len = 4096;
  // Tokens that the KV pages hold; 0: 16 sequences of max_model_len.
  uint64_t kv_capacity_tokens = 0;
  uint32_t end_percent = 4;
  // Every step takes at least this long.
  std::chrono::microseconds step_delay{0};
  // Called on the engine's thread at the start of step 0, 1, ...; may block, and its error is the
  // step's error.
  std::function<Status(uint64_t step)> before_step;
};

// "say" and then `text` byte by byte: a prompt whose answer is `text`.
std::vector<TokenId> fake_say_prompt(std::string_view text);
// The same for tokens.
std::vector<TokenId> fake_say_prompt(std::span<const TokenId> tokens);

// Errors: those of Tokenizer::create.
Result<std::unique_ptr<text::Tokenizer>> make_fake_tokenizer();

// Errors: those of PagePool::create.
Result<std::unique_ptr<ModelRunner>> make_fake_runner(const FakeModelOptions& options,
                                                      const EngineOptions& engine,
                                                      uint32_t max_logit_rows);

}  // namespace spin::engine
