// SPDX-License-Identifier: Apache-2.0
// What the engine needs from a model: sequences with KV memory of their own, and steps over them.
// Two implementations: engine/decoder_runner.h and, for tests, engine/fake_model.h.
//
// Thread: engine thread only, except pages_total() and pages_in_use(), which any thread may call.
// Numerics: a row of logits depends on its sequence's tokens alone, not on the rest of the batch
// or on how the prompt was cut into steps.
#pragma once

#include <cstdint>
#include <functional>

#include "engine/step_batch.h"
#include "spin/status.h"

namespace spin::engine {

// Called now and then while a step runs (at least once a layer), from any thread.
using StepProgress = std::function<void()>;

class ModelRunner {
 public:
  virtual ~ModelRunner() = default;

  // Ids below this have logits and may be fed.
  virtual uint64_t vocab_size() const = 0;
  // Limits of one step.
  virtual uint32_t max_step_tokens() const = 0;
  virtual uint32_t max_logit_rows() const = 0;

  virtual uint64_t pages_total() const = 0;
  virtual uint64_t pages_in_use() const = 0;
  // Pages that a sequence of `tokens` takes.
  virtual uint64_t pages_for(uint64_t tokens) const = 0;

  // Reserves the pages for `max_tokens`, all or none. Errors: kResourceExhausted.
  virtual Result<SequenceHandle> open_sequence(uint64_t max_tokens) = 0;
  // Returns the pages. Requires: an open sequence. Does not fail and allocates nothing.
  virtual void close_sequence(SequenceHandle sequence) = 0;

  // Runs one step; blocks until its logits are there. Lifetime: the view is valid until the next
  // call. Errors: the device's or the runner's own; the engine does not go on after one.
  virtual Result<LogitsView> run(const StepBatch& batch, const StepProgress& progress) = 0;

  // Recounts the pages against the open sequences. Errors: kInternal, saying what is wrong.
  virtual Status audit() const = 0;
};

}  // namespace spin::engine
