// SPDX-License-Identifier: Apache-2.0
// How a device is written in options and flags: "cpu", "cuda" (the same as "cuda:0") or "cuda:N".
// Thread: plain data, pure functions.
#pragma once

#include <cstdint>
#include <string_view>

#include "spin/status.h"

namespace spin {

enum class DeviceKind : uint8_t { kCpu, kCuda };

struct DeviceName {
  DeviceKind kind = DeviceKind::kCpu;
  int ordinal = 0;  // of the GPU
};

// What parse_device_name() takes.
inline constexpr std::string_view kDeviceNames = "cpu, cuda or cuda:N with N from 0 to 1023";

// The text alone: whether there is such a device is found out when it is created.
// Errors: kInvalidArgument with param() "device".
Result<DeviceName> parse_device_name(std::string_view text);

}  // namespace spin
