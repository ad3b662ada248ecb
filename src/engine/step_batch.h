// SPDX-License-Identifier: Apache-2.0
// One step as the runner sees it: some new tokens of some sequences, and the logits wanted after
// them. Thread: plain data.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "spin/token.h"

namespace spin::engine {

// Names a sequence that a runner has opened. A handle kept after close_sequence() is recognised.
struct SequenceHandle {
  uint32_t index = 0;
  uint32_t generation = 0;
  friend bool operator==(const SequenceHandle&, const SequenceHandle&) = default;
};

struct SequenceStep {
  SequenceHandle sequence;
  // The new tokens; they follow the tokens of earlier steps. Lifetime: until run() returns.
  std::span<const TokenId> tokens;
  // Logits after each of the last `logit_rows` tokens, <= tokens.size().
  uint32_t logit_rows = 0;
};

struct StepBatch {
  std::vector<SequenceStep> sequences;  // each sequence at most once
  bool requests_wait = false;           // for memory or a place
};

// [rows, vocab] f32: the rows of the batch's sequences in order, each sequence's in token order.
struct LogitsView {
  const float* data = nullptr;
  uint64_t rows = 0;
  uint64_t vocab = 0;
  uint64_t row_stride = 0;  // in floats, >= vocab

  std::span<const float> row(uint64_t index) const {
    return {data + index * row_stride, static_cast<size_t>(vocab)};
  }
};

}  // namespace spin::engine
