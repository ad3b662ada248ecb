// SPDX-License-Identifier: Apache-2.0
#include "server/shard.h"

#include <algorithm>
#include <exception>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>

#include "base/start_thread.h"
#include "server/connection.h"

namespace spin::server {

namespace asio = boost::asio;

Shard::Shard(HttpContext& context) : context_(context), timer_(io_), scratch_(kReadBlockBytes) {
  mailbox_ =
      std::make_shared<Mailbox>([this] { asio::post(io_, [this] { mailbox_->run_all(); }); });
  const ServerLimits& limits = context.limits;
  const auto shortest = std::min({limits.head_timeout, limits.body_timeout, limits.idle_timeout,
                                  limits.write_stall_timeout, limits.linger_timeout});
  sweep_interval_ = std::clamp(shortest / 4, std::chrono::milliseconds(5), sweep_interval_);
}

Shard::~Shard() {
  stop();
  mailbox_->close();
}

Status Shard::start() {
  arm_sweep();
  return base::start_thread(thread_, "connections", [this] { run(); });
}

// A handler that throws (std::bad_alloc, most likely) costs its connection and no other: nothing is
// armed for it any more, so the sweep or the end of the client closes it.
void Shard::run() {
  for (;;) {
    try {
      io_.run();
      return;
    } catch (const std::exception&) {
    }
  }
}

void Shard::stop() {
  if (!thread_.joinable()) return;
  asio::post(io_, [this] {
    const auto copy = connections_;
    for (const auto& connection : copy) connection->close();
    timer_.cancel();
    io_.stop();
  });
  thread_.join();
  mailbox_->close();  // before the engine delivers to a context that does not run any more
}

// The pending timer also keeps io_context::run() from returning.
void Shard::arm_sweep() {
  timer_.expires_after(sweep_interval_);
  timer_.async_wait([this](const boost::system::error_code& error) {
    if (error) return;
    arm_sweep();  // first: a sweep that fails is not the last one
    sweep();
  });
}

void Shard::sweep() {
  const auto now = std::chrono::steady_clock::now();
  // A copy: closing removes from the set.
  std::vector<std::shared_ptr<Connection>> due;
  for (const auto& connection : connections_) {
    if (connection->deadline_passed(now)) due.push_back(connection);
  }
  for (const auto& connection : due) connection->on_deadline();
}

}  // namespace spin::server
