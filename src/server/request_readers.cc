// SPDX-License-Identifier: Apache-2.0
#include "server/request_readers.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "base/parse_number.h"
#include "server/limits.h"
#include "spin/sampling_limits.h"

namespace spin::server {

namespace limits = sampling_limits;

std::string_view json_type_text(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "an array";
    case Json::value_t::string:
      return "a string";
    case Json::value_t::boolean:
      return "a boolean";
    default:
      return "a number";
  }
}

Status wrong_value(std::string_view param, std::string_view expected, const Json& found) {
  std::string message = fmt::format("`{}` must be {}, found ", param, expected);
  if (found.is_number_unsigned()) {
    message += std::to_string(found.get<uint64_t>());
  } else if (found.is_number_integer()) {
    message += std::to_string(found.get<int64_t>());
  } else {
    message += json_type_text(found);
  }
  return Status(StatusCode::kInvalidArgument, std::move(message), std::string(param));
}

std::optional<int64_t> json_integer(const Json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) {
    const auto number = value.get<double>();
    constexpr double kExact = 9007199254740992.0;  // 2^53
    if (std::trunc(number) != number || number > kExact || number < -kExact) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  return std::nullopt;
}

std::string printable_name(std::string_view name) {
  const bool good = !name.empty() && name.size() <= kMaxFieldNameEchoBytes &&
                    std::all_of(name.begin(), name.end(), [](char c) {
                      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                             (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '-';
                    });
  return good ? std::string(name) : std::string();
}

namespace {

Status bad(std::string_view param, std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message), std::string(param));
}

Status unsupported(std::string_view param, std::string message) {
  return Status(StatusCode::kUnsupported, std::move(message), std::string(param));
}

// One token id below the vocabulary size.
std::optional<TokenId> token_id(const Json& value, uint64_t vocab_size) {
  const auto number = json_integer(value);
  if (!number || *number < 0 || static_cast<uint64_t>(*number) >= vocab_size) return std::nullopt;
  return static_cast<TokenId>(*number);
}

Status read_ids(std::string_view param,
                const Json& array,
                uint64_t vocab_size,
                std::vector<TokenId>& out) {
  out.reserve(array.size());
  for (const Json& entry : array) {
    const auto id = token_id(entry, vocab_size);
    if (!id) {
      return wrong_value(param, fmt::format("token ids from 0 to {}", vocab_size - 1), entry);
    }
    out.push_back(*id);
  }
  return ok_status();
}

}  // namespace

Status read_model(const Json& value, ReadContext& context) {
  if (!value.is_string()) return wrong_value("model", "a string", value);
  context.out.model = value.get_ref<const std::string&>();
  return ok_status();
}

Status read_prompt(const Json& value, ReadContext& context) {
  constexpr std::string_view kExpected =
      "a string, an array of strings, an array of token ids or an array of arrays of token ids";
  auto& prompts = context.out.prompts;
  if (value.is_string()) {
    prompts.push_back({true, value.get<std::string>(), {}});
    return ok_status();
  }
  if (context.out.api == kTokenize) return wrong_value("prompt", "a string", value);
  if (!value.is_array()) return wrong_value("prompt", kExpected, value);
  if (value.empty()) return bad("prompt", "`prompt` must not be an empty array");
  const Json& first = value.front();
  if (first.is_number()) {
    PromptInput prompt{false, {}, {}};
    SPIN_RETURN_IF_ERROR(read_ids("prompt", value, context.model.vocab_size, prompt.ids));
    prompts.push_back(std::move(prompt));
    return ok_status();
  }
  if (value.size() > kMaxTotalChoices) {
    return bad("prompt", fmt::format("`prompt` must have at most {} entries, found {}",
                                     kMaxTotalChoices, value.size()));
  }
  for (const Json& entry : value) {
    if (entry.type() != first.type()) return bad("prompt", "`prompt` must not mix types");
    if (entry.is_string()) {
      prompts.push_back({true, entry.get<std::string>(), {}});
    } else if (entry.is_array()) {
      PromptInput prompt{false, {}, {}};
      SPIN_RETURN_IF_ERROR(read_ids("prompt", entry, context.model.vocab_size, prompt.ids));
      prompts.push_back(std::move(prompt));
    } else {
      return wrong_value("prompt", kExpected, entry);
    }
  }
  return ok_status();
}

