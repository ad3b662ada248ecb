// SPDX-License-Identifier: Apache-2.0
// The life of one choice of a request, and the check that it only moves along legal edges.
// Thread: engine thread only.
//
//   submitted -> waiting -> prefilling -> decoding -> finished
//       |           |           |                        ^
//       +-----------+-----------+------------------------+   (cancel, fault, refusal)
//
// submitted:  accepted by submit(), in the inbox; holds no pages.
// waiting:    in the scheduler's queue; holds no pages.
// prefilling: admitted, pages for prompt and output reserved; prompt partly processed.
// decoding:   the first token is sampled.
// finished:   pages returned; the end is reported. Terminal.
//
// The n choices of a request are n sequences with KV of their own: each is admitted, prefilled and
// ended by itself. They share only the prompt's token ids. (Sharing the prompt's pages comes with
// prefix reuse.)
#pragma once

#include <cstdint>

#include "base/check.h"

namespace spin::engine {

enum class Phase : uint8_t { kSubmitted, kWaiting, kPrefilling, kDecoding, kFinished };

constexpr bool is_legal_transition(Phase from, Phase to) {
  if (from == Phase::kFinished) return false;
  if (to == Phase::kFinished) return true;
  return static_cast<uint8_t>(to) == static_cast<uint8_t>(from) + 1;
}

class PhaseTracker {
 public:
  Phase phase() const { return phase_; }

  // Requires: the edge is legal; anything else is a fault of the engine's own.
  void advance(Phase to) {
    SPIN_CHECK(is_legal_transition(phase_, to));
    phase_ = to;
  }

 private:
  Phase phase_ = Phase::kSubmitted;
};

}  // namespace spin::engine
