// SPDX-License-Identifier: Apache-2.0
// `spin plan`: its flags, and the built program on the shape of a large model.
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/exit_codes.h"
#include "cli/options.h"
#include "tests/cli/program.h"
#include "tests/support/test_data.h"

namespace spin::cli {
namespace {

using spin::testing::test_data;
using ::testing::HasSubstr;

CommandLine parse(const std::vector<std::string>& args) {
  return parse_command_line(args, [](const char*) -> const char* { return nullptr; });
}

struct Ended {
  int exit_code = 0;
  std::string output;
  std::string error;
};

Ended run_program(const std::vector<std::string>& args) {
  Program program({.args = args});
  Ended run;
  run.exit_code = program.wait();
  run.output = program.output();
  run.error = program.error();
  return run;
}

std::string model() { return (test_data("shapes") / "qwen3-14b").string(); }

TEST(PlanOptions, FlagsFillTheQuestion) {
  const CommandLine line = parse({"plan",
                                  "m",
                                  "--context",
                                  "4096",
                                  "--batch",
                                  "3",
                                  "--sparse",
                                  "sketch:bits=1",
                                  "--dtype",
                                  "float32",
                                  "--block-size",
                                  "16",
                                  "--kv-buffer-ratio",
                                  "2.5",
                                  "--fast-memory",
                                  "7",
                                  "--host-memory",
                                  "8",
                                  "--max-num-batched-tokens",
                                  "9",
                                  "--json"});
  ASSERT_EQ(line.command, Command::kPlan) << line.text;
  const PlanQuestion& question = line.plan.question;
  EXPECT_EQ(question.model, "m");
  EXPECT_EQ(question.context_tokens, 4096u);
  EXPECT_EQ(question.batch, 3u);
  EXPECT_EQ(question.sparse, "sketch:bits=1");
  EXPECT_EQ(question.dtype, DTypeChoice::kFloat32);
  EXPECT_EQ(question.page_tokens, 16u);
  EXPECT_EQ(question.buffer_ratio, 2.5);
  EXPECT_EQ(question.fast_memory_bytes, 7u);
  EXPECT_EQ(question.host_memory_bytes, 8u);
  EXPECT_EQ(question.max_num_batched_tokens, 9u);
  EXPECT_TRUE(line.plan.json);
}

TEST(PlanOptions, RefusesWhatIsOutOfRange) {
  for (const std::vector<std::string>& bad : {std::vector<std::string>{"plan"},
                                              {"plan", "m", "--context", "0"},
                                              {"plan", "m", "--batch", "0"},
                                              {"plan", "m", "--dtype", "auto"},
                                              {"plan", "m", "--kv-buffer-ratio", "-1"}}) {
    EXPECT_EQ(parse(bad).exit_code, kExitUsage) << bad.back();
  }
}

TEST(PlanProgram, JsonAndTextTellTheSameBytes) {
  const std::vector<std::string> args = {"plan",          model(),      "--context", "131072",
                                         "--batch",       "32",         "--sparse",  "sketch",
                                         "--fast-memory", "51539607552"};
  std::vector<std::string> with_json = args;
  with_json.push_back("--json");
  const Ended json_run = run_program(with_json);
  ASSERT_EQ(json_run.exit_code, kExitOk) << json_run.error;
  const auto json = nlohmann::json::parse(json_run.output);
  const Ended text_run = run_program(args);
  ASSERT_EQ(text_run.exit_code, kExitOk) << text_run.error;
  uint64_t fast = 0;
  for (const auto& line : json["lines"]) {
    const uint64_t bytes = line["bytes"];
    EXPECT_THAT(text_run.output, HasSubstr(std::to_string(bytes))) << line["name"];
    if (line["tier"] == "fast") fast += bytes;
  }
  EXPECT_EQ(json["fast_bytes"], fast);
  EXPECT_LE(json["fast_metadata_bytes"].get<uint64_t>() * 100, json["kv_buffer_bytes"]);
  EXPECT_TRUE(json.contains("batch_by_fast_memory"));
  EXPECT_FALSE(json.contains("batch_by_host_memory"));
}

TEST(PlanProgram, NamesTheFlagAtFault) {
  const Ended run = run_program({"plan", model(), "--context", "1000000"});
  EXPECT_EQ(run.exit_code, kExitFailure);
  EXPECT_THAT(run.error, HasSubstr("131072"));
  const Ended unknown = run_program({"plan", model(), "--sparse", "nothing"});
  EXPECT_EQ(unknown.exit_code, kExitFailure);
  EXPECT_THAT(unknown.error, HasSubstr("nothing"));
}

}  // namespace
}  // namespace spin::cli
