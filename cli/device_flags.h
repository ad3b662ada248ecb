// SPDX-License-Identifier: Apache-2.0
// The flags that choose where a model runs, of every command that runs one.
// Thread: pure functions. Lifetime: the targets outlive the table.
#pragma once

#include <cstdint>
#include <string>

#include "cli/flag_table.h"

namespace spin::cli {

// --device and --threads.
void add_device_flags(FlagTable& table, std::string& device, uint32_t& threads);

}  // namespace spin::cli
