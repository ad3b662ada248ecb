// SPDX-License-Identifier: Apache-2.0
#include "base/errno_text.h"

#include <system_error>

namespace spin::base {

std::string errno_text(int error) { return std::generic_category().message(error); }

}  // namespace spin::base
