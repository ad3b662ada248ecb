// SPDX-License-Identifier: Apache-2.0
// The JSON of completion and chat objects, whole and as stream chunks. Written by appending; one
// chunk is one line. Thread: pure functions over plain data.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spin/request.h"

namespace spin::server {

// What is the same in every object of one response.
struct ResponseIdentity {
  bool chat = false;
  std::string id;  // cmpl-... or chatcmpl-...
  int64_t created_unix_s = 0;
  std::string model;
};

// One choice, or what a chunk says of it.
struct ChoiceView {
  uint32_t index = 0;
  std::string_view text;
  bool first = false;  // first chunk of this choice: carries the role
  bool with_logprobs = false;
  bool with_top = false;  // completions: logprobs > 0 lists alternatives, 0 only the chosen token
  // Entries of the prompt's tokens (echo) in front of those of the output.
  std::span<const TokenLogprob> prompt_logprobs;
  std::span<const TokenLogprob> logprobs;
  // Code points of the choice's text before this piece (completions: text_offset).
  uint64_t text_offset = 0;
  std::optional<FinishReason> finish_reason;
  const std::optional<std::string>* stop_string = nullptr;
  const std::optional<TokenId>* stop_token = nullptr;
};

// Code points that the tokens of `logprobs` add to text_offset.
uint64_t logprob_text_length(std::span<const TokenLogprob> logprobs);

// One event of a stream, `data: {...}` and the empty line. `usage` puts the counts so far into it.
std::string stream_chunk(const ResponseIdentity& identity,
                         const ChoiceView& choice,
                         const std::optional<Usage>& usage);
// The event with the final counts and no choices.
std::string usage_chunk(const ResponseIdentity& identity, const Usage& usage);
std::string data_event(std::string_view json);
inline constexpr std::string_view kDoneEvent = "data: [DONE]\n\n";

// The whole response.
std::string full_response(const ResponseIdentity& identity,
                          std::span<const ChoiceView> choices,
                          const Usage& usage);

}  // namespace spin::server
