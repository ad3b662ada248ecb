// SPDX-License-Identifier: Apache-2.0
// Who may ask, and under which name the server may be addressed. Thread: immutable after
// construction.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/http_message.h"

namespace spin::server {

// Takes the same time wherever the first difference is; the length is not secret.
bool constant_time_equal(std::string_view a, std::string_view b);

class Authorizer {
 public:
  explicit Authorizer(std::vector<std::string> keys) : keys_(std::move(keys)) {}
  bool required() const { return !keys_.empty(); }
  // Exactly one Authorization field with a known bearer token, or no keys at all.
  bool allows(const RequestHead& head) const;

 private:
  std::vector<std::string> keys_;
};

// "localhost", "127.0.0.1", "[::1]" and every other address of 127.0.0.0/8, with any port.
bool is_loopback_host(std::string_view host_field);

// The host name of a Host field without its port.
std::string_view host_without_port(std::string_view host_field);

}  // namespace spin::server
