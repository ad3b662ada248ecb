// SPDX-License-Identifier: Apache-2.0
// The subcommands. Each returns the exit code of the process (cli/exit_codes.h) and has told the
// user why. Thread: called on the main thread; block.
#pragma once

#include <string>

#include "cli/eval_options.h"
#include "cli/flag_table.h"
#include "cli/options.h"
#include "cli/signals.h"
#include "spin/status.h"

namespace spin::cli {

int run_generate(const GenerateOptions& options, SignalWatcher& signals);
int run_serve(const ServeOptions& options, SignalWatcher& signals);
int run_eval(const EvalOptions& options, SignalWatcher& signals);
int run_inspect(const InspectOptions& options);
int run_plan(const PlanOptions& options);

// The error's message; where its param() is the field of a flag of `table`, the flag's name too.
std::string describe(const Status& status, const FlagTable& table);

}  // namespace spin::cli
