// SPDX-License-Identifier: Apache-2.0
// A parsed HTTP request and a response to be sent, independent of the transport.
// Thread: plain data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/body_charge.h"

namespace spin::server {

struct RequestHead {
  std::string method;  // as sent; methods are case-sensitive
  std::string target;  // as sent
  std::string path;    // of the target, not percent-decoded; "" for CONNECT and "*"
  int version = 11;    // 10 or 11
  std::vector<std::pair<std::string, std::string>> fields;  // names in lower case

  bool keep_alive = true;
  bool expect_continue = false;
  bool chunked = false;
  std::optional<uint64_t> content_length;

  bool has_body() const { return chunked || (content_length && *content_length > 0); }

  // The first field of this (lower-case) name, or null.
  const std::string* find(std::string_view name) const {
    for (const auto& [key, value] : fields) {
      if (key == name) return &value;
    }
    return nullptr;
  }
};

struct HttpRequest {
  RequestHead head;
  std::string body;
  BodyCharge charge;  // kept for as long as the body is
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> fields;  // further ones, without CR or LF
  std::string body;
  bool close = false;  // end the connection after it
};

// "Bad Request" for 400 and so on.
std::string_view reason_phrase(int status);

// ASCII-only, locale-free.
std::string ascii_lower(std::string_view text);
bool ascii_iequals(std::string_view a, std::string_view b);

// Status line, fields and the empty line. `body_bytes` gives Content-Length; without it the head
// is that of a stream: chunked for HTTP/1.1, until close for HTTP/1.0.
std::string format_response_head(const HttpResponse& response,
                                 int version,
                                 bool keep_alive,
                                 std::optional<uint64_t> body_bytes);

}  // namespace spin::server
