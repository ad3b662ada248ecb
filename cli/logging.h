// SPDX-License-Identifier: Apache-2.0
// Sends the log to standard error. Thread: call once, before other threads start.
#pragma once

#include "cli/options.h"

namespace spin::cli {

void set_up_logging(LogLevel level);

}  // namespace spin::cli
