// SPDX-License-Identifier: Apache-2.0
// The delivery thread: turns step events into text, finds stop strings, and talks to the sinks.
//
// A choice's last delta is sent when its end is known here: by a token, by a stop string (the step
// thread is told and its later tokens of that choice are dropped unseen, so usage counts up to the
// token that completed the stop), or by kReleased. A request ends when all its choices are
// released: at that moment its pages are returned.
// A sink that throws loses its request, nothing else.
// Thread: run() on the delivery thread; the constructor anywhere before.
#pragma once

#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/metrics.h"
#include "engine/request.h"
#include "engine/step_event.h"
#include "text/tokenizer.h"

namespace spin::engine {

struct DeliveryParts {
  EngineShared* shared = nullptr;
  EventQueue* events = nullptr;
  Metrics* metrics = nullptr;
  const base::Clock* clock = nullptr;
  const text::Tokenizer* tokenizer = nullptr;
};

// What delivery needs to know of every choice. Errors: those of StopMatcher::create.
Result<std::vector<ChoiceText>> make_choice_texts(const SamplingParams& params,
                                                  const text::Tokenizer& tokenizer);

class Delivery {
 public:
  explicit Delivery(DeliveryParts parts) : parts_(parts) {}

  // Until the queue is closed and empty; then ends every request that is left, because the engine
  // stopped (kCancelled) or failed (kInternal).
  void run();

 private:
  void handle(StepEvent& event);
  void send_prompt_scores(Request& request, std::vector<SampledToken> scores);
  void take_token(Request& request, uint32_t choice, StepEvent& event);
  std::string text_of(Request& request,
                      ChoiceText& text,
                      const StepEvent& event,
                      OutputDelta& delta);
  void finish_choice(Request& request, uint32_t choice, const StepEvent& event);
  void send(Request& request, uint32_t choice, OutputDelta delta);
  void end(Request& request);
  void end_all_left();
  void signal_step();
  TokenLogprob to_logprob(SampledToken token) const;

  DeliveryParts parts_;
};

}  // namespace spin::engine
