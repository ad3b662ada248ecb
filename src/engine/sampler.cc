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

// `value` where `keep`, else +0. By its bits: a plain selection of floats is not vectorised.
float keep_if(bool keep, float value) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) & (0u - static_cast<uint32_t>(keep)));
}

// exp(x) for x <= 0 within two units in the last place; 0 below -87, where floats end.
// Straight-line arithmetic, so that loops over it vectorise (the library's does not).
float exp_of_negative(float x) {
  constexpr float kMagic = 0x1.8p23f;  // adding it rounds to an integer in the low bits
  const bool in_range = x >= -87.0f;   // not for a NaN (0 times infinity)
  const float clamped = keep_if(in_range, x);
  const float shifted = clamped * 0x1.715476p0f + kMagic;
  const float n = shifted - kMagic;
  const float r = clamped - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;  // ln 2 in two parts
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t scale = (std::bit_cast<uint32_t>(shifted) + 127u) << 23;
  const float result = p * std::bit_cast<float>(scale);
  return keep_if(in_range, result);
}

double row_sum(std::span<const float> row) {
  double lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= row.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += row[i + lane];
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  for (; i < row.size(); ++i) sum += row[i];
  return sum;
}

double log_sum_exp(std::span<const float> row) {
  constexpr size_t kBlock = 1024;
  float block[kBlock];
  const float largest = row_maximum(row);
  double sum = 0;
  for (size_t first = 0; first < row.size(); first += kBlock) {
    const std::span<const float> part = row.subspan(first, std::min(kBlock, row.size() - first));
    for (size_t i = 0; i < part.size(); ++i) block[i] = exp_of_negative(part[i] - largest);
    sum += row_sum({block, part.size()});
  }
  return static_cast<double>(largest) + std::log(sum);
}

// Weights in [0, 1] by size: two bins for every power of two.
constexpr size_t kWeightBins = 256;
size_t weight_bin(float weight) { return std::bit_cast<uint32_t>(weight) >> 22; }
static_assert((std::bit_cast<uint32_t>(1.0f) >> 22) < kWeightBins);

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
  weigh(largest, params);
  const double uniform = base::counter_uniform(input.seed, input.choice, input.output_index);
  const bool cut = params.top_p < 1.0f;
  if (params.top_k > 0 && static_cast<uint64_t>(params.top_k) < values_.size()) {
    gather_top_k(static_cast<uint64_t>(params.top_k));
    if (cut) {
      double sum = 0;
      for (const Candidate& candidate : candidates_) sum += candidate.weight;
      keep_top_p(params.top_p, sum);
    }
    return draw_from_candidates(uniform, best);
  }
  if (!cut) return draw_from_row(uniform, best);
  gather_likely(params.top_p);
  return draw_from_candidates(uniform, best);
}

void Sampler::weigh(float largest, const SamplingParams& params) {
  // Values are within +-3.4e38 and the inverse at most 1e5: the product may overflow to minus
  // infinity (weight 0), and the best one's is exactly 0 (weight 1).
  const float inverse = 1.0f / params.temperature;
  const float least = params.min_p > 0.0f ? std::min(1.0f, params.min_p) : 0.0f;
  weights_.resize(values_.size());
  for (size_t i = 0; i < values_.size(); ++i) {
    const float weight = exp_of_negative((values_[i] - largest) * inverse);
    weights_[i] = keep_if(weight >= least, weight);
  }
}

// The k best of the row into candidates_.
void Sampler::gather_top_k(uint64_t k) {
  const auto order = [](const Candidate& a, const Candidate& b) {
    return better(a, b, a.value, b.value);
  };
  candidates_.clear();
  for (size_t i = 0; i < values_.size(); ++i) {
    if (weights_[i] <= 0.0f) continue;
    const bool full = candidates_.size() == k;
    // Ids ascend: an equal value does not replace an earlier one.
    if (full && !(values_[i] > candidates_.front().value)) continue;
    if (full) {
      std::pop_heap(candidates_.begin(), candidates_.end(), order);
      candidates_.pop_back();
    }
    candidates_.push_back({values_[i], static_cast<TokenId>(i), weights_[i]});
    std::push_heap(candidates_.begin(), candidates_.end(), order);
  }
}

// As keep_top_p over the whole row. A coarse histogram of the weights first drops what cannot be
// kept, which is nearly all of a large vocabulary.
void Sampler::gather_likely(double top_p) {
  double bins[kWeightBins] = {};
  for (const float weight : weights_) bins[weight_bin(weight)] += weight;
  double sum = 0;
  for (const double bin : bins) sum += bin;
  size_t lowest = kWeightBins - 1;
  for (double running = bins[lowest]; lowest > 0 && running < top_p * sum;) {
    running += bins[--lowest];
  }
  candidates_.clear();
  for (size_t i = 0; i < values_.size(); ++i) {
    if (weights_[i] > 0.0f && weight_bin(weights_[i]) >= lowest) {
      candidates_.push_back({values_[i], static_cast<TokenId>(i), weights_[i]});
    }
  }
  keep_top_p(top_p, sum);
}

// Keeps the shortest list of best candidates whose weights reach top_p of `sum`: a selection by
// halves, linear in all.
void Sampler::keep_top_p(double top_p, double sum) {
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

// The first token at which the running sum passes `uniform` of the whole. `best` if there is none.
TokenId Sampler::draw_from_row(double uniform, TokenId best) const {
  const double target = uniform * row_sum(weights_);
  double running = 0;
  TokenId chosen = best;
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (weights_[i] <= 0.0f) continue;
    chosen = static_cast<TokenId>(i);
    running += weights_[i];
    if (running > target) break;
  }
  return chosen;
}

TokenId Sampler::draw_from_candidates(double uniform, TokenId best) const {
  double sum = 0;
  for (const Candidate& candidate : candidates_) sum += candidate.weight;
  double running = 0;
  TokenId chosen = best;
  for (const Candidate& candidate : candidates_) {
    if (candidate.weight <= 0.0f) continue;
    chosen = candidate.id;
    running += candidate.weight;
    if (running > uniform * sum) break;
  }
  return chosen;
}

}  // namespace spin::engine
