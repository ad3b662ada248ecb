// SPDX-License-Identifier: Apache-2.0
#include "server/openai_request.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/checked_math.h"
#include "io/json.h"
#include "server/limits.h"
#include "server/request_readers.h"
#include "spin/sampling_limits.h"

namespace spin::server {

namespace {

namespace limits = sampling_limits;
constexpr unsigned kGenerate = kCompletions | kChat;
constexpr unsigned kAll = kCompletions | kChat | kTokenize | kDetokenize;
constexpr double kTwo53 = 9007199254740992.0;
constexpr double kMaxU32 = 4294967295.0;

struct Value {
  bool boolean = false;
  int64_t integer = 0;
  double number = 0;
};

// One row: what the field is, and either a setter for its plain value or a reader of its own.
struct Field {
  FieldInfo info;
  void (*set)(ApiRequest&, const Value&) = nullptr;
  Status (*read)(const Json&, ReadContext&) = nullptr;
  // For kOff: the JSON texts, separated by spaces, that mean "off" (null always does).
  std::string_view off_values;
};

using R = ApiRequest;
using V = Value;

Field boolean(std::string_view name,
              unsigned apis,
              std::string_view default_text,
              void (*set)(R&, const V&)) {
  return {
      {name, apis, FieldKind::kBoolean, 0, 0, false, "boolean", default_text}, set, nullptr, {}};
}
Field integer(std::string_view name,
              unsigned apis,
              double min,
              double max,
              std::string_view range,
              std::string_view default_text,
              void (*set)(R&, const V&)) {
  return {
      {name, apis, FieldKind::kInteger, min, max, false, range, default_text}, set, nullptr, {}};
}
Field number(std::string_view name,
             double min,
             bool min_open,
             double max,
             std::string_view range,
             std::string_view default_text,
             void (*set)(R&, const V&)) {
  return {{name, kGenerate, FieldKind::kNumber, min, max, min_open, range, default_text},
          set,
          nullptr,
          {}};
}
Field other(std::string_view name,
            unsigned apis,
            std::string_view range,
            std::string_view default_text,
            Status (*read)(const Json&, ReadContext&)) {
  return {{name, apis, FieldKind::kOther, 0, 0, false, range, default_text}, nullptr, read, {}};
}
Field ignored(std::string_view name, unsigned apis) {
  return {
      {name, apis, FieldKind::kIgnored, 0, 0, false, "anything", "ignored"}, nullptr, nullptr, {}};
}
Field off(std::string_view name, unsigned apis, std::string_view off_values) {
  return {{name, apis, FieldKind::kOff, 0, 0, false, off_values, "not supported"},
          nullptr,
          nullptr,
          off_values};
}

void set_max_tokens(R& out, const V& value) {
  out.sampling.max_tokens = static_cast<uint64_t>(value.integer);
  out.max_tokens_given = true;
}

void append_sampling_fields(std::vector<Field>& fields) {
  fields.push_back(number("temperature", 0, false, limits::kMaxTemperature, "0 to 2",
                          "model's, else 1",
                          [](R& r, const V& v) { r.sampling.temperature = float(v.number); }));
  fields.push_back(integer("top_k", kGenerate, -1, 2147483647.0, "-1 to 2^31 - 1; -1 and 0: all",
                           "model's, else 0",
                           [](R& r, const V& v) { r.sampling.top_k = v.integer; }));
  fields.push_back(number("top_p", 0, true, 1, "above 0, to 1", "model's, else 1",
                          [](R& r, const V& v) { r.sampling.top_p = float(v.number); }));
  fields.push_back(number("min_p", 0, false, 1, "0 to 1", "model's, else 0",
                          [](R& r, const V& v) { r.sampling.min_p = float(v.number); }));
  fields.push_back(
      number("repetition_penalty", limits::kMinRepetitionPenalty, false,
             limits::kMaxRepetitionPenalty, "0.01 to 100", "model's, else 1",
             [](R& r, const V& v) { r.sampling.repetition_penalty = float(v.number); }));
  fields.push_back(number("presence_penalty", -limits::kMaxPresencePenalty, false,
                          limits::kMaxPresencePenalty, "-2 to 2", "0",
                          [](R& r, const V& v) { r.sampling.presence_penalty = float(v.number); }));
  fields.push_back(number(
      "frequency_penalty", -limits::kMaxPresencePenalty, false, limits::kMaxPresencePenalty,
      "-2 to 2", "0", [](R& r, const V& v) { r.sampling.frequency_penalty = float(v.number); }));
  fields.push_back(other("seed", kGenerate, "integer, -2^63 to 2^64 - 1", "random", read_seed));
  fields.push_back(integer("n", kGenerate, 1, limits::kMaxChoices, "1 to 128", "1",
                           [](R& r, const V& v) { r.sampling.n = uint32_t(v.integer); }));
  fields.push_back(other("stop", kGenerate, "string or up to 16 strings of 1 to 1,024 bytes",
                         "none", read_stop));
  fields.push_back(
      other("stop_token_ids", kGenerate, "up to 64 token ids", "none", read_stop_token_ids));
  fields.push_back(boolean("include_stop_str_in_output", kGenerate, "false", [](R& r, const V& v) {
    r.sampling.include_stop_str_in_output = v.boolean;
  }));
  fields.push_back(integer("min_tokens", kGenerate, 0, kMaxU32, "0 to max_tokens", "0",
                           [](R& r, const V& v) { r.sampling.min_tokens = uint32_t(v.integer); }));
  fields.push_back(integer("max_tokens", kCompletions, 0, kTwo53,
                           "1 to 2^53, within the model's length; 0 with echo", "16",
                           set_max_tokens));
  fields.push_back(integer("max_tokens", kChat, 1, kTwo53, "1 to 2^53, within the model's length",
                           "up to the model's length", set_max_tokens));
  fields.push_back(integer("max_completion_tokens", kGenerate, 1, kTwo53,
                           "as max_tokens, and goes before it", "none", nullptr));
  fields.push_back(boolean("ignore_eos", kGenerate, "false",
                           [](R& r, const V& v) { r.sampling.ignore_eos = v.boolean; }));
  fields.push_back(boolean("skip_special_tokens", kGenerate, "true",
                           [](R& r, const V& v) { r.sampling.skip_special_tokens = v.boolean; }));
  fields.push_back(other("logit_bias", kGenerate,
                         "object of up to 1,024 token ids, each -100 to 100", "none",
                         read_logit_bias));
}

void append_request_fields(std::vector<Field>& fields) {
  fields.push_back(other("model", kAll, "the served name", "the served name", read_model));
  fields.push_back(other("prompt", kCompletions,
                         "string, strings, token ids or lists of token ids; prompts x n up to 128",
                         "required", read_prompt));
  fields.push_back(other("prompt", kTokenize, "string", "this or messages", read_prompt));
  fields.push_back(other("messages", kChat | kTokenize,
                         "1 to 8,192 messages {role, content}; content a string or text parts",
                         "required", read_messages));
  fields.push_back(other("tokens", kDetokenize, "token ids", "required", read_detokenize_ids));
  fields.push_back(
      boolean("stream", kGenerate, "false", [](R& r, const V& v) { r.stream = v.boolean; }));
  fields.push_back(other("stream_options", kGenerate,
                         "{include_usage, continuous_usage_stats}; needs stream", "none",
                         read_stream_options));
  fields.push_back(
      boolean("echo", kCompletions, "false", [](R& r, const V& v) { r.echo = v.boolean; }));
  fields.push_back(
      integer("best_of", kCompletions, 1, limits::kMaxChoices, "1 to n", "n", nullptr));
  fields.push_back(other("logprobs", kCompletions, "integer, 0 to 20", "none", read_logprobs));
  fields.push_back(other("logprobs", kChat, "boolean", "false", read_logprobs));
  fields.push_back(integer("top_logprobs", kChat, 0, limits::kMaxTopLogprobs,
                           "0 to 20; needs logprobs", "0",
                           [](R& r, const V& v) { r.sampling.logprobs = uint32_t(v.integer); }));
  fields.push_back(boolean("add_special_tokens", kCompletions | kTokenize, "true",
                           [](R& r, const V& v) { r.add_special_tokens = v.boolean; }));
  fields.push_back(boolean("add_generation_prompt", kChat | kTokenize, "true",
                           [](R& r, const V& v) { r.chat.add_generation_prompt = v.boolean; }));
  fields.push_back(other("chat_template_kwargs", kChat | kTokenize, "{enable_thinking: boolean}",
                         "none", read_template_kwargs));
  fields.push_back(boolean("return_token_strs", kTokenize, "false",
                           [](R& r, const V& v) { r.return_token_strings = v.boolean; }));
  fields.push_back(other("sparse", kGenerate, "{\"algorithm\": name} and options of that algorithm",
                         "the server's", read_sparse));
  fields.push_back(
      other("response_format", kGenerate, "{\"type\": \"text\"}", "text", read_response_format));
  fields.push_back(other("tool_choice", kChat, "\"none\" or \"auto\"", "none", read_tool_choice));
}

void append_passive_fields(std::vector<Field>& fields) {
  for (const char* name :
       {"user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "request_id", "cache_salt"}) {
    fields.push_back(ignored(name, kGenerate));
  }
  fields.push_back(ignored("parallel_tool_calls", kChat));
  for (const char* name :
       {"tools", "functions", "documents", "bad_words", "allowed_token_ids", "logits_processors",
        "mm_processor_kwargs", "vllm_xargs", "kv_transfer_params", "structured_outputs"}) {
    fields.push_back(off(name, kGenerate, "[] {}"));
  }
  for (const char* name :
       {"function_call", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "guided_decoding_backend", "guided_whitespace_pattern", "prompt_embeds", "audio",
        "prediction", "chat_template", "reasoning_effort", "verbosity", "web_search_options",
        "truncate_prompt_tokens", "prompt_logprobs", "logit_processors", "grammar",
        "thinking_token_budget"}) {
    fields.push_back(off(name, kGenerate, ""));
  }
  fields.push_back(off("suffix", kCompletions, "\"\""));
  fields.push_back(off("modalities", kChat, "[\"text\"]"));
  fields.push_back(off("echo", kChat, "false"));
  fields.push_back(off("add_special_tokens", kChat, "false"));
  fields.push_back(off("continue_final_message", kChat | kTokenize, "false"));
  for (const char* name : {"use_beam_search", "return_tokens_as_token_ids", "return_token_ids",
                           "early_stopping", "include_reasoning"}) {
    fields.push_back(off(name, kGenerate, "false"));
  }
  fields.push_back(off("spaces_between_special_tokens", kGenerate, "true"));
  fields.push_back(off("length_penalty", kGenerate, "1 1.0"));
  fields.push_back(off("priority", kGenerate, "0"));
}

const std::vector<Field>& field_table() {
  static const std::vector<Field> table = [] {
    std::vector<Field> fields;
    append_request_fields(fields);
    append_sampling_fields(fields);
    append_passive_fields(fields);
    return fields;
  }();
  return table;
}

const Field* find_field(Api api, std::string_view name) {
  for (const Field& field : field_table()) {
    if ((field.info.apis & api) != 0 && field.info.name == name) return &field;
  }
  return nullptr;
}

bool is_off(std::string_view off_values, const Json& value) {
  if (value.is_null()) return true;
  const std::string text = (value.is_structured() && !value.empty() && value.size() > 4)
                               ? std::string()
                               : value.dump(-1, ' ', true, Json::error_handler_t::replace);
  while (!off_values.empty()) {
    const size_t end = std::min(off_values.find(' '), off_values.size());
    if (off_values.substr(0, end) == text) return true;
    off_values.remove_prefix(std::min(end + 1, off_values.size()));
  }
  return false;
}

Status read_field(const Field& field, const Json& value, ReadContext& context) {
  const FieldInfo& info = field.info;
  if (info.kind == FieldKind::kIgnored) return ok_status();
  if (info.kind == FieldKind::kOff) {
    if (is_off(field.off_values, value)) return ok_status();
    return Status(StatusCode::kUnsupported, fmt::format("`{}` is not supported", info.name),
                  std::string(info.name));
  }
  if (value.is_null()) return ok_status();  // as if it were not there
  if (field.read != nullptr) return field.read(value, context);
  Value plain;
  if (info.kind == FieldKind::kBoolean) {
    if (!value.is_boolean()) return wrong_value(info.name, "a boolean", value);
    plain.boolean = value.get<bool>();
  } else if (info.kind == FieldKind::kInteger) {
    const auto integer_value = json_integer(value);
    if (!integer_value || double(*integer_value) < info.min || double(*integer_value) > info.max) {
      return wrong_value(info.name, fmt::format("an integer, {}", info.range), value);
    }
    plain.integer = *integer_value;
  } else {
    // Compared as the float that will be used, so that 1e-50 is not taken for a positive number.
    const float narrow = value.is_number() ? static_cast<float>(value.get<double>()) : NAN;
    const float min = static_cast<float>(info.min);
    const bool above = info.min_open ? narrow > min : narrow >= min;
    if (!(above && narrow <= static_cast<float>(info.max))) {
      return wrong_value(info.name, fmt::format("a number, {}", info.range), value);
    }
    plain.number = narrow;
  }
  if (field.set != nullptr) field.set(context.out, plain);
  return ok_status();
}

Status invalid(std::string_view param, std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message), std::string(param));
}

std::optional<int64_t> given_integer(const Json& root, const char* name) {
  const auto found = root.find(name);
  if (found == root.end() || found->is_null()) return std::nullopt;
  return json_integer(*found);
}

bool given(const Json& root, const char* name) {
  const auto found = root.find(name);
  return found != root.end() && !found->is_null();
}

// Rules between fields. Every single field has been checked before.
Status check_together(const Json& root, ApiRequest& out) {
  SamplingParams& sampling = out.sampling;
  if (const auto tokens = given_integer(root, "max_completion_tokens")) {
    set_max_tokens(out, {false, *tokens, 0});
  }
  if (out.api == kCompletions && !out.max_tokens_given) sampling.max_tokens = 16;
  if (sampling.max_tokens == uint64_t{0}) {
    if (!out.echo || sampling.min_tokens > 0) {
      return invalid("max_tokens", "`max_tokens` must be at least 1, or 0 with `echo`");
    }
    out.echo_only = true;
    sampling.max_tokens = 1;
  }
  if (sampling.max_tokens && sampling.min_tokens > *sampling.max_tokens) {
    return invalid("min_tokens", "`min_tokens` must not be above `max_tokens`");
  }
  if (const auto best_of = given_integer(root, "best_of"); best_of && *best_of > sampling.n) {
    return invalid("best_of", "`best_of` must not be above `n`; choices are not ranked");
  }
  if (given(root, "stream_options") && !out.stream) {
    return invalid("stream_options", "`stream_options` needs `stream`");
  }
  if (out.api == kChat) {
    const auto flag = root.find("logprobs");
    const bool on = flag != root.end() && flag->is_boolean() && flag->get<bool>();
    if (!on) {
      if (given_integer(root, "top_logprobs").value_or(0) > 0) {
        return invalid("top_logprobs", "`top_logprobs` needs `logprobs`");
      }
      sampling.logprobs.reset();
    }
  }
  if (out.echo && sampling.logprobs) sampling.prompt_logprobs = sampling.logprobs;
  const uint64_t prompts = std::max<uint64_t>(out.prompts.size(), 1);
  if (prompts * sampling.n > kMaxTotalChoices) {
    return invalid(prompts > 1 ? "prompt" : "n",
                   fmt::format("prompts x `n` must be at most {}, found {}", kMaxTotalChoices,
                               prompts * sampling.n));
  }
  return ok_status();
}

Status check_required(const ApiRequest& out) {
  switch (out.api) {
    case kCompletions:
      if (out.prompts.empty()) return invalid("prompt", "`prompt` is missing");
      break;
    case kChat:
      if (out.messages.empty()) return invalid("messages", "`messages` is missing");
      break;
    case kTokenize:
      if (out.prompts.empty() == out.messages.empty()) {
        return invalid("prompt", "either `prompt` or `messages` must be given");
      }
      break;
    case kDetokenize:
      if (out.prompts.empty()) return invalid("tokens", "`tokens` is missing");
      break;
  }
  return ok_status();
}

}  // namespace

