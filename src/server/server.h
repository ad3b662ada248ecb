// SPDX-License-Identifier: Apache-2.0
// The OpenAI-compatible front end of an engine (docs/serving.md).
//
// Life of a server: start() listens and answers 503 "loading"; attach() gives it an engine;
// begin_drain() refuses new work; drain() ends what runs; stop() closes everything.
//
// Thread: one owner thread; requests are served by the server's own threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "server/options.h"
#include "spin/engine.h"
#include "spin/status.h"

namespace spin::server {

// What the front end counts itself, at one moment.
struct ServerStats {
  uint64_t connections_open = 0;
  uint64_t requests_active = 0;  // received, not yet answered
  uint64_t client_left = 0;
  uint64_t slow_readers = 0;
};

class Server {
 public:
  // Errors: kIoError with param "port" (in use, not permitted), kInvalidArgument,
  // kResourceExhausted (threads, descriptors).
  static Result<std::unique_ptr<Server>> start(const ServerOptions& options);

  ~Server();  // as stop()
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Lifetime: `engine` outlives stop(). Once.
  void attach(Engine& engine);

  uint16_t port() const;
  std::string url() const;  // "http://127.0.0.1:8000"
  ServerStats stats() const;

  // New work gets 503 with Retry-After, /health too; running requests go on.
  void begin_drain();

  // begin_drain(), waits up to `limit` for running requests, ends the rest with an error event,
  // lets the answers go out (at most a second), then stop(). True if nothing had to be ended.
  // The engine is drained and stopped on the way. Blocks.
  bool drain(std::chrono::duration<double> limit);

  // Closes all connections at once, cancels their requests; blocks, idempotent.
  void stop();

 private:
  class Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spin::server
