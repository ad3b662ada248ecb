// SPDX-License-Identifier: Apache-2.0
#include "server/auth.h"

#include <optional>

#include "base/parse_number.h"
#include "server/limits.h"

namespace spin::server {

bool constant_time_equal(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  // volatile keeps the compiler from leaving the loop early.
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<unsigned char>(
        difference | (static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i])));
  }
  return difference == 0;
}

bool Authorizer::allows(const RequestHead& head) const {
  if (keys_.empty()) return true;
  std::optional<std::string_view> value;
  for (const auto& [name, text] : head.fields) {
    if (name != "authorization") continue;
    if (value) return false;  // two of them: which one would a proxy have checked?
    value = text;
  }
  constexpr std::string_view kScheme = "bearer ";
  if (!value || value->size() <= kScheme.size() ||
      !ascii_iequals(value->substr(0, kScheme.size()), kScheme)) {
    return false;
  }
  const std::string_view token = value->substr(kScheme.size());
  if (token.size() > kMaxApiKeyBytes) return false;
  bool found = false;
  for (const std::string& key : keys_) {
    // No early exit: the time must not say which key it was.
    if (constant_time_equal(key, token)) found = true;
  }
  return found;
}

std::string_view host_without_port(std::string_view host) {
  if (!host.empty() && host.front() == '[') {
    const size_t end = host.find(']');
    return end == std::string_view::npos ? host : host.substr(0, end + 1);
  }
  return host.substr(0, host.find(':'));
}

bool is_loopback_host(std::string_view host_field) {
  std::string_view host = host_without_port(host_field);
  const std::string_view port = host_field.substr(host.size());
  if (!port.empty() && (port.front() != ':' || !base::parse_decimal(port.substr(1)))) return false;
  if (ascii_iequals(host, "localhost") || host == "[::1]") return true;
  // 127.a.b.c with plain decimal parts; "127.evil.example" must not pass.
  int parts = 0;
  while (true) {
    const size_t end = host.find('.');
    const auto number = base::parse_decimal(host.substr(0, end));
    if (!number || *number > 255 || (parts == 0 && *number != 127)) return false;
    ++parts;
    if (end == std::string_view::npos) return parts == 4;
    host.remove_prefix(end + 1);
  }
}

}  // namespace spin::server
