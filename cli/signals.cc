// SPDX-License-Identifier: Apache-2.0
#include "cli/signals.h"

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <utility>

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/start_thread.h"
#include "cli/exit_codes.h"

namespace spin::cli {
namespace {

void raise_event(int fd) {
  const uint64_t one = 1;
  // An event counter refuses only when it is full, and then it is readable already.
  [[maybe_unused]] const ssize_t written = ::write(fd, &one, sizeof(one));
}

void clear_event(int fd) {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(fd, &count, sizeof(count));
}

}  // namespace

Result<std::unique_ptr<SignalWatcher>> SignalWatcher::start() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  const int signal_fd = ::signalfd(-1, &set, SFD_CLOEXEC);
  const int event_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  const int stop_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (signal_fd < 0 || event_fd < 0 || stop_fd < 0 ||
      ::pthread_sigmask(SIG_BLOCK, &set, nullptr) != 0 ||
      std::signal(SIGPIPE, SIG_IGN) == SIG_ERR) {
    for (const int fd : {signal_fd, event_fd, stop_fd}) {
      if (fd >= 0) ::close(fd);
    }
    return Status(StatusCode::kIoError, "the operating system refuses a signal descriptor");
  }
  std::unique_ptr<SignalWatcher> watcher(new SignalWatcher(signal_fd, event_fd, stop_fd));
  SPIN_RETURN_IF_ERROR(
      base::start_thread(watcher->thread_, "signals", [raw = watcher.get()] { raw->run(); }));
  return watcher;
}

SignalWatcher::SignalWatcher(int signal_fd, int event_fd, int stop_fd)
    : signal_fd_(signal_fd), event_fd_(event_fd), stop_fd_(stop_fd) {}

SignalWatcher::~SignalWatcher() {
  raise_event(stop_fd_);
  if (thread_.joinable()) thread_.join();
  for (const int fd : {signal_fd_, event_fd_, stop_fd_}) ::close(fd);
}

void SignalWatcher::set_handler(std::function<void()> handler) {
  const base::MutexLock lock(mutex_);
  handler_ = std::move(handler);
}

void SignalWatcher::reset() {
  const base::MutexLock lock(mutex_);
  pending_.store(0, std::memory_order_release);
  clear_event(event_fd_);
}

void SignalWatcher::run() {
  while (true) {
    pollfd fds[] = {{signal_fd_, POLLIN, 0}, {stop_fd_, POLLIN, 0}};
    if (::poll(fds, 2, -1) < 0 && errno != EINTR) return;
    if (fds[1].revents != 0) return;
    if (fds[0].revents == 0) continue;
    signalfd_siginfo info;
    if (::read(signal_fd_, &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
      on_signal(static_cast<int>(info.ssi_signo));
    }
  }
}

void SignalWatcher::on_signal(int signal) {
  // Under the lock, so that reset() meets the number and the event both there or both not yet.
  const base::MutexLock lock(mutex_);
  // _exit: destructors would wait for the very work that the user no longer wants to wait for.
  if (pending_.exchange(signal, std::memory_order_acq_rel) != 0) _exit(kExitSignalBase + signal);
  raise_event(event_fd_);
  if (handler_) handler_();
}

}  // namespace spin::cli
