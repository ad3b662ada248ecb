// SPDX-License-Identifier: Apache-2.0
// One turn against an engine that plays a script: what is written where, and what ends it.
#include "cli/turn.h"

#include <atomic>
#include <csignal>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include "cli/commands.h"
#include "cli/terminal.h"

namespace spin::cli {
namespace {

using ::testing::HasSubstr;

// Plays `script` on a thread of its own once a request is submitted.
class ScriptedEngine : public Engine {
 public:
  using Script = std::function<void(RequestSink& sink, std::future<void> cancelled)>;

  explicit ScriptedEngine(Script script) : script_(std::move(script)) {}
  ~ScriptedEngine() override {
    if (thread_.joinable()) thread_.join();
  }

  Result<RequestId> submit(GenerateRequest request, std::shared_ptr<RequestSink> sink) override {
    if (request.prompt.empty()) {
      return Status(StatusCode::kInvalidArgument, "prompt must not be empty", "prompt");
    }
    thread_ =
        std::thread([this, sink = std::move(sink)] { script_(*sink, cancelled_.get_future()); });
    return RequestId{1};
  }
  void cancel(RequestId) override {
    if (!cancel_seen_) cancelled_.set_value();
    cancel_seen_ = true;
  }

  const ModelInfo& model_info() const override { return info_; }
  const SamplingParams& default_sampling() const override { return sampling_; }
  Result<std::vector<TokenId>> tokenize(std::string_view, bool) const override {
    return std::vector<TokenId>{1};
  }
  Result<std::string> detokenize(std::span<const TokenId>, bool) const override {
    return std::string();
  }
  std::string token_bytes(TokenId) const override { return ""; }
  Result<std::vector<TokenId>> encode_chat(std::span<const ChatMessage>,
                                           const ChatOptions&) const override {
    return std::vector<TokenId>{1};
  }
  EngineStats stats() const override { return {}; }
  Health health(std::chrono::duration<double>) const override { return {}; }
  void begin_drain() override {}
  bool wait_drained(std::chrono::duration<double>) override { return true; }
  void stop() override {}

 private:
  Script script_;
  std::promise<void> cancelled_;
  bool cancel_seen_ = false;  // cancel() is called on the main thread only
  std::thread thread_;
  ModelInfo info_;
  SamplingParams sampling_;
};

OutputDelta delta(std::string text) {
  OutputDelta d;
  d.text = std::move(text);
  d.token_ids = {1};
  return d;
}

OutputDelta last(FinishReason reason) {
  OutputDelta d;
  d.finish_reason = reason;
  return d;
}

RequestResult ended(Status status, uint64_t tokens) {
  RequestResult result;
  result.status = std::move(status);
  result.usage = {1, tokens};
  return result;
}

class TurnTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<SignalWatcher>> watcher = SignalWatcher::start();
    ASSERT_TRUE(watcher.ok());
    signals_ = std::move(watcher).value();
    ASSERT_EQ(::pipe(pipe_), 0);
  }
  void TearDown() override {
    for (const int fd : pipe_) {
      if (fd >= 0) ::close(fd);
    }
  }

  Result<Turn> run(ScriptedEngine::Script script) {
    engine_ = std::make_unique<ScriptedEngine>(std::move(script));
    ProgressBar progress(STDERR_FILENO, false);
    GenerateRequest request;
    request.prompt = {1};
    return run_turn(*engine_, *signals_, progress, pipe_[1], std::move(request));
  }

  std::string written() {
    ::close(pipe_[1]);
    pipe_[1] = -1;
    return read_all(pipe_[0], 1u << 20, -1).value();
  }

  std::unique_ptr<SignalWatcher> signals_;
  std::unique_ptr<ScriptedEngine> engine_;
  int pipe_[2] = {-1, -1};
};

TEST_F(TurnTest, WritesTheTextAndNothingElse) {
  const Result<Turn> turn = run([](RequestSink& sink, std::future<void>) {
    sink.on_prefill_progress(1, 2);
    sink.on_delta(delta("Hel"));
    sink.on_delta(delta("lo"));
    sink.on_delta(last(FinishReason::kStop));
    sink.on_end(ended(ok_status(), 3));
  });
  ASSERT_TRUE(turn.ok());
  EXPECT_EQ(turn->text, "Hello");
  EXPECT_EQ(turn->reason, FinishReason::kStop);
  EXPECT_EQ(turn->signal, 0);
  EXPECT_EQ(turn->result.usage.completion_tokens, 3u);
  EXPECT_EQ(written(), "Hello");
}

TEST_F(TurnTest, TextArrivesWhileTheRequestRuns) {
  const Result<Turn> turn = run([this](RequestSink& sink, std::future<void>) {
    sink.on_delta(delta("first"));
    std::string seen(5, ' ');
    // Blocks until the main thread has written it.
    EXPECT_EQ(::read(pipe_[0], seen.data(), seen.size()), 5);
    EXPECT_EQ(seen, "first");
    sink.on_delta(last(FinishReason::kStop));
    sink.on_end(ended(ok_status(), 1));
  });
  EXPECT_TRUE(turn.ok());
}

