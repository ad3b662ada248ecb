// SPDX-License-Identifier: Apache-2.0
// From the bytes of a request body to a validated request. One table names every field with its
// type, its range and what happens to it; a field outside the table is refused by name, so that
// nothing a client asks for is dropped in silence.
//
// Thread: pure functions; they run on worker threads (a body may be megabytes).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spin/chat.h"
#include "spin/request.h"
#include "spin/status.h"

namespace spin::server {

// Bits, so that a field can belong to several.
enum Api : unsigned {
  kCompletions = 1,
  kChat = 2,
  kTokenize = 4,
  kDetokenize = 8,
};

enum class FieldKind : uint8_t {
  kBoolean,
  kInteger,
  kNumber,
  kOther,    // has its own reader; `range` says what it takes
  kIgnored,  // any value, no effect (bookkeeping of other services)
  kOff,      // known, not supported: only the values that switch it off are taken
};

struct FieldInfo {
  std::string_view name;
  unsigned apis = 0;
  FieldKind kind = FieldKind::kOther;
  double min = 0;
  double max = 0;
  bool min_open = false;          // min itself is refused
  std::string_view range;         // for people
  std::string_view default_text;  // for people
};

// The table, for the tests and the documentation.
std::vector<FieldInfo> request_fields();

struct PromptInput {
  bool is_text = true;
  std::string text;
  std::vector<TokenId> ids;  // of the request where !is_text, else of the tokenizer
};

struct ApiRequest {
  Api api = kCompletions;
  std::string model;  // "" if not given
  std::vector<PromptInput> prompts;
  std::vector<ChatMessage> messages;
  ChatOptions chat;
  SamplingParams sampling;
  std::optional<std::string> sparse;  // as GenerateRequest::sparse
  bool add_special_tokens = true;
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  bool echo = false;
  // max_tokens 0 with echo: only the prompt (and its log-probabilities) is wanted.
  bool echo_only = false;
  bool max_tokens_given = false;
  bool return_token_strings = false;  // /tokenize
};

// What the checks need to know of the model.
struct RequestContext {
  SamplingParams default_sampling;
  uint64_t vocab_size = 0;
  uint64_t max_body_bytes = 64ull << 20;
};

// Errors: kInvalidArgument or kUnsupported, with param() wherever one field is at fault.
Result<ApiRequest> parse_api_request(Api api, std::string_view body, const RequestContext& context);

}  // namespace spin::server
