// SPDX-License-Identifier: Apache-2.0
#include "cli/prompt_source.h"

#include <cerrno>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "base/errno_text.h"
#include "base/quote.h"
#include "base/utf8.h"
#include "cli/terminal.h"

namespace spin::cli {
namespace {

Result<std::string> read_prompt_file(const std::string& path, int cancel_fd) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    return Status(
        error == ENOENT ? StatusCode::kNotFound : StatusCode::kIoError,
        fmt::format("cannot open {}: {}", base::quote_text(path), base::errno_text(error)));
  }
  Result<std::string> text = read_all(fd, kMaxPromptBytes, cancel_fd);
  ::close(fd);
  return text;
}

}  // namespace

Status check_utf8(std::string_view text, std::string_view what) {
  for (size_t at = 0; at < text.size();) {
    const base::Utf8Step step = base::utf8_step(text.substr(at));
    if (step.kind != base::Utf8Step::Kind::kValid) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{} must be UTF-8; byte {} is not (0x{:02x})", what, at,
                                static_cast<unsigned>(static_cast<unsigned char>(text[at]))));
    }
    at += step.length;
  }
  return ok_status();
}

Result<std::string> read_prompt(const GenerateOptions& options, int cancel_fd) {
  std::string text;
  if (options.prompt) {
    text = *options.prompt;
  } else if (!options.prompt_file.empty() && options.prompt_file != "-") {
    Result<std::string> file = read_prompt_file(options.prompt_file, cancel_fd);
    if (!file.ok()) return file.status().with_context("--prompt-file");
    text = std::move(file).value();
  } else {
    Result<std::string> input = read_all(STDIN_FILENO, kMaxPromptBytes, cancel_fd);
    if (!input.ok()) return input.status().with_context("standard input");
    text = std::move(input).value();
  }
  SPIN_RETURN_IF_ERROR(check_utf8(text, "the prompt"));
  return text;
}

}  // namespace spin::cli
