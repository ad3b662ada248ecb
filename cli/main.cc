// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/logging.h"
#include "cli/options.h"
#include "cli/signals.h"
#include "cli/terminal.h"

namespace {

using namespace spin::cli;  // NOLINT(google-build-using-namespace): the program's own names

int print_and_end(const CommandLine& line) {
  const bool good = line.exit_code == kExitOk;
  const spin::Status written = write_all(good ? STDOUT_FILENO : STDERR_FILENO, line.text);
  return written.ok() ? line.exit_code : kExitFailure;
}

int run(const CommandLine& line, LogLevel level) {
  // Before the first thread, which the log may start.
  spin::Result<std::unique_ptr<SignalWatcher>> signals = SignalWatcher::start();
  if (!signals.ok()) {
    print_error(signals.status().message());
    return kExitFailure;
  }
  set_up_logging(level);
  switch (line.command) {
    case Command::kGenerate:
      return run_generate(line.generate, **signals);
    case Command::kServe:
      return run_serve(line.serve, **signals);
    case Command::kEval:
      return run_eval(line.eval, **signals);
    case Command::kInspect:
      return run_inspect(line.inspect);
    case Command::kPlan:
      return run_plan(line.plan);
    case Command::kNone:
      break;
  }
  return print_and_end(line);
}

LogLevel log_level(const CommandLine& line) {
  switch (line.command) {
    case Command::kGenerate:
      return line.generate.log_level;
    case Command::kServe:
      return line.serve.log_level;
    case Command::kEval:
      return LogLevel::kWarning;
    case Command::kInspect:
      return line.inspect.log_level;
    case Command::kPlan:
      return line.plan.log_level;
    case Command::kNone:
      break;
  }
  return LogLevel::kInfo;
}

}  // namespace

int main(int argc, char** argv) try {
  secure_standard_streams();
  const std::vector<std::string> args(argv + (argc > 0 ? 1 : 0), argv + argc);
  // NOLINTNEXTLINE(concurrency-mt-unsafe): no other thread runs yet
  const CommandLine line = parse_command_line(args, [](const char* name) { return getenv(name); });
  if (line.command == Command::kNone) return print_and_end(line);
  return run(line, log_level(line));
} catch (const std::exception& error) {  // a library's, most likely memory
  print_error(error.what());
  return kExitFailure;
}
