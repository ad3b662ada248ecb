// SPDX-License-Identifier: Apache-2.0
// Errors in OpenAI's shape: {"error":{"message","type","param","code"}}. Messages are fixed texts
// or those of a Status, which by contract hold no addresses, paths or foreign text. Thread: pure
// functions.
#pragma once

#include <string>
#include <string_view>

#include "server/http_message.h"
#include "spin/status.h"

namespace spin::server {

struct ApiError {
  int status = 400;
  std::string message;
  std::string param;      // "" gives null
  std::string_view code;  // static storage; "" gives null
};

// Seconds after which a client may try again, for 429 and 503.
inline constexpr int kRetryAfterOverloadSeconds = 1;
inline constexpr int kRetryAfterUnavailableSeconds = 5;

// {"error":{...}}
std::string error_json(const ApiError& error);

// With Retry-After on 429 and 503, WWW-Authenticate on 401.
HttpResponse error_response(const ApiError& error);

// The HTTP view of a Status. Requires: !status.ok().
ApiError api_error(const Status& status);

}  // namespace spin::server
