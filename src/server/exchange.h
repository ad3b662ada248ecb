// SPDX-License-Identifier: Apache-2.0
// One request and its response, as a handler sees them. The connection behind it may vanish at any
// time; everything here then does nothing.
//
// Thread: post() from any thread; everything else on the I/O thread of the connection, which is
// where handlers are called and posted tasks run.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "server/http_message.h"
#include "server/mailbox.h"

namespace spin::server {

// What an exchange needs of its connection.
class Transport {
 public:
  virtual ~Transport() = default;
  // Before respond() with the same response: may replace it, which is then what is counted.
  virtual void admit(HttpResponse& response) = 0;
  virtual void respond(HttpResponse response) = 0;
  virtual void begin_stream(const HttpResponse& head) = 0;
  virtual void write(std::string_view bytes) = 0;
  virtual void end_stream() = 0;
  virtual uint64_t unsent_bytes() const = 0;
  virtual void abort() = 0;
};

class Exchange {
 public:
  Exchange(Transport* transport, std::shared_ptr<Mailbox> mailbox)
      : transport_(transport), mailbox_(std::move(mailbox)) {}

  // Runs `task` on the I/O thread, batched. Returns false if that thread is gone.
  bool post(Task task) { return mailbox_->post(std::move(task)); }

  // The response can still be written.
  bool open() const { return transport_ != nullptr; }
  // respond() or begin_stream() was called.
  bool started() const { return status_ != 0; }
  int status() const { return status_; }
  uint64_t response_bytes() const { return response_bytes_; }

  // The whole response. Requires: !started().
  void respond(HttpResponse response) {
    if (!open()) return;
    transport_->admit(response);
    status_ = response.status;
    response_bytes_ = response.body.size();
    Transport* transport = transport_;
    finish();
    transport->respond(std::move(response));
  }

  // Head of a streamed response; write() the content, end_stream() completes it.
  void begin_stream(const HttpResponse& head) {
    if (!open()) return;
    status_ = head.status;
    transport_->begin_stream(head);
  }
  void write(std::string_view bytes) {
    if (!open()) return;
    response_bytes_ += bytes.size();
    transport_->write(bytes);
  }
  void end_stream() {
    if (!open()) return;
    Transport* transport = transport_;
    finish();
    transport->end_stream();
  }

  // Bytes written that the system has not taken yet.
  uint64_t unsent_bytes() const { return open() ? transport_->unsent_bytes() : 0; }

  // Ends the connection without completing the response (the slow-reader limit).
  void abort() {
    if (open()) transport_->abort();
  }

  // `on_lost`: the client left, or the connection failed, before the response was complete.
  // `on_drained`: unsent_bytes() fell to zero after having been above it.
  void set_callbacks(std::function<void()> on_lost, std::function<void()> on_drained) {
    on_lost_ = std::move(on_lost);
    on_drained_ = std::move(on_drained);
  }
  // Once, when the exchange is over, complete or not.
  void set_on_done(std::function<void(const Exchange&, bool complete)> on_done) {
    on_done_ = std::move(on_done);
  }

  // --- For the connection.
  void lose() {
    if (!open()) return;
    transport_ = nullptr;
    auto on_lost = std::move(on_lost_);
    clear_callbacks();
    if (on_lost) on_lost();
    report(false);
  }
  void drained() {
    if (open() && on_drained_) {
      auto callback = on_drained_;  // it may end the exchange, which clears the member
      callback();
    }
  }

 private:
  void clear_callbacks() {
    on_lost_ = nullptr;
    on_drained_ = nullptr;
  }
  void finish() {
    transport_ = nullptr;
    clear_callbacks();
    report(true);
  }
  void report(bool complete) {
    auto on_done = std::move(on_done_);
    on_done_ = nullptr;
    if (on_done) on_done(*this, complete);
  }

  Transport* transport_;
  std::shared_ptr<Mailbox> mailbox_;
  int status_ = 0;
  uint64_t response_bytes_ = 0;
  std::function<void()> on_lost_;
  std::function<void()> on_drained_;
  std::function<void(const Exchange&, bool complete)> on_done_;
};

// What the HTTP layer calls. Thread: any I/O thread, concurrently.
class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  // Looks at the head before the body is read; a response refuses the request.
  virtual std::optional<HttpResponse> check_head(const RequestHead& head) = 0;
  // Must not block; answers through `exchange`, now or later.
  virtual void handle(HttpRequest request, std::shared_ptr<Exchange> exchange) = 0;
  // The answer to bytes that are not a request, and to limits of the connection.
  virtual HttpResponse make_error(int status, std::string_view text) = 0;
  // A request was refused without reaching handle(). `head` may be null.
  virtual void on_refused(const RequestHead* head, int status) = 0;
};

}  // namespace spin::server
