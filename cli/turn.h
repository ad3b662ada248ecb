// SPDX-License-Identifier: Apache-2.0
// One request from submission to its end: its text goes to a descriptor as it comes, its prefill to
// a progress bar, and a signal cancels it. Thread: run_turn() on the main thread; blocks.
#pragma once

#include <cstdint>
#include <string>

#include "cli/progress_bar.h"
#include "cli/signals.h"
#include "spin/engine.h"
#include "spin/request.h"
#include "spin/status.h"

namespace spin::cli {

struct Turn {
  std::string text;
  FinishReason reason = FinishReason::kAborted;
  RequestResult result;
  Status output;   // why the text could not be written; the request was cancelled then
  int signal = 0;  // the signal that cancelled it, 0 for none
};

// Errors: those of Engine::submit. What happens later is in the Turn.
Result<Turn> run_turn(Engine& engine,
                      SignalWatcher& signals,
                      ProgressBar& progress,
                      int out_fd,
                      GenerateRequest request);

}  // namespace spin::cli
