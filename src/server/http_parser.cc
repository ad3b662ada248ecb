// SPDX-License-Identifier: Apache-2.0
// The only unit that includes Beast.
#include "server/http_parser.h"

#include <algorithm>
#include <utility>

#include <boost/beast/http/basic_parser.hpp>

#include "base/parse_number.h"
#include "server/limits.h"

namespace spin::server {

namespace http = boost::beast::http;
namespace net = boost::asio;
using BeastError = boost::beast::error_code;
using BeastView = boost::beast::string_view;

// Receives the pieces that Beast finds. Fields that come after the head (trailers) are counted but
// not kept: a trailer must not change what the head said.
class RequestParser::Beast final : public http::basic_parser<true> {
 public:
  Beast(RequestHead& head, std::string& body) : head_(head), body_(body) {}

  size_t field_count = 0;

 private:
  void on_request_impl(
      http::verb, BeastView method, BeastView target, int version, BeastError&) override {
    head_.method.assign(method.data(), method.size());
    head_.target.assign(target.data(), target.size());
    head_.version = version;
  }
  void on_response_impl(int, BeastView, int, BeastError&) override {}
  void on_field_impl(http::field, BeastView name, BeastView value, BeastError& ec) override {
    if (++field_count > kMaxHeaderFields) {
      ec = http::make_error_code(http::error::header_limit);
      return;
    }
    if (head_done_) return;
    head_.fields.emplace_back(ascii_lower({name.data(), name.size()}),
                              std::string(value.data(), value.size()));
  }
  void on_header_impl(BeastError&) override { head_done_ = true; }
  void on_body_init_impl(const boost::optional<std::uint64_t>&, BeastError&) override {}
  size_t on_body_impl(BeastView bytes, BeastError&) override {
    body_.append(bytes.data(), bytes.size());
    return bytes.size();
  }
  // Beast takes quoted extensions with line ends in them; no line may go on after its end.
  void on_chunk_header_impl(std::uint64_t, BeastView extensions, BeastError& ec) override {
    const std::string_view text(extensions.data(), extensions.size());
    if (text.find_first_of("\r\n") != std::string_view::npos) {
      ec = http::error::bad_chunk_extension;
    }
  }
  size_t on_chunk_body_impl(std::uint64_t, BeastView bytes, BeastError&) override {
    body_.append(bytes.data(), bytes.size());
    return bytes.size();
  }
  void on_finish_impl(BeastError&) override {}

