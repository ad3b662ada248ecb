// SPDX-License-Identifier: Apache-2.0
// From a row of logits to a token.
//
// Order of operations (vLLM's): log-probabilities are taken from the raw row. Then logit_bias; the
// penalties (repetition, frequency, presence); the end tokens are masked while min_tokens are not
// reached, whatever the bias; temperature; min_p, top_k, top_p, each on what the one before left;
// the draw. Below kGreedyTemperature the largest value is taken. Ties go to the lowest id
// everywhere. Whatever floats the parameters hold, the result is a token of the row or an error:
// the request's checked ranges (engine/admission.h) are not relied upon.
//
// The draw is a pure function of (seed, choice, output index), so it does not depend on the batch.
// Cost: a few passes over the row that vectorise, no sort of it.
// Thread: a Sampler has scratch memory and belongs to one thread; the rest is plain data.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "spin/request.h"
#include "spin/status.h"
#include "spin/token.h"

namespace spin::engine {

inline constexpr float kGreedyTemperature = 1e-5f;

// The tokens that the penalties look at.
class TokenHistory {
 public:
  TokenHistory() = default;
  // `prompt` is kept (its distinct ids) only if `needs_prompt`: repetition penalty looks at it.
  TokenHistory(std::span<const TokenId> prompt, bool needs_prompt);

  void add_output(TokenId id) { ++output_counts_[id]; }

  std::span<const TokenId> prompt_ids() const { return prompt_ids_; }  // distinct, ascending
  const std::unordered_map<TokenId, uint32_t>& output_counts() const { return output_counts_; }

 private:
  std::vector<TokenId> prompt_ids_;
  std::unordered_map<TokenId, uint32_t> output_counts_;
};

struct SampleInput {
  std::span<const float> logits;  // [vocab]: exactly the ids that may be chosen
  const SamplingParams* params = nullptr;
  const TokenHistory* history = nullptr;
  // Ids that must not come before min_tokens: all end tokens and stop_token_ids.
  std::span<const TokenId> end_ids;
  uint64_t seed = 0;
  uint32_t choice = 0;
  uint64_t output_index = 0;  // tokens already sampled for this choice
};

struct TokenScore {
  TokenId id = 0;
  float logprob = 0.0f;
};

struct SampledToken {
  TokenId id = 0;
  float logprob = 0.0f;         // where asked for
  std::vector<TokenScore> top;  // where asked for, best first
};

class Sampler {
 public:
  // Errors: kInternal when the row holds a NaN or an infinity, or when no token may be chosen.
  Result<SampledToken> sample(const SampleInput& input);

  // Log-probability of `id` in the softmax of `logits`, and the `top_count` most likely tokens.
  // Errors: kInternal when the row holds a NaN or an infinity; kInvalidArgument for an id outside.
  Result<SampledToken> score(std::span<const float> logits, TokenId id, uint32_t top_count);

 private:
  struct Candidate {
    float value = 0.0f;  // modified logit
    TokenId id = 0;
    float weight = 0.0f;
  };
  void modify(const SampleInput& input);
  Result<TokenId> choose(const SampleInput& input);
  void weigh(float largest, const SamplingParams& params);
  void gather_top_k(uint64_t k);
  void gather_likely(double top_p);
  void keep_top_p(double top_p, double sum);
  TokenId draw_from_row(double uniform, TokenId best) const;
  TokenId draw_from_candidates(double uniform, TokenId best) const;

  std::vector<float> values_;   // [vocab] modified logits
  std::vector<float> weights_;  // [vocab] exp((value - largest) / temperature), 0: out
  std::vector<Candidate> candidates_;
};

// Whether every value is finite.
bool all_finite(std::span<const float> row);

// Index of the largest value, the lowest among equals. Requires: not empty, no NaN.
uint32_t argmax(std::span<const float> row);

}  // namespace spin::engine
