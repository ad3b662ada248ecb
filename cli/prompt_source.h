// SPDX-License-Identifier: Apache-2.0
// Where a prompt comes from: a flag, a file or standard input. Thread: any; blocks.
#pragma once

#include <string>
#include <string_view>

#include "cli/options.h"
#include "spin/status.h"

namespace spin::cli {

// Longest prompt that is read.
inline constexpr uint64_t kMaxPromptBytes = 128ull << 20;

// The prompt's bytes, checked to be UTF-8. Reads standard input where neither flag is given.
// Errors: kNotFound, kIoError, kResourceExhausted, kInvalidArgument (not UTF-8, with the place),
// kCancelled when `cancel_fd` becomes readable first.
Result<std::string> read_prompt(const GenerateOptions& options, int cancel_fd);

// ok, or kInvalidArgument with the number of the first byte that is not UTF-8.
Status check_utf8(std::string_view text, std::string_view what);

}  // namespace spin::cli
