// SPDX-License-Identifier: Apache-2.0
// The command line as a whole: which value wins, what is refused and with which words.
#include "cli/options.h"

#include <algorithm>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/exit_codes.h"
#include "spin/version.h"
#include "tests/support/test_data.h"

namespace spin::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;
using ::testing::StartsWith;

using Variables = std::map<std::string, std::string>;

CommandLine parse(const std::vector<std::string>& args, const Variables& variables = {}) {
  return parse_command_line(args, [&variables](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  });
}

GenerateOptions generate(std::vector<std::string> args, const Variables& variables = {}) {
  args.insert(args.begin(), {"generate", "--model", "m"});
  const CommandLine line = parse(args, variables);
  EXPECT_EQ(line.command, Command::kGenerate) << line.text;
  return line.generate;
}

ServeOptions serve(std::vector<std::string> args, const Variables& variables = {}) {
  args.insert(args.begin(), {"serve", "m"});
  const CommandLine line = parse(args, variables);
  EXPECT_EQ(line.command, Command::kServe) << line.text;
  return line.serve;
}

// The text of a usage error.
std::string refusal(const std::vector<std::string>& args, const Variables& variables = {}) {
  const CommandLine line = parse(args, variables);
  EXPECT_EQ(line.command, Command::kNone);
  EXPECT_EQ(line.exit_code, kExitUsage) << line.text;
  return line.text;
}

TEST(Options, NoCommandIsAUsageError) { EXPECT_THAT(refusal({}), HasSubstr("no command")); }

TEST(Options, AnUnknownCommandIsNamed) {
  EXPECT_THAT(refusal({"serv"}), HasSubstr("found 'serv'"));
}

TEST(Options, VersionIsOneLine) {
  const CommandLine line = parse({"--version"});
  EXPECT_EQ(line.command, Command::kNone);
  EXPECT_EQ(line.exit_code, kExitOk);
  EXPECT_EQ(line.text, std::string("spin ") + kVersion + "\n");
}

TEST(Options, HelpOfTheProgramNamesEveryCommand) {
  for (const char* spelling : {"--help", "-h"}) {
    const CommandLine line = parse({spelling});
    EXPECT_EQ(line.exit_code, kExitOk);
    for (const char* command : {"generate", "serve", "eval", "inspect", "plan"}) {
      EXPECT_THAT(line.text, HasSubstr(std::string("  ") + command + " "));
    }
  }
}

TEST(Options, HelpOfACommandNeedsNoModelAndNoValidEnvironment) {
  for (const char* command : {"generate", "serve", "inspect", "plan"}) {
    const CommandLine line = parse({command, "--help"}, {{"SPIN_PORT", "tcp://10.0.0.1:80"}});
    EXPECT_EQ(line.exit_code, kExitOk) << line.text;
    EXPECT_THAT(line.text, StartsWith(std::string("Usage: spin ") + command));
  }
}

TEST(Options, TheModelIsRequired) {
  EXPECT_THAT(refusal({"generate", "--prompt", "x"}), HasSubstr("--model is required"));
  EXPECT_THAT(refusal({"serve"}), HasSubstr("SPIN_MODEL"));
  EXPECT_EQ(parse({"serve"}, {{"SPIN_MODEL", "from-env"}}).serve.engine.model, "from-env");
}

TEST(Options, ServeAndInspectTakeTheModelAsPositionalToo) {
  EXPECT_EQ(parse({"serve", "a"}).serve.engine.model, "a");
  EXPECT_EQ(parse({"serve", "--model", "a"}).serve.engine.model, "a");
  EXPECT_EQ(parse({"inspect", "generate"}).inspect.model, "generate");
  EXPECT_THAT(refusal({"inspect", "a", "b"}), HasSubstr("b"));
  EXPECT_THAT(refusal({"generate", "--model", "a", "stray"}), HasSubstr("stray"));
}

