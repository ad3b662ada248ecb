// SPDX-License-Identifier: Apache-2.0
#include "server/api_error.h"

#include "server/json_writer.h"

namespace spin::server {

namespace {

std::string_view error_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 500:
      return "server_error";
    case 503:
      return "service_unavailable_error";
    default:
      return "invalid_request_error";
  }
}

}  // namespace

std::string error_json(const ApiError& error) {
  std::string out = "{\"error\":{\"message\":";
  append_json_string(out, error.message);
  out += ",\"type\":";
  append_json_string(out, error_type(error.status));
  out += ",\"param\":";
  if (error.param.empty()) {
    out += "null";
  } else {
    append_json_string(out, error.param);
  }
  out += ",\"code\":";
  if (error.code.empty()) {
    out += "null";
  } else {
    append_json_string(out, error.code);
  }
  out += "}}";
  return out;
}

HttpResponse error_response(const ApiError& error) {
  HttpResponse response;
  response.status = error.status;
  response.body = error_json(error);
  if (error.status == 429) {
    response.fields.emplace_back("Retry-After", std::to_string(kRetryAfterOverloadSeconds));
  } else if (error.status == 503) {
    response.fields.emplace_back("Retry-After", std::to_string(kRetryAfterUnavailableSeconds));
  } else if (error.status == 401) {
    response.fields.emplace_back("WWW-Authenticate", "Bearer");
  }
  return response;
}

ApiError api_error(const Status& status) {
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
      return {400, status.message(), status.param(), "invalid_value"};
    case StatusCode::kUnsupported:
      return {400, status.message(), status.param(), "unsupported_value"};
    case StatusCode::kNotFound:
      return {404, status.message(), status.param(), "not_found"};
    case StatusCode::kResourceExhausted:
      return {429, "the server is at its capacity; try again later", "", "overloaded"};
    case StatusCode::kUnavailable:
      return {503, "the server takes no new requests at the moment", "", "unavailable"};
    case StatusCode::kCancelled:
      return {503, "the request was ended by the server", "", "cancelled"};
    default:
      // A fault of our own; its text may say more than a client should read.
      return {500, "the server failed to process the request", "", "internal_error"};
  }
}

}  // namespace spin::server
