// SPDX-License-Identifier: Apache-2.0
#include "tests/cli/program.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace spin::cli {
namespace {

using Clock = std::chrono::steady_clock;

void close_fd(int& fd) {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

void make_pipe(int fds[2]) { EXPECT_EQ(::pipe2(fds, O_CLOEXEC), 0); }

// fds[0] is the program's end.
void make_terminal(int& master, int& slave) {
  master = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_GE(master, 0);
  ASSERT_EQ(::grantpt(master), 0);
  ASSERT_EQ(::unlockpt(master), 0);
  std::array<char, 128> name;
  ASSERT_EQ(::ptsname_r(master, name.data(), name.size()), 0);
  slave = ::open(name.data(), O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_GE(slave, 0);
}

std::vector<std::string> environment_of(const Program::Setup& setup) {
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::string_view(*entry).rfind("SPIN_", 0) != 0) out.emplace_back(*entry);
  }
  for (const auto& [name, value] : setup.environment) out.push_back(name + "=" + value);
  return out;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (std::string& text : texts) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

}  // namespace

Program::Program(Setup setup) {
  std::signal(SIGPIPE, SIG_IGN);
  int in[2] = {-1, -1};
  int out[2] = {-1, -1};
  int err[2] = {-1, -1};
  if (setup.terminal) {
    int slave = -1;
    make_terminal(input_, slave);
    in[0] = slave;
    err[1] = ::fcntl(slave, F_DUPFD_CLOEXEC, 0);
    error_fd_ = ::fcntl(input_, F_DUPFD_CLOEXEC, 0);
  } else {
    make_pipe(in);
    make_pipe(err);
    input_ = in[1];
    error_fd_ = err[0];
  }
  make_pipe(out);
  output_fd_ = out[0];
  start(setup, in, out, err);
  for (int fd : {in[0], out[1], err[1]}) ::close(fd);
}

void Program::start(const Setup& setup, const int in[2], const int out[2], const int err[2]) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err[1], STDERR_FILENO);
  if (setup.stdout_path.empty()) {
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  } else {
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, setup.stdout_path.c_str(), O_WRONLY,
                                     0);
  }
  for (const int fd : setup.closed) posix_spawn_file_actions_addclose(&actions, fd);
  std::vector<std::string> args = setup.args;
  args.insert(args.begin(), SPIN_PROGRAM);
  std::vector<std::string> environment = environment_of(setup);
  EXPECT_EQ(::posix_spawn(&pid_, SPIN_PROGRAM, &actions, nullptr, pointers(args).data(),
                          pointers(environment).data()),
            0);
  posix_spawn_file_actions_destroy(&actions);
}

Program::~Program() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  for (int* fd : {&input_, &output_fd_, &error_fd_}) close_fd(*fd);
}

void Program::write_input(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(input_, text.data(), text.size());
    if (written <= 0) return;  // the program ended without reading all of it
    text.remove_prefix(static_cast<size_t>(written));
  }
}

void Program::close_input() { close_fd(input_); }
void Program::close_output() { close_fd(output_fd_); }
void Program::signal(int signal) { ::kill(pid_, signal); }

void Program::pump() {
  pollfd fds[] = {{output_fd_, POLLIN, 0}, {error_fd_, POLLIN, 0}};
  if (::poll(fds, 2, 50) <= 0) return;
  const auto take = [](const pollfd& entry, int& fd, std::string& text) {
    if (entry.revents == 0) return;
    std::array<char, 65536> block;
    const ssize_t got = ::read(fd, block.data(), block.size());
    // A terminal's master says EIO once the program has closed its end.
    if (got <= 0) return close_fd(fd);
    text.append(block.data(), static_cast<size_t>(got));
  };
  take(fds[0], output_fd_, output_);
  take(fds[1], error_fd_, error_);
}

bool Program::wait_for_any_output(std::chrono::seconds limit) {
  const auto deadline = Clock::now() + limit;
  while (output_.empty()) {
    if (Clock::now() > deadline || output_fd_ < 0) {
      ADD_FAILURE() << "nothing on standard output; standard error: " << error_;
      return false;
    }
    pump();
  }
  return true;
}

bool Program::wait_for_error(std::string_view text, std::chrono::seconds limit) {
  const auto deadline = Clock::now() + limit;
  while (error_.find(text) == std::string::npos) {
    if (Clock::now() > deadline || error_fd_ < 0) {
      ADD_FAILURE() << "no '" << text << "' on standard error: " << error_;
      return false;
    }
    pump();
  }
  return true;
}

int Program::wait(std::chrono::seconds limit) {
  const auto deadline = Clock::now() + limit;
  if (error_fd_ >= 0 && input_ >= 0 && ::isatty(input_) == 0) close_input();
  int status = 0;
  while (::waitpid(pid_, &status, WNOHANG) == 0) {
    pump();
    if (Clock::now() > deadline) {
      ADD_FAILURE() << "the program does not end; standard error: " << error_;
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, &status, 0);
      break;
    }
  }
  pid_ = -1;
  // What is still in the pipes.
  while (output_fd_ >= 0 || error_fd_ >= 0) {
    pollfd fds[] = {{output_fd_, POLLIN, 0}, {error_fd_, POLLIN, 0}};
    if (::poll(fds, 2, 0) <= 0) break;
    pump();
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

Finished run_program(Program::Setup setup, std::string_view input) {
  Program program(std::move(setup));
  program.write_input(input);
  Finished finished;
  finished.code = program.wait();
  finished.output = program.output();
  finished.error = program.error();
  return finished;
}

}  // namespace spin::cli
