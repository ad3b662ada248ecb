// SPDX-License-Identifier: Apache-2.0
// The options of `spin eval ruler`, `ppl` and `agreement` and their flags (cli/flag_table.h).
// Thread: plain data, pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cli/flag_table.h"
#include "spin/evaluation.h"

namespace spin::cli {

enum class Evaluation : uint8_t { kRuler, kPerplexity, kAgreement };

struct EvalOptions {
  Evaluation kind = Evaluation::kRuler;
  EvaluationOptions evaluation;
  RulerQuestion ruler;
  TextQuestion text;
  std::string json;  // file for the results; empty: none
};

// "ruler", "ppl" or "agreement"; none for other names.
std::optional<Evaluation> evaluation_named(std::string_view name);
std::string_view evaluation_name(Evaluation kind);

// Flags of options.kind. Lifetime: the options outlive the table.
FlagTable eval_flags(EvalOptions& options);

// The help of `spin eval` itself.
std::string eval_help();

}  // namespace spin::cli
