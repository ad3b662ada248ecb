// SPDX-License-Identifier: Apache-2.0
// `spin eval`: runs an evaluation with a progress bar and prints its report as a table and,
// where asked for, as JSON.
#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "base/quote.h"
#include "cli/commands.h"
#include "cli/eval_options.h"
#include "cli/exit_codes.h"
#include "cli/progress_bar.h"
#include "cli/statistics.h"
#include "cli/terminal.h"
#include "spin/evaluation.h"

namespace spin::cli {
namespace {

using Json = nlohmann::ordered_json;
using Cells = std::vector<std::string>;

// First column to the left, the others to the right.
std::string table_text(const std::vector<Cells>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const Cells& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Cells& row : rows) {
    text += fmt::format("{:<{}}", row[0], widths[0]);
    for (size_t i = 1; i < row.size(); ++i) text += fmt::format("  {:>{}}", row[i], widths[i]);
    text += "\n";
  }
  return text;
}

Json use_json(const SettingUse& use) {
  Json out;
  out["prompts"] = use.prompts;
  out["dense_prompts"] = use.dense_prompts;
  out["steps"] = use.steps;
  out["attended_tokens_per_head"] = use.attended_per_head();
  out["hit_ratio"] = use.hit_ratio();
  out["hits"] = use.hits;
  out["misses"] = use.misses;
  out["evictions"] = use.evictions;
  out["fetched_bytes"] = use.fetched_bytes;
  out["index_bytes"] = use.index_bytes;
  out["mandatory_pages_per_head"] = use.mandatory_pages;
  out["leased_pages_per_head"] = use.leased_pages;
  out["fast_share"] = use.fast_share;
  return out;
}

const Cells kUseTitles = {"attended", "hits", "fetched", "fast slots", "index"};

// What a step reads and where it lay; empty for dense attention.
void add_use(const SettingUse& use, Cells& row) {
  if (use.steps == 0) {
    row.insert(row.end(), kUseTitles.size(), use.dense_prompts > 0 ? "dense" : "");
    return;
  }
  row.push_back(fmt::format("{:.1f}", use.attended_per_head()));
  row.push_back(fmt::format("{:.1f} %", 100 * use.hit_ratio()));
  row.push_back(bytes_text(use.fetched_bytes));
  row.push_back(fmt::format("{:.1f} %", 100 * use.fast_share));
  row.push_back(bytes_text(use.index_bytes));
}

std::string notes(const std::vector<std::pair<std::string, SettingUse>>& settings) {
  std::string text =
      "attended: tokens per KV head and step; hits: wanted pages that were in fast memory;\n"
      "fast slots: leased ones as a share of all pages.\n";
  for (const auto& [name, use] : settings) {
    if (use.dense_prompts == 0) continue;
    text += fmt::format("{}: {} of {} prompts are too short for it and were dense.\n", name,
                        use.dense_prompts, use.prompts);
  }
  return text;
}

template <typename Setting>
std::string notes_of(const std::vector<Setting>& settings) {
  std::vector<std::pair<std::string, SettingUse>> uses;
  for (const Setting& setting : settings) uses.emplace_back(setting.sparse, setting.use);
  return notes(uses);
}

std::string ruler_text(const RulerReport& report) {
  std::vector<Cells> rows = {{"setting", "all"}};
  for (const TaskCount& task : report.settings.front().tasks) {
    rows.front().push_back(base::printable_text(task.task));
  }
  rows.front().insert(rows.front().end(), kUseTitles.begin(), kUseTitles.end());
  for (const RulerSetting& setting : report.settings) {
    Cells row = {setting.sparse, fmt::format("{}/{}", setting.exact, report.prompts)};
    for (const TaskCount& task : setting.tasks) {
      row.push_back(fmt::format("{}/{}", task.exact, task.prompts));
    }
    add_use(setting.use, row);
    rows.push_back(std::move(row));
  }
  return fmt::format("{}\n{}{} prompts, {} tokens; prefill {:.1f} s, decoding {:.1f} s\n",
                     table_text(rows), notes_of(report.settings), report.prompts,
                     report.prompt_tokens, report.prefill_s, report.decode_s);
}

Json ruler_json(const RulerReport& report) {
  Json out;
  out["prompts"] = report.prompts;
  out["prompt_tokens"] = report.prompt_tokens;
  out["prefill_s"] = report.prefill_s;
  out["decode_s"] = report.decode_s;
  out["settings"] = Json::array();
  for (const RulerSetting& setting : report.settings) {
    Json one;
    one["sparse"] = setting.sparse;
    one["exact"] = setting.exact;
    one["token_accuracy"] = setting.token_accuracy;
    for (const TaskCount& task : setting.tasks) {
      one["per_task"][task.task] = {task.exact, task.prompts};
    }
    one["use"] = use_json(setting.use);
    out["settings"].push_back(std::move(one));
  }
  return out;
}

std::string text_text(const TextReport& report, Evaluation kind) {
  const bool perplexity = kind == Evaluation::kPerplexity;
  std::vector<Cells> rows = {perplexity ? Cells{"setting", "perplexity", "of dense"}
                                        : Cells{"setting", "top-1", "KL"}};
  rows.front().insert(rows.front().end(), kUseTitles.begin(), kUseTitles.end());
  const double dense = report.settings.front().perplexity;
  for (const TextSetting& setting : report.settings) {
    Cells row = {setting.sparse};
    if (perplexity) {
      row.push_back(fmt::format("{:.4f}", setting.perplexity));
      row.push_back(fmt::format("{:.4f}", setting.perplexity / dense));
    } else {
      row.push_back(fmt::format("{:.4f}", setting.agreement));
      row.push_back(fmt::format("{:.5f}", setting.divergence));
    }
    add_use(setting.use, row);
    rows.push_back(std::move(row));
  }
  return fmt::format("{}\n{}{} windows, {} positions; prefill {:.1f} s, decoding {:.1f} s\n",
                     table_text(rows), notes_of(report.settings), report.windows, report.positions,
                     report.prefill_s, report.decode_s);
}

Json text_json(const TextReport& report) {
  Json out;
  out["windows"] = report.windows;
  out["positions"] = report.positions;
  out["prefill_s"] = report.prefill_s;
  out["decode_s"] = report.decode_s;
  out["settings"] = Json::array();
  for (const TextSetting& setting : report.settings) {
    out["settings"].push_back({{"sparse", setting.sparse},
                               {"perplexity", setting.perplexity},
                               {"divergence", setting.divergence},
                               {"agreement", setting.agreement},
                               {"use", use_json(setting.use)}});
  }
  return out;
}

struct Printed {
  std::string text;
  Json json;
};

Result<Printed> evaluate(const EvalOptions& options, const EvaluationProgress& progress) {
  if (options.kind == Evaluation::kRuler) {
    SPIN_ASSIGN_OR_RETURN(const RulerReport report,
                          evaluate_ruler(options.evaluation, options.ruler, progress));
    return Printed{ruler_text(report), ruler_json(report)};
  }
  SPIN_ASSIGN_OR_RETURN(const TextReport report,
                        evaluate_text(options.evaluation, options.text, progress));
  return Printed{text_text(report, options.kind), text_json(report)};
}

int failed(const Status& status, Evaluation kind) {
  EvalOptions names;
  names.kind = kind;
  print_error(describe(status, eval_flags(names)));
  return kExitFailure;
}

// With an empty `text` and std::ios::app: whether the file can be written at all.
Status write_file(const std::string& path, const std::string& text, std::ios::openmode mode) {
  std::ofstream file(path, std::ios::binary | mode);
  file << text;
  file.close();
  if (file.good()) return ok_status();
  return Status(StatusCode::kIoError, fmt::format("cannot write {}", base::printable_text(path)),
                "json");
}

}  // namespace

int run_eval(const EvalOptions& options, SignalWatcher& signals) {
  if (!options.json.empty()) {
    // An evaluation may take hours: what cannot be saved is said before it, and what is there stays
    // until there is something new.
    const Status writable = write_file(options.json, "", std::ios::app);
    if (!writable.ok()) return failed(writable, options.kind);
  }
  ProgressBar bar(STDERR_FILENO, is_terminal(STDERR_FILENO));
  const Result<Printed> printed = evaluate(options, [&](double fraction, std::string_view part) {
    bar.update(part, fraction);
    return signals.pending() == 0;
  });
  bar.clear();
  if (!printed.ok()) {
    const int signal = signals.pending();
    if (printed.status().code() == StatusCode::kCancelled && signal != 0) {
      return kExitSignalBase + signal;
    }
    return failed(printed.status(), options.kind);
  }
  const Status written = write_all(STDOUT_FILENO, printed->text);
  if (!written.ok()) return failed(written, options.kind);
  if (options.json.empty()) return kExitOk;
  const Status saved = write_file(options.json, printed->json.dump(1) + "\n", std::ios::trunc);
  return saved.ok() ? kExitOk : failed(saved, options.kind);
}

}  // namespace spin::cli
