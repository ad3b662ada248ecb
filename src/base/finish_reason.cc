// SPDX-License-Identifier: Apache-2.0
// Names of finish reasons, for the engine, the server and the command line alike.
#include "spin/request.h"

namespace spin {

std::string_view finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAborted:
      return "abort";
    case FinishReason::kError:
      return "error";
  }
  return "error";
}

}  // namespace spin