namespace {

// A string, or text parts joined by line ends (as vLLM does).
Status read_content(const Json& content, const std::string& at, size_t& parts, std::string& out) {
  const std::string param = fmt::format("{}.content", at);
  if (content.is_string()) {
    out = content.get<std::string>();
    return ok_status();
  }
  if (!content.is_array()) return wrong_value(param, "a string or an array of text parts", content);
  bool first = true;
  for (const Json& part : content) {
    if (++parts > kMaxContentParts) {
      return bad("messages",
                 fmt::format("`messages` must have at most {} content parts", kMaxContentParts));
    }
    if (part.is_string()) {
      if (!first) out += '\n';
      out += part.get_ref<const std::string&>();
      first = false;
      continue;
    }
    if (!part.is_object()) return wrong_value(param, "an array of text parts", part);
    const auto type = part.find("type");
    if (type == part.end() || !type->is_string()) {
      return bad(param, fmt::format("`{}`: every part needs a `type`", param));
    }
    if (type->get_ref<const std::string&>() != "text") {
      return unsupported(param,
                         fmt::format("`{}`: only parts of type `text` are supported", param));
    }
    const auto text = part.find("text");
    if (text == part.end() || !text->is_string()) {
      return bad(param, fmt::format("`{}`: a text part needs a string `text`", param));
    }
    for (const auto& [key, value] : part.items()) {
      if (key != "type" && key != "text" && key != "cache_control") {
        return unsupported(param,
                           fmt::format("`{}`: a text part has only `type` and `text`", param));
      }
    }
    if (!first) out += '\n';
    out += text->get_ref<const std::string&>();
    first = false;
  }
  return ok_status();
}

Status check_message_field(const std::string& at, const std::string& key, const Json& value) {
  if (key == "role" || key == "content" || key == "name") return ok_status();
  const bool off = value.is_null() || ((value.is_array() || value.is_object()) && value.empty());
  static constexpr std::string_view kKnown[] = {
      "tool_calls", "tool_call_id", "function_call", "refusal",
      "audio",      "annotations",  "reasoning",     "reasoning_content"};
  const bool known = std::find(std::begin(kKnown), std::end(kKnown), key) != std::end(kKnown);
  if (known && off) return ok_status();
  const std::string name = printable_name(key);
  if (known)
    return unsupported(fmt::format("{}.{}", at, name),
                       fmt::format("`{}.{}` is not supported", at, name));
  if (name.empty()) return bad(at, fmt::format("`{}` has an unknown field", at));
  return bad(fmt::format("{}.{}", at, name),
             fmt::format("`{}` has an unknown field `{}`", at, name));
}

}  // namespace

Status read_messages(const Json& value, ReadContext& context) {
  if (!value.is_array()) return wrong_value("messages", "an array of messages", value);
  if (value.empty()) return bad("messages", "`messages` must not be an empty array");
  if (value.size() > kMaxMessages) {
    return bad("messages", fmt::format("`messages` must have at most {} entries, found {}",
                                       kMaxMessages, value.size()));
  }
  size_t parts = 0;
  for (size_t i = 0; i < value.size(); ++i) {
    const Json& entry = value[i];
    const std::string at = fmt::format("messages[{}]", i);
    if (!entry.is_object()) return wrong_value(at, "an object", entry);
    ChatMessage message;
    const auto role = entry.find("role");
    if (role == entry.end() || !role->is_string()) {
      return bad(fmt::format("{}.role", at), fmt::format("`{}.role` must be a string", at));
    }
    message.role = role->get<std::string>();
    if (message.role != "system" && message.role != "user" && message.role != "assistant") {
      return unsupported(fmt::format("{}.role", at),
                         fmt::format("`{}.role` must be system, user or assistant", at));
    }
    for (const auto& [key, field] : entry.items()) {
      SPIN_RETURN_IF_ERROR(check_message_field(at, key, field));
    }
    const auto content = entry.find("content");
    if (content == entry.end()) {
      return bad(fmt::format("{}.content", at), fmt::format("`{}.content` is missing", at));
    }
    SPIN_RETURN_IF_ERROR(read_content(*content, at, parts, message.content));
    context.out.messages.push_back(std::move(message));
  }
  return ok_status();
}

