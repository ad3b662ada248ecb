// SPDX-License-Identifier: Apache-2.0
#include "server/connection.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include "server/limits.h"

namespace spin::server {

namespace asio = boost::asio;
using ErrorCode = boost::system::error_code;

namespace {

// Reads of one wake-up, so that a flood on one connection does not starve the others.
constexpr int kReadsPerWakeUp = 8;
// The sent part of the output buffer is dropped when it is this large.
constexpr size_t kCompactBytes = 64u << 10;

bool would_block(const ErrorCode& error) {
  return error == asio::error::would_block || error == asio::error::try_again;
}

}  // namespace

Connection::Connection(asio::ip::tcp::socket socket, Shard& shard)
    : socket_(std::move(socket)),
      shard_(shard),
      answer_charge_(shard.context().counters.answer_bytes_pending) {
  HttpCounters& counters = shard_.context().counters;
  counters.connections_open.fetch_add(1, std::memory_order_relaxed);
  counters.connections_total.fetch_add(1, std::memory_order_relaxed);
}

Connection::~Connection() {
  shard_.context().counters.connections_open.fetch_sub(1, std::memory_order_relaxed);
}

void Connection::start() {
  shard_.add(shared_from_this());
  ErrorCode ignored;
  socket_.non_blocking(true, ignored);
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  const int send_buffer = shard_.context().limits.socket_send_buffer_bytes;
  if (send_buffer > 0) {
    socket_.set_option(asio::socket_base::send_buffer_size(send_buffer), ignored);
  }
  last_write_progress_ = Clock::now();
  begin_request();
  // A new connection gets the head's time for its first byte, not the idle time.
  set_deadline(shard_.context().limits.head_timeout);
  watch_read();
}

void Connection::close() {
  if (state_ == State::kClosed) return;
  const auto self = shared_from_this();
  state_ = State::kClosed;
  ErrorCode ignored;
  socket_.close(ignored);
  body_charge_.release();
  answer_charge_.release();
  shard_.remove(self);
  if (auto exchange = std::move(exchange_)) exchange->lose();
}

void Connection::abort() {
  shard_.context().counters.slow_readers_closed.fetch_add(1, std::memory_order_relaxed);
  close();
}

void Connection::refuse(int status, std::string_view text) {
  shard_.add(shared_from_this());
  ErrorCode ignored;
  socket_.non_blocking(true, ignored);
  last_write_progress_ = Clock::now();
  fail_request(status, text);
  if (state_ != State::kClosed) watch_read();
}

bool Connection::deadline_passed(Clock::time_point now) {
  if (unsent_bytes() > 0 &&
      now - last_write_progress_ > shard_.context().limits.write_stall_timeout) {
    return true;
  }
  if (shard_.context().closing.load(std::memory_order_relaxed) && unsent_bytes() == 0 &&
      (state_ == State::kIdle || state_ == State::kHead || state_ == State::kLingering)) {
    return true;
  }
  switch (state_) {
    case State::kHandling: {
      if (read_armed_) return false;
      // Reading is paused because the client sent too much ahead; ask the system whether it left.
      pollfd entry{socket_.native_handle(), POLLRDHUP, 0};
      return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
    }
    case State::kFlushing:
    case State::kClosed:
      return false;
    case State::kBody: {
      const ServerLimits& limits = shard_.context().limits;
      const auto earned = std::chrono::milliseconds(
          parser_->body_bytes() * 1000 / std::max<uint64_t>(limits.min_body_bytes_per_s, 1));
      return now > request_began_ + limits.body_timeout + earned;
    }
    default:
      return now > deadline_;
  }
}

void Connection::on_deadline() {
  if (state_ == State::kClosed) return;
  HttpCounters& counters = shard_.context().counters;
  if (unsent_bytes() > 0 && state_ != State::kLingering) return abort();
  if (state_ == State::kHandling) return close();
  if (state_ == State::kHead || state_ == State::kBody) {
    counters.timeouts.fetch_add(1, std::memory_order_relaxed);
    return fail_request(408, "the request did not arrive in time");
  }
  close();
}

// --- Reading.

void Connection::watch_read() {
  if (read_armed_ || state_ == State::kClosed) return;
  read_armed_ = true;
  socket_.async_wait(asio::socket_base::wait_read,
                     [self = shared_from_this()](const ErrorCode& error) {
                       self->read_armed_ = false;
                       if (error || self->state_ == State::kClosed) return;
                       self->on_readable();
                     });
}

void Connection::on_readable() {
  for (int i = 0; i < kReadsPerWakeUp; ++i) {
    if (state_ == State::kClosed || input_ended_) return;
    if (in_.size() >= kMaxPipelinedBytes) return;  // pump() or response_complete() goes on
    std::vector<char>& scratch = shard_.scratch();
    ErrorCode error;
    const size_t bytes = socket_.read_some(asio::buffer(scratch), error);
    if (would_block(error)) break;
    if (error) return on_end_of_input();
    pump({scratch.data(), bytes});
  }
  watch_read();
}

// The client has closed its sending side or the connection broke. A client that has finished
// sending cannot be told from one that left; work for it would be wasted, so it counts as left.
// What is already written still goes out.
void Connection::on_end_of_input() {
  input_ended_ = true;
  if (state_ == State::kHandling || unsent_bytes() == 0) return close();
  close_after_flush_ = true;
  linger_after_flush_ = false;
  if (state_ != State::kLingering) state_ = State::kFlushing;
}

// Runs requests out of in_ and `bytes` for as long as they are answered at once. The loop is here,
// and not in response_complete(), so that pipelined requests do not nest.
void Connection::pump(std::string_view bytes) {
  if (pumping_) return;
  const auto self = shared_from_this();
  pumping_ = true;
  if (!in_.empty()) {
    in_.append(bytes);
    std::string input = std::move(in_);
    in_.clear();
    std::string_view rest = input;
    while (!rest.empty() && consume(rest)) {
    }
    in_.assign(rest);
  } else {
    while (!bytes.empty() && consume(bytes)) {
    }
    in_.assign(bytes);
  }
  pumping_ = false;
  if (state_ == State::kFlushing || state_ == State::kLingering || state_ == State::kClosed) {
    in_.clear();
  }
}

bool Connection::consume(std::string_view& bytes) {
  switch (state_) {
    case State::kFlushing:
    case State::kLingering:
      bytes = {};
      return false;  // read and thrown away
    case State::kHandling:
    case State::kClosed:
      return false;
    case State::kIdle:
      // Answers of pipelined requests wait for a client that does not read them.
      if (unsent_bytes() > shard_.context().limits.max_unsent_bytes) return false;
      state_ = State::kHead;
      request_began_ = Clock::now();
      set_deadline(shard_.context().limits.head_timeout);
      break;
    default:
      break;
  }
  const uint64_t body_before = parser_->body_bytes();
  bytes.remove_prefix(parser_->feed(bytes));
  if (parser_->state() == RequestParser::State::kHeadDone) {
    on_head();
    if (state_ != State::kBody) return state_ != State::kClosed;
    bytes.remove_prefix(parser_->feed(bytes));
  }
  if (parser_->state() == RequestParser::State::kFailed) {
    fail_request(parser_->error().status, parser_->error().text);
    return true;
  }
  if (!charge_body(parser_->body_bytes() - body_before)) {
    fail_request(429, "too many bytes of request bodies are being received");
    return true;
  }
  if (parser_->state() == RequestParser::State::kComplete) dispatch();
  return true;
}

bool Connection::charge_body(uint64_t bytes) {
  HttpContext& context = shard_.context();
  return body_charge_.add(bytes) <= context.limits.max_total_body_bytes;
}

void Connection::begin_request() {
  state_ = State::kIdle;
  parser_.emplace(shard_.context().limits.max_body_bytes);
  streaming_ = false;
  body_charge_ = BodyCharge(shard_.context().counters.body_bytes_pending);
  set_deadline(shard_.context().limits.idle_timeout);
}

void Connection::on_head() {
  const RequestHead& head = parser_->head();
  version_ = head.version;
  keep_alive_ = head.keep_alive;
  head_request_ = head.method == "HEAD";
  if (auto refusal = shard_.context().handler->check_head(head)) {
    shard_.context().handler->on_refused(&head, refusal->status);
    // The body is not wanted, so the connection cannot be used for another request.
    if (head.has_body()) refusal->close = true;
    state_ = State::kHandling;
    respond(std::move(*refusal));
    return;
  }
  state_ = State::kBody;
  request_began_ = Clock::now();
  if (head.expect_continue && head.has_body()) {
    out_ += "HTTP/1.1 100 Continue\r\n\r\n";
    flush();
  }
}

void Connection::dispatch() {
  state_ = State::kHandling;
  exchange_ = std::make_shared<Exchange>(this, shard_.mailbox());
  HttpRequest request = parser_->take_request();
  request.charge = std::move(body_charge_);
  shard_.context().handler->handle(std::move(request), exchange_);
}

void Connection::fail_request(int status, std::string_view text) {
  const bool has_head = parser_ && parser_->state() != RequestParser::State::kHead &&
                        parser_->state() != RequestParser::State::kFailed;
  shard_.context().handler->on_refused(has_head ? &parser_->head() : nullptr, status);
  HttpResponse response = shard_.context().handler->make_error(status, text);
  response.close = true;
  head_request_ = false;
  state_ = State::kHandling;
  respond(std::move(response));
}

// --- Writing.

void Connection::respond(HttpResponse response) {
  if (state_ == State::kClosed) return;
  if (response.close || shard_.context().draining.load(std::memory_order_relaxed)) {
    keep_alive_ = false;
  }
  out_ += format_response_head(response, version_, keep_alive_, response.body.size());
  if (!head_request_) out_ += response.body;
  response_complete();
}

void Connection::admit(HttpResponse& response) {
  const uint64_t bytes = response.body.size();
  if (bytes <= kSmallAnswerBytes || head_request_) return;
  HttpContext& context = shard_.context();
  if (answer_charge_.add(bytes) <= context.limits.max_total_answer_bytes) return;
  answer_charge_.take_back(bytes);  // others before it on this connection may still wait
  auto fields = std::move(response.fields);
  response = context.handler->make_error(429, "too many bytes of answers wait for their clients");
  // The request's id; what described the lost content does not describe the error.
  for (auto& field : fields) {
    if (field.first == "X-Request-Id") response.fields.push_back(std::move(field));
  }
}

void Connection::begin_stream(const HttpResponse& head) {
  if (state_ == State::kClosed) return;
  // Without chunks only the end of the connection ends the content.
  if (version_ < 11 || shard_.context().draining.load(std::memory_order_relaxed)) {
    keep_alive_ = false;
  }
  streaming_ = true;
  out_ += format_response_head(head, version_, keep_alive_, std::nullopt);
}

void Connection::write(std::string_view bytes) {
  if (state_ == State::kClosed || bytes.empty()) return;
  if (version_ >= 11) {
    fmt::format_to(std::back_inserter(out_), "{:x}\r\n", bytes.size());
    out_ += bytes;
    out_ += "\r\n";
  } else {
    out_ += bytes;
  }
  flush();
}

void Connection::end_stream() {
  if (state_ == State::kClosed) return;
  if (version_ >= 11) out_ += "0\r\n\r\n";
  response_complete();
}

void Connection::response_complete() {
  const auto self = shared_from_this();
  exchange_.reset();
  body_charge_.release();
  if (keep_alive_) {
    begin_request();
    flush();
    if (state_ == State::kClosed) return;
    if (!pumping_ && !in_.empty()) pump({});
    if (!pumping_) watch_read();
    return;
  }
  state_ = State::kFlushing;
  close_after_flush_ = true;
  linger_after_flush_ = !input_ended_;
  flush();
}

// Writes what the socket takes now and waits for the rest. A failure closes the connection a moment
// later, so that a handler never learns of a loss inside its own call of write().
void Connection::flush() {
  if (write_armed_ || state_ == State::kClosed) return;
  while (unsent_bytes() > 0) {
    ErrorCode error;
    const size_t bytes =
        socket_.write_some(asio::buffer(out_.data() + out_begin_, out_.size() - out_begin_), error);
    if (would_block(error)) return watch_write();
    if (error) {
      out_.clear();
      out_begin_ = 0;
      asio::post(socket_.get_executor(), [self = shared_from_this()] { self->close(); });
      return;
    }
    out_begin_ += bytes;
    last_write_progress_ = Clock::now();
    if (out_begin_ >= kCompactBytes && out_begin_ > out_.size() / 2) {
      out_.erase(0, out_begin_);
      out_begin_ = 0;
    }
  }
  out_.clear();
  out_begin_ = 0;
  answer_charge_.release();
  if (out_.capacity() > kCompactBytes) out_.shrink_to_fit();
  last_write_progress_ = Clock::now();
  if (close_after_flush_) begin_linger();
}

void Connection::watch_write() {
  write_armed_ = true;
  last_write_progress_ = Clock::now();
  socket_.async_wait(asio::socket_base::wait_write,
                     [self = shared_from_this()](const ErrorCode& error) {
                       self->write_armed_ = false;
                       if (error || self->state_ == State::kClosed) return;
                       self->flush();
                       if (self->state_ == State::kClosed || self->unsent_bytes() > 0) return;
                       if (auto exchange = self->exchange_) exchange->drained();
                       // Pipelined requests may have waited for this.
                       if (self->state_ == State::kIdle && !self->in_.empty()) self->pump({});
                       if (self->state_ != State::kClosed) self->watch_read();
                     });
}

// Closing with unread input would reset the connection and could destroy the answer on its way, so
// the sending side is closed first and input is thrown away for a moment.
void Connection::begin_linger() {
  if (!linger_after_flush_) return close();
  close_after_flush_ = false;
  state_ = State::kLingering;
  ErrorCode error;
  socket_.shutdown(asio::socket_base::shutdown_send, error);
  if (error) return close();
  in_.clear();
  set_deadline(shard_.context().limits.linger_timeout);
  if (!pumping_) watch_read();
}

}  // namespace spin::server
