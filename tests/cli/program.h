// SPDX-License-Identifier: Apache-2.0
// Runs the built program with pipes for its streams. Tests only; one thread.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

namespace spin::cli {

class Program {
 public:
  struct Setup {
    std::vector<std::string> args;
    std::map<std::string, std::string> environment = {};  // besides the test's own, less SPIN_*
    std::string stdout_path = {};                         // empty: a pipe
    std::vector<int> closed = {};                         // of descriptors 0 to 2: not there
    bool terminal = false;                                // stdin and stderr are a pseudo terminal
  };

  explicit Program(Setup setup);
  // Kills what still runs.
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void write_input(std::string_view text);
  void close_input();
  // The reader of standard output goes away.
  void close_output();
  void signal(int signal);

  // Wait up to `limit`; false (and a test failure) when it passes first.
  bool wait_for_any_output(std::chrono::seconds limit = kLimit);
  bool wait_for_error(std::string_view text, std::chrono::seconds limit = kLimit);
  // Waits for the end; the exit code, or 1000 + signal. Closes the input first.
  int wait(std::chrono::seconds limit = kLimit);

  const std::string& output() const { return output_; }  // standard output so far
  const std::string& error() const { return error_; }    // standard error so far
  bool running() const { return pid_ > 0; }

  // Sanitizer builds are many times slower.
  static constexpr std::chrono::seconds kLimit{120};

 private:
  void start(const Setup& setup, const int in[2], const int out[2], const int err[2]);
  // Reads what is there, waiting at most 50 ms.
  void pump();

  pid_t pid_ = -1;
  int input_ = -1;
  int output_fd_ = -1;
  int error_fd_ = -1;
  std::string output_;
  std::string error_;
};

struct Finished {
  int code = 0;
  std::string output;
  std::string error;
};

// Starts, writes `input`, waits.
Finished run_program(Program::Setup setup, std::string_view input = "");

}  // namespace spin::cli
