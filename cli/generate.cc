// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <csignal>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/progress_bar.h"
#include "cli/prompt_source.h"
#include "cli/statistics.h"
#include "cli/terminal.h"
#include "cli/turn.h"
#include "spin/engine.h"

namespace spin::cli {
namespace {

constexpr uint64_t kMaxLineBytes = 1u << 20;

class Generation {
 public:
  Generation(const GenerateOptions& options, SignalWatcher& signals)
      : options_(options),
        signals_(signals),
        progress_(STDERR_FILENO, is_terminal(STDERR_FILENO)),
        text_terminal_(is_terminal(STDOUT_FILENO)) {}

  int run() {
    const bool no_prompt = !options_.prompt && options_.prompt_file.empty();
    if (no_prompt && options_.chat && is_terminal(STDIN_FILENO)) {
      const int code = load();
      return code == kExitOk ? converse() : code;
    }
    if (no_prompt && is_terminal(STDIN_FILENO)) {
      print_notice("Type the prompt; Ctrl-D ends it.\n");
    }
    // Before the model is loaded: a mistake in it should not cost that time.
    Result<std::string> prompt = read_prompt(options_, signals_.event_fd());
    if (!prompt.ok()) return failed(prompt.status());
    const int code = load();
    return code == kExitOk ? answer(*prompt) : code;
  }

 private:
  // Prints the error; the exit code.
  int failed(const Status& status) {
    progress_.clear();
    if (status.code() == StatusCode::kCancelled && signals_.pending() != 0) {
      return kExitSignalBase + signals_.pending();
    }
    GenerateOptions unused;
    print_error(describe(status, generate_flags(unused)));
    return kExitFailure;
  }

  int load() {
    const auto begin = std::chrono::steady_clock::now();
    Result<std::unique_ptr<Engine>> engine =
        create_engine(options_.engine, [this](double fraction, std::string_view part) {
          progress_.update(fmt::format("Loading {}", part), fraction);
          return signals_.pending() == 0;
        });
    if (!engine.ok()) return failed(engine.status());
    progress_.clear();
    engine_ = std::move(engine).value();
    load_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const ModelInfo& info = engine_->model_info();
    if (options_.stats != StatisticsFormat::kNone) print_notice(sparse_text(info));
    spdlog::info("model {}: {}, {} on {}, {} threads, chat format {}, at most {} tokens", info.name,
                 info.architecture, info.dtype, info.device, info.threads, info.chat_format,
                 info.max_model_len);
    return kExitOk;
  }

  Result<std::vector<TokenId>> encode(const std::string& prompt) const {
    if (!options_.chat) return engine_->tokenize(prompt, options_.add_special_tokens);
    std::vector<ChatMessage> messages = opening();
    messages.push_back({"user", prompt});
    return encode_chat(messages);
  }

  std::vector<ChatMessage> opening() const {
    std::vector<ChatMessage> messages;
    if (options_.system) messages.push_back({"system", *options_.system});
    return messages;
  }

  Result<std::vector<TokenId>> encode_chat(const std::vector<ChatMessage>& messages) const {
    ChatOptions chat;
    chat.enable_thinking = options_.enable_thinking;
    return engine_->encode_chat(messages, chat);
  }

  Result<Turn> generate(std::vector<TokenId> prompt) {
    spdlog::debug("prompt: {} tokens", prompt.size());
    GenerateRequest request;
    request.prompt = std::move(prompt);
    request.sampling = apply_overrides(engine_->default_sampling(), options_.sampling);
    request.stream = options_.stream;
    return run_turn(*engine_, signals_, progress_, STDOUT_FILENO, std::move(request));
  }

  Statistics statistics(const Turn& turn) {
    Statistics s = make_statistics(engine_->model_info(), turn.result, turn.reason);
    const MemorySampler::Peak peak = memory_.peak();
    s.load_s = load_s_;
    s.peak_anonymous_bytes = peak.anonymous_bytes;
    s.peak_resident_bytes = peak.resident_bytes;
    EngineStats engine = engine_->stats();
    s.tiers = std::move(engine.kv_tiers);
    s.sparse = engine.sparse;
    return s;
  }

