// SPDX-License-Identifier: Apache-2.0
#include "server/text_routes.h"

#include <utility>
#include <vector>

#include <fmt/format.h>

#include "server/api_error.h"
#include "server/json_writer.h"
#include "server/openai_request.h"

namespace spin::server {

namespace {

Result<ApiRequest> parse(Api api, const Engine& engine, std::string_view body, uint64_t max_body) {
  const ModelInfo& model = engine.model_info();
  auto request =
      parse_api_request(api, body, {engine.default_sampling(), model.vocab_size, max_body});
  if (request.ok() && !request->model.empty() && request->model != model.name) {
    return Status(StatusCode::kNotFound,
                  "the model does not exist; GET /v1/models names the one served", "model");
  }
  return request;
}

HttpResponse refuse(const Status& status) { return error_response(api_error(status)); }

}  // namespace

std::string model_json(const ModelInfo& model) {
  std::string out = "{\"id\":";
  append_json_string(out, model.name);
  out += fmt::format(R"(,"object":"model","created":{})", model.created_unix_s);
  out += ",\"owned_by\":\"spin\",\"root\":";
  append_json_string(out, model.name);
  out += ",\"parent\":null,\"max_model_len\":";
  append_json_integer(out, model.max_model_len);
  out += '}';
  return out;
}

HttpResponse answer_tokenize(const Engine& engine, std::string_view body, uint64_t max_body) {
  auto request = parse(kTokenize, engine, body, max_body);
  if (!request.ok()) return refuse(request.status());
  auto ids = request->messages.empty()
                 ? engine.tokenize(request->prompts[0].text, request->add_special_tokens)
                 : engine.encode_chat(request->messages, request->chat);
  if (!ids.ok()) return refuse(ids.status());
  HttpResponse response;
  std::string& out = response.body;
  out = fmt::format(R"({{"count":{},"max_model_len":{})", ids->size(),
                    engine.model_info().max_model_len);
  out += ",\"tokens\":[";
  for (size_t i = 0; i < ids->size(); ++i) {
    if (i > 0) out += ',';
    append_json_integer(out, (*ids)[i]);
  }
  out += "],\"token_strs\":";
  if (!request->return_token_strings) {
    out += "null}";
    return response;
  }
  out += '[';
  for (size_t i = 0; i < ids->size(); ++i) {
    if (i > 0) out += ',';
    append_json_string(out, engine.token_bytes((*ids)[i]));
  }
  out += "]}";
  return response;
}

HttpResponse answer_detokenize(const Engine& engine, std::string_view body, uint64_t max_body) {
  auto request = parse(kDetokenize, engine, body, max_body);
  if (!request.ok()) return refuse(request.status());
  auto text = engine.detokenize(request->prompts[0].ids, false);
  if (!text.ok()) return refuse(text.status());
  HttpResponse response;
  response.body = "{\"prompt\":";
  append_json_string(response.body, *text);
  response.body += '}';
  return response;
}

}  // namespace spin::server
