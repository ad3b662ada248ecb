// SPDX-License-Identifier: Apache-2.0
#include "tests/support/raw_http.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <thread>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/parse_number.h"

namespace spin::testing {

namespace {

using Clock = std::chrono::steady_clock;

bool wait_for(int fd, short events, Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  pollfd entry{fd, events, 0};
  return ::poll(&entry, 1, static_cast<int>(std::max<int64_t>(left.count(), 0))) > 0;
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

}  // namespace

RawClient::RawClient(uint16_t port, int receive_buffer_bytes) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  if (receive_buffer_bytes > 0) {
    ::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &receive_buffer_bytes, sizeof(receive_buffer_bytes));
  }
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    ::close(fd);
    return;
  }
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  fd_ = fd;
}

RawClient::~RawClient() { close(); }

void RawClient::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void RawClient::reset() {
  if (fd_ < 0) return;
  const linger option{1, 0};
  ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &option, sizeof(option));
  close();
}

void RawClient::shutdown_send() {
  if (fd_ >= 0) ::shutdown(fd_, SHUT_WR);
}

bool RawClient::send(std::string_view bytes, std::chrono::milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  while (!bytes.empty()) {
    if (fd_ < 0) return false;
    const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(fd_, POLLOUT, deadline)) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool RawClient::fill(Clock::time_point deadline) {
  if (fd_ < 0 || !wait_for(fd_, POLLIN, deadline)) return false;
  char block[65536];
  const ssize_t got = ::recv(fd_, block, sizeof(block), 0);
  if (got <= 0) return false;
  buffer_.append(block, static_cast<size_t>(got));
  return true;
}

std::string RawClient::receive_some(std::chrono::milliseconds limit) {
  if (buffer_.empty()) fill(Clock::now() + limit);
  return std::exchange(buffer_, {});
}

bool RawClient::wait_closed(std::chrono::milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  while (Clock::now() < deadline) {
    if (fd_ < 0) return true;
    if (!wait_for(fd_, POLLIN, deadline)) return false;
    char block[4096];
    const ssize_t got = ::recv(fd_, block, sizeof(block), 0);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return true;
  }
  return false;
}

RawResponse RawClient::read_response(std::chrono::milliseconds limit,
                                     bool no_body,
                                     bool keep_interim) {
  const auto deadline = Clock::now() + limit;
  RawResponse out;
  size_t head_end = 0;
  while ((head_end = buffer_.find("\r\n\r\n")) == std::string::npos) {
    if (!fill(deadline)) return out;
  }
  std::string_view head = std::string_view(buffer_).substr(0, head_end);
  if (head.size() >= 12) {
    out.status = static_cast<int>(base::parse_decimal(head.substr(9, 3)).value_or(0));
  }
  size_t line = head.find("\r\n");
  while (line != std::string_view::npos) {
    head.remove_prefix(line + 2);
    line = head.find("\r\n");
    const std::string_view field = head.substr(0, line);
    const size_t colon = field.find(": ");
    if (colon == std::string_view::npos) continue;
    out.fields[lower(field.substr(0, colon))] = std::string(field.substr(colon + 2));
  }
  buffer_.erase(0, head_end + 4);
  if (out.status == 100) {
    if (!keep_interim) return read_response(limit, no_body);
    out.complete = true;
    return out;
  }
  if (no_body) {
    out.complete = true;
    return out;
  }
  if (const auto length = out.fields.find("content-length"); length != out.fields.end()) {
    const size_t bytes = base::parse_decimal(length->second).value_or(0);
    while (buffer_.size() < bytes && fill(deadline)) {
    }
    out.complete = buffer_.size() >= bytes;
    out.body = buffer_.substr(0, bytes);
    buffer_.erase(0, bytes);
    return out;
  }
  if (out.fields.count("transfer-encoding") == 0) {  // until the connection ends
    while (fill(deadline)) {
    }
    out.body = std::exchange(buffer_, {});
    out.complete = true;
    return out;
  }
  size_t at = 0;
  for (;;) {
    size_t end = 0;
    while ((end = buffer_.find("\r\n", at)) == std::string::npos) {
      if (!fill(deadline)) return out;
    }
    const auto bytes = base::parse_hex(std::string_view(buffer_).substr(at, end - at));
    if (!bytes) return out;
    at = end + 2;
    while (buffer_.size() < at + *bytes + 2) {
      if (!fill(deadline)) return out;
    }
    out.body.append(buffer_, at, *bytes);
    at += *bytes + 2;
    if (*bytes == 0) break;
  }
  buffer_.erase(0, at);
  out.complete = true;
  return out;
}

std::string cat(std::initializer_list<std::string_view> parts) {
  std::string out;
  for (const std::string_view part : parts) out += part;
  return out;
}

std::string post_text(std::string_view path, std::string_view body, std::string_view fields) {
  std::string out = "POST ";
  out += path;
  out += " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
  out += fields;
  out += "Content-Length: ";
  out += std::to_string(body.size());
  out += "\r\n\r\n";
  out += body;
  return out;
}

std::string get_text(std::string_view path, std::string_view fields) {
  std::string out = "GET ";
  out += path;
  out += " HTTP/1.1\r\nHost: localhost\r\n";
  out += fields;
  out += "\r\n";
  return out;
}

RawResponse fetch(uint16_t port, std::string_view request_text) {
  RawClient client(port);
  if (!client.send(request_text)) return {};
  return client.read_response(std::chrono::milliseconds(60'000));
}

std::vector<std::string> sse_events(std::string_view body) {
  std::vector<std::string> out;
  while (!body.empty()) {
    const size_t end = body.find("\n\n");
    std::string_view event = body.substr(0, end);
    body.remove_prefix(end == std::string_view::npos ? body.size() : end + 2);
    if (event.starts_with(":")) continue;
    if (event.starts_with("data: ")) event.remove_prefix(6);
    out.emplace_back(event);
  }
  return out;
}

namespace {
size_t count_entries(const char* path) {
  std::error_code error;
  size_t count = 0;
  for (std::filesystem::directory_iterator it(path, error), end; !error && it != end;
       it.increment(error)) {
    ++count;
  }
  return count;
}
}  // namespace

size_t open_descriptors() { return count_entries("/proc/self/fd"); }
size_t thread_count() { return count_entries("/proc/self/task"); }

void sleep_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

}  // namespace spin::testing
