// SPDX-License-Identifier: Apache-2.0
#include "cli/options.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "base/parse_number.h"
#include "base/quote.h"
#include "cli/device_flags.h"
#include "cli/exit_codes.h"
#include "server/limits.h"
#include "spin/sampling_limits.h"
#include "spin/version.h"

namespace spin::cli {
namespace {

namespace limits = sampling_limits;

constexpr std::string_view kModelDefault = "from the model's generation_config.json, else ";
constexpr size_t kMaxPathBytes = 4095;

std::string model_default(std::string_view neutral) {
  return fmt::format("{}{}", kModelDefault, neutral);
}

void add_model(FlagTable& table, EngineOptions& options) {
  table.add_text(
      {"model", "PATH",
       "The checkpoint: a directory with config.json and safetensors files, a .gguf file, or a "
       ".safetensors file beside its config.json"},
      options.model, {1, kMaxPathBytes});
  table.make_required();
}

void add_engine_flags(FlagTable& table, EngineOptions& options) {
  table.add_text(
      {"tokenizer", "PATH", "Directory or file to take the tokenizer from", "the model's own"},
      options.tokenizer, {1, kMaxPathBytes});
  table.add_choice({"dtype", "TYPE",
                    "Type of the weights in memory and of their products; auto takes bfloat16 "
                    "where the processor multiplies it in hardware, else float32"},
                   {"auto", "float32", "bfloat16"}, "auto",
                   [&options](size_t index) { options.dtype = static_cast<DTypeChoice>(index); });
  static const std::vector<std::string> kChatFormats = {"auto",    "none",  "chatml", "smollm2",
                                                        "qwen2.5", "qwen3", "llama3", "llama3.1"};
  table.add_choice({"chat-format", "NAME",
                    "How a conversation becomes tokens; auto goes by the checkpoint's template"},
                   kChatFormats, options.chat_format,
                   [&options](size_t index) { options.chat_format = kChatFormats[index]; });
  static const std::vector<std::string> kGenerationConfigs = {"auto", "vllm"};
  table.add_choice(
      {"generation-config", "SOURCE",
       "Sampling defaults: auto reads the model's generation_config.json, vllm takes neutral "
       "values (temperature 1, everything else off)"},
      kGenerationConfigs, options.generation_config,
      [&options](size_t index) { options.generation_config = kGenerationConfigs[index]; });
  add_device_flags(table, options.device, options.threads);
  table.add_count({"max-model-len", "TOKENS",
                   "Longest prompt and output together; 0 takes the model's own limit, or what "
                   "the KV cache holds if that is less"},
                  options.max_model_len, {0, 1ull << 27});
  table.add_count({"max-num-batched-tokens", "TOKENS",
                   "Tokens in one step. More: faster prefill, more memory, longer pauses of "
                   "running requests"},
                  options.max_num_batched_tokens, {1, 1u << 20});
  table.add_count({"kv-cache-memory-bytes", "BYTES",
                   "Size of the KV cache in fast memory; 0 takes what the admitted requests can "
                   "need, at most 60 % of the memory left after the weights"},
                  options.kv_cache_memory_bytes, {0, 1ull << 50});
  table.also_named("fast-memory");
  table.add_real(
      {"gpu-memory-utilization", "X",
       "Share of the GPU's memory that weights, workspace and KV cache may take together; "
       "with --device cuda only",
       fmt::to_string(kDefaultGpuMemoryUtilization)},
      options.gpu_memory_utilization, {0, 1, true});
  table.add_choice({"block-size", "TOKENS", "Tokens of one page of the KV cache"},
                   {"8", "16", "32", "64"}, fmt::to_string(options.page_tokens),
                   [&options](size_t index) { options.page_tokens = 8u << index; });
}

// "auto" or a multiple of what a step needs.
std::string parse_buffer_ratio(std::string_view text, EngineOptions& options) {
  constexpr double kMost = 1000;
  options.kv_buffer_ratio = text == "auto" ? std::nullopt : base::parse_double(text);
  const bool good = text == "auto" || (options.kv_buffer_ratio && *options.kv_buffer_ratio >= 0 &&
                                       *options.kv_buffer_ratio <= kMost);
  return good ? "" : fmt::format("auto, or a number from 0 to {}", kMost);
}

void add_sparse_flags(FlagTable& table, EngineOptions& options) {
  table.group("Sparse attention");
  table.add_texts({"sparse", "NAME[:K=V,...]",
                   "Sparse attention that requests may use, with its options; the first one given "
                   "is what requests get that name none. Names and options are in "
                   "docs/algorithms",
                   "dense, every request attends to its whole context"},
                  options.sparse, {1, 1024, 16});
  table.add_count({"kv-offloading-size", "BYTES",
                   "Host memory for the pages of sparse requests, beside the KV cache in fast "
                   "memory; 0 keeps every request in fast memory"},
                  options.host_memory_bytes, {0, 1ull << 50});
  table.add_one({"kv-buffer-ratio", "X",
                 "Pages of a sparse request kept in fast memory beyond those that a step needs, "
                 "as a multiple of these; auto shares out the room that there is",
                 "auto"},
                "auto, or a number from 0 to 1000",
                [&options](std::string_view text) { return parse_buffer_ratio(text, options); });
  table.add_text({"selection-trace", "PATH",
                  "File to which the pages are recorded that sparse requests select in every step; "
                  "spin_locality_bench reads it",
                  "none"},
                 options.selection_trace, {1, kMaxPathBytes});
}

void add_log_level(FlagTable& table, LogLevel& level) {
  static const std::vector<std::string> kLevels = {"debug", "info", "warning", "error"};
  table.add_choice({"log-level", "LEVEL", "Least severe messages to write to standard error"},
                   kLevels, kLevels[static_cast<size_t>(level)],
                   [&level](size_t index) { level = static_cast<LogLevel>(index); });
}

void add_prompt_flags(FlagTable& table, GenerateOptions& options) {
  table.group("Prompt");
  table.add_text({"prompt", "TEXT", "The prompt, UTF-8", "read from standard input"},
                 options.prompt, {0, 128u << 20});
  table.add_text({"prompt-file", "PATH",
                  "File with the prompt, taken byte for byte; - is standard input", "none"},
                 options.prompt_file, {1, kMaxPathBytes});
  table.add_switch({"chat", "",
                    "The prompt is a user's message and is put into the model's chat format. "
                    "Without a prompt on a terminal: an interactive conversation"},
                   options.chat);
  table.add_text({"system", "TEXT", "System message in front of the conversation; with --chat",
                  "the chat format's own"},
                 options.system, {0, 128u << 20});
  table.add_switch(
      {"enable-thinking", "", "Whether a Qwen3 model thinks before it answers; with --chat",
       "the chat format's own"},
      options.enable_thinking);
  table.add_switch({"add-special-tokens", "",
                    "Puts the model's begin-of-sequence token, if it has one, in front of a "
                    "prompt that is not a chat"},
                   options.add_special_tokens);
}

// "ID" or "ID:BIAS".
std::optional<TokenId> parse_token_id(std::string_view text) {
  const std::optional<uint64_t> id = base::parse_decimal(text);
  if (!id || *id > std::numeric_limits<TokenId>::max()) return std::nullopt;
  return static_cast<TokenId>(*id);
}

std::string parse_logit_bias(std::string_view text, SamplingOverrides& sampling) {
  const std::string expected =
      fmt::format("ID:BIAS with BIAS from {} to {}, at most {} times", -limits::kMaxLogitBias,
                  limits::kMaxLogitBias, limits::kMaxLogitBiasEntries);
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return expected;
  const std::optional<TokenId> id = parse_token_id(text.substr(0, colon));
  const std::optional<double> bias = base::parse_double(text.substr(colon + 1));
  if (!id || !bias || !(std::abs(*bias) <= limits::kMaxLogitBias) ||
      sampling.logit_bias.size() == limits::kMaxLogitBiasEntries) {
    return expected;
  }
  sampling.logit_bias.emplace_back(*id, static_cast<float>(*bias));
  return "";
}

std::string parse_stop_token(std::string_view text, SamplingOverrides& sampling) {
  const std::optional<TokenId> id = parse_token_id(text);
  if (!id || sampling.stop_token_ids.size() == limits::kMaxStopTokenIds) {
    return fmt::format("a token id below 2^32, at most {} times", limits::kMaxStopTokenIds);
  }
  sampling.stop_token_ids.push_back(*id);
  return "";
}

void add_choosing_flags(FlagTable& table, SamplingOverrides& sampling) {
  table.group("Sampling");
  const std::string one = model_default("1");
  const std::string off = model_default("0");
  table.add_real({"temperature", "X", "Below 1e-5: always the most likely token", one},
                 sampling.temperature, {0, limits::kMaxTemperature});
  table.add_signed({"top-k", "N", "Only the N most likely tokens; 0 or -1: all", off},
                   sampling.top_k, -1, std::numeric_limits<int32_t>::max());
  table.add_real(
      {"top-p", "X", "Only the most likely tokens that together reach this probability", one},
      sampling.top_p, {0, 1, true});
  table.add_real(
      {"min-p", "X", "Only tokens at least this likely, relative to the most likely one", off},
      sampling.min_p, {0, 1});
  table.add_real({"repetition-penalty", "X",
                  "Above 1: tokens of prompt and output are less likely to come again", one},
                 sampling.repetition_penalty,
                 {limits::kMinRepetitionPenalty, limits::kMaxRepetitionPenalty});
  table.add_real({"presence-penalty", "X", "Taken off the logit of every token of the output", "0"},
                 sampling.presence_penalty,
                 {-limits::kMaxPresencePenalty, limits::kMaxPresencePenalty});
  table.add_real({"frequency-penalty", "X", "As above, times how often the token has come", "0"},
                 sampling.frequency_penalty,
                 {-limits::kMaxPresencePenalty, limits::kMaxPresencePenalty});
  table.add_count({"seed", "N", "The same seed gives the same tokens", "a new one every time"},
                  sampling.seed, {});
  table.add_parsed({"logit-bias", "ID:BIAS", "Added to the logit of token ID", "none"},
                   "BIAS from -100 to 100",
                   [&sampling](std::string_view text) { return parse_logit_bias(text, sampling); });
}

void add_ending_flags(FlagTable& table, SamplingOverrides& sampling) {
  table.group("Output");
  table.add_count({"max-tokens", "N", "Most tokens to generate",
                   "until the model ends or its length is reached"},
                  sampling.max_tokens, {1, 1ull << 27});
  table.add_count({"min-tokens", "N", "No end token and no stop before so many tokens", "0"},
                  sampling.min_tokens, {0, 1ull << 27});
  table.add_texts({"stop", "TEXT", "Text that ends the output and is not printed", "none"},
                  sampling.stop, {1, limits::kMaxStopStringBytes, limits::kMaxStopStrings});
  table.add_parsed({"stop-token-ids", "ID", "Token that ends the output", "none"},
                   fmt::format("a token id, at most {} times", limits::kMaxStopTokenIds),
                   [&sampling](std::string_view text) { return parse_stop_token(text, sampling); });
  table.add_switch({"include-stop-str-in-output", "", "Prints the stop text too"},
                   sampling.include_stop_str_in_output);
  table.add_switch({"ignore-eos", "", "The model's own end tokens do not end the output"},
                   sampling.ignore_eos);
  table.add_switch({"skip-special-tokens", "", "Special tokens yield no text"},
                   sampling.skip_special_tokens);
}

CommandLine usage_error(std::string_view command, const Status& status) {
  CommandLine line;
  line.exit_code = kExitUsage;
  const std::string name = command.empty() ? "spin" : fmt::format("spin {}", command);
  line.text = fmt::format("{0}: {1}\nTry '{0} --help'.\n", name, status.message());
  return line;
}

CommandLine text_only(std::string text) {
  CommandLine line;
  line.exit_code = kExitOk;
  line.text = std::move(text);
  return line;
}

Status check(const GenerateOptions& options) {
  const auto refuse = [](std::string message) {
    return Status(StatusCode::kInvalidArgument, std::move(message));
  };
  if (options.prompt && !options.prompt_file.empty()) {
    return refuse("--prompt and --prompt-file exclude each other");
  }
  if (!options.chat && options.system) return refuse("--system needs --chat");
  if (!options.chat && options.enable_thinking) return refuse("--enable-thinking needs --chat");
  const SamplingOverrides& sampling = options.sampling;
  if (sampling.min_tokens && sampling.max_tokens && *sampling.min_tokens > *sampling.max_tokens) {
    return refuse(fmt::format("--min-tokens must be at most --max-tokens ({}), found {}",
                              *sampling.max_tokens, *sampling.min_tokens));
  }
  return ok_status();
}

}  // namespace

SamplingParams apply_overrides(SamplingParams defaults, const SamplingOverrides& overrides) {
  const auto take = [](auto& field, const auto& value) {
    if (value) field = static_cast<std::decay_t<decltype(field)>>(*value);
  };
  take(defaults.temperature, overrides.temperature);
  take(defaults.top_k, overrides.top_k);
  take(defaults.top_p, overrides.top_p);
  take(defaults.min_p, overrides.min_p);
  take(defaults.repetition_penalty, overrides.repetition_penalty);
  take(defaults.presence_penalty, overrides.presence_penalty);
  take(defaults.frequency_penalty, overrides.frequency_penalty);
  take(defaults.min_tokens, overrides.min_tokens);
  if (overrides.seed) defaults.seed = overrides.seed;
  if (overrides.max_tokens) defaults.max_tokens = overrides.max_tokens;
  if (!overrides.stop.empty()) defaults.stop = overrides.stop;
  if (!overrides.stop_token_ids.empty()) defaults.stop_token_ids = overrides.stop_token_ids;
  if (!overrides.logit_bias.empty()) defaults.logit_bias = overrides.logit_bias;
  defaults.include_stop_str_in_output = overrides.include_stop_str_in_output;
  defaults.ignore_eos = overrides.ignore_eos;
  defaults.skip_special_tokens = overrides.skip_special_tokens;
  return defaults;
}

FlagTable generate_flags(GenerateOptions& options) {
  FlagTable table("generate", "--model PATH [OPTIONS]",
                  "Answers one prompt, or holds a conversation, on the terminal. The text goes to "
                  "standard output; progress, statistics and errors go to standard error.");
  table.group("Model");
  add_model(table, options.engine);
  add_engine_flags(table, options.engine);
  add_sparse_flags(table, options.engine);
  add_prompt_flags(table, options);
  add_choosing_flags(table, options.sampling);
  add_ending_flags(table, options.sampling);
  table.add_switch({"stream", "", "Prints the text as it comes instead of at the end"},
                   options.stream);
  table.add_choice({"stats", "FORMAT", "Statistics on standard error at the end; json is one line"},
                   {"text", "json", "none"}, "text",
                   [&options](size_t i) { options.stats = static_cast<StatisticsFormat>(i); });
  add_log_level(table, options.log_level);
  return table;
}

FlagTable serve_flags(ServeOptions& options) {
  FlagTable table("serve", "MODEL [OPTIONS]",
                  "Serves a model on an OpenAI-compatible HTTP API. SIGTERM or Ctrl-C ends it once "
                  "the running requests are done; a second one ends it at once.");
  table.group("Model");
  add_model(table, options.engine);
  table.also_positional("MODEL");
  table.add_text({"served-model-name", "NAME", "Name of the model in the API",
                  "the last component of the model's path"},
                 options.engine.served_model_name, {1, 256});
  add_engine_flags(table, options.engine);
  table.add_count({"seed", "N", "Seed of requests that bring none", "a new one every time"},
                  options.engine.seed, {});
  add_sparse_flags(table, options.engine);
  table.group("Scheduling");
  table.add_count({"max-num-seqs", "N",
                   "Requests in the running set (the choices of a request count singly). More: "
                   "higher throughput, longer steps"},
                  options.engine.max_num_seqs, {1, 4096});
  table.add_count({"max-queued-requests", "N",
                   "Requests waiting beyond the running set; more are refused with status 429"},
                  options.engine.max_queued_requests, {0, 1u << 20});
  table.add_switch({"enable-chunked-prefill", "",
                    "Processes a long prompt in pieces between the steps of running requests; "
                    "off: a prompt has to fit --max-num-batched-tokens"},
                   options.engine.enable_chunked_prefill);
  table.group("Server");
  table.add_text(
      {"host", "ADDRESS", "Address to listen on; 0.0.0.0 listens on all IPv4 interfaces"},
      options.host, {1, 255});
  table.add_count({"port", "N", "Port to listen on; 0 takes a free one"}, options.port, {0, 65535});
  table.add_texts(
      {"api-key", "KEY", "Key that clients must send as a bearer token (all routes but /health)",
       "no key is asked for"},
      options.api_keys, {1, server::kMaxApiKeyBytes, 64, true});
  table.refuse_empty_environment();
  table.add_texts({"allowed-host", "NAME",
                   "Further name that clients may use in the Host field while the server listens "
                   "on a loopback address",
                   "localhost and loopback addresses only"},
                  options.allowed_hosts, {1, 255, 64, true});
  table.add_count({"max-body-bytes", "BYTES", "Largest request body; more is status 413"},
                  options.max_body_bytes, {1024, 1ull << 30});
  table.add_count({"max-connections", "N", "Connections open at the same time"},
                  options.max_connections, {1, 65536});
  table.add_real({"stall-seconds", "S",
                  "Seconds without a finished step while requests wait after which /health "
                  "answers 503"},
                 options.stall_seconds, {0.1, 86400});
  table.add_real(
      {"drain-seconds", "S", "Seconds that running requests may go on after SIGTERM or Ctrl-C"},
      options.drain_seconds, {0, 86400});
  table.add_switch({"access-log", "", "Logs one line per request, without prompts, at level info"},
                   options.access_log);
  add_log_level(table, options.log_level);
  return table;
}

FlagTable inspect_flags(InspectOptions& options) {
  FlagTable table("inspect", "MODEL [OPTIONS]",
                  "Prints what a checkpoint holds and what memory it needs, without loading its "
                  "weights.");
  table.add_text({"model", "PATH", "The checkpoint: a directory, a .gguf or a .safetensors file"},
                 options.model, {1, kMaxPathBytes});
  table.make_required();
  table.also_positional("MODEL");
  table.add_text(
      {"tokenizer", "PATH", "Directory or file to take the tokenizer from", "the model's own"},
      options.tokenizer, {1, kMaxPathBytes});
  table.add_count(
      {"context", "TOKENS", "Context for which memory is computed; 0 takes the model's own limit"},
      options.context, {0, 1ull << 27});
  table.add_choice(
      {"dtype", "TYPE", "Type of the weights in memory; auto shows float32 and bfloat16"},
      {"auto", "float32", "bfloat16"}, "auto",
      [&options](size_t index) { options.dtype = static_cast<DTypeChoice>(index); });
  table.add_choice({"block-size", "TOKENS", "Tokens of one page of the KV cache"},
                   {"8", "16", "32", "64"}, fmt::to_string(options.page_tokens),
                   [&options](size_t index) { options.page_tokens = 8u << index; });
  table.add_switch({"tensors", "", "Lists every tensor"}, options.tensors);
  table.add_switch({"json", "", "Prints one JSON object instead of text"}, options.json);
  add_log_level(table, options.log_level);
  return table;
}

std::string program_help() {
  return "Usage: spin COMMAND [OPTIONS]\n"
         "\n"
         "Spin answers prompts with language models of the Llama, Qwen2 and Qwen3 family.\n"
         "\n"
         "Commands:\n"
         "  generate   answers a prompt on the terminal\n"
         "  serve      serves a model on an OpenAI-compatible HTTP API\n"
         "  eval       compares sparse attention with dense attention\n"
         "  inspect    prints what a checkpoint holds and what memory it needs\n"
         "  plan       prints what a context and a batch take in each memory tier\n"
         "\n"
         "Options:\n"
         "  -h, --help   prints this text; 'spin COMMAND --help' that of a command\n"
         "  --version    prints the version\n"
         "\n"
         "Every option of a command is also an environment variable: SPIN_ and the\n"
         "option's name in capitals with '_' for '-', e.g. SPIN_MAX_MODEL_LEN. The\n"
         "command line goes before the environment.\n";
}

namespace {

// `args` without "eval".
CommandLine parse_eval(std::span<const std::string> args, const Environment& environment) {
  const std::string kind = args.empty() ? "" : args.front();
  if (kind == "--help" || kind == "-h") return text_only(eval_help());
  const std::optional<Evaluation> known = evaluation_named(kind);
  if (!known) {
    const std::string found = args.empty() ? "none" : base::quote_text(kind);
    return usage_error("eval",
                       Status(StatusCode::kInvalidArgument,
                              fmt::format("expected ruler, ppl or agreement, found {}", found)));
  }
  CommandLine line;
  line.command = Command::kEval;
  line.eval.kind = *known;
  FlagTable table = eval_flags(line.eval);
  const Status status = table.parse(args.subspan(1), environment);
  if (status.code() == StatusCode::kCancelled) return text_only(table.help());
  if (!status.ok()) return usage_error(fmt::format("eval {}", kind), status);
  return line;
}

}  // namespace

CommandLine parse_command_line(std::span<const std::string> args, const Environment& environment) {
  if (args.empty()) return usage_error("", Status(StatusCode::kInvalidArgument, "no command"));
  const std::string& name = args.front();
  if (name == "--help" || name == "-h") return text_only(program_help());
  if (name == "--version") return text_only(fmt::format("spin {}\n", kVersion));

  const std::span<const std::string> rest = args.subspan(1);
  CommandLine line;
  std::optional<FlagTable> table;  // fills `line`
  if (name == "generate") {
    line.command = Command::kGenerate;
    table = generate_flags(line.generate);
  } else if (name == "serve") {
    line.command = Command::kServe;
    table = serve_flags(line.serve);
  } else if (name == "eval") {
    return parse_eval(rest, environment);
  } else if (name == "inspect") {
    line.command = Command::kInspect;
    table = inspect_flags(line.inspect);
  } else if (name == "plan") {
    line.command = Command::kPlan;
    table = plan_flags(line.plan);
  } else {
    return usage_error(
        "",
        Status(StatusCode::kInvalidArgument,
               fmt::format("expected a command (generate, serve, eval, inspect or plan), found {}",
                           base::quote_text(name))));
  }
  Status status = table->parse(rest, environment);
  if (status.code() == StatusCode::kCancelled) return text_only(table->help());
  if (status.ok() && line.command == Command::kGenerate) status = check(line.generate);
  if (!status.ok()) return usage_error(name, status);
  return line;
}

}  // namespace spin::cli