TEST(Options, TheFirstArgumentThatBelongsToNoFlagIsNamed) {
  EXPECT_THAT(refusal({"generate", "--modle", "m", "--prompt", "x"}),
              StartsWith("spin generate: unknown option '--modle'\n"));
  EXPECT_THAT(refusal({"serve", "m", "--pipeline-parallel-size=2", "--port", "1"}),
              StartsWith("spin serve: unknown option '--pipeline-parallel-size'\n"));
  EXPECT_THAT(refusal({"generate", "-m", "m"}), HasSubstr("unknown option '-m'\n"));
  EXPECT_THAT(refusal({"inspect", "a", "b", "c"}), HasSubstr("unexpected argument 'b'\n"));
  EXPECT_THAT(refusal({"inspect", "a", "--", "--json"}),
              HasSubstr("unexpected argument '--json'\n"));
  EXPECT_EQ(parse({"inspect", "--", "--json"}).inspect.model, "--json");
  EXPECT_EQ(parse({"inspect", "a", "--"}).inspect.model, "a");
  EXPECT_THAT(refusal({"inspect", "a", "b\x1B[2J"}), Not(HasSubstr("\x1B")));
}

TEST(Options, AFlagWithoutItsValueIsNamed) {
  for (const char* flag : {"--model", "--prompt", "--stop"}) {
    EXPECT_THAT(refusal({"generate", flag}), StartsWith(std::string("spin generate: ") + flag +
                                                        ": expected a value, found none\n"));
  }
  EXPECT_THAT(refusal({"serve", "--model"}), HasSubstr("--model: expected a value, found none\n"));
}

TEST(Options, TheFlagGoesBeforeTheEnvironmentAndThatBeforeTheDefault) {
  EXPECT_EQ(serve({}).port, 8000u);
  EXPECT_EQ(serve({}, {{"SPIN_PORT", "9"}}).port, 9u);
  EXPECT_EQ(serve({"--port", "10"}, {{"SPIN_PORT", "9"}}).port, 10u);
  // A variable that the flag overrides is not even read.
  EXPECT_EQ(serve({"--port", "10"}, {{"SPIN_PORT", "nonsense"}}).port, 10u);
  EXPECT_FALSE(serve({}, {{"SPIN_ENABLE_CHUNKED_PREFILL", "0"}}).engine.enable_chunked_prefill);
  EXPECT_TRUE(serve({"--enable-chunked-prefill"}, {{"SPIN_ENABLE_CHUNKED_PREFILL", "0"}})
                  .engine.enable_chunked_prefill);
  EXPECT_EQ(generate({}, {{"SPIN_DTYPE", "float32"}}).engine.dtype, DTypeChoice::kFloat32);
}

TEST(Options, AnEmptyVariableIsUnset) { EXPECT_EQ(serve({}, {{"SPIN_PORT", ""}}).port, 8000u); }

TEST(Options, ABadVariableIsNamed) {
  const std::string text = refusal({"serve", "m"}, {{"SPIN_PORT", "tcp://10.0.0.1:80"}});
  EXPECT_THAT(text, HasSubstr("environment variable SPIN_PORT"));
  EXPECT_THAT(text, HasSubstr("from 0 to 65535"));
  EXPECT_THAT(text, HasSubstr("'tcp://10.0.0.1:80'"));
}

TEST(Options, VariablesOfOtherCommandsAreNotRead) {
  EXPECT_EQ(generate({}, {{"SPIN_PORT", "x"}}).engine.model, "m");
}

TEST(Options, TheLastOfTwoValuesWins) {
  EXPECT_EQ(serve({"--port", "1", "--port", "2"}).port, 2u);
  EXPECT_TRUE(generate({"--no-chat", "--chat"}).chat);
  EXPECT_FALSE(generate({"--chat", "--no-chat"}).chat);
}

