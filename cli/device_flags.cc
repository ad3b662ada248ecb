// SPDX-License-Identifier: Apache-2.0
#include "cli/device_flags.h"

#include <string_view>

#include "spin/device_name.h"

namespace spin::cli {

void add_device_flags(FlagTable& table, std::string& device, uint32_t& threads) {
  const std::string range(kDeviceNames);
  table.add_one({"device", "NAME",
                 "Where the model runs: on the CPU or on the NVIDIA GPU number N; cuda is cuda:0 "
                 "and needs a build with -DSPIN_CUDA=ON",
                 device},
                range, [&device, range](std::string_view text) {
                  if (!parse_device_name(text).ok()) return range;
                  device = text;
                  return std::string();
                });
  table.add_count({"threads", "N", "Threads of compute on the CPU; 0 takes all usable cores"},
                  threads, {0, 1024});
}

}  // namespace spin::cli
