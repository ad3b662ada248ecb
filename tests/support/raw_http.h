// SPDX-License-Identifier: Apache-2.0
// A client that can send anything: raw bytes over a POSIX socket, and a forgiving reader of
// responses. For tests of the HTTP server. Thread: one thread per client.
#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace spin::testing {

struct RawResponse {
  int status = 0;                             // 0: the connection ended before a whole head came
  std::map<std::string, std::string> fields;  // lower-case names
  std::string body;                           // chunks joined
  bool complete = false;                      // the body is whole
};

class RawClient {
 public:
  // Connects to 127.0.0.1:port; connected() tells whether it worked.
  explicit RawClient(uint16_t port, int receive_buffer_bytes = 0);
  ~RawClient();
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  bool connected() const { return fd_ >= 0; }
  // False when the peer does not take all of it within `limit`.
  bool send(std::string_view bytes,
            std::chrono::milliseconds limit = std::chrono::milliseconds(20'000));
  // Reads whatever comes within `limit`; "" on end of input or nothing.
  std::string receive_some(std::chrono::milliseconds limit);
  // One response, and no byte more. 100 Continue is skipped unless `keep_interim`.
  RawResponse read_response(std::chrono::milliseconds limit = std::chrono::milliseconds(20'000),
                            bool no_body = false,
                            bool keep_interim = false);
  // The peer closes within `limit` (what it sends before is thrown away).
  bool wait_closed(std::chrono::milliseconds limit);
  void shutdown_send();
  // With a reset instead of an orderly end.
  void reset();
  void close();

 private:
  bool fill(std::chrono::steady_clock::time_point deadline);

  int fd_ = -1;
  std::string buffer_;
};

// The parts in a row.
std::string cat(std::initializer_list<std::string_view> parts);

// POST with Host, Content-Type and Content-Length.
std::string post_text(std::string_view path, std::string_view body, std::string_view fields = "");
std::string get_text(std::string_view path, std::string_view fields = "");

// One request on a connection of its own.
RawResponse fetch(uint16_t port, std::string_view request_text);

// The payloads after `data: ` of a stream, split at empty lines as vLLM's client does.
std::vector<std::string> sse_events(std::string_view body);

// Open file descriptors and threads of this process.
size_t open_descriptors();
size_t thread_count();

// Polls until `condition` holds; false after `limit`.
template <typename Condition>
bool eventually(Condition condition,
                std::chrono::milliseconds limit = std::chrono::milliseconds(10'000));

void sleep_ms(int milliseconds);

template <typename Condition>
bool eventually(Condition condition, std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    sleep_ms(1);
  }
  return true;
}

}  // namespace spin::testing