  RequestHead& head_;
  std::string& body_;
  bool head_done_ = false;
};

RequestParser::RequestParser(uint64_t max_body_bytes)
    : max_body_bytes_(max_body_bytes), beast_(std::make_unique<Beast>(head_, body_)) {
  beast_->eager(true);
  beast_->header_limit(static_cast<std::uint32_t>(kMaxHeadBytes));
  beast_->body_limit(max_body_bytes);
}

RequestParser::~RequestParser() = default;

void RequestParser::fail(int status, std::string_view text) {
  state_ = State::kFailed;
  error_ = {status, text};
  raw_.clear();
}

size_t RequestParser::feed(std::string_view bytes) {
  switch (state_) {
    case State::kHead:
      return feed_head(bytes);
    case State::kHeadDone:
      state_ = beast_->is_done() ? State::kComplete : State::kBody;
      if (state_ == State::kComplete) return 0;
      return feed_body(bytes);
    case State::kBody:
      return feed_body(bytes);
    case State::kComplete:
    case State::kFailed:
      return 0;
  }
  return 0;
}

// Looks at each byte of the head once, as it comes, so that a request that can only be refused is
// refused at once instead of at the deadline. Returns false after fail().
bool RequestParser::scan_head_byte(char c) {
  const char previous = raw_.empty() ? '\0' : raw_.back();
  const auto byte = static_cast<unsigned char>(c);
  if ((byte < 0x20 && c != '\t' && c != '\r' && c != '\n') || byte == 0x7F) {
    fail(400, "control character in the request head");
    return false;
  }
  if (c == '\n' && previous != '\r') {
    fail(400, "line of the request head ends without carriage return");
    return false;
  }
  if (previous == '\r' && c != '\n') {
    fail(400, "carriage return without line feed in the request head");
    return false;
  }
  if (previous == '\n' && (c == ' ' || c == '\t')) {
    fail(400, "folded header line");
    return false;
  }
  if (lines_ == 0) {  // the request line
    const bool target_bytes = c == '\r' || c == '\n' || (byte >= 0x20 && byte < 0x7F);
    if (!target_bytes) {
      fail(400, "request line must be printable ASCII");
      return false;
    }
    // 32 bytes leave room for the method, 16 for the version and its separators.
    if (raw_.size() >= kMaxTargetBytes + kMaxMethodBytes + 16) {
      fail(414, "request target is too long");
      return false;
    }
  }
  return true;
}

size_t RequestParser::feed_head(std::string_view bytes) {
  size_t used = 0;
  while (used < bytes.size()) {
    const char c = bytes[used++];
    started_ = true;
    if (!scan_head_byte(c)) return used;
    raw_ += c;
    if (raw_.size() > kMaxHeadBytes) {
      fail(431, "request header fields are too large");
      return used;
    }
    if (c != '\n') continue;
    if (raw_.size() == 2) {
      fail(400, "empty request line");
      return used;
    }
    // Known as soon as the first line ends; a client of HTTP/0.9 sends no more than that.
    if (lines_ == 0 && !raw_.ends_with(" HTTP/1.1\r\n") && !raw_.ends_with(" HTTP/1.0\r\n")) {
      fail(400, "HTTP version must be 1.0 or 1.1");
      return used;
    }
    const bool empty_line = raw_.ends_with("\r\n\r\n");
    ++lines_;
    // The request line and the empty line are not fields.
    if (!empty_line && lines_ > kMaxHeaderFields + 1) {
      fail(431, "too many request header fields");
      return used;
    }
    if (empty_line) {
      finish_head();
      return used;
    }
  }
  return used;
}

void RequestParser::finish_head() {
  BeastError ec;
  beast_->put(net::const_buffer(raw_.data(), raw_.size()), ec);
  // The body has not come yet, so "need more" is the normal end here.
  if (ec && ec != http::error::need_more) {
    if (ec == http::error::body_limit) return fail(413, "request body is too large");
    if (ec == http::error::header_limit) return fail(431, "request header fields are too large");
    if (ec == http::error::bad_version) return fail(400, "HTTP version must be 1.0 or 1.1");
    if (ec == http::error::bad_method) return fail(400, "malformed method");
    if (ec == http::error::bad_target) return fail(400, "malformed request target");
    if (ec == http::error::bad_transfer_encoding || ec == http::error::bad_content_length ||
        ec == http::error::multiple_content_length) {
      return fail(400, "contradictory or malformed body length");
    }
    return fail(400, "malformed request head");
  }
  raw_.clear();
  raw_.shrink_to_fit();
  if (!beast_->is_header_done()) return fail(400, "malformed request head");
  if (!check_fields() || !check_target()) return;
  head_.keep_alive = beast_->keep_alive();
  beast_->field_count = 0;  // from here on: trailers
  state_ = State::kHeadDone;
}

namespace {

bool is_host_text(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("-._~:[]").find(c) != std::string_view::npos;
  });
}

}  // namespace

bool RequestParser::check_fields() {
  if (head_.method.size() > kMaxMethodBytes) return fail(400, "malformed method"), false;
  size_t hosts = 0, lengths = 0, codings = 0;
  for (const auto& [name, value] : head_.fields) {
    if (name == "host") {
      ++hosts;
      if (!is_host_text(value)) return fail(400, "malformed Host field"), false;
    } else if (name == "content-length") {
      ++lengths;
      head_.content_length = base::parse_decimal(value);
      if (!head_.content_length) return fail(400, "malformed Content-Length"), false;
    } else if (name == "transfer-encoding") {
      ++codings;
      if (head_.version < 11) {
        return fail(400, "Transfer-Encoding needs HTTP/1.1"), false;
      }
      if (!ascii_iequals(value, "chunked")) {
        return fail(501, "transfer coding other than chunked"), false;
      }
      head_.chunked = true;
    } else if (name == "expect") {
      if (!ascii_iequals(value, "100-continue")) return fail(417, "unknown expectation"), false;
      head_.expect_continue = head_.version >= 11;
    }
  }
  if (hosts > 1) return fail(400, "more than one Host field"), false;
  if (hosts == 0 && head_.version >= 11) return fail(400, "Host field is missing"), false;
  if (lengths > 1 || codings > 1 || (lengths > 0 && codings > 0)) {
    return fail(400, "more than one body length"), false;
  }
  return true;
}

