// SPDX-License-Identifier: Apache-2.0
// One I/O thread with its connections, and the counters that all shards share.
//
// Thread: everything on the shard's own thread unless it says otherwise.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <unordered_set>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>

#include "server/exchange.h"
#include "server/limits.h"
#include "server/mailbox.h"
#include "spin/status.h"

namespace spin::server {

class Connection;

// Thread: atomics.
struct HttpCounters {
  std::atomic<uint64_t> connections_open{0};
  std::atomic<uint64_t> connections_total{0};
  std::atomic<uint64_t> connections_refused{0};   // above the limit
  std::atomic<uint64_t> accept_errors{0};         // out of file descriptors and the like
  std::atomic<uint64_t> body_bytes_pending{0};    // of requests being received or handled
  std::atomic<uint64_t> answer_bytes_pending{0};  // of whole answers, until the client took them
  std::atomic<uint64_t> slow_readers_closed{0};
  std::atomic<uint64_t> timeouts{0};
};

// What connections need to know of the server.
struct HttpContext {
  ServerLimits limits;
  HttpHandler* handler = nullptr;
  HttpCounters counters;
  std::atomic<bool> draining{false};  // responses close their connection
  std::atomic<bool> closing{false};   // connections without a request are closed
};

class Shard {
 public:
  explicit Shard(HttpContext& context);
  ~Shard();

  // Thread: any. Starts the thread. Errors: kResourceExhausted.
  Status start();
  // Thread: any. Closes all connections and ends the thread; blocks.
  void stop();

  boost::asio::io_context& io() { return io_; }
  HttpContext& context() { return context_; }
  const std::shared_ptr<Mailbox>& mailbox() { return mailbox_; }
  // One read buffer for all connections of the shard: an idle connection owns no buffer.
  std::vector<char>& scratch() { return scratch_; }

  void add(const std::shared_ptr<Connection>& connection) { connections_.insert(connection); }
  void remove(const std::shared_ptr<Connection>& connection) { connections_.erase(connection); }

 private:
  void run();
  void arm_sweep();
  void sweep();

  HttpContext& context_;
  boost::asio::io_context io_{1};
  boost::asio::steady_timer timer_;
  std::shared_ptr<Mailbox> mailbox_;
  std::vector<char> scratch_;
  std::unordered_set<std::shared_ptr<Connection>> connections_;
  std::chrono::milliseconds sweep_interval_{250};
  std::thread thread_;
};

}  // namespace spin::server
