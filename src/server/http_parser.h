// SPDX-License-Identifier: Apache-2.0
// One HTTP/1.x request from hostile bytes. Boost.Beast's parser does the grammar; around it stand
// checks for what it lets pass: several Host or Content-Length fields, transfer codings other than
// a single `chunked` (which Beast would read as "no body"), folded lines, control bytes in the
// target, unbounded chunk extensions and trailers.
//
// Thread: external synchronisation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "server/http_message.h"

namespace spin::server {

// Why a request was refused before it reached a handler: a status and a fixed text.
struct HttpError {
  int status = 400;
  std::string_view text;  // static storage
};

class RequestParser {
 public:
  explicit RequestParser(uint64_t max_body_bytes);
  ~RequestParser();
  RequestParser(const RequestParser&) = delete;
  RequestParser& operator=(const RequestParser&) = delete;

  enum class State : uint8_t {
    kHead,      // more bytes of the head are needed
    kHeadDone,  // the head is complete and the body has not been touched yet
    kBody,      // more bytes of the body are needed
    kComplete,
    kFailed,  // see error(); nothing after this point can be trusted, so close the connection
  };

  // Reads from the front of `bytes` and returns how many were used. Stops after the head
  // (kHeadDone), so that the caller can refuse a request before its body comes; the next feed(),
  // also of nothing, goes on with the body. Bytes after the request are left for the next one.
  size_t feed(std::string_view bytes);

  State state() const { return state_; }
  // Bytes of this request were seen.
  bool started() const { return started_; }
  // Requires: state() is kFailed.
  const HttpError& error() const { return error_; }
  // Valid from kHeadDone on.
  const RequestHead& head() const { return head_; }
  // Content bytes received so far.
  uint64_t body_bytes() const { return body_.size(); }
  // Requires: state() is kComplete.
  HttpRequest take_request();

 private:
  class Beast;  // keeps Boost out of this header

  size_t feed_head(std::string_view bytes);
  size_t feed_body(std::string_view bytes);
  size_t put_body(std::string_view bytes);
  bool scan_head_byte(char c);
  void finish_head();
  bool check_fields();
  bool check_target();
  void fail(int status, std::string_view text);

  State state_ = State::kHead;
  bool started_ = false;
  HttpError error_;
  RequestHead head_;
  std::string body_;
  std::string raw_;             // the head so far; in a chunked body: an incomplete chunk line
  size_t lines_ = 0;            // complete lines of the head
  uint64_t framing_bytes_ = 0;  // of a chunked body
  uint64_t max_body_bytes_;
  std::unique_ptr<Beast> beast_;
};

}  // namespace spin::server
