// SPDX-License-Identifier: Apache-2.0
// The version of Spin that this header belongs to. Thread: constants.
#pragma once

namespace spin {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace spin
