// SPDX-License-Identifier: Apache-2.0
// std::bad_alloc of the standard containers as a Status, at the borders where one request's or one
// load's memory must not end the process. Thread: as the function that is called.
#pragma once

#include <new>
#include <string>
#include <string_view>

#include "spin/status.h"

namespace spin::base {

// function(), which returns a Status or a Result. `what` goes on from "out of memory while".
// Errors: those of `function`; kResourceExhausted.
template <typename Function>
auto guard_memory(std::string_view what, Function&& function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted, "out of memory while " + std::string(what));
  }
}

}  // namespace spin::base
