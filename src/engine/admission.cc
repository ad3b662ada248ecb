// SPDX-License-Identifier: Apache-2.0
#include "engine/admission.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/utf8.h"
#include "spin/sampling_limits.h"

namespace spin::engine {
namespace {

using namespace sampling_limits;  // NOLINT(google-build-using-namespace): its constants

Status invalid(std::string message, std::string_view param) {
  return Status(StatusCode::kInvalidArgument, std::move(message), std::string(param));
}

// Also refuses NaN.
Status check_range(float value, float low, float high, std::string_view name) {
  if (value >= low && value <= high) return ok_status();
  return invalid(fmt::format("{} must be in [{}, {}], found {}", name, low, high, value), name);
}

Status check_at_most(uint64_t value, uint64_t limit, std::string_view what, std::string_view name) {
  if (value <= limit) return ok_status();
  return invalid(fmt::format("{} must be at most {}, found {}", what, limit, value), name);
}

Status check_floats(const SamplingParams& params) {
  SPIN_RETURN_IF_ERROR(check_range(params.temperature, 0, kMaxTemperature, "temperature"));
  if (!(params.top_p > 0 && params.top_p <= 1)) {
    return invalid(fmt::format("top_p must be in (0, 1], found {}", params.top_p), "top_p");
  }
  SPIN_RETURN_IF_ERROR(check_range(params.min_p, 0, 1, "min_p"));
  SPIN_RETURN_IF_ERROR(check_range(params.repetition_penalty,
                                   static_cast<float>(kMinRepetitionPenalty), kMaxRepetitionPenalty,
                                   "repetition_penalty"));
  SPIN_RETURN_IF_ERROR(check_range(params.presence_penalty, -kMaxPresencePenalty,
                                   kMaxPresencePenalty, "presence_penalty"));
  return check_range(params.frequency_penalty, -kMaxPresencePenalty, kMaxPresencePenalty,
                     "frequency_penalty");
}

Status check_counts(const SamplingParams& params) {
  if (params.top_k < -1) {
    return invalid(fmt::format("top_k must be -1, 0 or at least 1, found {}", params.top_k),
                   "top_k");
  }
  if (params.n < 1 || params.n > kMaxChoices) {
    return invalid(fmt::format("n must be in [1, {}], found {}", kMaxChoices, params.n), "n");
  }
  SPIN_RETURN_IF_ERROR(
      check_at_most(params.logprobs.value_or(0), kMaxTopLogprobs, "logprobs", "logprobs"));
  SPIN_RETURN_IF_ERROR(check_at_most(params.prompt_logprobs.value_or(0), kMaxTopLogprobs,
                                     "prompt_logprobs", "prompt_logprobs"));
  if (params.max_tokens == uint64_t{0}) {
    return invalid("max_tokens must be at least 1, found 0", "max_tokens");
  }
  if (params.max_tokens && params.min_tokens > *params.max_tokens) {
    return invalid(fmt::format("min_tokens must be at most max_tokens ({}), found {}",
                               *params.max_tokens, params.min_tokens),
                   "min_tokens");
  }
  return ok_status();
}

Status check_stops(const SamplingParams& params, uint64_t vocab_size) {
  SPIN_RETURN_IF_ERROR(
      check_at_most(params.stop.size(), kMaxStopStrings, "the number of stop strings", "stop"));
  for (const std::string& stop : params.stop) {
    if (stop.empty()) return invalid("a stop string must not be empty", "stop");
    SPIN_RETURN_IF_ERROR(check_at_most(stop.size(), kMaxStopStringBytes,
                                       "the length of a stop string in bytes", "stop"));
    if (!base::is_valid_utf8(stop)) return invalid("a stop string must be UTF-8", "stop");
  }
  SPIN_RETURN_IF_ERROR(check_at_most(params.stop_token_ids.size(), kMaxStopTokenIds,
                                     "the number of stop_token_ids", "stop_token_ids"));
  for (const TokenId id : params.stop_token_ids) {
    if (id >= vocab_size) {
      return invalid(fmt::format("stop_token_ids must be below the vocabulary size {}, found {}",
                                 vocab_size, id),
                     "stop_token_ids");
    }
  }
  return ok_status();
}

Status check_bias(const SamplingParams& params, uint64_t vocab_size) {
  SPIN_RETURN_IF_ERROR(check_at_most(params.logit_bias.size(), kMaxLogitBiasEntries,
                                     "the number of logit_bias entries", "logit_bias"));
  for (const auto& [id, bias] : params.logit_bias) {
    if (id >= vocab_size) {
      return invalid(fmt::format("the ids of logit_bias must be below the vocabulary size {}, "
                                 "found {}",
                                 vocab_size, id),
                     "logit_bias");
    }
    SPIN_RETURN_IF_ERROR(check_range(bias, -kMaxLogitBias, kMaxLogitBias, "logit_bias"));
  }
  return ok_status();
}

// Prompt and output against the model's length.
Status check_length(const GenerateRequest& request, const RequestLimits& limits) {
  const uint64_t prompt = request.prompt.size();
  const uint64_t length = limits.max_model_len;
  if (prompt >= length) {
    return invalid(fmt::format("context_length_exceeded: this model's maximum context length is {} "
                               "tokens, and the prompt has {} (at most {}, to leave room for one "
                               "token of output)",
                               length, prompt, length - 1),
                   "prompt");
  }
  const SamplingParams& sampling = request.sampling;
  if (sampling.max_tokens && *sampling.max_tokens > length - prompt) {
    return invalid(fmt::format("context_length_exceeded: this model's maximum context length is {} "
                               "tokens, but {} in the prompt and {} of output were requested (at "
                               "most {} of output)",
                               length, prompt, *sampling.max_tokens, length - prompt),
                   "max_tokens");
  }
  if (sampling.min_tokens > length - prompt) {
    return invalid(fmt::format("context_length_exceeded: this model's maximum context length is {} "
                               "tokens, but {} in the prompt and min_tokens {} were requested",
                               length, prompt, sampling.min_tokens),
                   "min_tokens");
  }
  return ok_status();
}

}  // namespace

Status check_sampling(const SamplingParams& params, const RequestLimits& limits) {
  SPIN_RETURN_IF_ERROR(check_floats(params));
  SPIN_RETURN_IF_ERROR(check_counts(params));
  SPIN_RETURN_IF_ERROR(check_stops(params, limits.vocab_size));
  return check_bias(params, limits.vocab_size);
}

uint64_t resolved_max_tokens(const GenerateRequest& request, const RequestLimits& limits) {
  if (request.sampling.max_tokens) return *request.sampling.max_tokens;
  const uint64_t left = limits.max_model_len - request.prompt.size();
  if (limits.default_max_tokens == 0) return left;
  return std::min(left, std::max<uint64_t>(limits.default_max_tokens, request.sampling.min_tokens));
}

Status check_request(const GenerateRequest& request, const RequestLimits& limits) {
  SPIN_RETURN_IF_ERROR(check_sampling(request.sampling, limits));
  if (request.prompt.empty()) return invalid("the prompt must have at least one token", "prompt");
  SPIN_RETURN_IF_ERROR(check_length(request, limits));
  for (const TokenId id : request.prompt) {
    if (id >= limits.vocab_size) {
      return invalid(fmt::format("the prompt's token ids must be below the vocabulary size {}, "
                                 "found {}",
                                 limits.vocab_size, id),
                     "prompt");
    }
  }
  if (limits.max_prompt_tokens != 0 && request.prompt.size() > limits.max_prompt_tokens) {
    return invalid(fmt::format("the prompt has {} tokens, but without chunked prefill a prompt is "
                               "processed in one step of at most {} tokens "
                               "(max_num_batched_tokens)",
                               request.prompt.size(), limits.max_prompt_tokens),
                   "prompt");
  }
  return ok_status();
}

Status check_memory(const MemoryNeed& need,
                    const GenerateRequest& request,
                    const RequestLimits& limits) {
  if (need.fits(limits.memory)) return ok_status();
  std::string lack;
  if (need.pages > limits.memory.pages) {
    lack = fmt::format("{} pages of KV cache, but there are {} ({} tokens) in all", need.pages,
                       limits.memory.pages, limits.kv_capacity_tokens);
  } else if (need.host_extents > limits.memory.host_extents) {
    lack = fmt::format("{} extents of host memory, but there are {} in all", need.host_extents,
                       limits.memory.host_extents);
  } else {
    lack = fmt::format("{} bytes for summaries and tables, but there are {} in all",
                       need.index_bytes, limits.memory.index_bytes);
  }
  return invalid(
      fmt::format("context_length_exceeded: {} tokens of prompt and {} of output need {}",
                  request.prompt.size(), resolved_max_tokens(request, limits), lack),
      request.sampling.max_tokens ? "max_tokens" : "prompt");
}

}  // namespace spin::engine