TEST_F(TurnTest, ASignalCancelsAndKeepsWhatWasWritten) {
  const Result<Turn> turn = run([](RequestSink& sink, std::future<void> cancelled) {
    sink.on_delta(delta("part"));
    ::kill(::getpid(), SIGINT);
    cancelled.wait();
    sink.on_delta(last(FinishReason::kAborted));
    sink.on_end(ended(Status(StatusCode::kCancelled, "cancelled"), 1));
  });
  ASSERT_TRUE(turn.ok());
  EXPECT_EQ(turn->signal, SIGINT);
  EXPECT_EQ(turn->reason, FinishReason::kAborted);
  EXPECT_EQ(written(), "part");
}

TEST_F(TurnTest, ASignalBeforeTheRequestCancelsItToo) {
  ::kill(::getpid(), SIGTERM);
  while (signals_->pending() == 0) std::this_thread::yield();
  const Result<Turn> turn = run([](RequestSink& sink, std::future<void> cancelled) {
    cancelled.wait();
    sink.on_end(ended(Status(StatusCode::kCancelled, "cancelled"), 0));
  });
  ASSERT_TRUE(turn.ok());
  EXPECT_EQ(turn->signal, SIGTERM);
}

TEST_F(TurnTest, AClosedReaderCancels) {
  ::close(pipe_[0]);
  pipe_[0] = -1;
  const Result<Turn> turn = run([](RequestSink& sink, std::future<void> cancelled) {
    sink.on_delta(delta("lost"));
    cancelled.wait();
    sink.on_end(ended(Status(StatusCode::kCancelled, "cancelled"), 1));
  });
  ASSERT_TRUE(turn.ok());
  EXPECT_EQ(turn->output.code(), StatusCode::kIoError);
  EXPECT_EQ(turn->signal, 0);
}

TEST_F(TurnTest, ARefusalIsReturned) {
  ScriptedEngine engine([](RequestSink&, std::future<void>) {});
  ProgressBar progress(STDERR_FILENO, false);
  const Result<Turn> turn = run_turn(engine, *signals_, progress, pipe_[1], GenerateRequest{});
  EXPECT_EQ(turn.status().param(), "prompt");
}

// watcher:  pending = SIGINT . . . . . event readable, handler called
// test:                       reset()
// The event must not stay readable without a pending signal: the next prompt would end at once.
TEST(Signals, AResetInTheMiddleOfASignalForgetsAllOfIt) {
  const Result<std::unique_ptr<SignalWatcher>> watcher = SignalWatcher::start();
  ASSERT_TRUE(watcher.ok());
  std::atomic<int> handled = 0;
  (*watcher)->set_handler([&handled] { ++handled; });
  for (int i = 1; i <= 500; ++i) {
    ::kill(::getpid(), SIGINT);
    while ((*watcher)->pending() == 0) {
    }
    (*watcher)->reset();
    while (handled < i) std::this_thread::yield();
    pollfd event = {(*watcher)->event_fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&event, 1, 0), 0) << "round " << i;
  }
}

TEST_F(TurnTest, ASecondTurnAfterAnInterruptedOneRuns) {
  ::kill(::getpid(), SIGINT);
  while (signals_->pending() == 0) std::this_thread::yield();
  signals_->reset();
  const Result<Turn> turn = run([](RequestSink& sink, std::future<void>) {
    sink.on_delta(delta("again"));
    sink.on_end(ended(ok_status(), 1));
  });
  ASSERT_TRUE(turn.ok());
  EXPECT_EQ(turn->signal, 0);
  EXPECT_EQ(written(), "again");
}

TEST(SignalsDeathTest, TheSecondSignalEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto two_signals = [](int signal) {
    const Result<std::unique_ptr<SignalWatcher>> watcher = SignalWatcher::start();
    ::kill(::getpid(), signal);
    while ((*watcher)->pending() == 0) std::this_thread::yield();
    ::kill(::getpid(), signal);
    ::pause();
  };
  EXPECT_EXIT(two_signals(SIGINT), ::testing::ExitedWithCode(130), "");
  EXPECT_EXIT(two_signals(SIGTERM), ::testing::ExitedWithCode(143), "");
}

TEST(Describe, NamesTheFlagOfAField) {
  ServeOptions options;
  const FlagTable table = serve_flags(options);
  const auto text = [&table](const char* param) {
    return describe(Status(StatusCode::kInvalidArgument, "wrong", param), table);
  };
  EXPECT_EQ(text("max_model_len"), "wrong (--max-model-len)");
  EXPECT_EQ(text("page_tokens"), "wrong (--block-size)");
  EXPECT_EQ(text("prompt"), "wrong");
  EXPECT_EQ(text(""), "wrong");
}

}  // namespace
}  // namespace spin::cli
