// SPDX-License-Identifier: Apache-2.0
#include "server/generation.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include <fmt/format.h>

#include "base/checked_math.h"
#include "base/memory_guard.h"

namespace spin::server {

// Takes the engine's events of one prompt to the I/O thread.
class GenerationSink final : public RequestSink {
 public:
  GenerationSink(std::shared_ptr<Generation> generation, size_t prompt)
      : generation_(std::move(generation)), prompt_(prompt) {}

  void on_prompt_logprobs(PromptLogprobs logprobs) override {
    post([logprobs = std::move(logprobs)](Generation& to, size_t prompt) mutable {
      to.on_prompt_logprobs(prompt, std::move(logprobs));
    });
  }
  void on_delta(OutputDelta delta) override {
    post([delta = std::move(delta)](Generation& to, size_t prompt) mutable {
      to.on_delta(prompt, std::move(delta));
    });
  }
  void on_end(const RequestResult& result) override {
    post([result](Generation& to, size_t prompt) { to.on_end(prompt, result); });
  }

 private:
  template <typename F>
  void post(F function) {
    generation_->exchange_->post(
        [generation = generation_, prompt = prompt_, function = std::move(function)]() mutable {
          function(*generation, prompt);
        });
  }

  const std::shared_ptr<Generation> generation_;
  const size_t prompt_;
};

namespace {

// Bytes that a delta costs while it is kept.
size_t delta_bytes(const OutputDelta& delta) {
  size_t bytes = delta.text.size() + delta.token_ids.size() * sizeof(TokenId);
  for (const TokenLogprob& token : delta.logprobs) {
    bytes += sizeof(TokenLogprob) + token.bytes.size() + token.top.size() * sizeof(Alternative);
  }
  return bytes;
}

void merge(OutputDelta& into, OutputDelta delta) {
  into.choice = delta.choice;
  into.text += delta.text;
  into.logprobs.insert(into.logprobs.end(), std::make_move_iterator(delta.logprobs.begin()),
                       std::make_move_iterator(delta.logprobs.end()));
  into.completion_tokens = std::max(into.completion_tokens, delta.completion_tokens);
  if (delta.finish_reason) {
    into.finish_reason = delta.finish_reason;
    into.stop_string = std::move(delta.stop_string);
    into.stop_token = delta.stop_token;
  }
}

}  // namespace

Generation::Generation(Engine& engine,
                       std::shared_ptr<Exchange> exchange,
                       const ServerLimits& limits,
                       GenerationCounters& counters,
                       std::string label)
    : engine_(engine),
      exchange_(std::move(exchange)),
      limits_(limits),
      counters_(counters),
      label_(std::move(label)) {}

void Generation::attach() {
  // Weak: the exchange must not keep alive what keeps it alive.
  const std::weak_ptr<Generation> weak = weak_from_this();
  exchange_->set_callbacks(
      [weak] {
        if (auto self = weak.lock()) self->on_lost();
      },
      [weak] {
        if (auto self = weak.lock()) self->on_drained();
      });
}

// --- Worker thread.

void Generation::prepare(Api api, const std::string& body, std::string id_suffix) {
  if (left()) return;  // before the work of reading a body that nobody waits for
  identity_.chat = api == kChat;
  identity_.id = (api == kChat ? "chatcmpl-" : "cmpl-") + std::move(id_suffix);
  identity_.created_unix_s = static_cast<int64_t>(std::time(nullptr));
  identity_.model = engine_.model_info().name;
  std::optional<ApiError> error;
  const Status memory = base::guard_memory("reading the request", [&] {
    error = parse_and_submit(api, body);
    return ok_status();
  });
  if (!memory.ok()) error = api_error(memory);
  if (!error) return;
  cancel_all();
  exchange_->post([self = shared_from_this(), error = *error] { self->fail(error); });
}

std::optional<ApiError> Generation::parse_and_submit(Api api, const std::string& body) {
  const ModelInfo& model = engine_.model_info();
  const RequestContext context{engine_.default_sampling(), model.vocab_size,
                               limits_.max_body_bytes};
  auto parsed = parse_api_request(api, body, context);
  if (!parsed.ok()) return api_error(parsed.status());
  request_ = std::move(parsed).value();
  if (!request_.model.empty() && request_.model != model.name) {
    return ApiError{404, "the model does not exist; GET /v1/models names the one served", "model",
                    "model_not_found"};
  }
  if (left()) return std::nullopt;
  if (auto error = make_tokens()) return error;
  if (auto error = check_lengths()) return error;
  return submit_all();
}

std::optional<ApiError> Generation::make_tokens() {
  if (request_.api == kChat) {
    auto ids = engine_.encode_chat(request_.messages, request_.chat);
    if (!ids.ok()) {
      ApiError error = api_error(ids.status());
      if (error.param.empty()) error.param = "messages";
      return error;
    }
    request_.prompts.push_back({false, {}, std::move(ids).value()});
  }
  for (PromptInput& prompt : request_.prompts) {
    if (prompt.is_text) {
      auto ids = engine_.tokenize(prompt.text, request_.add_special_tokens);
      if (!ids.ok()) {
        ApiError error = api_error(ids.status());
        if (error.param.empty()) error.param = "prompt";
        return error;
      }
      prompt.ids = std::move(ids).value();
    }
    if (prompt.ids.empty()) {
      return ApiError{400, "the prompt must have at least one token",
                      request_.api == kChat ? "messages" : "prompt", "invalid_value"};
    }
    if (!request_.echo) {
      prompt.text.clear();
      prompt.text.shrink_to_fit();
    } else if (!prompt.is_text) {
      auto text = engine_.detokenize(prompt.ids, false);
      if (!text.ok()) return api_error(text.status());
      prompt.text = std::move(text).value();
    }
  }
  return std::nullopt;
}

// The context limit with both numbers, and the size of a response full of log-probabilities.
std::optional<ApiError> Generation::check_lengths() const {
  const uint64_t limit = engine_.model_info().max_model_len;
  const SamplingParams& sampling = request_.sampling;
  uint64_t entries = 0;
  for (const PromptInput& prompt : request_.prompts) {
    const uint64_t tokens = prompt.ids.size();
    const uint64_t output = request_.max_tokens_given ? sampling.max_tokens.value_or(1) : 1;
    const auto total = base::checked_add(tokens, output);
    if (!total || *total > limit) {
      const std::string tail = request_.max_tokens_given && !request_.echo_only
                                   ? fmt::format("{} more were asked for", output)
                                   : std::string("at least one more is needed");
      std::string message = fmt::format(
          "the model's context is {} tokens, but the prompt has {} and {}", limit, tokens, tail);
      return ApiError{400, message, request_.api == kChat ? "messages" : "prompt",
                      "context_length_exceeded"};
    }
    if (sampling.logprobs) {
      if (sampling.prompt_logprobs) entries += tokens;
      if (request_.max_tokens_given) entries += output;
    }
  }
  const uint64_t width = uint64_t{sampling.n} * (uint64_t{sampling.logprobs.value_or(0)} + 1);
  if (entries > kMaxLogprobEntries / width) {
    return ApiError{
        400,
        fmt::format("the response would hold more than {} log-probabilities", kMaxLogprobEntries),
        "logprobs", "invalid_value"};
  }
  return std::nullopt;
}

std::optional<ApiError> Generation::submit_all() {
  const size_t prompts = request_.prompts.size();
  const uint64_t limit = engine_.model_info().max_model_len;
  for (PromptInput& prompt : request_.prompts) {
    if (request_.echo) echo_texts_.push_back(std::move(prompt.text));
    prompt_tokens_.push_back(prompt.ids.size());
  }
  choices_.resize(prompts * request_.sampling.n);
  prompt_logprobs_.resize(prompts);
  ends_left_ = prompts;
  // From the first submit() on, the I/O thread reads all of this.
  for (size_t i = 0; i < prompts; ++i) {
    GenerateRequest request;
    request.label = label_;
    request.prompt = std::move(request_.prompts[i].ids);
    request.sampling = request_.sampling;
    request.sparse = request_.sparse;
    request.stream = request_.stream;
    if (request.sampling.max_tokens && !request_.max_tokens_given) {
      request.sampling.max_tokens =
          std::min(*request.sampling.max_tokens, limit - request.prompt.size());
      request.sampling.min_tokens = std::min<uint32_t>(
          request.sampling.min_tokens,
          static_cast<uint32_t>(std::min<uint64_t>(*request.sampling.max_tokens, UINT32_MAX)));
    }
    auto id =
        engine_.submit(std::move(request), std::make_shared<GenerationSink>(shared_from_this(), i));
    if (!id.ok()) return api_error(id.status());
    if (!keep_or_cancel(*id)) return std::nullopt;  // the client has left: nobody to answer
  }
  return std::nullopt;
}

// Notes an accepted request, or cancels it if the whole was cancelled meanwhile.
bool Generation::keep_or_cancel(RequestId id) {
  {
    base::MutexLock lock(mutex_);
    if (!cancelled_) {
      ids_.push_back(id);
      return true;
    }
  }
  engine_.cancel(id);
  return false;
}

bool Generation::left() {
  base::MutexLock lock(mutex_);
  return cancelled_;
}

void Generation::cancel_all() {
  std::vector<RequestId> ids;
  {
    base::MutexLock lock(mutex_);
    cancelled_ = true;
    ids.swap(ids_);
  }
  for (const RequestId id : ids) engine_.cancel(id);
}

// --- I/O thread.

void Generation::on_lost() {
  if (done_) return;
  done_ = true;
  counters_.client_left.fetch_add(1, std::memory_order_relaxed);
  cancel_all();
}

void Generation::on_drained() {
  // Before the first chunk the worker may still be at work on the choices.
  if (done_ || !stream_begun_) return;
  for (uint32_t i = 0; i < choices_.size() && !done_; ++i) write_held(i);
}

void Generation::on_prompt_logprobs(size_t prompt, PromptLogprobs logprobs) {
  if (!done_) prompt_logprobs_[prompt] = std::move(logprobs);
}

void Generation::on_delta(size_t prompt, OutputDelta delta) {
  if (done_) return;
  const auto index = static_cast<uint32_t>(prompt * request_.sampling.n + delta.choice);
  if (index >= choices_.size()) return;
  Choice& choice = choices_[index];
  if (request_.echo_only) {  // the one token was sampled only because an engine needs a goal
    delta.text.clear();
    delta.token_ids.clear();
    delta.logprobs.clear();
    delta.stop_string.reset();
    delta.stop_token.reset();
    delta.completion_tokens = 0;
    if (!delta.finish_reason) return;
    delta.finish_reason = FinishReason::kLength;
  }
  if (!request_.stream) return collect(choice, std::move(delta));
  hold(choice, std::move(delta));
  if (exchange_->unsent_bytes() <= limits_.max_unsent_bytes) return write_held(index);
  if (held_bytes_ > limits_.max_held_bytes) {
    done_ = true;
    counters_.slow_readers.fetch_add(1, std::memory_order_relaxed);
    cancel_all();
    exchange_->abort();
  }
}

void Generation::hold(Choice& choice, OutputDelta delta) {
  const size_t bytes = delta_bytes(delta);
  choice.held_bytes += bytes;
  held_bytes_ += bytes;
  if (choice.has_held) {
    merge(choice.held, std::move(delta));
  } else {
    choice.held = std::move(delta);
    choice.has_held = true;
  }
}

void Generation::write_held(uint32_t index) {
  Choice& choice = choices_[index];
  if (!choice.has_held) return;
  const OutputDelta delta = std::move(choice.held);
  choice.held = {};
  choice.has_held = false;
  held_bytes_ -= choice.held_bytes;
  choice.held_bytes = 0;
  write_chunk(index, delta);
}

std::string_view Generation::echo_text(uint32_t index) const {
  if (!request_.echo) return {};
  return echo_texts_[index / request_.sampling.n];
}

ChoiceView Generation::view(uint32_t index, const OutputDelta& delta) const {
  ChoiceView out;
  out.index = index;
  out.text = delta.text;
  out.with_logprobs = request_.sampling.logprobs.has_value();
  out.with_top = request_.sampling.logprobs.value_or(0) > 0;
  out.logprobs = delta.logprobs;
  out.text_offset = choices_[index].text_offset;
  out.first = !choices_[index].started;
  if (out.first && request_.echo) {
    out.prompt_logprobs = prompt_logprobs_[index / request_.sampling.n].tokens;
  }
  out.finish_reason = delta.finish_reason;
  out.stop_string = &delta.stop_string;
  out.stop_token = &delta.stop_token;
  return out;
}

void Generation::write_chunk(uint32_t index, const OutputDelta& delta) {
  Choice& choice = choices_[index];
  ChoiceView chunk = view(index, delta);
  std::string with_echo;
  if (chunk.first && request_.echo) {
    with_echo = std::string(echo_text(index)) + delta.text;
    chunk.text = with_echo;
  }
  std::optional<Usage> usage;
  if (request_.continuous_usage) {
    usage = Usage{prompt_tokens_[index / request_.sampling.n], delta.completion_tokens};
  }
  if (!stream_begun_) {
    // Only now: until the first token an error can still be answered with its own status.
    stream_begun_ = true;
    HttpResponse head;
    head.content_type = "text/event-stream; charset=utf-8";
    head.fields = {{"Cache-Control", "no-cache"}, {"X-Request-Id", label_}};
    exchange_->begin_stream(head);
  }
  const std::string event = stream_chunk(identity_, chunk, usage);
  choice.started = true;
  choice.text_offset +=
      logprob_text_length(chunk.prompt_logprobs) + logprob_text_length(chunk.logprobs);
  exchange_->write(event);
}

void Generation::collect(Choice& choice, OutputDelta delta) {
  collected_bytes_ += delta_bytes(delta);
  merge(choice.all, std::move(delta));
  if (collected_bytes_ > kMaxCollectedBytes) {
    fail({400, "the response is too large; use `stream` or fewer tokens", "max_tokens",
          "response_too_large"});
  }
}

void Generation::on_end(size_t /*prompt*/, RequestResult result) {
  if (done_) return;
  if (!result.status.ok()) return fail(api_error(result.status));
  usage_.prompt_tokens += result.usage.prompt_tokens;
  if (!request_.echo_only) usage_.completion_tokens += result.usage.completion_tokens;
  if (--ends_left_ == 0) complete();
}

void Generation::complete() {
  if (request_.stream) {
    for (uint32_t i = 0; i < choices_.size(); ++i) write_held(i);
    if (request_.include_usage) exchange_->write(usage_chunk(identity_, usage_));
    done_ = true;
    exchange_->write(kDoneEvent);
    exchange_->end_stream();
    return;
  }
  done_ = true;
  std::vector<ChoiceView> views;
  std::vector<std::string> texts;
  texts.reserve(choices_.size());
  for (uint32_t i = 0; i < choices_.size(); ++i) {
    ChoiceView choice = view(i, choices_[i].all);
    if (request_.echo) {
      texts.push_back(std::string(echo_text(i)) + choices_[i].all.text);
      choice.text = texts.back();
    }
    views.push_back(choice);
  }
  HttpResponse response;
  response.fields.emplace_back("X-Request-Id", label_);
  response.body = full_response(identity_, views, usage_);
  exchange_->respond(std::move(response));
}

// Before the first chunk an error has its own status; afterwards it is an event of the stream.
void Generation::fail(const ApiError& error) {
  if (done_) return;
  done_ = true;
  cancel_all();
  if (stream_begun_) {
    exchange_->write(data_event(error_json(error)));
    exchange_->write(kDoneEvent);
    exchange_->end_stream();
    return;
  }
  HttpResponse response = error_response(error);
  response.fields.emplace_back("X-Request-Id", label_);
  exchange_->respond(std::move(response));
}

}  // namespace spin::server
