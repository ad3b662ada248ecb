// SPDX-License-Identifier: Apache-2.0
// Standard input, output and error as file descriptors: whole writes, bounded reads, no buffers of
// the C++ streams in between. Thread: free functions; one writer per descriptor at a time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "spin/status.h"

namespace spin::cli {

// Call first. Descriptors 0 to 2 that the caller has closed are taken by placeholders that cannot
// be read or written: a socket or file opened later would get the number and, with it, the
// program's output, or be read as its input. SIGPIPE is ignored: a write then fails with EPIPE.
void secure_standard_streams();

bool is_terminal(int fd);

// Writes all of `text`. Errors: kIoError; the message says so when the reader has gone (EPIPE).
Status write_all(int fd, std::string_view text);

// "spin: `message`" as a line on standard error, control characters replaced. Cannot fail: where
// standard error is closed there is nobody to tell.
void print_error(std::string_view message);

// As write_all to standard error, without a result.
void print_notice(std::string_view text);

// Reads to the end. Errors: kResourceExhausted above `max_bytes`, kIoError, kCancelled when
// `cancel_fd` becomes readable (-1: never).
Result<std::string> read_all(int fd, uint64_t max_bytes, int cancel_fd);

// Reads lines of a terminal (or of a pipe that plays one).
class LineReader {
 public:
  explicit LineReader(int fd) : fd_(fd) {}

  struct Line {
    std::string text;           // without the newline
    bool end_of_input = false;  // nothing was left; text is empty
  };
  // Errors: as read_all, for one line.
  Result<Line> next(uint64_t max_bytes, int cancel_fd);

 private:
  const int fd_;
  std::string buffer_;
  bool ended_ = false;
};

}  // namespace spin::cli