  // The exit code of a turn; says on standard error what went wrong.
  int conclude(const Turn& turn) {
    if (turn.signal != 0) return kExitSignalBase + turn.signal;
    if (!turn.output.ok()) return failed(turn.output.with_context("standard output"));
    if (!turn.result.status.ok()) return failed(turn.result.status);
    return kExitOk;
  }

  // On a terminal the shell's prompt, or the statistics, should begin a line of their own.
  void end_line(const Turn& turn) {
    if (!text_terminal_ || turn.text.empty() || turn.text.back() == '\n') return;
    [[maybe_unused]] const Status ignored = write_all(STDOUT_FILENO, "\n");
  }

  int answer(const std::string& prompt) {
    Result<std::vector<TokenId>> ids = encode(prompt);
    if (!ids.ok()) return failed(ids.status());
    Result<Turn> turn = generate(std::move(ids).value());
    if (!turn.ok()) return failed(turn.status());
    end_line(*turn);
    if (options_.stats != StatisticsFormat::kNone) {
      const Statistics s = statistics(*turn);
      const bool json = options_.stats == StatisticsFormat::kJson;
      print_notice(json ? statistics_json(s) : fmt::format("\n{}", statistics_text(s)));
    }
    return conclude(*turn);
  }

  int converse() {
    print_notice(
        fmt::format("{}: write a message. Ctrl-C stops an answer; /clear forgets the conversation; "
                    "/exit or Ctrl-D ends.\n",
                    engine_->model_info().name));
    LineReader reader(STDIN_FILENO);
    std::vector<ChatMessage> messages = opening();
    while (true) {
      print_notice("\n> ");
      Result<LineReader::Line> line = reader.next(kMaxLineBytes, signals_.event_fd());
      if (!line.ok() || line->end_of_input) print_notice("\n");
      if (!line.ok()) return failed(line.status());
      if (line->end_of_input || line->text == "/exit") return kExitOk;
      if (line->text.empty()) continue;
      if (line->text == "/clear") {
        messages = opening();
        continue;
      }
      const int code = exchange(std::move(line->text), messages);
      if (code != kExitOk) return code;
    }
  }

  // One message and its answer. Refusals are told and leave the conversation as it was.
  int exchange(std::string text, std::vector<ChatMessage>& messages) {
    const size_t before = messages.size();
    messages.push_back({"user", std::move(text)});
    const Status utf8 = check_utf8(messages.back().content, "a message");
    Result<std::vector<TokenId>> ids = utf8.ok() ? encode_chat(messages) : utf8;
    Result<Turn> turn = ids.ok() ? generate(std::move(ids).value()) : ids.status();
    if (!turn.ok()) {
      messages.resize(before);
      failed(turn.status());
      return kExitOk;
    }
    end_line(*turn);
    messages.push_back({"assistant", turn->text});
    if (options_.stats == StatisticsFormat::kText) {
      print_notice(fmt::format("[{}]\n", statistics_line(statistics(*turn))));
    } else if (options_.stats == StatisticsFormat::kJson) {
      print_notice(statistics_json(statistics(*turn)));
    }
    if (turn->signal == SIGINT) {  // stops the answer, not the conversation
      signals_.reset();
      return kExitOk;
    }
    return conclude(*turn);
  }

  const GenerateOptions& options_;
  SignalWatcher& signals_;
  ProgressBar progress_;
  const bool text_terminal_;
  MemorySampler memory_;
  std::unique_ptr<Engine> engine_;
  double load_s_ = 0;
};

}  // namespace

int run_generate(const GenerateOptions& options, SignalWatcher& signals) {
  return Generation(options, signals).run();
}

}  // namespace spin::cli
