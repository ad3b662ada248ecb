// SPDX-License-Identifier: Apache-2.0
// The number of a token in a model's vocabulary. Thread: plain data.
#pragma once

#include <cstdint>

namespace spin {

using TokenId = uint32_t;

}  // namespace spin
