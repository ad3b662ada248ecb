// SPDX-License-Identifier: Apache-2.0
// Readers of the request fields that are more than one number: prompt, messages, stop, logit_bias
// and the like. Used by openai_request.cc only. Thread: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "server/openai_request.h"

namespace spin::server {

using Json = nlohmann::json;

// "a string", "an object": what was found, without its content.
std::string_view json_type_text(const Json& value);

// `param` must be `expected`, found <type or number>.
Status wrong_value(std::string_view param, std::string_view expected, const Json& found);

// An integer, also one written as 5.0; nothing for anything else, or beyond 2^53 in that form.
std::optional<int64_t> json_integer(const Json& value);

// A field's name from outside, fit for a message: letters, digits, `_.-`, at most 64; else "".
std::string printable_name(std::string_view name);

struct ReadContext {
  ApiRequest& out;
  const RequestContext& model;
};

// Each reads one non-null value of the field it is named after.
Status read_model(const Json& value, ReadContext& context);
Status read_prompt(const Json& value, ReadContext& context);
Status read_messages(const Json& value, ReadContext& context);
Status read_stop(const Json& value, ReadContext& context);
Status read_stop_token_ids(const Json& value, ReadContext& context);
Status read_logit_bias(const Json& value, ReadContext& context);
Status read_stream_options(const Json& value, ReadContext& context);
Status read_seed(const Json& value, ReadContext& context);
Status read_logprobs(const Json& value, ReadContext& context);
Status read_response_format(const Json& value, ReadContext& context);
Status read_tool_choice(const Json& value, ReadContext& context);
Status read_template_kwargs(const Json& value, ReadContext& context);
Status read_sparse(const Json& value, ReadContext& context);
Status read_detokenize_ids(const Json& value, ReadContext& context);

}  // namespace spin::server