std::vector<FieldInfo> request_fields() {
  std::vector<FieldInfo> out;
  for (const Field& field : field_table()) out.push_back(field.info);
  return out;
}

Result<ApiRequest> parse_api_request(Api api,
                                     std::string_view body,
                                     const RequestContext& context) {
  const io::JsonLimits json_limits{context.max_body_bytes, kMaxJsonDepth, kMaxJsonValues,
                                   kMaxJsonMemoryBytes};
  auto parsed = io::parse_json(body, json_limits);
  if (!parsed.ok()) {
    // Also a limit is the request's own fault here: 400, not 429.
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the body is not acceptable JSON: {}", parsed.status().message()));
  }
  const Json& root = *parsed;
  if (!root.is_object()) {
    return Status(StatusCode::kInvalidArgument, "the body must be a JSON object");
  }
  ApiRequest out;
  out.api = api;
  out.sampling = context.default_sampling;
  ReadContext read_context{out, context};
  for (const auto& [key, value] : root.items()) {
    const Field* field = find_field(api, key);
    if (field == nullptr) {
      const std::string name = printable_name(key);
      return Status(
          StatusCode::kInvalidArgument,
          name.empty() ? std::string("unknown field") : fmt::format("unknown field `{}`", name),
          name);
    }
    SPIN_RETURN_IF_ERROR(read_field(*field, value, read_context));
  }
  SPIN_RETURN_IF_ERROR(check_required(out));
  SPIN_RETURN_IF_ERROR(check_together(root, out));
  return out;
}

}  // namespace spin::server
