// SPDX-License-Identifier: Apache-2.0
#include "text/chat_template.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/quote.h"
#include "base/utf8.h"

namespace spin::text {
namespace {

constexpr std::pair<ChatFormat, std::string_view> kNames[] = {
    {ChatFormat::kChatMl, "chatml"},  {ChatFormat::kSmolLm2, "smollm2"},
    {ChatFormat::kQwen25, "qwen2.5"}, {ChatFormat::kQwen3, "qwen3"},
    {ChatFormat::kLlama3, "llama3"},  {ChatFormat::kLlama31, "llama3.1"},
};

constexpr std::string_view kAccepted = "none, chatml, smollm2, qwen2.5, qwen3, llama3, llama3.1";

constexpr std::string_view kSmolLm2System =
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
constexpr std::string_view kQwen25System =
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.";

// ChatML without a default system message, without spaces and line breaks.
constexpr std::string_view kPlainChatMl =
    "{%formessageinmessages%}{{'<|im_start|>'+message['role']+'\\n'+message['content']+"
    "'<|im_end|>'+'\\n'}}{%endfor%}{%ifadd_generation_prompt%}{{'<|im_start|>assistant\\n'}}"
    "{%endif%}";

// The pieces of a prompt: ours (control tokens are read) and the user's (they are not).
class Conversation {
 public:
  void ours(std::string_view text) { pieces_.push_back({std::string(text), true}); }
  void user(std::string_view text) { pieces_.push_back({std::string(text), false}); }

