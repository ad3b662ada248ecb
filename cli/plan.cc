// SPDX-License-Identifier: Apache-2.0
// `spin plan`: what a context and a batch take in each memory tier, as a table or as JSON.
#include "spin/plan.h"

#include <algorithm>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "base/quote.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/options.h"
#include "cli/statistics.h"
#include "cli/terminal.h"

namespace spin::cli {
namespace {

using Json = nlohmann::ordered_json;

double ratio(uint64_t larger, uint64_t smaller) {
  return smaller == 0 ? 0 : static_cast<double>(larger) / static_cast<double>(smaller);
}

Json plan_json(const PlanQuestion& question, const Plan& plan) {
  Json out;
  out["context_tokens"] = question.context_tokens;
  out["batch"] = question.batch;
  out["sparse"] = question.sparse;
  out["page_tokens"] = question.page_tokens;
  out["mandatory_pages_per_head"] = plan.mandatory_pages;
  out["lease_pages_per_head"] = plan.lease_pages;
  out["attended_tokens_at_most"] = plan.attended_tokens;
  out["lines"] = Json::array();
  for (const PlanLine& line : plan.lines) {
    out["lines"].push_back({{"name", line.name},
                            {"tier", line.tier},
                            {"bytes", line.bytes},
                            {"metadata", line.metadata},
                            {"formula", line.formula}});
  }
  out["fast_bytes"] = plan.fast_bytes;
  out["host_bytes"] = plan.host_bytes;
  out["kv_buffer_bytes"] = plan.kv_buffer_bytes;
  out["fast_metadata_bytes"] = plan.fast_metadata_bytes;
  out["flat_plain_bytes"] = plan.flat_plain_bytes;
  out["flat_worst_bytes"] = plan.flat_worst_bytes;
  if (question.fast_memory_bytes != 0) out["batch_by_fast_memory"] = plan.batch_by_fast;
  if (question.host_memory_bytes != 0) out["batch_by_host_memory"] = plan.batch_by_host;
  return out;
}

std::string plan_text(const PlanQuestion& question, const Plan& plan) {
  std::string out =
      fmt::format("{} tokens x {} requests, {}, pages of {} tokens\n\n", question.context_tokens,
                  question.batch, base::printable_text(question.sparse), question.page_tokens);
  for (const PlanLine& line : plan.lines) {
    out += fmt::format("{:<4}  {:<22} {:>12}  {:>16}  {}\n", line.tier, line.name,
                       bytes_text(line.bytes), line.bytes, line.formula);
  }
  out += fmt::format("\n{:<28} {:>12}  {:>16}\n", "fast memory", bytes_text(plan.fast_bytes),
                     plan.fast_bytes);
  out += fmt::format("{:<28} {:>12}  {:>16}\n", "host memory", bytes_text(plan.host_bytes),
                     plan.host_bytes);
  out += fmt::format(
      "\nfast metadata {} ({:.2f} % of the KV buffers of {})\n"
      "  flat, one 8-byte entry a logical page: {}, {:.1f} times as much\n"
      "  flat, worst case a partition:          {}, {:.1f} times as much\n"
      "    ({})\n",
      bytes_text(plan.fast_metadata_bytes),
      100 * ratio(plan.fast_metadata_bytes, plan.kv_buffer_bytes), bytes_text(plan.kv_buffer_bytes),
      bytes_text(plan.flat_plain_bytes), ratio(plan.flat_plain_bytes, plan.fast_metadata_bytes),
      bytes_text(plan.flat_worst_bytes), ratio(plan.flat_worst_bytes, plan.fast_metadata_bytes),
      plan.flat_worst_formula);
  out += fmt::format("pages a head: {} mandatory, {} leased; at most {} tokens attended a step\n",
                     plan.mandatory_pages, plan.lease_pages, plan.attended_tokens);
  if (question.fast_memory_bytes != 0) {
    out += fmt::format("fast memory of {} holds {} such requests\n",
                       bytes_text(question.fast_memory_bytes), plan.batch_by_fast);
  }
  if (question.host_memory_bytes != 0) {
    out += fmt::format("host memory of {} holds {} such requests\n",
                       bytes_text(question.host_memory_bytes), plan.batch_by_host);
  }
  return out;
}

}  // namespace

FlagTable plan_flags(PlanOptions& options) {
  PlanQuestion& question = options.question;
  FlagTable table("plan", "MODEL [OPTIONS]",
                  "Prints what a context and a batch take in each memory tier, table by table, "
                  "without loading anything but the model's configuration.");
  table.add_text({"model", "PATH",
                  "A checkpoint as for serve, a directory with a config.json, or that file alone"},
                 question.model, {1, 4095});
  table.make_required();
  table.also_positional("MODEL");
  table.add_count({"context", "TOKENS", "Prompt and output of one request"},
                  question.context_tokens, {1, 1ull << 27});
  table.add_count({"batch", "N", "Requests at the same time"}, question.batch, {1, 1u << 20});
  table.add_text(
      {"sparse", "NAME[:k=v,...]", "The sparse-attention algorithm and its options", "dense"},
      question.sparse, {1, 1024});
  table.add_choice({"dtype", "TYPE", "Type of weights and KV cache"}, {"float32", "bfloat16"},
                   "bfloat16", [&question](size_t index) {
                     question.dtype = index == 0 ? DTypeChoice::kFloat32 : DTypeChoice::kBFloat16;
                   });
  table.add_choice({"block-size", "TOKENS", "Tokens of one page of the KV cache"},
                   {"8", "16", "32", "64"}, fmt::to_string(question.page_tokens),
                   [&question](size_t index) { question.page_tokens = 8u << index; });
  table.add_real({"kv-buffer-ratio", "X", "Buffering pages for each mandatory page"},
                 question.buffer_ratio, {0, 1000});
  table.add_count({"max-num-batched-tokens", "TOKENS", "Tokens in one step"},
                  question.max_num_batched_tokens, {1, 1u << 20});
  table.add_count({"fast-memory", "BYTES",
                   "Fast memory there is, to print how many requests fit; "
                   "0: not asked"},
                  question.fast_memory_bytes, {0, 1ull << 50});
  table.add_count({"host-memory", "BYTES", "Host memory there is; 0: not asked"},
                  question.host_memory_bytes, {0, 1ull << 50});
  table.add_switch({"json", "", "Prints one JSON object instead of text"}, options.json);
  static const std::vector<std::string> kLevels = {"debug", "info", "warning", "error"};
  table.add_choice({"log-level", "LEVEL", "Least severe messages to write to standard error"},
                   kLevels, kLevels[static_cast<size_t>(options.log_level)],
                   [&options](size_t index) { options.log_level = static_cast<LogLevel>(index); });
  return table;
}

int run_plan(const PlanOptions& options) {
  const Result<Plan> plan = plan_serving(options.question);
  if (!plan.ok()) {
    PlanOptions names;
    print_error(describe(plan.status(), plan_flags(names)));
    return kExitFailure;
  }
  const std::string text = options.json ? plan_json(options.question, *plan).dump(2) + "\n"
                                        : plan_text(options.question, *plan);
  const Status written = write_all(STDOUT_FILENO, text);
  if (written.ok()) return kExitOk;
  print_error(written.message());
  return kExitFailure;
}

}  // namespace spin::cli
