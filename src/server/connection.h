// SPDX-License-Identifier: Apache-2.0
// One client connection: reads requests in order, hands them to the handler one at a time, writes
// what it answers, notices when the client leaves.
//
// States:  idle -> head -> body -> handling -> idle (keep-alive)
//                                           -> flushing -> lingering -> closed
// from any state to closed when the socket fails or a deadline passes.
//
// Thread: the shard's thread.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <boost/asio/ip/tcp.hpp>

#include "server/exchange.h"
#include "server/http_parser.h"
#include "server/shard.h"

namespace spin::server {

class Connection final : public Transport, public std::enable_shared_from_this<Connection> {
 public:
  using Clock = std::chrono::steady_clock;

  Connection(boost::asio::ip::tcp::socket socket, Shard& shard);
  ~Connection() override;

  void start();
  // At once, whatever is unsent; idempotent.
  void close();
  // Answers `status` and closes; for connections above the limit.
  void refuse(int status, std::string_view text);

  // Also looks for a client that left while reading is paused.
  bool deadline_passed(Clock::time_point now);
  void on_deadline();

 private:
  enum class State : uint8_t { kIdle, kHead, kBody, kHandling, kFlushing, kLingering, kClosed };

  // Transport, called through the exchange. admit() replaces an answer that would take the waiting
  // ones above their limit.
  void admit(HttpResponse& response) override;
  void respond(HttpResponse response) override;
  void begin_stream(const HttpResponse& head) override;
  void write(std::string_view bytes) override;
  void end_stream() override;
  uint64_t unsent_bytes() const override { return out_.size() - out_begin_; }
  void abort() override;

  void watch_read();
  void on_readable();
  void on_end_of_input();
  void pump(std::string_view bytes);
  // Consumes from the front of `bytes`; false when no more can be consumed now.
  bool consume(std::string_view& bytes);
  void on_head();
  void dispatch();
  void fail_request(int status, std::string_view text);
  void begin_request();
  void response_complete();
  bool charge_body(uint64_t bytes);

  void flush();
  void watch_write();
  void begin_linger();
  void set_deadline(std::chrono::milliseconds after) { deadline_ = Clock::now() + after; }

  boost::asio::ip::tcp::socket socket_;
  Shard& shard_;
  State state_ = State::kIdle;
  std::optional<RequestParser> parser_;
  std::string in_;  // bytes after the request at work
  std::string out_;
  size_t out_begin_ = 0;
  bool read_armed_ = false;
  bool write_armed_ = false;
  bool pumping_ = false;
  bool input_ended_ = false;
  bool close_after_flush_ = false;
  bool linger_after_flush_ = false;

  // Of the request at work.
  std::shared_ptr<Exchange> exchange_;
  int version_ = 11;
  bool keep_alive_ = true;
  bool head_request_ = false;
  bool streaming_ = false;
  BodyCharge body_charge_;

  BodyCharge answer_charge_;  // whole answers in out_

  Clock::time_point deadline_;
  Clock::time_point request_began_;
  Clock::time_point last_write_progress_;
};

}  // namespace spin::server
