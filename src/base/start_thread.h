// SPDX-License-Identifier: Apache-2.0
// The one place that starts threads: the system's refusal is a Status, not an exception.
// Thread: any.
#pragma once

#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "spin/status.h"

namespace spin::base {

// Runs `body` on a new thread, which becomes `out` (a std::thread or std::jthread that is not
// joinable). `what` names it in the message. Errors: kResourceExhausted.
template <typename Thread, typename Body>
Status start_thread(Thread& out, std::string_view what, Body body) {
  try {
    out = Thread(std::move(body));
  } catch (const std::system_error&) {
    return Status(StatusCode::kResourceExhausted,
                  "the system refused a thread for " + std::string(what));
  }
  return ok_status();
}

}  // namespace spin::base