TEST(Options, IntegersTakeUnits) {
  EXPECT_EQ(serve({"--max-model-len", "32k"}).engine.max_model_len, 32000u);
  EXPECT_EQ(serve({"--max-model-len", "32K"}).engine.max_model_len, 32768u);
  EXPECT_EQ(serve({"--kv-cache-memory-bytes=2G"}).engine.kv_cache_memory_bytes, 2ull << 30);
}

TEST(Options, FastMemoryIsAnotherNameOfTheKvCache) {
  EXPECT_EQ(serve({"--fast-memory=2G"}).engine.kv_cache_memory_bytes, 2ull << 30);
  EXPECT_EQ(serve({"--kv-cache-memory-bytes=1", "--fast-memory", "2"}).engine.kv_cache_memory_bytes,
            2u);
  EXPECT_THAT(serve_flags(*std::make_unique<ServeOptions>()).help(),
              HasSubstr("--fast-memory, --kv-cache-memory-bytes BYTES"));
}

TEST(Options, TheDeviceReachesTheEngine) {
  EXPECT_EQ(generate({}).engine.device, "cpu");
  EXPECT_EQ(generate({"--device", "cuda"}).engine.device, "cuda");
  EXPECT_EQ(serve({"--device=cuda:3"}).engine.device, "cuda:3");
  EXPECT_EQ(serve({"--device=cpu"}, {{"SPIN_DEVICE", "cuda"}}).engine.device, "cpu");
  EXPECT_EQ(serve({}).engine.gpu_memory_utilization, std::nullopt);
  EXPECT_EQ(serve({"--gpu-memory-utilization=0.5"}).engine.gpu_memory_utilization, 0.5);
}

TEST(Options, SparseAttentionReachesTheEngine) {
  EXPECT_TRUE(generate({}).engine.sparse.empty());
  EXPECT_EQ(generate({}).engine.kv_buffer_ratio, std::nullopt);
  const EngineOptions engine = generate({"--sparse", "quest:budget=64,block=16", "--sparse=dense",
                                         "--kv-offloading-size=3G", "--kv-buffer-ratio=1.5"})
                                   .engine;
  EXPECT_THAT(engine.sparse, ElementsAre("quest:budget=64,block=16", "dense"));
  EXPECT_EQ(engine.host_memory_bytes, 3ull << 30);
  EXPECT_EQ(engine.kv_buffer_ratio, 1.5);
  EXPECT_EQ(engine.selection_trace, "");
  EXPECT_EQ(generate({"--selection-trace=t"}).engine.selection_trace, "t");
  EXPECT_EQ(serve({"--kv-buffer-ratio=0"}).engine.kv_buffer_ratio, 0.0);
  EXPECT_EQ(serve({"--kv-buffer-ratio=2", "--kv-buffer-ratio=auto"}).engine.kv_buffer_ratio,
            std::nullopt);
}

struct BadValue {
  const char* command;
  const char* flag;
  const char* value;
  const char* range;
};

void PrintTo(const BadValue& bad, std::ostream* out) {
  *out << bad.command << " --" << bad.flag << "=" << bad.value;
}

class BadValues : public ::testing::TestWithParam<BadValue> {};

TEST_P(BadValues, AreUsageErrorsThatNameFlagAndRange) {
  const BadValue& bad = GetParam();
  const std::string flag = std::string("--") + bad.flag;
  const std::string text = refusal({bad.command, "--model", "m", flag, bad.value});
  EXPECT_THAT(text, HasSubstr(flag));
  EXPECT_THAT(text, HasSubstr(bad.range));
  // The environment variable of the flag is refused alike.
  const std::string variable = environment_name(bad.flag);
  const std::string other = refusal({bad.command, "--model", "m"}, {{variable, bad.value}});
  EXPECT_THAT(other, HasSubstr(variable));
  EXPECT_THAT(other, HasSubstr(bad.range));
}

