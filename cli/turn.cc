// SPDX-License-Identifier: Apache-2.0
#include "cli/turn.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "cli/terminal.h"

namespace spin::cli {
namespace {

// What has happened since the last look.
struct News {
  std::vector<OutputDelta> deltas;
  std::optional<double> prefill;  // fraction
  std::optional<RequestResult> end;
  bool woken = false;
};

// Hands the engine's events to the main thread, so that a slow reader of standard output holds up
// nobody but itself.
class TurnSink : public RequestSink {
 public:
  void on_prefill_progress(uint64_t done_tokens, uint64_t total_tokens) override {
    const base::MutexLock lock(mutex_);
    if (total_tokens > 0) {
      news_.prefill = static_cast<double>(done_tokens) / static_cast<double>(total_tokens);
    }
    changed_.notify_one();
  }

  void on_delta(OutputDelta delta) override {
    const base::MutexLock lock(mutex_);
    news_.deltas.push_back(std::move(delta));
    changed_.notify_one();
  }

  void on_end(const RequestResult& result) override {
    const base::MutexLock lock(mutex_);
    news_.end = result;
    changed_.notify_one();
  }

  // From the signal watcher.
  void wake() {
    const base::MutexLock lock(mutex_);
    news_.woken = true;
    changed_.notify_one();
  }

  // Blocks until there is something.
  News wait() {
    const base::MutexLock lock(mutex_);
    while (!news_.woken && !news_.end && !news_.prefill && news_.deltas.empty()) {
      changed_.wait(mutex_);
    }
    return std::exchange(news_, News{});
  }

 private:
  base::Mutex mutex_;
  base::CondVar changed_;
  News news_ SPIN_GUARDED_BY(mutex_);
};

// Writes a delta, unless an earlier one could not be written.
void take_delta(const OutputDelta& delta, ProgressBar& progress, int out_fd, Turn& turn) {
  if (delta.finish_reason) turn.reason = *delta.finish_reason;
  turn.text += delta.text;
  if (delta.text.empty() || !turn.output.ok()) return;
  progress.clear();
  turn.output = write_all(out_fd, delta.text);
}

}  // namespace

Result<Turn> run_turn(Engine& engine,
                      SignalWatcher& signals,
                      ProgressBar& progress,
                      int out_fd,
                      GenerateRequest request) {
  const auto sink = std::make_shared<TurnSink>();
  signals.set_handler([sink] { sink->wake(); });
  Result<RequestId> id = engine.submit(std::move(request), sink);
  if (!id.ok()) {
    signals.set_handler(nullptr);
    return id.status();
  }
  // A signal that came before the handler was set.
  if (signals.pending() != 0) sink->wake();

  Turn turn;
  bool has_text = false;
  while (true) {
    const News news = sink->wait();
    for (const OutputDelta& delta : news.deltas) {
      has_text = has_text || !delta.token_ids.empty() || !delta.text.empty();
      take_delta(delta, progress, out_fd, turn);
    }
    if (news.prefill && !has_text) progress.update("Reading the prompt", *news.prefill);
    if (news.woken) turn.signal = signals.pending();
    if (news.end) {
      turn.result = *news.end;
      break;
    }
    if (turn.signal != 0 || !turn.output.ok()) engine.cancel(*id);
  }
  progress.clear();
  signals.set_handler(nullptr);
  return turn;
}

}  // namespace spin::cli
