// SPDX-License-Identifier: Apache-2.0
// Which path and method is what. Paths are compared as sent: no percent-decoding, no folding of
// slashes or dots, so there is one spelling of each and the checks cannot look at another.
// Thread: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace spin::server {

enum class Route : uint8_t {
  kHealth,
  kPing,
  kVersion,
  kMetrics,
  kModels,
  kModel,  // /v1/models/{id}
  kCompletions,
  kChatCompletions,
  kTokenize,
  kDetokenize,
};

struct RouteInfo {
  Route route = Route::kHealth;
  std::string_view path;     // for the log and the metrics; never what the client sent
  std::string_view allowed;  // methods, for the Allow field
  bool post = false;
  bool needs_key = true;
  bool needs_engine = false;
};

// Nothing for an unknown path.
std::optional<RouteInfo> find_route(std::string_view path);

// The id in /v1/models/{id}, percent-decoded once; nothing if malformed.
std::optional<std::string> model_id_of(std::string_view path);

}  // namespace spin::server
