// SPDX-License-Identifier: Apache-2.0
// How the HTTP server is started; the flags of `spin serve` are made from it. Thread: plain data.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "server/limits.h"

namespace spin::server {

struct ServerOptions {
  // A numeric address or "localhost". Anything but a loopback address is reachable by others.
  std::string host = "127.0.0.1";
  uint16_t port = 8000;  // 0: a free one
  // Accepted bearer tokens; none: everybody may ask. /health never needs one.
  std::vector<std::string> api_keys;
  // Further names that the Host field may carry while the server listens on a loopback address
  // (a browser page must not reach it under a name of its own).
  std::vector<std::string> allowed_hosts;
  uint32_t io_threads = 1;
  uint32_t worker_threads = 2;  // JSON and tokenising
  // /health turns 503 when requests wait and no step has ended for so long.
  std::chrono::duration<double> stall_limit{30};
  ServerLimits limits;
  // Gets one line per finished request, without prompts, on a thread of its own; may block, lines
  // beyond kMaxAccessLogQueue are dropped and counted. Null: no access log.
  std::function<void(std::string_view line)> access_log;
};

}  // namespace spin::server
