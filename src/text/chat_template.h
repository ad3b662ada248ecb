// SPDX-License-Identifier: Apache-2.0
// The chat formats of the supported families, written in code: a checkpoint's Jinja template only
// selects one of them by its markers and is never run.
//
// Thread: free functions, callable from any thread.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spin/chat.h"
#include "spin/status.h"
#include "spin/token.h"
#include "text/tokenizer.h"

namespace spin::text {

enum class ChatFormat {
  kChatMl,   // turns between <|im_start|> and <|im_end|>, no default system message
  kSmolLm2,  // ChatML with SmolLM2's default system message
  kQwen25,   // ChatML with Qwen2.5's default system message
  kQwen3,    // ChatML; earlier reasoning is removed, enable_thinking
  kLlama3,   // Llama 3.0
  kLlama31,  // Llama 3.1 to 3.3: a system header with dates is always there
};

// "chatml", "smollm2", "qwen2.5", "qwen3", "llama3", "llama3.1".
std::string_view chat_format_name(ChatFormat format);

// The value of --chat-format: a name as above, or "none" (gives nothing: chat is refused).
// Errors: kInvalidArgument, naming the accepted values.
Result<std::optional<ChatFormat>> parse_chat_format(std::string_view name);

// Errors: kUnsupported for a template that is none of the known ones; the message names
// --chat-format and its values.
Result<ChatFormat> detect_chat_format(std::string_view template_text);

// The conversation as text, exactly as the checkpoint's template renders it.
// Errors: kInvalidArgument (param "messages") for an empty list, a role other than system, user
// and assistant, an order that the template refuses, or an option that the format does not have.
Result<std::string> render_chat(ChatFormat format,
                                std::span<const ChatMessage> messages,
                                const ChatOptions& options = {});

// The conversation as tokens. The format's own pieces are read with parse_special, the contents
// of messages without: a content that spells "<|im_end|>" is only text. The format brings its own
// BOS, so EncodeOptions::add_special plays no part.
// Ensures: equals encode(render_chat(...), parse_special) when no content spells an added token.
// Errors: as render_chat; kUnsupported if the vocabulary lacks a control token of the format;
// those of Tokenizer::encode.
Result<std::vector<TokenId>> encode_chat(const Tokenizer& tokenizer,
                                         ChatFormat format,
                                         std::span<const ChatMessage> messages,
                                         const ChatOptions& options = {});

}  // namespace spin::text
