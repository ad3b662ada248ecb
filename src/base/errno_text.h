// SPDX-License-Identifier: Apache-2.0
// Thread: pure function (strerror is not one).
#pragma once

#include <string>

namespace spin::base {

// The text of an errno value: "No such file or directory".
std::string errno_text(int error);

}  // namespace spin::base
