// SPDX-License-Identifier: Apache-2.0
#include "engine/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/counter_rng.h"

namespace spin::engine {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
// Modified logits stay inside +-kLargest, so that differences of two of them are finite.
constexpr float kLargest = 1e37f;
constexpr size_t kLanes = 16;

// The result of a modification, which may have overflowed or, with absurd parameters, be no number.
float bounded(double value, float before) {
  if (std::isnan(value)) return before;
  return static_cast<float>(
      std::clamp(value, -static_cast<double>(kLargest), static_cast<double>(kLargest)));
}

// Largest of the row. Separate lanes, because a plain maximum of floats is not vectorised.
float row_maximum(std::span<const float> row) {
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, kMasked);
  size_t i = 0;
  for (; i + kLanes <= row.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = row[i + lane] > lanes[lane] ? row[i + lane] : lanes[lane];
    }
  }
  float largest = kMasked;
  for (const float lane : lanes) largest = std::max(largest, lane);
  for (; i < row.size(); ++i) largest = std::max(largest, row[i]);
  return largest;
}

double log_sum_exp(std::span<const float> row) {
  const float largest = row_maximum(row);
  double sum = 0;
  for (const float value : row) sum += std::exp(value - largest);
  return static_cast<double>(largest) + std::log(sum);
}

// Better: larger value, then lower id. A total order, so selections are unique.
template <typename T>
bool better(const T& a, const T& b, float a_value, float b_value) {
  return a_value != b_value ? a_value > b_value : a.id < b.id;
}

std::vector<TokenScore> top_scores(std::span<const float> row, double norm, uint32_t count) {
  std::vector<TokenScore> heap;  // the worst of the best in front
  const size_t limit = std::min<size_t>(count, row.size());
  heap.reserve(limit);
  const auto order = [](const TokenScore& a, const TokenScore& b) {
    return better(a, b, a.logprob, b.logprob);
  };
  for (size_t i = 0; i < row.size() && limit > 0; ++i) {
    if (heap.size() == limit && !(row[i] > heap.front().logprob)) continue;
    if (heap.size() == limit) {
      std::pop_heap(heap.begin(), heap.end(), order);
      heap.pop_back();
    }
    heap.push_back({static_cast<TokenId>(i), row[i]});
    std::push_heap(heap.begin(), heap.end(), order);
  }
  std::sort_heap(heap.begin(), heap.end(), order);
  for (TokenScore& score : heap) {
    score.logprob = static_cast<float>(static_cast<double>(score.logprob) - norm);
  }
  return heap;
}

Status broken_row() {
  return Status(StatusCode::kInternal, "the model's logits hold a value that is no finite number");
}

}  // namespace

TokenHistory::TokenHistory(std::span<const TokenId> prompt, bool needs_prompt) {
  if (!needs_prompt) return;
  prompt_ids_.assign(prompt.begin(), prompt.end());
  std::sort(prompt_ids_.begin(), prompt_ids_.end());
  prompt_ids_.erase(std::unique(prompt_ids_.begin(), prompt_ids_.end()), prompt_ids_.end());
  prompt_ids_.shrink_to_fit();
}

bool all_finite(std::span<const float> row) {
  // An exponent of all ones is a NaN or an infinity. Integer lanes vectorise.
  uint32_t bad = 0;
  for (const float value : row) {
    bad |= static_cast<uint32_t>((std::bit_cast<uint32_t>(value) & 0x7F800000u) == 0x7F800000u);
  }
  return bad == 0;
}

uint32_t argmax(std::span<const float> row) {
  const float largest = row_maximum(row);
  return static_cast<uint32_t>(std::find(row.begin(), row.end(), largest) - row.begin());
}

Result<SampledToken> Sampler::score(std::span<const float> logits, TokenId id, uint32_t top_count) {
  if (id >= logits.size()) {
    return Status(StatusCode::kInvalidArgument, "token id outside the row of logits");
  }
  if (!all_finite(logits)) return broken_row();
  const double norm = log_sum_exp(logits);
  SampledToken token;
  token.id = id;
  token.logprob = static_cast<float>(static_cast<double>(logits[id]) - norm);
  token.top = top_scores(logits, norm, top_count);
  return token;
}

Result<SampledToken> Sampler::sample(const SampleInput& input) {
  if (input.logits.empty() || !all_finite(input.logits)) return broken_row();
  values_.assign(input.logits.begin(), input.logits.end());
  modify(input);
  SPIN_ASSIGN_OR_RETURN(const TokenId id, choose(input));
  if (input.params->logprobs) return score(input.logits, id, *input.params->logprobs);
  SampledToken token;
  token.id = id;
  return token;
}

