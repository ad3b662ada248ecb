// SPDX-License-Identifier: Apache-2.0
// Every limit on a length, a count, a depth or a duration of the HTTP front end, in one place. The
// table in docs/serving.md repeats it; tests/server tries most of them at the limit and one above.
// Thread: constants and plain data.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace spin::server {

// --- HTTP head. Longer targets give 414, more fields or bytes 431.
inline constexpr size_t kMaxTargetBytes = 8u << 10;
inline constexpr size_t kMaxMethodBytes = 32;
inline constexpr size_t kMaxHeadBytes = 64u << 10;
inline constexpr size_t kMaxHeaderFields = 100;

// --- Chunked bodies.
// One chunk-size line with its extensions, or the whole trailer section.
inline constexpr size_t kMaxChunkLineBytes = 8u << 10;
// Bytes of a body that are framing, not content (3 million one-byte chunks are 18 MB).
inline constexpr uint64_t kMaxChunkFramingBytes = 32u << 20;

// --- A connection.
// Input kept while a response is in the making; TCP holds the sender back beyond it.
inline constexpr size_t kMaxPipelinedBytes = 64u << 10;
// Bytes of one read.
inline constexpr size_t kReadBlockBytes = 64u << 10;

// --- JSON bodies (src/io/json.h counts depth, values and memory while reading).
inline constexpr uint32_t kMaxJsonDepth = 64;
inline constexpr uint64_t kMaxJsonValues = 4'000'000;
inline constexpr uint64_t kMaxJsonMemoryBytes = 512ull << 20;

// Freed memory is given back to the system after a body of at least this size.
inline constexpr size_t kLargeBodyBytes = 1u << 20;

// --- Requests. The ranges of sampling parameters are those of spin/sampling_limits.h.
inline constexpr uint64_t kMaxTotalChoices = 128;  // prompts x n
inline constexpr size_t kMaxMessages = 8192;
inline constexpr size_t kMaxContentParts = 4096;      // over all messages
inline constexpr size_t kMaxFieldNameEchoBytes = 64;  // of an unknown field's name in an error
inline constexpr size_t kMaxSparseOptions = 17;       // of `sparse`, the algorithm among them
inline constexpr size_t kMaxSparseOptionBytes = 64;   // of one value
// Log-probabilities that one response may hold: (prompt with echo + max_tokens) x choices x
// (alternatives + 1). About 80 bytes of JSON each.
inline constexpr uint64_t kMaxLogprobEntries = 4'000'000;
// Collected text and log-probabilities of one response that is not streamed.
inline constexpr uint64_t kMaxCollectedBytes = 512ull << 20;

// A whole answer up to this size is sent whatever waits for other clients.
inline constexpr size_t kSmallAnswerBytes = 64u << 10;

// --- Names from outside that are repeated in headers and logs.
inline constexpr size_t kMaxRequestIdBytes = 128;
inline constexpr size_t kMaxApiKeyBytes = 1024;

// --- Access log lines that wait for the writer; more are dropped and counted.
inline constexpr size_t kMaxAccessLogQueue = 8192;

// The limits an operator (or a test) may set.
struct ServerLimits {
  uint64_t max_body_bytes = 64ull << 20;       // of one request; above: 413
  uint64_t max_total_body_bytes = 1ull << 30;  // of all requests being received; above: 429
  // Of all whole answers that their clients have not taken; above: 429 instead of a large one.
  uint64_t max_total_answer_bytes = 1ull << 30;
  uint32_t max_connections = 8192;           // above: 429 and close
  uint32_t max_pending_requests = 1024;      // waiting for a worker; above: 429
  size_t max_unsent_bytes = 256u << 10;      // of one stream; then deltas are merged
  size_t max_held_bytes = 256u << 10;        // merged deltas of one stream; above: cancelled
  int socket_send_buffer_bytes = 256 << 10;  // SO_SNDBUF; 0: the system's choice

  std::chrono::milliseconds head_timeout{10'000};  // from the first byte to the empty line
  std::chrono::milliseconds body_timeout{10'000};  // plus received / min_body_rate
  uint64_t min_body_bytes_per_s = 64u << 10;
  std::chrono::milliseconds idle_timeout{75'000};         // between requests of a connection
  std::chrono::milliseconds write_stall_timeout{30'000};  // no byte taken by the client
  std::chrono::milliseconds linger_timeout{2'000};        // unread input after an early refusal
};

}  // namespace spin::server
