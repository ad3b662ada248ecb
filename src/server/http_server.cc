// SPDX-License-Identifier: Apache-2.0
#include "server/http_server.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include <boost/asio/ip/address.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

#include "server/connection.h"
#include "server/shard.h"

namespace spin::server {

namespace asio = boost::asio;
using ErrorCode = boost::system::error_code;
using Tcp = asio::ip::tcp;

namespace {
// Out of file descriptors: the connection stays in the system's queue for this long.
constexpr std::chrono::milliseconds kAcceptRetry{50};
}  // namespace

class HttpServer::Impl {
 public:
  Impl(HttpHandler& handler, const ServerLimits& limits, uint32_t io_threads) {
    context_.limits = limits;
    context_.handler = &handler;
    for (uint32_t i = 0; i < std::max(io_threads, 1u); ++i) {
      shards_.push_back(std::make_unique<Shard>(context_));
    }
    acceptor_ = std::make_unique<Tcp::acceptor>(shards_[0]->io());
    retry_ = std::make_unique<asio::steady_timer>(shards_[0]->io());
  }

  ~Impl() {
    stop();
    acceptor_.reset();
    retry_.reset();
    // Shard 0 first: a pending accept of its thread owns a socket of another shard's context.
    for (auto& shard : shards_) shard.reset();
  }

  Status listen(const std::string& host, uint16_t port);

  Status start() {
    started_ = true;
    accept();  // before the thread runs, so no other thread touches the acceptor
    for (auto& shard : shards_) SPIN_RETURN_IF_ERROR(shard->start());
    return ok_status();
  }

  void begin_drain() { context_.draining.store(true, std::memory_order_relaxed); }

  void close_idle() { context_.closing.store(true, std::memory_order_relaxed); }

  void stop() {
    if (!started_) return;
    started_ = false;
    asio::post(shards_[0]->io(), [this] {
      stopping_ = true;
      ErrorCode ignored;
      acceptor_->close(ignored);
      retry_->cancel();
    });
    // Shard 0 last: its accept handler hands sockets to the others.
    for (size_t i = shards_.size(); i-- > 0;) shards_[i]->stop();
  }

  uint16_t port_ = 0;
  bool loopback_ = false;
  HttpContext context_;

 private:
  void accept();
  void on_accept(const ErrorCode& error, Tcp::socket socket, Shard& target);

  std::vector<std::unique_ptr<Shard>> shards_;
  std::unique_ptr<Tcp::acceptor> acceptor_;
  std::unique_ptr<asio::steady_timer> retry_;
  size_t next_shard_ = 0;
  bool started_ = false;
  bool stopping_ = false;  // shard 0's thread
};

Status HttpServer::Impl::listen(const std::string& host, uint16_t port) {
  ErrorCode error;
  const auto address = asio::ip::make_address(host == "localhost" ? "127.0.0.1" : host, error);
  if (error) {
    return Status(StatusCode::kInvalidArgument,
                  "host must be a numeric address or localhost, found '" + host + "'", "host");
  }
  const Tcp::endpoint endpoint(address, port);
  auto failed = [&](std::string_view what) {
    std::string place = host + ":" + std::to_string(port);
    if (error == asio::error::address_in_use) {
      return Status(StatusCode::kIoError,
                    place + " is already in use; choose another --port or stop the other server",
                    "port");
    }
    return Status(StatusCode::kIoError, std::string(what) + " " + place + ": " + error.message(),
                  "port");
  };
  acceptor_->open(endpoint.protocol(), error);
  if (error) return failed("cannot open a socket for");
  // A restarted server must not wait for old connections to time out.
  acceptor_->set_option(Tcp::acceptor::reuse_address(true), error);
  acceptor_->bind(endpoint, error);
  if (error) return failed("cannot bind");
  acceptor_->listen(asio::socket_base::max_listen_connections, error);
  if (error) return failed("cannot listen on");
  acceptor_->non_blocking(true, error);
  const Tcp::endpoint bound = acceptor_->local_endpoint(error);
  if (error) return failed("cannot find the port of");
  port_ = bound.port();
  loopback_ = address.is_loopback();
  return ok_status();
}

void HttpServer::Impl::accept() {
  Shard& target = *shards_[next_shard_++ % shards_.size()];
  acceptor_->async_accept(target.io(), [this, &target](const ErrorCode& error, Tcp::socket socket) {
    on_accept(error, std::move(socket), target);
  });
}

void HttpServer::Impl::on_accept(const ErrorCode& error, Tcp::socket socket, Shard& target) {
  if (stopping_ || error == asio::error::operation_aborted) return;
  if (error) {
    context_.counters.accept_errors.fetch_add(1, std::memory_order_relaxed);
    if (error == asio::error::connection_aborted) return accept();
    retry_->expires_after(kAcceptRetry);
    retry_->async_wait([this](const ErrorCode& cancelled) {
      if (!cancelled && !stopping_) accept();
    });
    return;
  }
  auto connection = std::make_shared<Connection>(std::move(socket), target);
  const bool full = context_.counters.connections_open.load(std::memory_order_relaxed) >
                    context_.limits.max_connections;
  asio::post(target.io(), [connection = std::move(connection), full, this]() mutable {
    if (full) {
      context_.counters.connections_refused.fetch_add(1, std::memory_order_relaxed);
      connection->refuse(429, "too many connections");
    } else {
      connection->start();
    }
    connection.reset();
  });
  accept();
}

HttpServer::HttpServer(HttpHandler& handler, const ServerLimits& limits, uint32_t io_threads)
    : impl_(std::make_unique<Impl>(handler, limits, io_threads)) {}

HttpServer::~HttpServer() { stop(); }

Status HttpServer::listen(const std::string& host, uint16_t port) {
  return impl_->listen(host, port);
}
Status HttpServer::start() { return impl_->start(); }
void HttpServer::begin_drain() { impl_->begin_drain(); }
void HttpServer::close_idle() { impl_->close_idle(); }
void HttpServer::stop() { impl_->stop(); }
uint16_t HttpServer::port() const { return impl_->port_; }
bool HttpServer::loopback() const { return impl_->loopback_; }
const HttpCounters& HttpServer::counters() const { return impl_->context_.counters; }

}  // namespace spin::server
