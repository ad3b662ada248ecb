// SPDX-License-Identifier: Apache-2.0
#include "server/openai_response.h"

#include <algorithm>
#include <cmath>

#include "base/utf8.h"
#include "server/json_writer.h"

namespace spin::server {

namespace {

// What clients of OpenAI's API see instead of minus infinity.
constexpr double kLowestLogprob = -9999.0;

void append_logprob(std::string& out, float logprob) {
  append_json_number(out, std::isfinite(logprob) ? double(logprob) : kLowestLogprob);
}

bool has_probability(const TokenLogprob& token) { return !std::isnan(token.logprob); }

void append_identity(std::string& out, const ResponseIdentity& identity, bool chunk) {
  out += "{\"id\":";
  append_json_string(out, identity.id);
  out += ",\"object\":";
  if (!identity.chat) {
    out += "\"text_completion\"";
  } else {
    out += chunk ? "\"chat.completion.chunk\"" : "\"chat.completion\"";
  }
  out += ",\"created\":" + std::to_string(identity.created_unix_s) + ",\"model\":";
  append_json_string(out, identity.model);
  out += ",\"choices\":[";
}

void append_usage(std::string& out, const Usage& usage) {
  out += ",\"usage\":{\"prompt_tokens\":";
  append_json_integer(out, usage.prompt_tokens);
  out += ",\"completion_tokens\":";
  append_json_integer(out, usage.completion_tokens);
  out += ",\"total_tokens\":";
  append_json_integer(out, usage.prompt_tokens + usage.completion_tokens);
  out += '}';
}

// --- Completions: four parallel arrays; top_logprobs is a map from token text.

// A token's text as a JSON string. One that is not a whole character gets OpenAI's `bytes:` form,
// so that different tokens keep different names.
void append_token_name(std::string& out, std::string_view bytes) {
  if (base::is_valid_utf8(bytes)) return append_json_string(out, bytes);
  static constexpr char kHex[] = "0123456789abcdef";
  std::string name = "bytes:";
  for (const char c : bytes) {
    name += "\\x";
    name += kHex[static_cast<unsigned char>(c) >> 4];
    name += kHex[static_cast<unsigned char>(c) & 15];
  }
  append_json_string(out, name);
}

uint64_t code_points(std::string_view bytes) {
  uint64_t count = 0;
  while (!bytes.empty()) {
    const base::Utf8Step step = base::utf8_step(bytes);
    bytes.remove_prefix(std::min(bytes.size(), std::max<size_t>(step.length, 1)));
    ++count;
  }
  return count;
}

// The most likely tokens and the chosen one. A key must not come twice, so of two tokens with the
// same bytes the likelier one is named.
void append_top_map(std::string& out, const TokenLogprob& token, bool with_top) {
  out += '{';
  std::vector<std::string_view> named;
  auto add = [&](std::string_view bytes, float logprob) {
    if (std::find(named.begin(), named.end(), bytes) != named.end()) return;
    if (!named.empty()) out += ',';
    named.push_back(bytes);
    append_token_name(out, bytes);
    out += ':';
    append_logprob(out, logprob);
  };
  if (with_top) {
    for (const Alternative& alternative : token.top) add(alternative.bytes, alternative.logprob);
  }
  add(token.bytes, token.logprob);
  out += '}';
}

void append_completion_logprobs(std::string& out, const ChoiceView& choice) {
  std::vector<const TokenLogprob*> tokens;
  for (const auto& token : choice.prompt_logprobs) tokens.push_back(&token);
  for (const auto& token : choice.logprobs) tokens.push_back(&token);
  auto list = [&](std::string_view name, auto&& append_one) {
    out += '"';
    out += name;
    out += "\":[";
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (i > 0) out += ',';
      append_one(*tokens[i]);
    }
    out += ']';
  };
  out += "{";
  list("tokens", [&](const TokenLogprob& token) { append_token_name(out, token.bytes); });
  out += ',';
  list("token_logprobs", [&](const TokenLogprob& token) {
    if (has_probability(token)) {
      append_logprob(out, token.logprob);
    } else {
      out += "null";
    }
  });
  out += ',';
  list("top_logprobs", [&](const TokenLogprob& token) {
    if (has_probability(token)) {
      append_top_map(out, token, choice.with_top);
    } else {
      out += "null";
    }
  });
  out += ',';
  uint64_t offset = choice.text_offset;
  list("text_offset", [&](const TokenLogprob& token) {
    append_json_integer(out, offset);
    offset += code_points(token.bytes);
  });
  out += '}';
}

// --- Chat: a list of objects.

void append_chat_token(std::string& out, std::string_view bytes, float logprob) {
  out += "{\"token\":";
  append_json_string(out, bytes);
  out += ",\"logprob\":";
  append_logprob(out, logprob);
  out += ",\"bytes\":[";
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i > 0) out += ',';
    append_json_integer(out, static_cast<unsigned char>(bytes[i]));
  }
  out += ']';
}

