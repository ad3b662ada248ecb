// SPDX-License-Identifier: Apache-2.0
// Every limit on a request (the ranges of spin/sampling_limits.h among them), checked before
// anything exists for it. Thread: pure functions.
#pragma once

#include <cstdint>

#include "engine/memory_need.h"
#include "spin/request.h"
#include "spin/status.h"

namespace spin::engine {

// What the engine can hold.
struct RequestLimits {
  uint64_t vocab_size = 0;
  uint64_t max_model_len = 0;       // prompt and output of one choice
  uint64_t kv_capacity_tokens = 0;  // of the whole pool
  MemoryNeed memory;                // of all tiers
  // 0: no limit of its own; else prompts are processed in one step of so many tokens.
  uint64_t max_prompt_tokens = 0;
  // Output of a request that names no limit, where the model's length leaves more; 0: none.
  uint64_t default_max_tokens = 0;
};

// Ranges of every field; independent of the prompt. Errors: kInvalidArgument with param().
Status check_sampling(const SamplingParams& params, const RequestLimits& limits);

// Output limit of a request: its max_tokens, or the default, or what the model's length leaves;
// never below min_tokens.
// Requires: the prompt is shorter than max_model_len.
uint64_t resolved_max_tokens(const GenerateRequest& request, const RequestLimits& limits);

// Everything: sampling, the prompt's ids, and whether prompt and output can ever fit. A request
// that cannot is refused with the numbers; messages of that kind begin with
// "context_length_exceeded".
// Errors: kInvalidArgument with param().
Status check_request(const GenerateRequest& request, const RequestLimits& limits);

// Errors: kInvalidArgument with the numbers, when one choice can never be given what it needs.
Status check_memory(const MemoryNeed& need,
                    const GenerateRequest& request,
                    const RequestLimits& limits);

}  // namespace spin::engine
