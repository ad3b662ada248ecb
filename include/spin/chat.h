// SPDX-License-Identifier: Apache-2.0
// What a conversation is made of before it becomes tokens. Thread: plain data.
#pragma once

#include <optional>
#include <string>

namespace spin {

struct ChatMessage {
  std::string role;     // "system", "user" or "assistant"
  std::string content;  // UTF-8; never read as control tokens
};

struct ChatOptions {
  // Ends the prompt with the header of an assistant turn, so that the model answers.
  bool add_generation_prompt = true;
  // Qwen3 only: false puts an empty think block in front of the answer; nothing or true lets the
  // model think. The other formats have no such switch and refuse a value.
  std::optional<bool> enable_thinking;
  // Llama 3.1 only: the date in the system header, e.g. "26 Jul 2024" (the template's default).
  // Ignored by the other formats.
  std::optional<std::string> date_string;
};

}  // namespace spin