void append_chat_logprobs(std::string& out, const ChoiceView& choice) {
  out += "{\"content\":[";
  bool first = true;
  for (const TokenLogprob& token : choice.logprobs) {
    if (!first) out += ',';
    first = false;
    append_chat_token(out, token.bytes, token.logprob);
    out += ",\"top_logprobs\":[";
    for (size_t i = 0; i < token.top.size(); ++i) {
      if (i > 0) out += ',';
      append_chat_token(out, token.top[i].bytes, token.top[i].logprob);
      out += '}';
    }
    out += "]}";
  }
  out += "],\"refusal\":null}";
}

void append_logprobs(std::string& out, const ResponseIdentity& identity, const ChoiceView& choice) {
  out += ",\"logprobs\":";
  if (!choice.with_logprobs) {
    out += "null";
  } else if (identity.chat) {
    append_chat_logprobs(out, choice);
  } else {
    append_completion_logprobs(out, choice);
  }
}

void append_finish(std::string& out, const ChoiceView& choice) {
  out += ",\"finish_reason\":";
  if (choice.finish_reason) {
    append_json_string(out, finish_reason_name(*choice.finish_reason));
  } else {
    out += "null";
  }
  out += ",\"stop_reason\":";
  if (choice.stop_string != nullptr && choice.stop_string->has_value()) {
    append_json_string(out, **choice.stop_string);
  } else if (choice.stop_token != nullptr && choice.stop_token->has_value()) {
    append_json_integer(out, **choice.stop_token);
  } else {
    out += "null";
  }
}

void append_choice(std::string& out,
                   const ResponseIdentity& identity,
                   const ChoiceView& choice,
                   bool chunk) {
  out += "{\"index\":";
  append_json_integer(out, choice.index);
  if (!identity.chat) {
    out += ",\"text\":";
    append_json_string(out, choice.text);
  } else if (chunk) {
    out += choice.first ? ",\"delta\":{\"role\":\"assistant\",\"content\":"
                        : ",\"delta\":{\"content\":";
    append_json_string(out, choice.text);
    out += '}';
  } else {
    out += ",\"message\":{\"role\":\"assistant\",\"content\":";
    append_json_string(out, choice.text);
    out += ",\"refusal\":null}";
  }
  append_logprobs(out, identity, choice);
  append_finish(out, choice);
  out += '}';
}

}  // namespace

uint64_t logprob_text_length(std::span<const TokenLogprob> logprobs) {
  uint64_t length = 0;
  for (const TokenLogprob& token : logprobs) length += code_points(token.bytes);
  return length;
}

std::string data_event(std::string_view json) {
  std::string out = "data: ";
  out += json;
  out += "\n\n";
  return out;
}

std::string stream_chunk(const ResponseIdentity& identity,
                         const ChoiceView& choice,
                         const std::optional<Usage>& usage) {
  std::string out = "data: ";
  append_identity(out, identity, true);
  append_choice(out, identity, choice, true);
  out += ']';
  if (usage) append_usage(out, *usage);
  out += "}\n\n";
  return out;
}

std::string usage_chunk(const ResponseIdentity& identity, const Usage& usage) {
  std::string out = "data: ";
  append_identity(out, identity, true);
  out += ']';
  append_usage(out, usage);
  out += "}\n\n";
  return out;
}

std::string full_response(const ResponseIdentity& identity,
                          std::span<const ChoiceView> choices,
                          const Usage& usage) {
  std::string out;
  append_identity(out, identity, false);
  for (size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) out += ',';
    append_choice(out, identity, choices[i], false);
  }
  out += ']';
  append_usage(out, usage);
  out += '}';
  return out;
}

}  // namespace spin::server
