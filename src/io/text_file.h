// SPDX-License-Identifier: Apache-2.0
// Small files as one string (config.json and its kind). Thread: any.
#pragma once

#include <cstdint>
#include <string>

#include "spin/status.h"

namespace spin::io {

// The whole content of a regular file. The content is bytes: whoever parses it checks its encoding.
// Errors: kNotFound; kInvalidArgument for anything but a regular file; kResourceExhausted when it
// is larger than `max_bytes`; kIoError. Messages hold the file's name, not its directory.
Result<std::string> read_text_file(const std::string& path, uint64_t max_bytes);

}  // namespace spin::io
