// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include "cli/commands.h"

namespace spin::cli {

std::string describe(const Status& status, const FlagTable& table) {
  // The fields whose flags have vLLM's names instead of their own.
  std::string flag = status.param() == "page_tokens"         ? "block_size"
                     : status.param() == "host_memory_bytes" ? "kv_offloading_size"
                                                             : status.param();
  std::replace(flag.begin(), flag.end(), '_', '-');
  flag = "--" + flag;
  const std::vector<std::string> names = table.flag_names();
  if (std::find(names.begin(), names.end(), flag) == names.end()) return status.message();
  return fmt::format("{} ({})", status.message(), flag);
}

}  // namespace spin::cli