INSTANTIATE_TEST_SUITE_P(
    Table,
    BadValues,
    ::testing::Values(BadValue{"serve", "port", "65536", "from 0 to 65535"},
                      BadValue{"serve", "port", "-1", "from 0 to 65535"},
                      BadValue{"serve", "port", "80 ", "from 0 to 65535"},
                      BadValue{"serve", "port", "18446744073709551617", "from 0 to 65535"},
                      BadValue{"serve", "device", "gpu", "cpu, cuda or cuda:N"},
                      BadValue{"serve", "device", "cuda:", "N from 0 to 1023"},
                      BadValue{"serve", "device", "cuda:1024", "N from 0 to 1023"},
                      BadValue{"generate", "device", "cuda:-1", "cpu, cuda or cuda:N"},
                      BadValue{"generate", "device", "CPU", "cpu, cuda or cuda:N"},
                      BadValue{"serve", "threads", "1025", "from 0 to 1024"},
                      BadValue{"serve", "threads", "two", "from 0 to 1024"},
                      BadValue{"serve", "max-model-len", "1.5k", "from 0 to 134217728"},
                      BadValue{"serve", "max-num-seqs", "0", "from 1 to 4096"},
                      BadValue{"serve", "max-num-batched-tokens", "0", "from 1 to 1048576"},
                      BadValue{"serve", "kv-cache-memory-bytes", "9999999T", "from 0 to"},
                      BadValue{"serve", "gpu-memory-utilization", "0", "above 0 and up to 1"},
                      BadValue{"generate", "gpu-memory-utilization", "90", "above 0 and up to 1"},
                      BadValue{"serve", "kv-offloading-size", "some", "from 0 to"},
                      BadValue{"serve", "kv-buffer-ratio", "1001", "auto, or a number from 0"},
                      BadValue{"serve", "kv-buffer-ratio", "-0.5", "auto, or a number from 0"},
                      BadValue{"generate", "kv-buffer-ratio", "much", "auto, or a number from 0"},
                      BadValue{"serve", "block-size", "9", "one of 8, 16, 32, 64"},
                      BadValue{"serve", "dtype", "fp16", "one of auto, float32, bfloat16"},
                      BadValue{"serve", "chat-format", "jinja", "one of auto, none, chatml"},
                      BadValue{"serve", "generation-config", "x", "one of auto, vllm"},
                      BadValue{"serve", "log-level", "trace", "one of debug, info, warning, error"},
                      BadValue{"serve", "drain-seconds", "-1", "from 0 to 86400"},
                      BadValue{"serve", "stall-seconds", "nan", "from 0.1 to 86400"},
                      BadValue{"serve", "max-body-bytes", "10", "from 1024 to"},
                      BadValue{"generate", "temperature", "2.1", "from 0 to 2"},
                      BadValue{"generate", "temperature", "hot", "from 0 to 2"},
                      BadValue{"generate", "temperature", "inf", "from 0 to 2"},
                      BadValue{"generate", "top-p", "0", "above 0 and up to 1"},
                      BadValue{"generate", "top-k", "-2", "from -1 to"},
                      BadValue{"generate", "top-k", "--1", "from -1 to"},
                      BadValue{"generate", "min-p", "1.01", "from 0 to 1"},
                      BadValue{"generate", "repetition-penalty", "0", "from 0.01 to 100"},
                      BadValue{"generate", "presence-penalty", "-2.5", "from -2 to 2"},
                      BadValue{"generate", "frequency-penalty", "3", "from -2 to 2"},
                      BadValue{"generate", "seed", "-1", "an integer"},
                      BadValue{"generate", "max-tokens", "0", "from 1 to"},
                      BadValue{"generate", "stop-token-ids", "4294967296", "below 2^32"},
                      BadValue{"generate", "logit-bias", "5", "ID:BIAS"},
                      BadValue{"generate", "logit-bias", "5:101", "ID:BIAS"},
                      BadValue{"generate", "logit-bias", "x:1", "ID:BIAS"},
                      BadValue{"generate", "stats", "xml", "one of text, json, none"},
                      BadValue{"inspect", "context", "x", "from 0 to"}),
    [](const auto& test) {
      std::string name = std::string(test.param.flag) + "_" + std::to_string(test.index);
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

TEST(Options, ASwitchTakesOnlyYesOrNo) {
  EXPECT_THAT(refusal({"serve", "m"}, {{"SPIN_ENABLE_CHUNKED_PREFILL", "perhaps"}}),
              HasSubstr("1, 0, true or false"));
  EXPECT_THAT(refusal({"serve", "m", "--enable-chunked-prefill=perhaps"}),
              HasSubstr("enable-chunked-prefill"));
  EXPECT_FALSE(serve({"--enable-chunked-prefill=false"}).engine.enable_chunked_prefill);
}

TEST(Options, AnUnknownFlagIsNamed) {
  EXPECT_THAT(refusal({"serve", "m", "--tensor-parallel-size", "2"}),
              HasSubstr("--tensor-parallel-size"));
}

TEST(Options, AFlagWithoutItsValueIsRefused) {
  EXPECT_THAT(refusal({"serve", "m", "--port"}), HasSubstr("--port"));
}

TEST(Options, TextsArriveByteForByte) {
  // Spellings that CLI11 would take for vectors, separators or flags.
  for (const char* text : {"[a,b]", "{}", "%%", "--prompt", "-1", " x ", "a\nb", "\xff"}) {
    EXPECT_EQ(generate({"--prompt", text}).prompt, text);
    EXPECT_THAT(generate({"--stop", text}).sampling.stop, ElementsAre(text));
  }
  EXPECT_EQ(generate({"--prompt", ""}).prompt, "");
}

TEST(Options, RepeatableFlagsKeepTheirOrder) {
  const GenerateOptions options =
      generate({"--stop", "b", "--stop", "a", "--stop-token-ids", "7", "--stop-token-ids", "5",
                "--logit-bias", "3:-1.5", "--logit-bias", "4:100"});
  EXPECT_THAT(options.sampling.stop, ElementsAre("b", "a"));
  EXPECT_THAT(options.sampling.stop_token_ids, ElementsAre(7u, 5u));
  EXPECT_THAT(options.sampling.logit_bias, ElementsAre(Pair(3u, -1.5f), Pair(4u, 100.0f)));
}

TEST(Options, TooManyStopTextsAreRefused) {
  std::vector<std::string> args = {"generate", "--model", "m"};
  for (int i = 0; i < 16; ++i) args.insert(args.end(), {"--stop", "x"});
  EXPECT_EQ(parse(args).command, Command::kGenerate);
  args.insert(args.end(), {"--stop", "x"});
  EXPECT_THAT(refusal(args), HasSubstr("at most 16 values"));
}

TEST(Options, ApiKeysComeFromFlagsOrTheEnvironment) {
  EXPECT_TRUE(serve({}).api_keys.empty());
  EXPECT_THAT(serve({"--api-key", "a", "--api-key", "b"}).api_keys, ElementsAre("a", "b"));
  EXPECT_THAT(serve({}, {{"SPIN_API_KEY", "c"}}).api_keys, ElementsAre("c"));
}

// Whoever sets an empty key believes that the server is closed; it must not start open.
TEST(Options, AnEmptyApiKeyIsRefused) {
  EXPECT_THAT(refusal({"serve", "m", "--api-key", ""}), HasSubstr("--api-key"));
  EXPECT_THAT(refusal({"serve", "m"}, {{"SPIN_API_KEY", ""}}), HasSubstr("SPIN_API_KEY"));
}

// No client could ever send such a key or name, so the server would shut everybody out; a key read
// from a file often ends in a newline.
TEST(Options, TextsThatNoHeaderCanCarryAreRefused) {
  for (const char* text : {"key\n", "a b", "a\r\nb", "\xC3\xA9", "\x1b", "\x7f"}) {
    for (const char* flag : {"--api-key", "--allowed-host"}) {
      EXPECT_THAT(refusal({"serve", "m", flag, text}), HasSubstr("without spaces"));
    }
    EXPECT_THAT(refusal({"serve", "m"}, {{"SPIN_API_KEY", text}}), HasSubstr("SPIN_API_KEY"));
  }
  EXPECT_THAT(serve({"--api-key", "!~sk-Aa0_+/="}).api_keys, ElementsAre("!~sk-Aa0_+/="));
}

TEST(Options, NoRefusalRepeatsControlCharacters) {
  for (const std::vector<std::string>& args :
       std::vector<std::vector<std::string>>{{"serve", "--no\x1b[31m\n"},
                                             {"serve", "m", "ex\x1b[31mtra"},
                                             {"serve", "m", "--port", "\x1b[31m"},
                                             {"serve", "m", "--log-level", "\x1b[31m"},
                                             {"com\x1b[31mmand"}}) {
    EXPECT_EQ(refusal(args).find('\x1b'), std::string::npos) << args.back();
  }
}

TEST(Options, RulesBetweenFlags) {
  EXPECT_THAT(refusal({"generate", "--model", "m", "--prompt", "a", "--prompt-file", "b"}),
              HasSubstr("exclude each other"));
  EXPECT_THAT(refusal({"generate", "--model", "m", "--system", "a"}), HasSubstr("--chat"));
  EXPECT_THAT(refusal({"generate", "--model", "m", "--no-enable-thinking"}), HasSubstr("--chat"));
  EXPECT_THAT(refusal({"generate", "--model", "m", "--max-tokens", "3", "--min-tokens", "4"}),
              HasSubstr("--min-tokens must be at most --max-tokens (3), found 4"));
}

TEST(Options, GenerateRunsOneRequestAtATime) {
  const GenerateOptions options = generate({});
  EXPECT_EQ(options.engine.max_num_seqs, 1u);
}

TEST(Options, ThinkingIsLeftToTheFormatUnlessGiven) {
  EXPECT_FALSE(generate({"--chat"}).enable_thinking.has_value());
  EXPECT_EQ(generate({"--chat", "--enable-thinking"}).enable_thinking, true);
  EXPECT_EQ(generate({"--chat", "--no-enable-thinking"}).enable_thinking, false);
}

TEST(Options, OverridesTouchOnlyWhatWasGiven) {
  SamplingParams defaults;
  defaults.temperature = 0.6f;
  defaults.top_k = 20;
  defaults.top_p = 0.95f;
  SamplingOverrides overrides = generate({"--temperature", "0", "--max-tokens", "5"}).sampling;
  const SamplingParams result = apply_overrides(defaults, overrides);
  EXPECT_EQ(result.temperature, 0.0f);
  EXPECT_EQ(result.top_k, 20);
  EXPECT_EQ(result.top_p, 0.95f);
  EXPECT_EQ(result.max_tokens, 5u);
  EXPECT_TRUE(result.skip_special_tokens);
}

TEST(Options, EverySamplingFlagReachesTheRequest) {
  const SamplingOverrides overrides =
      generate({"--temperature=0.5", "--top-k=4", "--top-p=0.5", "--min-p=0.25",
                "--repetition-penalty=1.5", "--presence-penalty=-0.5", "--frequency-penalty=0.5",
                "--seed=9", "--stop=x", "--stop-token-ids=2", "--logit-bias=1:2", "--max-tokens=10",
                "--min-tokens=3", "--include-stop-str-in-output", "--ignore-eos",
                "--no-skip-special-tokens"})
          .sampling;
  const SamplingParams p = apply_overrides({}, overrides);
  EXPECT_EQ(p.temperature, 0.5f);
  EXPECT_EQ(p.top_k, 4);
  EXPECT_EQ(p.top_p, 0.5f);
  EXPECT_EQ(p.min_p, 0.25f);
  EXPECT_EQ(p.repetition_penalty, 1.5f);
  EXPECT_EQ(p.presence_penalty, -0.5f);
  EXPECT_EQ(p.frequency_penalty, 0.5f);
  EXPECT_EQ(p.seed, 9u);
  EXPECT_THAT(p.stop, ElementsAre("x"));
  EXPECT_THAT(p.stop_token_ids, ElementsAre(2u));
  EXPECT_THAT(p.logit_bias, ElementsAre(Pair(1u, 2.0f)));
  EXPECT_EQ(p.max_tokens, 10u);
  EXPECT_EQ(p.min_tokens, 3u);
  EXPECT_TRUE(p.include_stop_str_in_output);
  EXPECT_TRUE(p.ignore_eos);
  EXPECT_FALSE(p.skip_special_tokens);
}

TEST(Options, EveryEngineFlagReachesTheEngine) {
  const EngineOptions engine =
      serve({"--tokenizer=t", "--served-model-name=n", "--dtype=bfloat16", "--chat-format=none",
             "--generation-config=vllm", "--threads=3", "--max-model-len=100", "--max-num-seqs=5",
             "--max-num-batched-tokens=64", "--no-enable-chunked-prefill",
             "--kv-cache-memory-bytes=1M", "--block-size=32", "--max-queued-requests=7",
             "--seed=11"})
          .engine;
  EXPECT_EQ(engine.model, "m");
  EXPECT_EQ(engine.tokenizer, "t");
  EXPECT_EQ(engine.served_model_name, "n");
  EXPECT_EQ(engine.dtype, DTypeChoice::kBFloat16);
  EXPECT_EQ(engine.chat_format, "none");
  EXPECT_EQ(engine.generation_config, "vllm");
  EXPECT_EQ(engine.threads, 3u);
  EXPECT_EQ(engine.max_model_len, 100u);
  EXPECT_EQ(engine.max_num_seqs, 5u);
  EXPECT_EQ(engine.max_num_batched_tokens, 64u);
  EXPECT_FALSE(engine.enable_chunked_prefill);
  EXPECT_EQ(engine.kv_cache_memory_bytes, 1u << 20);
  EXPECT_EQ(engine.page_tokens, 32u);
  EXPECT_EQ(engine.max_queued_requests, 7u);
  EXPECT_EQ(engine.seed, 11u);
}

TEST(Options, HelpNamesEveryFlagItsVariableAndItsDefault) {
  GenerateOptions g;
  ServeOptions s;
  InspectOptions i;
  for (const FlagTable& table : {generate_flags(g), serve_flags(s), inspect_flags(i)}) {
    const std::string help = table.help();
    std::set<std::string> seen;
    for (const std::string& name : table.flag_names()) {
      EXPECT_TRUE(seen.insert(name).second) << name << " is declared twice";
      EXPECT_THAT(help, HasSubstr(name));
      if (name.rfind("--no-", 0) != 0) {
        EXPECT_THAT(help, HasSubstr(fmt::format("[{}]", environment_name(name.substr(2)))));
      }
    }
    const auto count = [&help](const std::string& word) {
      size_t found = 0;
      for (size_t at = help.find(word); at != std::string::npos; at = help.find(word, at + 1)) {
        ++found;
      }
      return found;
    };
    EXPECT_EQ(count("Default:"), count("[SPIN_"));
    EXPECT_EQ(help.find("Default: ."), std::string::npos) << help;
    for (size_t at = 0, end; (end = help.find('\n', at)) != std::string::npos; at = end + 1) {
      EXPECT_LE(end - at, 80u) << help.substr(at, end - at);
    }
  }
}

// docs/cli.md holds the help texts as they are printed; tools/make_cli_docs.sh writes them there.
TEST(Options, TheDocumentationHoldsTheHelpTexts) {
  const std::string page = spin::testing::read_file(spin::testing::source_path("docs/cli.md"));
  EXPECT_THAT(page, HasSubstr(program_help()));
  for (const char* command : {"generate", "serve", "inspect"}) {
    EXPECT_THAT(page, HasSubstr(parse({command, "--help"}).text)) << command;
  }
}

}  // namespace
}  // namespace spin::cli
