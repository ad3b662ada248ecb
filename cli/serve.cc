// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <chrono>
#include <memory>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include "base/quote.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/progress_bar.h"
#include "cli/statistics.h"
#include "cli/terminal.h"
#include "server/server.h"
#include "spin/engine.h"

namespace spin::cli {
namespace {

server::ServerOptions server_options(const ServeOptions& options) {
  server::ServerOptions out;
  out.host = options.host;
  out.port = static_cast<uint16_t>(options.port);
  out.api_keys = options.api_keys;
  out.allowed_hosts = options.allowed_hosts;
  out.stall_limit = std::chrono::duration<double>(options.stall_seconds);
  out.limits.max_body_bytes = options.max_body_bytes;
  out.limits.max_connections = options.max_connections;
  if (options.access_log && spdlog::should_log(spdlog::level::info)) {
    out.access_log = [](std::string_view line) { spdlog::info("{}", line); };
  }
  return out;
}

int failed(const Status& status) {
  ServeOptions unused;
  print_error(describe(status, serve_flags(unused)));
  return kExitFailure;
}

bool is_loopback(std::string_view host) {
  return host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0;
}

// Blocks until SIGINT or SIGTERM has come.
void wait_for_signal(const SignalWatcher& signals) {
  while (signals.pending() == 0) {
    pollfd event = {signals.event_fd(), POLLIN, 0};
    if (::poll(&event, 1, -1) < 0 && errno != EINTR) return;
  }
}

std::string ready_line(const ModelInfo& info) {
  return fmt::format(
      "ready: model {} ({}), dtype {}, KV cache of {} tokens ({}), at most {} tokens per request, "
      "chat format {}, on {}\n",
      base::printable_text(info.name), info.architecture, info.dtype, info.kv_capacity_tokens,
      bytes_text(info.kv_cache_bytes), info.max_model_len, info.chat_format,
      base::printable_text(info.device));
}

Result<std::unique_ptr<Engine>> load(const EngineOptions& options, const SignalWatcher& signals) {
  ProgressBar progress(STDERR_FILENO, is_terminal(STDERR_FILENO));
  return create_engine(options, [&](double fraction, std::string_view part) {
    progress.update(fmt::format("Loading {}", part), fraction);
    return signals.pending() == 0;
  });
}

}  // namespace

int run_serve(const ServeOptions& options, SignalWatcher& signals) {
  // The engine is declared first: it has to outlive the server.
  std::unique_ptr<Engine> engine;
  Result<std::unique_ptr<server::Server>> server = server::Server::start(server_options(options));
  if (!server.ok()) return failed(server.status());
  print_notice(fmt::format("listening on {}\n", (*server)->url()));
  if (options.api_keys.empty() && !is_loopback(options.host)) {
    spdlog::warn("other machines can reach {} and no --api-key is asked for", (*server)->url());
  }

  Result<std::unique_ptr<Engine>> loaded = load(options.engine, signals);
  if (!loaded.ok()) {
    (*server)->stop();
    const bool asked = loaded.status().code() == StatusCode::kCancelled && signals.pending() != 0;
    return asked ? kExitOk : failed(loaded.status());
  }
  engine = std::move(loaded).value();
  (*server)->attach(*engine);
  print_notice(sparse_text(engine->model_info()));
  print_notice(ready_line(engine->model_info()));

  wait_for_signal(signals);
  spdlog::info("draining: running requests may go on for {} s", options.drain_seconds);
  const auto limit = std::chrono::duration<double>(options.drain_seconds);
  if (!(*server)->drain(limit)) spdlog::warn("the drain limit ended running requests");
  return kExitOk;
}

}  // namespace spin::cli
