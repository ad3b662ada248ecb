// SPDX-License-Identifier: Apache-2.0
// How the two benchmark clients read a stream, rebuilt from their sources: one splits at empty
// lines and skips comments, the other reads line by line and looks into choices[0] unguarded.
// Thread: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "tests/support/raw_http.h"

namespace spin::server {

struct ClientView {
  bool success = false;
  bool saw_done = false;
  std::string text;
  uint64_t token_events = 0;
  std::optional<uint64_t> completion_tokens;
  std::optional<uint64_t> prompt_tokens;
};

// `vllm bench serve`: any event with choices is a token event; usage counts only without choices.
inline ClientView read_like_vllm(std::string_view body, bool chat) {
  ClientView view;
  for (const std::string& event : testing::sse_events(body)) {
    if (event == "[DONE]") {
      view.saw_done = true;
      continue;
    }
    const auto data = nlohmann::json::parse(event, nullptr, false);
    if (data.is_discarded()) return view;
    if (data.contains("choices") && !data["choices"].empty()) {
      const auto& choice = data["choices"][0];
      if (chat && !choice.contains("delta")) return view;
      const auto& text = chat ? choice["delta"]["content"] : choice["text"];
      if (!text.is_string()) return view;
      view.text += text.get<std::string>();
      ++view.token_events;
    } else if (data.contains("usage")) {
      view.completion_tokens = data["usage"]["completion_tokens"];
      view.prompt_tokens = data["usage"]["prompt_tokens"];
    }
  }
  view.success = view.token_events > 0;
  return view;
}

// `sglang.bench_serving`: every line is `data: ` and JSON or [DONE]; an empty choices list raises.
inline ClientView read_like_sglang(std::string_view body, bool chat) {
  ClientView view;
  while (!body.empty()) {
    const size_t end = body.find('\n');
    std::string_view line = body.substr(0, end);
    body.remove_prefix(end == std::string_view::npos ? body.size() : end + 1);
    if (line.empty()) continue;
    if (!line.starts_with("data: ")) return view;
    line.remove_prefix(6);
    if (line == "[DONE]") {
      view.saw_done = true;
      continue;
    }
    const auto data = nlohmann::json::parse(line, nullptr, false);
    if (data.is_discarded() || !data.contains("choices") || data["choices"].empty()) return view;
    const auto& choice = data["choices"][0];
    const auto& text = chat ? choice["delta"]["content"] : choice["text"];
    if (!text.is_string()) return view;
    if (!text.get_ref<const std::string&>().empty()) ++view.token_events;
    view.text += text.get<std::string>();
    if (data.contains("usage")) view.completion_tokens = data["usage"]["completion_tokens"];
  }
  view.success = view.saw_done && view.token_events > 0;
  return view;
}

}  // namespace spin::server
