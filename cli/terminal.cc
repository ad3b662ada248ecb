// SPDX-License-Identifier: Apache-2.0
#include "cli/terminal.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include "base/errno_text.h"
#include "base/quote.h"

namespace spin::cli {
namespace {

constexpr size_t kBlockBytes = 64 * 1024;

Status io_error(std::string_view what, int error) {
  return Status(StatusCode::kIoError, fmt::format("{} failed: {}", what, base::errno_text(error)));
}

// Appends what is there, at least one byte; false at the end of the input.
Result<bool> read_some(int fd, int cancel_fd, std::string& out) {
  while (true) {
    if (cancel_fd >= 0) {
      pollfd fds[] = {{fd, POLLIN, 0}, {cancel_fd, POLLIN, 0}};
      if (::poll(fds, 2, -1) < 0) {
        if (errno == EINTR) continue;
        return io_error("waiting for input", errno);
      }
      if (fds[1].revents != 0) return Status(StatusCode::kCancelled, "interrupted");
    }
    std::array<char, kBlockBytes> block;
    const ssize_t got = ::read(fd, block.data(), block.size());
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got < 0) return io_error("reading", errno);
    out.append(block.data(), static_cast<size_t>(got));
    return got > 0;
  }
}

}  // namespace

void secure_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
    // The lowest free number is `fd`, since those below are taken by now.
    ::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
  std::signal(SIGPIPE, SIG_IGN);
}

bool is_terminal(int fd) { return ::isatty(fd) == 1; }

Status write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN) {  // the descriptor is shared with a program that made it non-blocking
      pollfd ready = {fd, POLLOUT, 0};
      ::poll(&ready, 1, -1);
      continue;
    }
    if (errno == EPIPE) return Status(StatusCode::kIoError, "the reader has closed the pipe");
    if (errno == ENOSPC) return Status(StatusCode::kIoError, "no space left");
    return io_error("writing", errno);
  }
  return ok_status();
}

void print_notice(std::string_view text) {
  [[maybe_unused]] const Status ignored = write_all(STDERR_FILENO, text);
}

void print_error(std::string_view message) {
  // Messages may repeat text of a hostile file: no escape sequence reaches the terminal.
  print_notice("spin: " + base::printable_text(message) + "\n");
}

Result<std::string> read_all(int fd, uint64_t max_bytes, int cancel_fd) {
  std::string text;
  while (true) {
    SPIN_ASSIGN_OR_RETURN(const bool more, read_some(fd, cancel_fd, text));
    if (text.size() > max_bytes) {
      return Status(StatusCode::kResourceExhausted,
                    fmt::format("expected at most {} bytes, found more", max_bytes));
    }
    if (!more) return text;
  }
}

Result<LineReader::Line> LineReader::next(uint64_t max_bytes, int cancel_fd) {
  while (true) {
    const size_t newline = buffer_.find('\n');
    if (newline != std::string::npos) {
      Line line{buffer_.substr(0, newline), false};
      buffer_.erase(0, newline + 1);
      return line;
    }
    if (buffer_.size() > max_bytes) {
      return Status(StatusCode::kResourceExhausted,
                    fmt::format("expected a line of at most {} bytes, found more", max_bytes));
    }
    if (ended_) {
      Line line{std::move(buffer_), false};
      buffer_.clear();
      line.end_of_input = line.text.empty();
      return line;
    }
    SPIN_ASSIGN_OR_RETURN(const bool more, read_some(fd_, cancel_fd, buffer_));
    ended_ = !more;
  }
}

}  // namespace spin::cli
