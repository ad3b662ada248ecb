// SPDX-License-Identifier: Apache-2.0
// The options of each subcommand, and the one table per struct from which flags, environment
// variables, ranges and help come. Thread: plain data, pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/eval_options.h"
#include "cli/flag_table.h"
#include "spin/options.h"
#include "spin/plan.h"
#include "spin/request.h"
#include "spin/status.h"

namespace spin::cli {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };
enum class StatisticsFormat : uint8_t { kText, kJson, kNone };

// Sampling fields that the user set; the others keep the model's defaults.
struct SamplingOverrides {
  std::optional<float> temperature;
  std::optional<int64_t> top_k;
  std::optional<float> top_p;
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
  std::optional<float> presence_penalty;
  std::optional<float> frequency_penalty;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  std::vector<TokenId> stop_token_ids;
  std::vector<std::pair<TokenId, float>> logit_bias;
  std::optional<uint64_t> max_tokens;
  std::optional<uint64_t> min_tokens;
  bool include_stop_str_in_output = false;
  bool ignore_eos = false;
  bool skip_special_tokens = true;
};

// `defaults` with the fields that were set.
SamplingParams apply_overrides(SamplingParams defaults, const SamplingOverrides& overrides);

struct GenerateOptions {
  EngineOptions engine;
  std::optional<std::string> prompt;
  std::string prompt_file;  // empty: none
  bool chat = false;
  std::optional<std::string> system;
  std::optional<bool> enable_thinking;
  bool add_special_tokens = true;
  SamplingOverrides sampling;
  bool stream = true;
  StatisticsFormat stats = StatisticsFormat::kText;
  LogLevel log_level = LogLevel::kWarning;

  GenerateOptions() {
    engine.max_num_seqs = 1;
    engine.max_queued_requests = 1;
  }
};

struct ServeOptions {
  EngineOptions engine;
  std::string host = "127.0.0.1";
  uint32_t port = 8000;  // 0: any free one
  std::vector<std::string> api_keys;
  std::vector<std::string> allowed_hosts;
  uint64_t max_body_bytes = 64ull << 20;
  uint32_t max_connections = 8192;
  double stall_seconds = 30;  // without a step: /health answers 503
  double drain_seconds = 30;  // running requests may go on so long after SIGTERM
  bool access_log = true;
  LogLevel log_level = LogLevel::kInfo;
};

struct InspectOptions {
  std::string model;
  std::string tokenizer;
  uint64_t context = 0;  // tokens; 0: the model's own limit
  uint32_t page_tokens = 8;
  DTypeChoice dtype = DTypeChoice::kAuto;
  bool json = false;
  bool tensors = true;
  LogLevel log_level = LogLevel::kWarning;
};

struct PlanOptions {
  PlanQuestion question;
  bool json = false;
  LogLevel log_level = LogLevel::kWarning;
};

// Lifetime: the options outlive the table.
FlagTable generate_flags(GenerateOptions& options);
FlagTable serve_flags(ServeOptions& options);
FlagTable inspect_flags(InspectOptions& options);
FlagTable plan_flags(PlanOptions& options);  // cli/plan.cc

enum class Command : uint8_t { kNone, kGenerate, kServe, kEval, kInspect, kPlan };

// What main() has to do.
struct CommandLine {
  Command command = Command::kNone;
  GenerateOptions generate;
  ServeOptions serve;
  EvalOptions eval;
  InspectOptions inspect;
  PlanOptions plan;
  // Where no command is to be run (help, version, a usage error): the exit code and what to print
  // first, on standard output for code 0, else on standard error.
  int exit_code = 0;
  std::string text;
};

// `args` without the program's name.
CommandLine parse_command_line(std::span<const std::string> args, const Environment& environment);

// The help of `spin` itself.
std::string program_help();

}  // namespace spin::cli
