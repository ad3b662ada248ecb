// SPDX-License-Identifier: Apache-2.0
#include "server/routes.h"

#include "base/parse_number.h"

namespace spin::server {

namespace {

constexpr std::string_view kModelPrefix = "/v1/models/";

constexpr RouteInfo get(Route route, std::string_view path, bool needs_key, bool needs_engine) {
  return {route, path, "GET, HEAD", false, needs_key, needs_engine};
}
constexpr RouteInfo post(Route route, std::string_view path) {
  return {route, path, "POST", true, true, true};
}

constexpr RouteInfo kRoutes[] = {
    get(Route::kHealth, "/health", false, false),
    get(Route::kPing, "/ping", false, false),
    get(Route::kVersion, "/version", true, false),
    get(Route::kMetrics, "/metrics", true, false),
    get(Route::kModels, "/v1/models", true, true),
    post(Route::kCompletions, "/v1/completions"),
    post(Route::kChatCompletions, "/v1/chat/completions"),
    post(Route::kTokenize, "/tokenize"),
    post(Route::kDetokenize, "/detokenize"),
};

}  // namespace

std::optional<RouteInfo> find_route(std::string_view path) {
  for (const RouteInfo& info : kRoutes) {
    if (info.path == path) return info;
  }
  if (path.starts_with(kModelPrefix) && path.size() > kModelPrefix.size()) {
    return get(Route::kModel, "/v1/models/{id}", true, true);
  }
  return std::nullopt;
}

std::optional<std::string> model_id_of(std::string_view path) {
  if (!path.starts_with(kModelPrefix)) return std::nullopt;
  path.remove_prefix(kModelPrefix.size());
  std::string out;
  while (!path.empty()) {
    if (path.front() != '%') {
      out += path.front();
      path.remove_prefix(1);
      continue;
    }
    if (path.size() < 3) return std::nullopt;
    const auto byte = base::parse_hex(path.substr(1, 2));
    if (!byte) return std::nullopt;
    out += static_cast<char>(*byte);
    path.remove_prefix(3);
  }
  return out;
}

}  // namespace spin::server
