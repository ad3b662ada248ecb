// SPDX-License-Identifier: Apache-2.0
// The text of GET /metrics: vLLM's names and histogram shapes under `spin:`, and what the front end
// counts itself. Thread: pure function.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "spin/stats.h"

namespace spin::server {

struct FrontEndCounts {
  uint64_t connections_open = 0;
  uint64_t connections_total = 0;
  uint64_t connections_refused = 0;
  uint64_t accept_errors = 0;
  uint64_t timeouts = 0;
  uint64_t client_left = 0;
  uint64_t slow_readers = 0;
  uint64_t log_lines_dropped = 0;
  uint64_t requests_active = 0;
  uint64_t body_bytes_pending = 0;
  uint64_t answer_bytes_pending = 0;
  uint64_t worker_queue = 0;
  std::array<uint64_t, 6> responses_by_class{};  // index 2 counts 2xx, ...
};

// `stats` null: no engine yet.
std::string metrics_text(const EngineStats* stats,
                         const FrontEndCounts& front,
                         std::string_view model_name);

}  // namespace spin::server
