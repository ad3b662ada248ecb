// SPDX-License-Identifier: Apache-2.0
// `spin eval`: its flags, and the built program on a tiny model.
#include <csignal>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/eval_options.h"
#include "cli/exit_codes.h"
#include "cli/options.h"
#include "tests/cli/program.h"
#include "tests/support/test_data.h"

namespace spin::cli {
namespace {

using spin::testing::read_file;
using spin::testing::source_path;
using spin::testing::TempDir;
using spin::testing::test_data;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

CommandLine parse(const std::vector<std::string>& args) {
  return parse_command_line(args, [](const char*) -> const char* { return nullptr; });
}

EvalOptions eval(std::vector<std::string> args) {
  args.insert(args.begin(), "eval");
  const CommandLine line = parse(args);
  EXPECT_EQ(line.command, Command::kEval) << line.text;
  return line.eval;
}

std::string refusal(std::vector<std::string> args) {
  args.insert(args.begin(), "eval");
  const CommandLine line = parse(args);
  EXPECT_EQ(line.command, Command::kNone);
  EXPECT_EQ(line.exit_code, kExitUsage) << line.text;
  return line.text;
}

TEST(EvalOptions, EachKindHasItsFlags) {
  const EvalOptions ruler = eval({"ruler",
                                  "--model",
                                  "m",
                                  "--data",
                                  "d",
                                  "--sparse",
                                  "sketch:bits=1",
                                  "--sparse",
                                  "quest",
                                  "--fast-fraction",
                                  "0.25",
                                  "--limit-per-task",
                                  "3",
                                  "--json",
                                  "j",
                                  "--block-size",
                                  "16",
                                  "--dtype",
                                  "bfloat16",
                                  "--device",
                                  "cuda:1"});
  EXPECT_EQ(ruler.kind, Evaluation::kRuler);
  EXPECT_EQ(ruler.evaluation.model, "m");
  EXPECT_EQ(ruler.ruler.data, "d");
  EXPECT_THAT(ruler.evaluation.sparse, ElementsAre("sketch:bits=1", "quest"));
  EXPECT_EQ(ruler.evaluation.fast_fraction, 0.25);
  EXPECT_EQ(ruler.ruler.limit_per_task, 3u);
  EXPECT_EQ(ruler.json, "j");
  EXPECT_EQ(ruler.evaluation.page_tokens, 16u);
  EXPECT_EQ(ruler.evaluation.dtype, DTypeChoice::kBFloat16);
  EXPECT_EQ(ruler.evaluation.device, "cuda:1");
  for (const char* kind : {"ppl", "agreement"}) {
    const EvalOptions text = eval({kind, "--model", "m", "--text", "t", "--window-tokens", "4K",
                                   "--positions", "32", "--windows", "2"});
    EXPECT_EQ(evaluation_name(text.kind), kind);
    EXPECT_EQ(text.text.text, "t");
    EXPECT_EQ(text.text.window_tokens, 4096u);
    EXPECT_EQ(text.text.positions, 32u);
    EXPECT_EQ(text.text.windows, 2u);
    EXPECT_EQ(text.evaluation.fast_fraction, 0.1);
    EXPECT_EQ(text.evaluation.device, "cpu");
  }
}

TEST(EvalOptions, WhatIsWrongIsRefusedByName) {
  EXPECT_THAT(refusal({}), HasSubstr("expected ruler, ppl or agreement, found none"));
  EXPECT_THAT(refusal({"speed"}), HasSubstr("found 'speed'"));
  EXPECT_THAT(refusal({"ruler", "--model", "m"}), HasSubstr("--data"));
  EXPECT_THAT(refusal({"ppl", "--text", "t"}), HasSubstr("--model"));
  EXPECT_THAT(refusal({"ruler", "--model", "m", "--data", "d", "--fast-fraction", "1.5"}),
              HasSubstr("--fast-fraction"));
  EXPECT_THAT(refusal({"ppl", "--model", "m", "--text", "t", "--device", "gpu"}),
              HasSubstr("--device: expected cpu, cuda or cuda:N"));
  EXPECT_THAT(refusal({"ppl", "--model", "m", "--text", "t", "--limit-per-task", "3"}),
              HasSubstr("--limit-per-task"));
  EXPECT_THAT(refusal({"ruler", "--model", "m", "--data", "d", "--nothing"}),
              HasSubstr("spin eval ruler --help"));
}

TEST(EvalOptions, TheDocumentationHoldsTheHelpTexts) {
  const std::string page = read_file(source_path("docs/cli.md"));
  EXPECT_THAT(page, HasSubstr(parse({"eval", "--help"}).text));
  for (const char* kind : {"ruler", "ppl", "agreement"}) {
    const std::string help = parse({"eval", kind, "--help"}).text;
    EXPECT_THAT(page, HasSubstr(help)) << kind;
    for (size_t at = 0, end; (end = help.find('\n', at)) != std::string::npos; at = end + 1) {
      EXPECT_LE(end - at, 80u) << help.substr(at, end - at);
    }
  }
}

std::string tiny() { return test_data("tiny/llama-linear").string(); }

std::string prompts(int count) {
  std::string text;
  for (int i = 0; text.size() < 90; ++i) text += std::to_string(i * i % 97) + " ";
  std::string lines;
  for (int i = 0; i < count; ++i) {
    const nlohmann::json line = {
        {"task", i % 2 == 0 ? "even" : "odd"}, {"prompt", text}, {"answer_ids", {5, 6}}};
    lines += line.dump() + "\n";
  }
  return lines;
}

constexpr const char* kSetting = "sketch:budget=16,local=16,offset=32";

TEST(EvalProcess, RulerPrintsATableAndWritesJson) {
  const TempDir dir;
  const std::string data = dir.write("p.jsonl", prompts(3)).string();
  const std::string file = (dir.path() / "out.json").string();
  const Finished run = run_program(
      {{"eval", "ruler", "--model", tiny(), "--data", data, "--sparse", kSetting, "--json", file}});
  ASSERT_EQ(run.code, kExitOk) << run.error;
  EXPECT_EQ(run.error, "");  // no progress bar without a terminal
  EXPECT_THAT(run.output, HasSubstr("even"));
  EXPECT_THAT(run.output, HasSubstr("sketch:budget=16,sinks=4,local=16,bits=2"));
  EXPECT_THAT(run.output, HasSubstr("3 prompts"));
  const nlohmann::json report = nlohmann::json::parse(read_file(file));
  EXPECT_EQ(report.at("prompts"), 3);
  ASSERT_EQ(report.at("settings").size(), 2u);
  EXPECT_EQ(report.at("settings")[0].at("sparse"), "dense");
  const nlohmann::json& sketch = report.at("settings")[1];
  EXPECT_EQ(sketch.at("per_task").at("even")[1], 2);
  EXPECT_EQ(sketch.at("per_task").at("odd")[1], 1);
  EXPECT_EQ(sketch.at("use").at("steps"), 6);
  EXPECT_GT(sketch.at("use").at("misses"), 0);
  EXPECT_LE(sketch.at("use").at("attended_tokens_per_head"), 8 + 16 + 24);
}

TEST(EvalProcess, TextKindsPrintTheirColumns) {
  const TempDir dir;
  std::string text;
  for (int i = 0; i < 100; ++i) text += std::to_string(i * i) + " ";
  const std::string file = dir.write("text", text).string();
  const std::vector<std::string> rest = {"--model",         tiny(),  "--text",      file,
                                         "--window-tokens", "100",   "--positions", "10",
                                         "--sparse",        kSetting};
  const auto run = [&](const char* kind) {
    std::vector<std::string> args = {"eval", kind};
    args.insert(args.end(), rest.begin(), rest.end());
    return run_program({args});
  };
  const Finished perplexity = run("ppl");
  ASSERT_EQ(perplexity.code, kExitOk) << perplexity.error;
  EXPECT_THAT(perplexity.output, HasSubstr("perplexity"));
  EXPECT_THAT(perplexity.output, HasSubstr("1.0000"));  // dense of dense
  const Finished agreement = run("agreement");
  ASSERT_EQ(agreement.code, kExitOk) << agreement.error;
  EXPECT_THAT(agreement.output, HasSubstr("top-1"));
  EXPECT_THAT(agreement.output, HasSubstr("10 positions"));
}

TEST(EvalProcess, ErrorsNameTheFlagAndFail) {
  const TempDir dir;
  const std::string data = dir.write("p.jsonl", "{}\n").string();
  const auto run = [&](std::vector<std::string> more) {
    std::vector<std::string> args = {"eval", "ruler", "--model", tiny(), "--data", data};
    args.insert(args.end(), more.begin(), more.end());
    return run_program({args});
  };
  const Finished bad_line = run({});
  EXPECT_EQ(bad_line.code, kExitFailure);
  EXPECT_THAT(bad_line.error, HasSubstr("line 1"));
  EXPECT_THAT(bad_line.error, HasSubstr("--data"));
  const Finished bad_setting = run({"--sparse", "nothing"});
  EXPECT_EQ(bad_setting.code, kExitFailure);
  EXPECT_THAT(bad_setting.error, HasSubstr("--sparse"));
  dir.write("p.jsonl", prompts(1));
  const Finished unwritable = run({"--json", (dir.path() / "no" / "file").string()});
  EXPECT_EQ(unwritable.code, kExitFailure);
  EXPECT_THAT(unwritable.error, HasSubstr("--json"));
  EXPECT_EQ(unwritable.output, "");  // said before hours of work
}

TEST(EvalProcess, EarlierResultsStayWhereAnEvaluationFails) {
  const TempDir dir;
  const std::string data = dir.write("p.jsonl", "{}\n").string();
  const std::string file = dir.write("out.json", "earlier").string();
  const Finished failed =
      run_program({{"eval", "ruler", "--model", tiny(), "--data", data, "--json", file}});
  EXPECT_EQ(failed.code, kExitFailure);
  EXPECT_EQ(read_file(file), "earlier");
}

TEST(EvalProcess, AnInterruptEndsIt) {
  const TempDir dir;
  const std::string data = dir.write("p.jsonl", prompts(2000)).string();
  Program program({{"eval", "ruler", "--model", tiny(), "--data", data, "--sparse", kSetting},
                   {},
                   {},
                   {},
                   true});
  ASSERT_TRUE(program.wait_for_error("Prompt"));
  program.signal(SIGINT);
  EXPECT_EQ(program.wait(), kExitSignalBase + SIGINT);
}

}  // namespace
}  // namespace spin::cli