Status read_stop(const Json& value, ReadContext& context) {
  auto& stop = context.out.sampling.stop;
  stop.clear();
  auto add = [&stop](const Json& entry) {
    if (!entry.is_string()) return wrong_value("stop", "a string or an array of strings", entry);
    const auto& text = entry.get_ref<const std::string&>();
    if (text.empty() || text.size() > limits::kMaxStopStringBytes) {
      return bad("stop", fmt::format("each of `stop` must have 1 to {} bytes, found {}",
                                     limits::kMaxStopStringBytes, text.size()));
    }
    stop.push_back(text);
    return ok_status();
  };
  if (!value.is_array()) return add(value);
  if (value.size() > limits::kMaxStopStrings) {
    return bad("stop", fmt::format("`stop` must have at most {} entries, found {}",
                                   limits::kMaxStopStrings, value.size()));
  }
  for (const Json& entry : value) SPIN_RETURN_IF_ERROR(add(entry));
  return ok_status();
}

Status read_stop_token_ids(const Json& value, ReadContext& context) {
  if (!value.is_array()) return wrong_value("stop_token_ids", "an array of token ids", value);
  if (value.size() > limits::kMaxStopTokenIds) {
    return bad("stop_token_ids",
               fmt::format("`stop_token_ids` must have at most {} entries, found {}",
                           limits::kMaxStopTokenIds, value.size()));
  }
  auto& ids = context.out.sampling.stop_token_ids;
  ids.clear();
  return read_ids("stop_token_ids", value, context.model.vocab_size, ids);
}

Status read_logit_bias(const Json& value, ReadContext& context) {
  if (!value.is_object()) {
    return wrong_value("logit_bias", "an object of token ids and numbers", value);
  }
  if (value.size() > limits::kMaxLogitBiasEntries) {
    return bad("logit_bias", fmt::format("`logit_bias` must have at most {} entries, found {}",
                                         limits::kMaxLogitBiasEntries, value.size()));
  }
  auto& bias = context.out.sampling.logit_bias;
  bias.clear();
  for (const auto& [key, entry] : value.items()) {
    const auto id = base::parse_decimal(key);
    if (!id || *id >= context.model.vocab_size) {
      return bad("logit_bias", fmt::format("keys of `logit_bias` must be token ids from 0 to {}",
                                           context.model.vocab_size - 1));
    }
    const double number = entry.is_number() ? entry.get<double>() : NAN;
    if (!(std::abs(number) <= limits::kMaxLogitBias)) {
      return wrong_value("logit_bias", "an object whose values are numbers from -100 to 100",
                         entry);
    }
    bias.emplace_back(static_cast<TokenId>(*id), static_cast<float>(number));
  }
  return ok_status();
}

Status read_stream_options(const Json& value, ReadContext& context) {
  if (!value.is_object()) return wrong_value("stream_options", "an object", value);
  for (const auto& [key, entry] : value.items()) {
    const std::string name = printable_name(key);
    const std::string param =
        name.empty() ? "stream_options" : fmt::format("stream_options.{}", name);
    if (key != "include_usage" && key != "continuous_usage_stats" && key != "include_obfuscation") {
      return bad(param, fmt::format("`stream_options` has an unknown field{}",
                                    name.empty() ? name : fmt::format(" `{}`", name)));
    }
    if (entry.is_null()) continue;
    if (!entry.is_boolean()) return wrong_value(param, "a boolean", entry);
    if (key == "include_usage") {
      context.out.include_usage = entry.get<bool>();
    } else if (key == "continuous_usage_stats") {
      context.out.continuous_usage = entry.get<bool>();
    } else if (entry.get<bool>()) {
      return unsupported(param, fmt::format("`{}` is not supported", param));
    }
  }
  return ok_status();
}

Status read_seed(const Json& value, ReadContext& context) {
  if (value.is_number_unsigned()) {
    context.out.sampling.seed = value.get<uint64_t>();
    return ok_status();
  }
  const auto number = json_integer(value);
  if (!number) return wrong_value("seed", "an integer from -2^63 to 2^64 - 1", value);
  context.out.sampling.seed = static_cast<uint64_t>(*number);
  return ok_status();
}

// An integer for completions, a boolean for chat (top_logprobs then gives the number).
Status read_logprobs(const Json& value, ReadContext& context) {
  if (context.out.api == kChat) {
    if (!value.is_boolean()) return wrong_value("logprobs", "a boolean", value);
    if (value.get<bool>()) {
      // top_logprobs may have been read before; the order of fields is not ours.
      if (!context.out.sampling.logprobs) context.out.sampling.logprobs = 0;
    }
    return ok_status();
  }
  const auto number = json_integer(value);
  if (!number || *number < 0 || *number > limits::kMaxTopLogprobs) {
    return wrong_value("logprobs", fmt::format("an integer from 0 to {}", limits::kMaxTopLogprobs),
                       value);
  }
  context.out.sampling.logprobs = static_cast<uint32_t>(*number);
  return ok_status();
}

