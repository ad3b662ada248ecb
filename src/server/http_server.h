// SPDX-License-Identifier: Apache-2.0
// Listens on one address and spreads connections over I/O threads.
//
// Thread: listen(), start() and stop() from one owner thread; counters from any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "server/exchange.h"
#include "server/limits.h"
#include "spin/status.h"

namespace spin::server {

struct HttpContext;
struct HttpCounters;

class HttpServer {
 public:
  HttpServer(HttpHandler& handler, const ServerLimits& limits, uint32_t io_threads);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // `host` is a numeric address or "localhost"; port 0 takes a free one. Connections wait in the
  // system's queue until start(). Errors: kInvalidArgument (not an address), kIoError (port in
  // use, no permission).
  Status listen(const std::string& host, uint16_t port);
  // Errors: kResourceExhausted; stop() ends what was started.
  Status start();
  // Responses written from now on close their connection; new connections are still accepted, so
  // that their requests can be answered with 503.
  void begin_drain();
  // From now on a connection without a request at work is closed as soon as nothing is unsent.
  void close_idle();
  // Closes the listener and every connection; blocks until the threads have ended. Idempotent.
  void stop();

  uint16_t port() const;
  // The bound address is a loopback one.
  bool loopback() const;
  const HttpCounters& counters() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace spin::server
