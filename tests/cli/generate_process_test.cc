// SPDX-License-Identifier: Apache-2.0
// `spin generate` and `spin inspect` as users run them: the built program on small checkpoints.
#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "cli/exit_codes.h"
#include "tests/cli/program.h"
#include "tests/support/test_data.h"

namespace spin::cli {
namespace {

using spin::testing::read_file;
using spin::testing::source_path;
using spin::testing::TempDir;
using spin::testing::test_data;
using ::testing::HasSubstr;
using ::testing::Not;

std::string tiny() { return test_data("tiny/qwen3-default/qwen3-default.gguf").string(); }
std::string needle() { return source_path("models/needle-29m").string(); }

// Flags that make a run of the tiny model short and repeatable.
std::vector<std::string> tiny_args(std::vector<std::string> more) {
  std::vector<std::string> args = {
      "generate",      "--model", tiny(),         "--dtype",      "float32",
      "--temperature", "0",       "--ignore-eos", "--max-tokens", "12"};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

nlohmann::json last_line(const std::string& text) {
  const size_t end = text.find_last_not_of('\n');
  const size_t begin = text.rfind('\n', end);
  return nlohmann::json::parse(text.substr(begin == std::string::npos ? 0 : begin + 1), nullptr,
                               false);
}

TEST(GenerateProcess, GreedyTextIsTheSameFromEverySourceOfThePromptAndFormatOfTheModel) {
  const TempDir dir;
  const std::string file = dir.write("prompt", "Hello there").string();
  const Finished flag = run_program({tiny_args({"--prompt", "Hello there"})});
  ASSERT_EQ(flag.code, kExitOk) << flag.error;
  EXPECT_NE(flag.output, "");
  EXPECT_EQ(run_program({tiny_args({"--prompt-file", file})}).output, flag.output);
  EXPECT_EQ(run_program({tiny_args({})}, "Hello there").output, flag.output);
  EXPECT_EQ(run_program({tiny_args({"--prompt-file", "-"})}, "Hello there").output, flag.output);
  EXPECT_EQ(run_program({tiny_args({"--prompt", "Hello there", "--no-stream"})}).output,
            flag.output);
  EXPECT_EQ(run_program({tiny_args({"--prompt", "Hello there", "--model",
                                    test_data("tiny/qwen3-default/model.safetensors").string()})})
                .output,
            flag.output);
}

TEST(GenerateProcess, StatisticsGoToStandardErrorAsOneJsonLine) {
  const Finished done = run_program({tiny_args({"--prompt", "Hello", "--stats", "json"})});
  ASSERT_EQ(done.code, kExitOk) << done.error;
  const nlohmann::json stats = last_line(done.error);
  ASSERT_TRUE(stats.is_object()) << done.error;
  EXPECT_GT(stats["prompt_tokens"], 0);
  EXPECT_EQ(stats["completion_tokens"], 12);
  EXPECT_EQ(stats["finish_reason"], "length");
  EXPECT_EQ(stats["dtype"], "float32");
  for (const char* field :
       {"load_s", "ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s", "peak_anonymous_bytes",
        "peak_resident_bytes", "weight_bytes", "kv_used_bytes"}) {
    EXPECT_GT(stats[field], 0) << field;
  }
  EXPECT_LE(stats["kv_used_bytes"], stats["kv_reserved_bytes"]);
  EXPECT_THAT(done.output, Not(HasSubstr("prompt_tokens")));
}

TEST(GenerateProcess, StatisticsCanBeTextOrNothing) {
  const Finished text = run_program({tiny_args({"--prompt", "Hello"})});
  EXPECT_THAT(text.error, HasSubstr("tokens/s, ended by length"));
  // No progress bar either: standard error is a pipe.
  EXPECT_EQ(run_program({tiny_args({"--prompt", "Hello", "--stats", "none"})}).error, "");
}

TEST(GenerateProcess, LogLevelInfoNamesTheModel) {
  const Finished done =
      run_program({tiny_args({"--prompt", "Hello", "--stats", "none", "--log-level", "info"})});
  EXPECT_THAT(done.error, HasSubstr("qwen3"));
}

TEST(GenerateProcess, AStopTextEndsTheOutput) {
  const Finished whole = run_program({tiny_args({"--prompt", "Hello there"})});
  ASSERT_GT(whole.output.size(), 3u);
  // Somewhere inside; a whole character, as the output is valid UTF-8.
  size_t at = whole.output.size() / 2;
  while (at > 0 && (static_cast<unsigned char>(whole.output[at]) & 0xC0) == 0x80) --at;
  size_t end = at + 1;
  while (end < whole.output.size() &&
         (static_cast<unsigned char>(whole.output[end]) & 0xC0) == 0x80)
    ++end;
  const std::string stop = whole.output.substr(at, end - at);
  const std::string before = whole.output.substr(0, whole.output.find(stop));
  const Finished cut =
      run_program({tiny_args({"--prompt", "Hello there", "--stop", stop, "--stats", "json"})});
  EXPECT_EQ(cut.output, before);
  EXPECT_EQ(last_line(cut.error)["finish_reason"], "stop");
  EXPECT_EQ(run_program({tiny_args({"--prompt", "Hello there", "--stop", stop,
                                    "--include-stop-str-in-output"})})
                .output,
            before + stop);
}

TEST(GenerateProcess, ASeedMakesSamplingRepeatable) {
  const auto sample = [](const char* seed) {
    return run_program({tiny_args({"--prompt", "Hello", "--temperature", "2", "--seed", seed})})
        .output;
  };
  EXPECT_EQ(sample("1"), sample("1"));
  EXPECT_NE(sample("1"), sample("2"));
}

TEST(GenerateProcess, AChatIsAnswered) {
  const Finished done =
      run_program({tiny_args({"--chat", "--chat-format", "chatml", "--system", "Be brief.",
                              "--prompt", "Hello", "--stats", "json"})});
  ASSERT_EQ(done.code, kExitOk) << done.error;
  const Finished plain = run_program({tiny_args({"--prompt", "Hello", "--stats", "json"})});
  EXPECT_GT(last_line(done.error)["prompt_tokens"], last_line(plain.error)["prompt_tokens"]);
}

TEST(GenerateProcess, AModelWithoutChatFormatNamesTheFlag) {
  const Finished done =
      run_program({tiny_args({"--chat", "--prompt", "Hello", "--chat-format", "none"})});
  EXPECT_EQ(done.code, kExitFailure);
  EXPECT_THAT(done.error, HasSubstr("--chat-format"));
  EXPECT_EQ(done.output, "");
}

TEST(GenerateProcess, TheRetrievalModelFindsTheNumber) {
  const auto vectors = nlohmann::json::parse(read_file(test_data("needle/vectors.json")));
  const auto& item = vectors["items"][0];
  const TempDir dir;
  const std::string file = dir.write("prompt", item["prompt"].get<std::string>()).string();
  const Finished done =
      run_program({{"generate", "--model", needle(), "--prompt-file", file, "--temperature", "0",
                    "--max-tokens", "16", "--max-model-len", "1K"}});
  EXPECT_EQ(done.code, kExitOk) << done.error;
  EXPECT_EQ(done.output + "<|im_end|>", item["answer"].get<std::string>());
}

// A run that would go on for long.
Program::Setup long_run() {
  return {{"generate", "--model", needle(), "--prompt", "The grass is green.", "--ignore-eos",
           "--max-tokens", "8000", "--max-model-len", "8100", "--stats", "json"}};
}

TEST(GenerateProcess, CtrlCStopsAndStillPrintsStatistics) {
  for (const int signal : {SIGINT, SIGTERM}) {
    Program program(long_run());
    ASSERT_TRUE(program.wait_for_any_output());
    program.signal(signal);
    EXPECT_EQ(program.wait(), kExitSignalBase + signal);
    const nlohmann::json stats = last_line(program.error());
    ASSERT_TRUE(stats.is_object()) << program.error();
    EXPECT_EQ(stats["finish_reason"], "abort");
    EXPECT_GT(stats["completion_tokens"], 0);
    EXPECT_LT(stats["completion_tokens"], 8000);
  }
}

TEST(GenerateProcess, CtrlCWhileThePromptIsTypedEnds) {
  Program::Setup setup{tiny_args({})};
  setup.terminal = true;
  Program program(setup);
  ASSERT_TRUE(program.wait_for_error("Type the prompt"));
  program.write_input("Hello\n");  // no end of input
  program.signal(SIGINT);
  EXPECT_EQ(program.wait(), 130);
  EXPECT_EQ(program.output(), "");
}

TEST(GenerateProcess, AClosedReaderEndsTheRun) {
  Program program(long_run());
  ASSERT_TRUE(program.wait_for_any_output());
  program.close_output();
  EXPECT_EQ(program.wait(), kExitFailure);
  EXPECT_THAT(program.error(), HasSubstr("standard output: the reader has closed the pipe"));
}

TEST(GenerateProcess, AFullDiskIsAnError) {
  Program::Setup setup{tiny_args({"--prompt", "Hello"})};
  setup.stdout_path = "/dev/full";
  const Finished done = run_program(setup);
  EXPECT_EQ(done.code, kExitFailure);
  EXPECT_THAT(done.error, HasSubstr("standard output: no space left"));
}

// Without placeholders the program's own descriptors get the free numbers: it would wait for a
// prompt from one of them, or write its text into a file or a socket.
TEST(GenerateProcess, ClosedStandardStreamsAreNotMistakenForOtherFiles) {
  const auto run = [](std::vector<std::string> more, std::vector<int> closed) {
    Program::Setup setup{tiny_args(std::move(more))};
    setup.closed = std::move(closed);
    return run_program(setup);
  };
  const Finished usual = run({"--prompt", "Hello"}, {});
  ASSERT_EQ(usual.code, kExitOk) << usual.error;
  const Finished no_input = run({}, {STDIN_FILENO});
  EXPECT_EQ(no_input.code, kExitFailure);
  EXPECT_THAT(no_input.error, HasSubstr("standard input: reading failed"));
  const Finished no_output = run({"--prompt", "Hello"}, {STDOUT_FILENO});
  EXPECT_EQ(no_output.code, kExitFailure);
  EXPECT_THAT(no_output.error, HasSubstr("standard output: writing failed"));
  const Finished no_error = run({"--prompt", "Hello", "--stats", "json"}, {STDERR_FILENO});
  EXPECT_EQ(no_error.code, kExitOk);
  EXPECT_EQ(no_error.output, usual.output);
  EXPECT_EQ(run({"--prompt", "Hello"}, {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}).code,
            kExitFailure);
}

TEST(GenerateProcess, APromptThatIsNotUtf8IsRefusedBeforeTheModelIsLoaded) {
  const Finished done = run_program({{"generate", "--model", "/dev/null"}}, "ab\xff");
  EXPECT_EQ(done.code, kExitFailure);
  EXPECT_EQ(done.error, "spin: the prompt must be UTF-8; byte 2 is not (0xff)\n");
}

TEST(GenerateProcess, APromptFileThatCannotBeReadSaysWhy) {
  const Finished done = run_program({tiny_args({"--prompt-file", "no/such.txt"})});
  EXPECT_EQ(done.code, kExitFailure);
  EXPECT_THAT(done.error, HasSubstr("cannot open 'no/such.txt': No such file or directory"));
}

TEST(GenerateProcess, BytesThatAreValidButOddAreAccepted) {
  const Finished done = run_program({tiny_args({})}, std::string_view("a\0b\x1b[31m\n", 9));
  EXPECT_EQ(done.code, kExitOk) << done.error;
}

TEST(GenerateProcess, APromptThatCannotFitIsRefusedWithTheNumbers) {
  const Finished done = run_program({tiny_args({})}, std::string(4000, 'x'));
  EXPECT_EQ(done.code, kExitFailure);
  EXPECT_THAT(done.error, HasSubstr("128"));  // the model's length
}

TEST(GenerateProcess, AModelThatIsNoModelIsARunTimeError) {
  const TempDir dir;
  const std::string empty = (dir.path() / "empty").string();
  ASSERT_TRUE(std::filesystem::create_directory(empty));
  const std::string garbage = dir.write("bad.gguf", std::string(1000, '\x7f')).string();
  for (const std::string& path : {std::string("/dev/zero"), (dir.path() / "absent").string(),
                                  (dir.path() / "absent.gguf").string(), empty, garbage}) {
    for (const char* command : {"generate", "inspect"}) {
      std::vector<std::string> args = {command, "--model", path};
      if (std::string(command) == "generate") args.insert(args.end(), {"--prompt", "x"});
      const Finished done = run_program({args});
      EXPECT_EQ(done.code, kExitFailure) << command << " " << path;
      EXPECT_EQ(done.output, "");
      EXPECT_THAT(done.error, ::testing::StartsWith("spin: ")) << path;
      EXPECT_EQ(done.error.find('\n'), done.error.size() - 1) << done.error;
    }
  }
}

TEST(GenerateProcess, UsageErrorsExitWithTwo) {
  EXPECT_EQ(run_program({{}}).code, kExitUsage);
  EXPECT_EQ(run_program({{"generate"}}).code, kExitUsage);
  const Finished done = run_program({{"generate", "--model", "m", "--temperature", "9"}});
  EXPECT_EQ(done.code, kExitUsage);
  EXPECT_EQ(done.output, "");
  EXPECT_THAT(done.error, HasSubstr("--temperature"));
}

TEST(GenerateProcess, HelpAndVersionGoToStandardOutput) {
  EXPECT_THAT(run_program({{"--version"}}).output, HasSubstr("spin "));
  const Finished help = run_program({{"generate", "--help"}});
  EXPECT_EQ(help.code, kExitOk);
  EXPECT_THAT(help.output, HasSubstr("--max-tokens"));
  Program::Setup full{{"generate", "--help"}};
  full.stdout_path = "/dev/full";
  EXPECT_EQ(run_program(full).code, kExitFailure);
}

TEST(GenerateProcess, TheEnvironmentIsRead) {
  Program::Setup setup{{"generate", "--temperature", "0", "--ignore-eos", "--dtype", "float32"}};
  setup.environment = {
      {"SPIN_MODEL", tiny()}, {"SPIN_PROMPT", "Hello there"}, {"SPIN_MAX_TOKENS", "12"}};
  const Finished done = run_program(setup);
  EXPECT_EQ(done.code, kExitOk) << done.error;
  EXPECT_EQ(done.output, run_program({tiny_args({"--prompt", "Hello there"})}).output);
}

TEST(InteractiveProcess, HoldsAConversation) {
  Program::Setup setup{tiny_args({"--chat", "--chat-format", "chatml", "--max-tokens", "5"})};
  setup.terminal = true;
  Program program(setup);
  ASSERT_TRUE(program.wait_for_error("/exit"));
  ASSERT_TRUE(program.wait_for_error("> "));
  program.write_input("hi\n");
  ASSERT_TRUE(program.wait_for_error("5 tokens"));
  const std::string first = program.output();
  EXPECT_NE(first, "");
  program.write_input("/clear\n");
  program.write_input("hi\n");
  program.write_input("/exit\n");
  EXPECT_EQ(program.wait(), kExitOk);
  // The same message to a conversation that was forgotten has the same answer.
  EXPECT_EQ(program.output(), first + first);
}

TEST(InteractiveProcess, ARefusedMessageDoesNotEndTheConversation) {
  Program::Setup setup{tiny_args({"--chat", "--chat-format", "chatml", "--max-tokens", "5"})};
  setup.terminal = true;
  Program program(setup);
  ASSERT_TRUE(program.wait_for_error("> "));
  program.write_input(std::string(500, 'x') + "\n");
  ASSERT_TRUE(program.wait_for_error("spin: "));
  program.write_input("hi\n");
  ASSERT_TRUE(program.wait_for_error("5 tokens"));
  program.write_input("\x04");
  EXPECT_EQ(program.wait(), kExitOk);
}

TEST(InteractiveProcess, CtrlCStopsTheAnswerAndAtThePromptTheProgram) {
  Program::Setup setup = long_run();
  setup.args = {"generate",      "--model",         needle(),       "--chat",
                "--chat-format", "chatml",          "--ignore-eos", "--max-tokens",
                "8000",          "--max-model-len", "8100"};
  setup.terminal = true;
  Program program(setup);
  ASSERT_TRUE(program.wait_for_error("> "));
  EXPECT_THAT(program.error(), HasSubstr("Loading "));  // the progress bar
  program.write_input("hi\n");
  ASSERT_TRUE(program.wait_for_any_output());
  program.signal(SIGINT);
  ASSERT_TRUE(program.wait_for_error("tokens/s"));
  program.signal(SIGINT);
  EXPECT_EQ(program.wait(), 130);
}

TEST(InspectProcess, PrintsWhatACheckpointHolds) {
  const Finished done = run_program({{"inspect", tiny(), "--context", "100"}});
  ASSERT_EQ(done.code, kExitOk) << done.error;
  for (const char* text : {"qwen3, 2 layers, hidden 32", "8 query heads, 1 KV heads of 64", "GGUF",
                           "KV per token", "one sequence of 100 tokens", "tensors: "}) {
    EXPECT_THAT(done.output, HasSubstr(text));
  }
  EXPECT_EQ(done.error, "");
}

TEST(InspectProcess, JsonHoldsTheNumbers) {
  const Finished done =
      run_program({{"inspect", needle(), "--json", "--context", "1K", "--block-size", "16"}});
  ASSERT_EQ(done.code, kExitOk) << done.error;
  const auto report = nlohmann::json::parse(done.output, nullptr, false);
  ASSERT_TRUE(report.is_object()) << done.output;
  EXPECT_EQ(report["architecture"], "qwen3");
  EXPECT_EQ(report["layers"], 8);
  EXPECT_EQ(report["tokenizer"]["vocab_size"].is_number(), true);
  ASSERT_EQ(report["memory"].size(), 2u);
  // K and V of 8 layers, 2 KV heads of 128, four bytes each.
  EXPECT_EQ(report["memory"][0]["dtype"], "float32");
  EXPECT_EQ(report["memory"][0]["kv_bytes_per_token"], 2 * 8 * 2 * 128 * 4);
  EXPECT_EQ(report["memory"][0]["kv_bytes"], 1024ull * 2 * 8 * 2 * 128 * 4);
  EXPECT_EQ(report["memory"][1]["kv_bytes_per_token"], 2 * 8 * 2 * 128 * 2);
  uint64_t stored = 0;
  for (const auto& tensor : report["tensors"]) stored += tensor["bytes"].get<uint64_t>();
  uint64_t typed = 0;
  for (const auto& type : report["types"]) typed += type["bytes"].get<uint64_t>();
  EXPECT_EQ(stored, typed);
}

TEST(InspectProcess, TensorsCanBeLeftOut) {
  const Finished done = run_program({{"inspect", tiny(), "--no-tensors", "--dtype", "bfloat16"}});
  EXPECT_EQ(done.code, kExitOk);
  EXPECT_THAT(done.output, Not(HasSubstr("tensors: ")));
  EXPECT_THAT(done.output, Not(HasSubstr("float32")));
  EXPECT_THAT(done.output, HasSubstr("bfloat16"));
}

TEST(InspectProcess, ATokenizerThatIsMissingIsSaid) {
  const TempDir dir;
  const Finished done =
      run_program({{"inspect", tiny(), "--tokenizer", (dir.path() / "absent").string()}});
  EXPECT_EQ(done.code, kExitOk);
  EXPECT_THAT(done.error, HasSubstr("no tokenizer"));
}

}  // namespace
}  // namespace spin::cli