void Sampler::modify(const SampleInput& input) {
  const SamplingParams& params = *input.params;
  const auto change = [this](TokenId id, auto&& function) {
    if (id >= values_.size()) return;
    values_[id] = bounded(function(static_cast<double>(values_[id])), values_[id]);
  };
  for (const auto& [id, bias] : params.logit_bias) {
    change(id, [bias = static_cast<double>(bias)](double x) { return x + bias; });
  }
  if (params.repetition_penalty != 1.0f) {
    const double penalty = params.repetition_penalty;
    const auto repeat = [penalty](double x) { return x > 0 ? x / penalty : x * penalty; };
    for (const TokenId id : input.history->prompt_ids()) change(id, repeat);
    for (const auto& [id, count] : input.history->output_counts()) {
      const auto& prompt = input.history->prompt_ids();
      if (!std::binary_search(prompt.begin(), prompt.end(), id)) change(id, repeat);
    }
  }
  if (params.frequency_penalty != 0.0f || params.presence_penalty != 0.0f) {
    for (const auto& [id, count] : input.history->output_counts()) {
      const double penalty = static_cast<double>(params.frequency_penalty) * count +
                             static_cast<double>(params.presence_penalty);
      change(id, [penalty](double x) { return x - penalty; });
    }
  }
  if (input.output_index < params.min_tokens) {
    for (const TokenId id : input.end_ids) {
      if (id < values_.size()) values_[id] = kMasked;
    }
  }
}

Result<TokenId> Sampler::choose(const SampleInput& input) {
  const SamplingParams& params = *input.params;
  const uint32_t best = argmax(values_);
  const float largest = values_[best];
  if (largest == kMasked) {
    return Status(StatusCode::kInternal, "min_tokens leaves no token that may be chosen");
  }
  // Written so that a NaN takes the greedy way.
  if (!(params.temperature >= kGreedyTemperature) || params.top_k == 1) return best;
  keep_likely(largest, params);
  if (params.top_k > 0) keep_top_k(static_cast<uint64_t>(params.top_k));
  if (params.top_p < 1.0f) keep_top_p(params.top_p);

  double sum = 0;
  for (const Candidate& candidate : candidates_) sum += candidate.weight;
  const double target = base::counter_uniform(input.seed, input.choice, input.output_index) * sum;
  double running = 0;
  TokenId chosen = best;
  for (const Candidate& candidate : candidates_) {
    if (candidate.weight <= 0) continue;
    chosen = candidate.id;
    running += candidate.weight;
    if (running > target) break;
  }
  return chosen;
}

void Sampler::keep_likely(float largest, const SamplingParams& params) {
  // min_p: weight >= min_p, in the log domain.
  const double inverse = 1.0 / static_cast<double>(params.temperature);
  const double min_p = params.min_p > 0.0f ? std::min(1.0, static_cast<double>(params.min_p)) : 0.0;
  const double cut = min_p > 0 ? std::log(min_p) : -std::numeric_limits<double>::infinity();
  candidates_.clear();
  for (size_t i = 0; i < values_.size(); ++i) {
    if (values_[i] == kMasked) continue;
    const double exponent = (static_cast<double>(values_[i]) - largest) * inverse;
    if (exponent < cut) continue;
    candidates_.push_back({values_[i], static_cast<TokenId>(i),
                           exponent < -100.0 ? 0.0f : std::exp(static_cast<float>(exponent))});
  }
}

void Sampler::keep_top_k(uint64_t k) {
  if (k >= candidates_.size()) return;
  const auto cut = candidates_.begin() + static_cast<std::ptrdiff_t>(k);
  std::nth_element(
      candidates_.begin(), cut, candidates_.end(),
      [](const Candidate& a, const Candidate& b) { return better(a, b, a.value, b.value); });
  candidates_.erase(cut, candidates_.end());
}

// Keeps the shortest list of best candidates whose weights reach top_p of the sum: a selection by
// halves, linear in all.
void Sampler::keep_top_p(double top_p) {
  double sum = 0;
  for (const Candidate& candidate : candidates_) sum += candidate.weight;
  const double target = top_p > 0 ? top_p * sum : 0;
  size_t low = 0;                    // all before are kept, their weight is `kept`
  size_t high = candidates_.size();  // all from here on are dropped
  double kept = 0;
  while (high - low > 1) {
    const size_t middle = low + (high - low) / 2;
    const auto at = [this](size_t i) {
      return candidates_.begin() + static_cast<std::ptrdiff_t>(i);
    };
    std::nth_element(at(low), at(middle), at(high), [](const Candidate& a, const Candidate& b) {
      return better(a, b, a.value, b.value);
    });
    double upper = 0;
    for (size_t i = low; i < middle; ++i) upper += candidates_[i].weight;
    if (kept + upper >= target) {
      high = middle;
    } else {
      kept += upper;
      low = middle;
    }
  }
  candidates_.resize(std::max<size_t>(high, 1));
}

}  // namespace spin::engine
