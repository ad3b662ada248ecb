// SPDX-License-Identifier: Apache-2.0
// How `spin` ends (docs/cli.md, "Exit codes"). Thread: constants.
#pragma once

namespace spin::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;       // a file, the model, the engine or an output failed
inline constexpr int kExitUsage = 2;         // a flag or an environment variable is wrong
inline constexpr int kExitSignalBase = 128;  // + the signal that ended the work: 130 for Ctrl-C

}  // namespace spin::cli
