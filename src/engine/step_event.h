// SPDX-License-Identifier: Apache-2.0
// What the step thread tells the delivery thread, one batch per step. Thread: plain data.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/bounded_queue.h"
#include "engine/request.h"
#include "engine/sampler.h"
#include "spin/request.h"
#include "spin/status.h"

namespace spin::engine {

enum class EventKind : uint8_t {
  kAdmitted,      // the request's first choice entered the running set
  kPrefill,       // prompt tokens processed
  kPromptScores,  // log-probabilities of the prompt; before the choice's first token
  kToken,         // a token was sampled
  kReleased,      // the choice has ended and its pages are returned; last of its choice
};

struct StepEvent {
  EventKind kind = EventKind::kToken;
  Request* request = nullptr;
  uint32_t choice = 0;
  double time_s = 0;

  uint64_t done_tokens = 0;                 // kPrefill
  std::vector<SampledToken> prompt_scores;  // kPromptScores: of prompt tokens 1..
  SampledToken token;                       // kToken
  // kToken: this token ends the choice, by its id (kStop) or by the limit (kLength).
  // kReleased: how it ended, if the delivery thread does not know yet.
  std::optional<FinishReason> finish;
  bool by_stop_token = false;  // kToken: `token` is one of the request's stop_token_ids
  Status status;               // kReleased: the reason of kAborted or kError
};

using StepEvents = std::vector<StepEvent>;
using EventQueue = base::BoundedQueue<StepEvents>;

}  // namespace spin::engine