  struct Piece {
    std::string text;
    bool trusted;
  };
  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  std::vector<Piece> pieces_;
};

Status invalid(std::string message, std::string param = "messages") {
  return Status(StatusCode::kInvalidArgument, std::move(message), std::move(param));
}

// Python's str.strip() without arguments, which Jinja's `trim` is.
bool is_python_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

std::string_view trim(std::string_view text) {
  size_t begin = text.size();
  size_t end = 0;
  for (size_t pos = 0; pos < text.size();) {
    const base::Utf8Step step = base::utf8_step(text.substr(pos));
    const bool valid = step.kind == base::Utf8Step::Kind::kValid;
    if (!valid || !is_python_space(step.code_point)) {
      begin = std::min(begin, pos);
      end = pos + step.length;
    }
    pos += step.length;
  }
  return begin < end ? text.substr(begin, end - begin) : std::string_view();
}

std::string_view strip_newlines_left(std::string_view text) {
  const size_t begin = text.find_first_not_of('\n');
  return begin == std::string_view::npos ? std::string_view() : text.substr(begin);
}

std::string_view strip_newlines_right(std::string_view text) {
  return text.substr(0, text.find_last_not_of('\n') + 1);
}

void chatml_turn(std::string_view role, std::string_view content, Conversation& out) {
  out.ours(fmt::format("<|im_start|>{}\n", role));
  out.user(content);
  out.ours("<|im_end|>\n");
}

// ChatML; `default_system` stands in front when the conversation has no system message there.
void format_chatml(std::span<const ChatMessage> messages,
                   std::string_view default_system,
                   const ChatOptions& options,
                   Conversation& out) {
  if (!default_system.empty() && messages[0].role != "system") {
    out.ours(fmt::format("<|im_start|>system\n{}<|im_end|>\n", default_system));
  }
  for (const ChatMessage& message : messages) chatml_turn(message.role, message.content, out);
  if (options.add_generation_prompt) out.ours("<|im_start|>assistant\n");
}

struct Reasoned {
  std::string_view reasoning;
  std::string_view answer;
};

// Cuts an assistant's text at its think block, as Qwen3's template does.
Reasoned split_reasoning(std::string_view content) {
  constexpr std::string_view kOpen = "<think>";
  constexpr std::string_view kClose = "</think>";
  const size_t first_close = content.find(kClose);
  if (first_close == std::string_view::npos) return {{}, content};
  const std::string_view answer = content.substr(content.rfind(kClose) + kClose.size());
  std::string_view reasoning = strip_newlines_right(content.substr(0, first_close));
  if (const size_t open = reasoning.rfind(kOpen); open != std::string_view::npos) {
    reasoning.remove_prefix(open + kOpen.size());
  }
  return {strip_newlines_left(reasoning), strip_newlines_left(answer)};
}

bool is_tool_response(std::string_view content) {
  constexpr std::string_view kOpen = "<tool_response>";
  constexpr std::string_view kClose = "</tool_response>";
  return content.starts_with(kOpen) && content.ends_with(kClose);
}

void format_qwen3(std::span<const ChatMessage> messages,
                  const ChatOptions& options,
                  Conversation& out) {
  size_t last_query = messages.size() - 1;
  for (size_t i = messages.size(); i-- > 0;) {
    if (messages[i].role == "user" && !is_tool_response(messages[i].content)) {
      last_query = i;
      break;
    }
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    if (message.role != "assistant") {
      chatml_turn(message.role, message.content, out);
      continue;
    }
    // Reasoning stays only in answers to the last question.
    const Reasoned parts = split_reasoning(message.content);
    const bool is_last = i + 1 == messages.size();
    if (i > last_query && (is_last || !parts.reasoning.empty())) {
      out.ours("<|im_start|>assistant\n<think>\n");
      out.user(strip_newlines_right(parts.reasoning));
      out.ours("\n</think>\n\n");
      out.user(strip_newlines_left(parts.answer));
      out.ours("<|im_end|>\n");
    } else {
      chatml_turn(message.role, parts.answer, out);
    }
  }
  if (!options.add_generation_prompt) return;
  out.ours("<|im_start|>assistant\n");
  if (options.enable_thinking == false) out.ours("<think>\n\n</think>\n\n");
}

void llama_turn(std::string_view role, std::string_view content, Conversation& out) {
  out.ours(fmt::format("<|start_header_id|>{}<|end_header_id|>\n\n", role));
  out.user(trim(content));
  out.ours("<|eot_id|>");
}

void format_llama3(std::span<const ChatMessage> messages,
                   bool with_dates,
                   const ChatOptions& options,
                   Conversation& out) {
  out.ours("<|begin_of_text|>");
  if (with_dates) {
    out.ours(
        "<|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: ");
    out.user(options.date_string.value_or("26 Jul 2024"));
    out.ours("\n\n");
    if (messages[0].role == "system") {
      out.user(trim(messages[0].content));
      messages = messages.subspan(1);
    }
    out.ours("<|eot_id|>");
  }
  for (const ChatMessage& message : messages) llama_turn(message.role, message.content, out);
  if (options.add_generation_prompt) {
    out.ours("<|start_header_id|>assistant<|end_header_id|>\n\n");
  }
}

Result<Conversation> format_chat(ChatFormat format,
                                 std::span<const ChatMessage> messages,
                                 const ChatOptions& options) {
  if (messages.empty()) return invalid("messages: expected at least one message");
  for (const ChatMessage& message : messages) {
    if (message.role != "system" && message.role != "user" && message.role != "assistant") {
      return invalid(
          fmt::format("messages: expected the role system, user or assistant, found {} "
                      "(tools are unsupported)",
                      base::quote_text(message.role)));
    }
  }
  if (options.enable_thinking && format != ChatFormat::kQwen3) {
    return invalid(fmt::format("enable_thinking: the chat format {} has no such switch",
                               chat_format_name(format)),
                   "chat_template_kwargs");
  }
  Conversation out;
  switch (format) {
    case ChatFormat::kChatMl:
      format_chatml(messages, "", options, out);
      break;
    case ChatFormat::kSmolLm2:
      format_chatml(messages, kSmolLm2System, options, out);
      break;
    case ChatFormat::kQwen25:
      format_chatml(messages, kQwen25System, options, out);
      break;
    case ChatFormat::kQwen3:
      format_qwen3(messages, options, out);
      break;
    case ChatFormat::kLlama3:
    case ChatFormat::kLlama31:
      format_llama3(messages, format == ChatFormat::kLlama31, options, out);
      break;
  }
  return out;
}

bool is_llama(ChatFormat format) {
  return format == ChatFormat::kLlama3 || format == ChatFormat::kLlama31;
}

}  // namespace

std::string_view chat_format_name(ChatFormat format) {
  for (const auto& [known, name] : kNames) {
    if (known == format) return name;
  }
  return "unknown";
}

Result<std::optional<ChatFormat>> parse_chat_format(std::string_view name) {
  if (name == "none") return std::optional<ChatFormat>();
  for (const auto& [format, known] : kNames) {
    if (known == name) return std::optional<ChatFormat>(format);
  }
  return Status(
      StatusCode::kInvalidArgument,
      fmt::format("chat format: expected one of {}; found {}", kAccepted, base::quote_text(name)));
}

Result<ChatFormat> detect_chat_format(std::string_view template_text) {
  const auto has = [template_text](std::string_view marker) {
    return template_text.find(marker) != std::string_view::npos;
  };
  if (has("<|im_start|>")) {
    if (has("enable_thinking is false") && has("last_query_index") &&
        has("'<think>\\n\\n</think>\\n\\n'")) {
      return ChatFormat::kQwen3;
    }
    if (has(kQwen25System) && !has("think>")) return ChatFormat::kQwen25;
    if (has(kSmolLm2System) && !has("think>")) return ChatFormat::kSmolLm2;
    std::string dense(template_text);
    std::erase_if(dense, [](char c) { return c == ' ' || c == '\n'; });
    if (dense == kPlainChatMl) return ChatFormat::kChatMl;
  }
  if (has("<|start_header_id|>") && has("<|end_header_id|>") && has("<|eot_id|>") &&
      !has("think>")) {
    const bool cutting = has("Cutting Knowledge Date: December 2023");
    const bool today = has("Today Date: ");
    if (cutting && today) return ChatFormat::kLlama31;
    if (!cutting && !today) return ChatFormat::kLlama3;
  }
  return Status(StatusCode::kUnsupported,
                fmt::format("chat template: it is none of the known ones; choose a format with "
                            "--chat-format NAME ({})",
                            kAccepted));
}

Result<std::string> render_chat(ChatFormat format,
                                std::span<const ChatMessage> messages,
                                const ChatOptions& options) {
  SPIN_ASSIGN_OR_RETURN(const Conversation conversation, format_chat(format, messages, options));
  std::string text;
  for (const Conversation::Piece& piece : conversation.pieces()) text += piece.text;
  return text;
}

Result<std::vector<TokenId>> encode_chat(const Tokenizer& tokenizer,
                                         ChatFormat format,
                                         std::span<const ChatMessage> messages,
                                         const ChatOptions& options) {
  constexpr std::string_view kChatMlTokens[] = {"<|im_start|>", "<|im_end|>"};
  constexpr std::string_view kLlamaTokens[] = {"<|begin_of_text|>", "<|start_header_id|>",
                                               "<|end_header_id|>", "<|eot_id|>"};
  const auto needed = is_llama(format) ? std::span<const std::string_view>(kLlamaTokens)
                                       : std::span<const std::string_view>(kChatMlTokens);
  for (const std::string_view name : needed) {
    const auto id = tokenizer.find(name);
    if (!id || !tokenizer.is_special(*id)) {
      return Status(StatusCode::kUnsupported,
                    fmt::format("chat format {}: the vocabulary has no control token {}",
                                chat_format_name(format), name));
    }
  }
  SPIN_ASSIGN_OR_RETURN(const Conversation conversation, format_chat(format, messages, options));
  std::vector<TextPiece> pieces;
  for (const Conversation::Piece& piece : conversation.pieces()) {
    pieces.push_back({piece.text, piece.trusted});
  }
  return tokenizer.encode_pieces(pieces);
}

}  // namespace spin::text