// Sets head_.path. The absolute form is taken apart and must name the same host as the Host field,
// so that no check can look at one name while another is used.
bool RequestParser::check_target() {
  std::string_view target = head_.target;
  if (target.size() > kMaxTargetBytes) return fail(414, "request target is too long"), false;
  if (target.find('#') != std::string_view::npos) {
    return fail(400, "request target has a fragment"), false;
  }
  if (head_.method == "CONNECT" || target == "*") return true;  // no path: no route takes it
  if (target.front() != '/') {
    const size_t scheme_end = target.find("://");
    const std::string_view scheme = target.substr(0, std::min(scheme_end, target.size()));
    if (scheme_end == std::string_view::npos ||
        !(ascii_iequals(scheme, "http") || ascii_iequals(scheme, "https"))) {
      return fail(400, "malformed request target"), false;
    }
    target.remove_prefix(scheme_end + 3);
    const size_t path_begin = std::min(target.find_first_of("/?"), target.size());
    const std::string* host = head_.find("host");
    if (host == nullptr || !ascii_iequals(*host, target.substr(0, path_begin))) {
      return fail(400, "request target and Host field name different hosts"), false;
    }
    target.remove_prefix(path_begin);
    if (target.empty() || target.front() != '/') {
      head_.path.assign(1, '/');
      return true;
    }
  }
  head_.path = std::string(target.substr(0, target.find('?')));
  return true;
}

size_t RequestParser::put_body(std::string_view bytes) {
  const uint64_t body_before = body_.size();
  BeastError ec;
  const size_t used = beast_->put(net::const_buffer(bytes.data(), bytes.size()), ec);
  if (head_.chunked) {
    framing_bytes_ += used - (body_.size() - body_before);
    if (framing_bytes_ > kMaxChunkFramingBytes) {
      fail(413, "chunked body has too much framing");
      return used;
    }
  }
  if (ec && ec != http::error::need_more) {
    if (ec == http::error::body_limit) {
      fail(413, "request body is too large");
    } else if (ec == http::error::header_limit) {
      fail(431, "too many trailer fields");
    } else {
      fail(400, "malformed chunked body");
    }
    return used;
  }
  if (beast_->is_done()) state_ = State::kComplete;
  return used;
}

namespace {

// Beast reads `0x10` as the size 0 and looks at the rest of the line only when the whole trailer
// section has come; this look at what it left unread refuses it at once. Other lines it judges
// itself as soon as they end.
bool is_false_last_chunk(std::string_view bytes) {
  if (bytes.starts_with("\r\n")) bytes.remove_prefix(2);
  const size_t end = bytes.find_first_not_of('0');
  if (end == 0 || end == std::string_view::npos) return false;
  return std::string_view("; \t\r0123456789abcdefABCDEF").find(bytes[end]) ==
         std::string_view::npos;
}

// Whether a chunk line has ended although Beast waits for more of it: it looks for the end of a
// quoted extension beyond the line. (A last chunk is left unread until its trailers are there.)
bool is_unfinished_line(std::string_view bytes) {
  if (bytes.starts_with("\r\n")) bytes.remove_prefix(2);
  const size_t end = bytes.find("\r\n");
  if (end == std::string_view::npos) return false;
  const std::string_view line = bytes.substr(0, end);
  const std::string_view size = line.substr(0, line.find_first_of("; \t"));
  if (size.find_first_not_of('0') != std::string_view::npos) return true;
  bool is_quoted = false;
  for (size_t i = size.size(); i < line.size(); ++i) {
    if (is_quoted && line[i] == '\\') {
      ++i;
    } else if (line[i] == '"') {
      is_quoted = !is_quoted;
    }
  }
  return is_quoted;
}

}  // namespace

size_t RequestParser::feed_body(std::string_view bytes) {
  if (bytes.empty()) return 0;
  if (!head_.chunked) return put_body(bytes);  // takes everything up to the end of the body
  // Beast leaves an incomplete chunk line or trailer section unread; it is kept in raw_.
  size_t used = 0;
  if (raw_.empty()) {
    used = put_body(bytes);
    if (state_ != State::kBody || used == bytes.size()) return used;
    raw_.assign(bytes.substr(used));
  } else {
    const size_t kept = raw_.size();
    raw_.append(bytes);
    // Beast asserts that a last chunk it has begun to read comes again with five bytes at least,
    // which `0` and the first half of the empty line are not.
    const bool too_short = raw_.front() == '0' && raw_.size() < 5;
    const size_t taken = too_short ? 0 : put_body(raw_);
    if (state_ == State::kFailed) return bytes.size();
    if (state_ == State::kComplete) {
      raw_.clear();
      return taken - kept;  // what was kept before was incomplete, so it is all used now
    }
    raw_.erase(0, taken);
  }
  if (raw_.size() > kMaxChunkLineBytes) {
    fail(400, "chunk line or trailer is too long");
  } else if (is_false_last_chunk(raw_) || is_unfinished_line(raw_)) {
    fail(400, "malformed chunked body");
  }
  return bytes.size();
}

HttpRequest RequestParser::take_request() {
  HttpRequest request{std::move(head_), std::move(body_), {}};
  return request;
}

}  // namespace spin::server
