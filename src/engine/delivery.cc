// SPDX-License-Identifier: Apache-2.0
#include "engine/delivery.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

namespace spin::engine {
namespace {

// How bad an end is; a request with several choices counts as its worst one.
int severity(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return 0;
    case FinishReason::kLength:
      return 1;
    case FinishReason::kAborted:
      return 2;
    case FinishReason::kError:
      return 3;
  }
  return 3;
}

void note_reason(Request& request, FinishReason reason) {
  if (!request.worst_reason || severity(reason) > severity(*request.worst_reason)) {
    request.worst_reason = reason;
  }
}

void append(OutputDelta& all, OutputDelta delta) {
  all.text += delta.text;
  all.token_ids.insert(all.token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
  all.logprobs.insert(all.logprobs.end(), std::make_move_iterator(delta.logprobs.begin()),
                      std::make_move_iterator(delta.logprobs.end()));
  all.choice = delta.choice;
  all.finish_reason = delta.finish_reason;
  all.stop_string = std::move(delta.stop_string);
  all.stop_token = delta.stop_token;
  all.completion_tokens = delta.completion_tokens;
}

}  // namespace

Result<std::vector<ChoiceText>> make_choice_texts(const SamplingParams& params,
                                                  const text::Tokenizer& tokenizer) {
  std::vector<ChoiceText> texts(params.n);
  for (ChoiceText& text : texts) {
    text.detokenizer.emplace(tokenizer, params.skip_special_tokens);
    if (params.stop.empty()) continue;
    SPIN_ASSIGN_OR_RETURN(
        text.matcher, text::StopMatcher::create(params.stop, params.include_stop_str_in_output));
  }
  return texts;
}

void Delivery::run() {
  while (auto batch = parts_.events->pop()) {
    for (StepEvent& event : *batch) {
      Request& request = *event.request;
      try {
        handle(event);
      } catch (...) {  // the sink's, or std::bad_alloc: this request is lost, the others are not
        request.sink_broken = true;
        request.cancel_requested.store(true);
        signal_step();
      }
      if (event.kind == EventKind::kReleased &&
          ++request.released_choices == request.texts.size()) {
        end(request);
      }
    }
  }
  end_all_left();
}

void Delivery::handle(StepEvent& event) {
  Request& request = *event.request;
  if (event.kind == EventKind::kReleased) {
    if (event.finish) note_reason(request, *event.finish);
    if (!event.status.ok() && request.final_status.ok()) request.final_status = event.status;
  }
  if (request.sink_broken) return;
  switch (event.kind) {
    case EventKind::kAdmitted:
      request.times.admitted = event.time_s;
      return;
    case EventKind::kPrefill:
      request.sink->on_prefill_progress(event.done_tokens, request.spec.prompt.size());
      return;
    case EventKind::kPromptScores:
      send_prompt_scores(request, std::move(event.prompt_scores));
      return;
    case EventKind::kToken:
      take_token(request, event.choice, event);
      return;
    case EventKind::kReleased:
      finish_choice(request, event.choice, event);
      return;
  }
}

TokenLogprob Delivery::to_logprob(SampledToken token) const {
  TokenLogprob out;
  out.id = token.id;
  out.logprob = token.logprob;
  out.bytes = parts_.tokenizer->token_bytes(token.id);
  out.top.reserve(token.top.size());
  for (const TokenScore& score : token.top) {
    out.top.push_back(
        {score.id, score.logprob, std::string(parts_.tokenizer->token_bytes(score.id))});
  }
  return out;
}

// Every choice computes them, with the same result; the first to come is sent.
void Delivery::send_prompt_scores(Request& request, std::vector<SampledToken> scores) {
  if (std::exchange(request.prompt_scores_sent, true)) return;
  PromptLogprobs out;
  out.tokens.reserve(scores.size() + 1);
  SampledToken first;
  first.id = request.spec.prompt.front();
  first.logprob = std::numeric_limits<float>::quiet_NaN();
  out.tokens.push_back(to_logprob(std::move(first)));
  for (SampledToken& score : scores) out.tokens.push_back(to_logprob(std::move(score)));
  request.sink->on_prompt_logprobs(std::move(out));
}

void Delivery::take_token(Request& request, uint32_t choice, StepEvent& event) {
  ChoiceText& text = request.texts[choice];
  if (text.finished) return;  // it came after the stop string
  if (request.times.first_token < 0) {
    request.times.first_token = event.time_s;
    parts_.metrics->record_first_token(event.time_s - request.times.submitted);
  }
  if (text.last_token_s >= 0) parts_.metrics->record_token_gap(event.time_s - text.last_token_s);
  text.last_token_s = event.time_s;
  ++text.completion_tokens;
  parts_.metrics->record_generated(1);

  OutputDelta delta;
  delta.choice = choice;
  delta.completion_tokens = text.completion_tokens;
  delta.token_ids.push_back(event.token.id);
  delta.finish_reason = event.finish;
  if (event.by_stop_token) delta.stop_token = event.token.id;
  delta.text = text_of(request, text, event, delta);
  if (request.spec.sampling.logprobs) delta.logprobs.push_back(to_logprob(std::move(event.token)));
  if (delta.stop_string && !event.finish) {  // the step thread does not know yet
    request.stop_hit[choice].store(true);
    signal_step();
  }
  send(request, choice, std::move(delta));
}

// The text that this token releases. Sets the delta's end if a stop string is found.
std::string Delivery::text_of(Request& request,
                              ChoiceText& text,
                              const StepEvent& event,
                              OutputDelta& delta) {
  const SamplingParams& params = request.spec.sampling;
  std::string piece;
  // The token that ends a choice by its id is no text, unless the caller wants to see it.
  if (event.finish != FinishReason::kStop || params.include_stop_str_in_output) {
    piece = text.detokenizer->feed(event.token.id);
  }
  if (event.finish) piece += text.detokenizer->flush();
  // Text of the first min_tokens tokens is not searched.
  if (!text.matcher || text.completion_tokens <= params.min_tokens) return piece;
  std::string released = text.matcher->feed(piece);
  if (const auto index = text.matcher->matched_stop()) {
    delta.finish_reason = FinishReason::kStop;
    delta.stop_string = params.stop[*index];
    delta.stop_token.reset();
  } else if (event.finish) {
    released += text.matcher->flush();
  }
  return released;
}

// kReleased: the last delta, if no token brought it.
void Delivery::finish_choice(Request& request, uint32_t choice, const StepEvent& event) {
  ChoiceText& text = request.texts[choice];
  if (text.finished) return;
  OutputDelta delta;
  delta.choice = choice;
  delta.completion_tokens = text.completion_tokens;
  delta.finish_reason = event.finish;
  const std::string tail = text.detokenizer->flush();
  if (text.matcher) {
    delta.text = text.matcher->feed(tail) + text.matcher->flush();
  } else {
    delta.text = tail;
  }
  send(request, choice, std::move(delta));
}

void Delivery::send(Request& request, uint32_t choice, OutputDelta delta) {
  ChoiceText& text = request.texts[choice];
  text.finished = delta.finish_reason.has_value();
  if (request.spec.stream) {
    request.sink->on_delta(std::move(delta));
    return;
  }
  append(text.gathered, std::move(delta));
  if (text.finished) request.sink->on_delta(std::move(text.gathered));
}

// The one terminal event; afterwards the request is gone.
void Delivery::end(Request& request) {
  RequestResult result;
  result.status = request.final_status;
  if (request.sink_broken) {
    result.status = Status(StatusCode::kInternal, "the receiver of the output failed");
    request.worst_reason = FinishReason::kError;
  }
  result.usage.prompt_tokens = request.spec.prompt.size();
  for (const ChoiceText& text : request.texts) {
    result.usage.completion_tokens += text.completion_tokens;
  }
  RequestTimes& times = request.times;
  times.finished = parts_.clock->now_s();
  const auto since_submit = [&](double time) { return time < 0 ? 0.0 : time - times.submitted; };
  result.timing = {since_submit(times.admitted), since_submit(times.first_token),
                   since_submit(times.finished)};
  parts_.metrics->record_finished(request.worst_reason.value_or(FinishReason::kError), times,
                                  result.usage);
  // Out of the gauges before the receiver hears of it; drained only when it has.
  std::unique_ptr<Request> gone;
  {
    base::MutexLock lock(parts_.shared->mutex);
    const auto place = parts_.shared->live.find(request.id);
    gone = std::move(place->second);
    parts_.shared->live.erase(place);
    ++parts_.shared->ending;
  }
  try {
    gone->sink->on_end(result);
  } catch (...) {  // it has had its terminal event
  }
  gone.reset();
  base::MutexLock lock(parts_.shared->mutex);
  --parts_.shared->ending;
  parts_.shared->ended.notify_all();
}

void Delivery::end_all_left() {
  for (;;) {
    Request* request = nullptr;
    bool failed = false;
    {
      base::MutexLock lock(parts_.shared->mutex);
      if (parts_.shared->live.empty()) return;
      request = parts_.shared->live.begin()->second.get();
      failed = parts_.shared->failed;
    }
    StepEvent event;
    event.kind = EventKind::kReleased;
    event.finish = failed ? FinishReason::kError : FinishReason::kAborted;
    event.status = failed ? Status(StatusCode::kInternal, "the engine has failed")
                          : Status(StatusCode::kCancelled, "the engine was stopped");
    event.request = request;
    for (event.choice = 0; event.choice < request->texts.size(); ++event.choice) {
      if (request->texts[event.choice].finished) continue;
      try {
        handle(event);
      } catch (...) {
        request->sink_broken = true;
      }
    }
    end(*request);
  }
}

void Delivery::signal_step() {
  base::MutexLock lock(parts_.shared->mutex);
  parts_.shared->signalled = true;
  parts_.shared->wake_step.notify_one();
}

}  // namespace spin::engine