Status read_response_format(const Json& value, ReadContext&) {
  if (!value.is_object()) return wrong_value("response_format", "an object", value);
  const auto type = value.find("type");
  if (type == value.end() || !type->is_string() || type->get_ref<const std::string&>() != "text" ||
      value.size() != 1) {
    return unsupported("response_format", "`response_format` supports only {\"type\": \"text\"}");
  }
  return ok_status();
}

Status read_tool_choice(const Json& value, ReadContext&) {
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    if (text == "none" || text == "auto") return ok_status();
  }
  return unsupported("tool_choice", "`tool_choice` is not supported; tools are not");
}

// The allow-list of S31: anything else in here could change how the request is processed.
Status read_template_kwargs(const Json& value, ReadContext& context) {
  if (!value.is_object()) return wrong_value("chat_template_kwargs", "an object", value);
  for (const auto& [key, entry] : value.items()) {
    const std::string name = printable_name(key);
    const std::string param =
        name.empty() ? "chat_template_kwargs" : fmt::format("chat_template_kwargs.{}", name);
    if (key != "enable_thinking") {
      return unsupported(param, "`chat_template_kwargs` takes only `enable_thinking`");
    }
    if (entry.is_null()) continue;
    if (!entry.is_boolean()) return wrong_value(param, "a boolean", entry);
    context.out.chat.enable_thinking = entry.get<bool>();
  }
  return ok_status();
}

namespace {

// The text of an option's value; nothing for what cannot be one. Files are named when the server is
// started, never by a request: nothing that looks like a path is passed on.
std::optional<std::string> option_text(const Json& value) {
  if (value.is_boolean()) return value.get<bool>() ? "true" : "false";
  if (value.is_number_unsigned()) return std::to_string(value.get<uint64_t>());
  if (value.is_number_integer()) return std::to_string(value.get<int64_t>());
  if (value.is_number_float()) return fmt::format("{}", value.get<double>());
  if (!value.is_string()) return std::nullopt;
  const auto& text = value.get_ref<const std::string&>();
  const bool good = !text.empty() && text.size() <= kMaxSparseOptionBytes &&
                    std::all_of(text.begin(), text.end(), [](char c) {
                      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                             (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '-' || c == '%';
                    });
  return good ? std::optional<std::string>(text) : std::nullopt;
}

}  // namespace

// {"algorithm": "quest", "budget": 1024} becomes "quest:budget=1024". Which algorithms and options
// there are is the engine's to say.
Status read_sparse(const Json& value, ReadContext& context) {
  constexpr std::string_view kExpected = "an object with an `algorithm` and options of it";
  if (!value.is_object()) return wrong_value("sparse", kExpected, value);
  const auto algorithm = value.find("algorithm");
  if (algorithm == value.end()) return bad("sparse", "`sparse` needs an `algorithm`");
  if (value.size() > kMaxSparseOptions) {
    return bad("sparse", fmt::format("`sparse` takes at most {} options", kMaxSparseOptions - 1));
  }
  const auto name = algorithm->is_string() ? option_text(*algorithm) : std::nullopt;
  if (!name) return bad("sparse", "`sparse.algorithm` must be the name of an algorithm");
  std::string spec = *name;
  char separator = ':';
  for (const auto& [key, entry] : value.items()) {
    if (key == "algorithm" || entry.is_null()) continue;
    const std::string option = printable_name(key);
    if (option.empty()) return bad("sparse", "`sparse` has an option whose name is no name");
    const auto text = option_text(entry);
    if (!text) {
      return bad("sparse", fmt::format("`sparse.{}` must be a number, a boolean, or a string of "
                                       "letters, digits and `_.-%`, found {}",
                                       option, json_type_text(entry)));
    }
    spec += fmt::format("{}{}={}", separator, option, *text);
    separator = ',';
  }
  context.out.sparse = std::move(spec);
  return ok_status();
}

Status read_detokenize_ids(const Json& value, ReadContext& context) {
  if (!value.is_array()) return wrong_value("tokens", "an array of token ids", value);
  PromptInput prompt{false, {}, {}};
  SPIN_RETURN_IF_ERROR(read_ids("tokens", value, context.model.vocab_size, prompt.ids));
  context.out.prompts.push_back(std::move(prompt));
  return ok_status();
}

}  // namespace spin::server
