// SPDX-License-Identifier: Apache-2.0
#include "tests/server/scripted_engine.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>

namespace spin::server {

namespace {

// Pieces of text that JSON, SSE and UTF-8 handling can stumble over.
constexpr const char* kPieces[] = {
    "a",      " b",       "\n", "\"",     "\\", "\u00e9", "\u4f60\u597d", "\U0001F600", "</",
    "data: ", "\r\n\r\n", "\t", "\u2028", "x",  "{}"};

uint64_t hash(std::string_view text, uint64_t a, uint64_t b) {
  uint64_t h = 1469598103934665603ull ^ (a * 0x9E3779B97F4A7C15ull) ^ (b * 0xC2B2AE3D27D4EB4Full);
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  h ^= h >> 29;
  return h * 0xBF58476D1CE4E5B9ull >> 7;
}

std::string piece(std::string_view prompt, uint32_t choice, uint64_t index) {
  return kPieces[hash(prompt, choice, index) % std::size(kPieces)];
}

bool starts(std::string_view text, std::string_view word) { return text.starts_with(word); }

}  // namespace

ScriptedEngine::ScriptedEngine(ScriptedOptions options) : options_(options) {
  info_.name = "scripted";
  info_.chat_format = "chatml";
  info_.vocab_size = kVocabulary;
  info_.max_model_len = options.max_model_len;
  info_.created_unix_s = 1;
  {
    base::MutexLock lock(mutex_);
    for (HistogramSnapshot* histogram :
         {&stats_.time_to_first_token_s, &stats_.inter_token_latency_s, &stats_.e2e_latency_s,
          &stats_.queue_time_s, &stats_.prefill_time_s, &stats_.decode_time_s,
          &stats_.inference_time_s, &stats_.iteration_tokens, &stats_.prompt_tokens_per_request,
          &stats_.generation_tokens_per_request}) {
      histogram->bounds = {0.1, 1};
      histogram->counts = {2, 1, 1};
      histogram->sum = 5.5;
    }
    stats_.kv_pages_total = 1000;
  }
  thread_ = std::thread([this] { run(); });
}

ScriptedEngine::~ScriptedEngine() { stop(); }

std::string ScriptedEngine::expected_text(std::string_view prompt,
                                          uint32_t choice,
                                          uint64_t tokens) {
  std::string out;
  for (uint64_t i = 0; i < tokens; ++i) out += piece(prompt, choice, i);
  return out;
}

Result<std::vector<TokenId>> ScriptedEngine::tokenize(std::string_view text, bool) const {
  if (const double seconds = tokenize_s_; seconds > 0) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }
  if (text == "exhaust") throw std::bad_alloc();
  std::vector<TokenId> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

Result<std::string> ScriptedEngine::detokenize(std::span<const TokenId> ids, bool) const {
  std::string out;
  for (const TokenId id : ids) out += token_bytes(id);
  return out;
}

std::string ScriptedEngine::token_bytes(TokenId id) const {
  return id < 256 ? std::string(1, static_cast<char>(id)) : std::string();
}

Result<std::vector<TokenId>> ScriptedEngine::encode_chat(std::span<const ChatMessage> messages,
                                                         const ChatOptions&) const {
  std::string text;
  for (const ChatMessage& message : messages) text += message.content;
  return tokenize(text, false);
}

Result<RequestId> ScriptedEngine::submit(GenerateRequest request,
                                         std::shared_ptr<RequestSink> sink) {
  auto text = detokenize(request.prompt, false);
  if (!text.ok()) return text.status();
  base::MutexLock lock(mutex_);
  ++stats_.requests_received;
  auto refuse = [this](Status status) SPIN_NO_THREAD_SAFETY_ANALYSIS {
    ++stats_.requests_refused;
    return status;
  };
  if (stopping_ || draining_) return refuse(Status(StatusCode::kUnavailable, "draining"));
  if (starts(*text, "refuse")) {
    return refuse(Status(StatusCode::kInvalidArgument, "the test says no", "prompt"));
  }
  if (starts(*text, "full") || running_.size() >= options_.max_queued) {
    return refuse(Status(StatusCode::kResourceExhausted, "queue full at 0xdeadbeef00"));
  }
  auto running = std::make_shared<Running>();
  running->id = {next_id_++};
  last_sampling_ = request.sampling;
  last_sparse_ = request.sparse;
  running->request = std::move(request);
  running->text = std::move(*text);
  running->sink = std::move(sink);
  running->whole.resize(running->request.sampling.n);
  running_.push_back(running);
  wake_.notify_all();
  return running->id;
}

void ScriptedEngine::cancel(RequestId id) {
  base::MutexLock lock(mutex_);
  for (const auto& running : running_) {
    if (running->id == id) running->cancelled = true;
  }
}

SamplingParams ScriptedEngine::last_sampling() const {
  base::MutexLock lock(mutex_);
  return last_sampling_;
}

std::optional<std::string> ScriptedEngine::last_sparse() const {
  base::MutexLock lock(mutex_);
  return last_sparse_;
}

uint64_t ScriptedEngine::active() const {
  base::MutexLock lock(mutex_);
  return running_.size();
}

EngineStats ScriptedEngine::stats() const {
  base::MutexLock lock(mutex_);
  EngineStats out = stats_;
  out.requests_running = running_.size();
  out.kv_pages_in_use = running_.size();
  out.kv_tiers = {{"fast", 100, 40, 409600, 163840, 163840},
                  {"host", 2000, 64, 8192000, 262144, 262144}};
  out.sparse.sequences_tiered = 3;
  out.sparse.page_hits = 700;
  out.sparse.page_misses = 30;
  out.sparse.attended_tokens = 5000000000;
  return out;
}

Health ScriptedEngine::health(std::chrono::duration<double>) const { return {health_, 0, "test"}; }

void ScriptedEngine::begin_drain() {
  base::MutexLock lock(mutex_);
  draining_ = true;
}

bool ScriptedEngine::wait_drained(std::chrono::duration<double> limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (active() > 0) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

void ScriptedEngine::stop() {
  {
    base::MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

OutputDelta ScriptedEngine::make_delta(const Running& running, uint32_t choice) const {
  const SamplingParams& sampling = running.request.sampling;
  OutputDelta delta;
  delta.choice = choice;
  delta.text = piece(running.text, choice, running.made);
  if (options_.flood_bytes > 0) delta.text.assign(options_.flood_bytes, 'f');
  delta.token_ids = {static_cast<TokenId>(97 + choice % 26)};
  delta.completion_tokens = running.made + 1;
  if (sampling.logprobs) {
    TokenLogprob token{delta.token_ids[0], -0.5f, delta.text, {}};
    for (uint32_t i = 0; i < *sampling.logprobs; ++i) {
      token.top.push_back(
          {i, -0.5f - static_cast<float>(i), std::string(1, static_cast<char>(65 + i))});
    }
    delta.logprobs.push_back(std::move(token));
  }
  if (running.made + 1 >= sampling.max_tokens.value_or(32)) {
    delta.finish_reason = FinishReason::kLength;
  }
  return delta;
}

bool ScriptedEngine::step(Running& running) {
  const SamplingParams& sampling = running.request.sampling;
  auto end = [&running, &sampling](Status status) {
    RequestResult result;
    result.status = std::move(status);
    result.usage = {running.request.prompt.size(), running.made * sampling.n};
    running.sink->on_end(result);
    return true;
  };
  if (starts(running.text, "fault") || (starts(running.text, "break") && running.made == 3)) {
    return end(Status(StatusCode::kInternal, "fault in /home/engine.cpp:12 at 0x7ffdeadbeef0"));
  }
  if (!running.begun && sampling.prompt_logprobs) {
    PromptLogprobs logprobs;
    for (const TokenId id : running.request.prompt) {
      TokenLogprob token{id, -1.0f, token_bytes(id), {}};
      if (logprobs.tokens.empty()) token.logprob = NAN;
      logprobs.tokens.push_back(std::move(token));
    }
    running.sink->on_prompt_logprobs(std::move(logprobs));
  }
  running.begun = true;
  bool last = false;
  for (uint32_t choice = 0; choice < sampling.n; ++choice) {
    OutputDelta delta = make_delta(running, choice);
    last = delta.finish_reason.has_value();
    if (running.request.stream) {
      running.sink->on_delta(std::move(delta));
      continue;
    }
    OutputDelta& whole = running.whole[choice];
    delta.text.insert(0, whole.text);
    delta.logprobs.insert(delta.logprobs.begin(), whole.logprobs.begin(), whole.logprobs.end());
    delta.token_ids.insert(delta.token_ids.begin(), whole.token_ids.begin(), whole.token_ids.end());
    whole = std::move(delta);
    if (last) running.sink->on_delta(whole);
  }
  ++running.made;
  return last ? end(ok_status()) : false;
}

void ScriptedEngine::run() {
  for (;;) {
    std::vector<std::shared_ptr<Running>> batch;
    bool stopping = false;
    {
      base::MutexLock lock(mutex_);
      while (running_.empty() && !stopping_) wake_.wait(mutex_);
      if (stopping_) {
        for (const auto& running : running_) running->cancelled = true;
      }
      if (running_.empty()) return;
      batch = running_;
      stopping = stopping_;
      ++stats_.steps;
    }
    if (hanging_ && !stopping) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    std::vector<std::shared_ptr<Running>> ended;
    for (const auto& running : batch) {
      bool cancelled = false;
      {
        base::MutexLock lock(mutex_);
        cancelled = running->cancelled;
      }
      // A copy of the flag for step(), which runs without the lock.
      Running& state = *running;
      if (cancelled) {
        RequestResult result;
        result.status = Status(StatusCode::kCancelled, "cancelled");
        state.sink->on_end(result);
        ended.push_back(running);
      } else if (step(state)) {
        ended.push_back(running);
      }
    }
    {
      base::MutexLock lock(mutex_);
      for (const auto& running : ended) {
        running_.erase(std::find(running_.begin(), running_.end(), running));
        ++stats_.requests_finished[running->cancelled ? 2 : 1];
      }
    }
    if (options_.step_delay.count() > 0) std::this_thread::sleep_for(options_.step_delay);
  }
}

}  // namespace spin::server
