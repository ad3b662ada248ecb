// SPDX-License-Identifier: Apache-2.0
// What the engine needs from a model: sequences with KV memory of their own, and steps over them.
// Two implementations: engine/decoder_runner.h and, for tests, engine/fake_model.h.
//
// Thread: engine thread only, except need(), total_memory(), pages_total(), pages_in_use() and
// add_stats(), which any thread may call.
// Numerics: a row of logits depends on its sequence's tokens alone, not on the rest of the batch
// or on how the prompt was cut into steps.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "engine/memory_need.h"
#include "engine/step_batch.h"
#include "spin/stats.h"
#include "spin/status.h"
#include "spin/token.h"

namespace spin::sparse {
class SparseAlgorithm;
}  // namespace spin::sparse

namespace spin::engine {

// What a sequence is opened for.
struct SequenceRequest {
  std::span<const TokenId> prompt;  // alive until the sequence is closed
  uint64_t max_tokens = 0;          // prompt and output
  // How decode steps attend; null: densely. A prompt below its minimum length is dense as well, and
  // so is one whose logits are wanted (they are those of dense attention).
  std::shared_ptr<const sparse::SparseAlgorithm> algorithm;
  bool wants_prompt_logits = false;
  // Fast pages that others still take which were admitted together with it: never part of a buffer.
  uint64_t promised_pages = 0;
};

// What it takes.
struct SequenceNeed {
  MemoryNeed memory;               // at least
  bool is_sparse = false;          // decode steps select
  bool exclusive_prefill = false;  // the prompt goes through the staging buffer: one at a time
};

// Why a sequence of a step has no result; the step and the others are sound.
struct SequenceFault {
  uint32_t index = 0;  // in the batch
  Status status;
};

struct StepOutput {
  LogitsView logits;  // a row that belongs to a fault means nothing
  std::vector<SequenceFault> faults;
};

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

  // Pages of the fast tier.
  virtual uint64_t pages_total() const = 0;
  virtual uint64_t pages_in_use() const = 0;

  // Requires: max_tokens > 0. Pure.
  virtual SequenceNeed need(const SequenceRequest& request) const = 0;
  virtual MemoryNeed total_memory() const = 0;
  // What new sequences can be given now, counting what others would give up for them.
  virtual MemoryNeed free_memory() const = 0;

  // Reserves the memory for `max_tokens`, all or none. Requires: at most one sequence with an
  // exclusive prefill has an unfinished prompt. Errors: kResourceExhausted.
  virtual Result<SequenceHandle> open_sequence(const SequenceRequest& request) = 0;
  // Returns the memory. Requires: an open sequence. Does not fail and allocates nothing.
  virtual void close_sequence(SequenceHandle sequence) = 0;

  // A sequence that decodes can give up its fast memory between steps and take it again later; its
  // KV stays as it is. suspend_pages(): fast pages that this frees for others beyond what
  // free_memory() counts; 0: it cannot be suspended. Errors: kResourceExhausted, and nothing has
  // changed; any other: the sequence can only be closed.
  virtual uint64_t suspend_pages(SequenceHandle /*sequence*/) { return 0; }
  virtual Status suspend_sequence(SequenceHandle /*sequence*/) {
    return Status(StatusCode::kResourceExhausted, "sequences of this runner are not suspended");
  }
  // What a suspended sequence needs at least to resume.
  virtual MemoryNeed resume_need(SequenceHandle /*sequence*/) { return {}; }
  // `promised_pages`: as SequenceRequest's.
  virtual Status resume_sequence(SequenceHandle /*sequence*/, uint64_t /*promised_pages*/) {
    return ok_status();
  }

  // Runs one step; blocks until its logits are there. Of a sequence with an exclusive prefill, t
  // tokens of the prompt mean the share t / prompt of the whole work on it. Lifetime: the view is
  // valid until the next call. Errors: the device's or the runner's own; the engine does not go on
  // after one. A sequence with a fault must be closed.
  virtual Result<StepOutput> run(const StepBatch& batch, const StepProgress& progress) = 0;

  // Fills what the engine's statistics say of memory and attention.
  virtual void add_stats(EngineStats& stats) const = 0;

  // Recounts the memory against the open sequences. Errors: kInternal, saying what is wrong.
  virtual Status audit() const = 0;
};

}  // namespace spin::engine
