// SPDX-License-Identifier: Apache-2.0
#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include <fmt/format.h>

#include "base/check.h"
#include "model/model_limits.h"

namespace spin::model {
namespace {

constexpr double kTwoPi = 2.0 * std::numbers::pi;

Status check_range(std::string_view name, double value, double low, double high) {
  // Written so that a NaN fails.
  if (value >= low && value <= high) return ok_status();
  return Status(StatusCode::kInvalidArgument,
                fmt::format("RoPE {} must be in [{}, {}], found {}", name, low, high, value));
}

double llama3_frequency(const RopeConfig& config, double frequency) {
  const double original = static_cast<double>(config.original_positions);
  const double wavelength = kTwoPi / frequency;
  if (wavelength < original / config.high_freq_factor) return frequency;
  if (wavelength > original / config.low_freq_factor) return frequency / config.factor;
  const double smooth = (original / wavelength - config.low_freq_factor) /
                        (config.high_freq_factor - config.low_freq_factor);
  return (1.0 - smooth) * frequency / config.factor + smooth * frequency;
}

// Where YaRN's ramp from "keep" to "interpolate" begins and ends, in units of i.
struct Ramp {
  double begin = 0;
  double end = 0;
};

Ramp yarn_ramp(const RopeConfig& config, uint32_t head_dim) {
  const auto dimension_of = [&](double rotations) {
    return head_dim *
           std::log(static_cast<double>(config.original_positions) / (rotations * kTwoPi)) /
           (2.0 * std::log(config.theta));
  };
  double begin = dimension_of(config.beta_fast);
  double end = dimension_of(config.beta_slow);
  if (config.truncate) {
    begin = std::floor(begin);
    end = std::ceil(end);
  }
  begin = std::max(begin, 0.0);
  end = std::min(end, static_cast<double>(head_dim) - 1.0);
  if (begin == end) end += 0.001;  // no division by zero; the reference does the same
  return {begin, end};
}

double yarn_attention_factor(const RopeConfig& config) {
  if (config.attention_factor) return *config.attention_factor;
  const auto g = [&](double mscale) {
    return config.factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(config.factor) + 1.0;
  };
  if (config.mscale && config.mscale_all_dim) return g(*config.mscale) / g(*config.mscale_all_dim);
  return g(1.0);
}

Status check_llama3(const RopeConfig& config) {
  SPIN_RETURN_IF_ERROR(
      check_range("low_freq_factor", config.low_freq_factor, kMinRopeParameter, kMaxRopeParameter));
  SPIN_RETURN_IF_ERROR(check_range("high_freq_factor", config.high_freq_factor, kMinRopeParameter,
                                   kMaxRopeParameter));
  if (config.low_freq_factor < config.high_freq_factor) return ok_status();
  return Status(StatusCode::kInvalidArgument,
                fmt::format("RoPE low_freq_factor must be less than high_freq_factor, found {} "
                            "and {}",
                            config.low_freq_factor, config.high_freq_factor));
}

Status check_yarn(const RopeConfig& config) {
  SPIN_RETURN_IF_ERROR(
      check_range("beta_fast", config.beta_fast, kMinRopeParameter, kMaxRopeParameter));
  SPIN_RETURN_IF_ERROR(
      check_range("beta_slow", config.beta_slow, kMinRopeParameter, kMaxRopeParameter));
  if (config.beta_fast <= config.beta_slow) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("RoPE beta_fast must be more than beta_slow, found {} and {}",
                              config.beta_fast, config.beta_slow));
  }
  for (const auto& [name, value] :
       {std::pair{"mscale", config.mscale}, std::pair{"mscale_all_dim", config.mscale_all_dim}}) {
    if (!value) continue;
    SPIN_RETURN_IF_ERROR(check_range(name, *value, kMinRopeParameter, kMaxRopeParameter));
  }
  return check_range("attention factor", yarn_attention_factor(config), kMinRopeAttentionFactor,
                     kMaxRopeAttentionFactor);
}

}  // namespace

std::string_view rope_scaling_name(RopeScaling scaling) {
  switch (scaling) {
    case RopeScaling::kNone:
      return "none";
    case RopeScaling::kLinear:
      return "linear";
    case RopeScaling::kLlama3:
      return "llama3";
    case RopeScaling::kYarn:
      return "yarn";
  }
  return "unknown";
}

Status check_rope(const RopeConfig& config) {
  SPIN_RETURN_IF_ERROR(check_range("theta", config.theta, kMinRopeTheta, kMaxRopeTheta));
  if (config.scaling == RopeScaling::kNone) return ok_status();
  SPIN_RETURN_IF_ERROR(check_range("factor", config.factor, 1.0, kMaxRopeFactor));
  if (config.scaling == RopeScaling::kLinear) return ok_status();
  SPIN_RETURN_IF_ERROR(check_range("original_max_position_embeddings",
                                   static_cast<double>(config.original_positions), 1.0,
                                   static_cast<double>(kMaxPositions)));
  return config.scaling == RopeScaling::kLlama3 ? check_llama3(config) : check_yarn(config);
}

RopeTable make_rope_table(const RopeConfig& config,
                          uint32_t head_dim,
                          std::span<const float> divisors) {
  const uint32_t half = head_dim / 2;
  SPIN_CHECK(head_dim % 2 == 0 && (divisors.empty() || divisors.size() == half));
  RopeTable table;
  table.inv_freq.reserve(half);
  const Ramp ramp = config.scaling == RopeScaling::kYarn ? yarn_ramp(config, head_dim) : Ramp{};
  for (uint32_t i = 0; i < half; ++i) {
    double frequency = std::pow(config.theta, -2.0 * i / head_dim);
    if (config.scaling == RopeScaling::kLinear) frequency /= config.factor;
    if (config.scaling == RopeScaling::kLlama3) frequency = llama3_frequency(config, frequency);
    if (config.scaling == RopeScaling::kYarn) {
      const double keep = 1.0 - std::clamp((i - ramp.begin) / (ramp.end - ramp.begin), 0.0, 1.0);
      frequency = keep * frequency + (1.0 - keep) * frequency / config.factor;
    }
    if (!divisors.empty()) frequency /= divisors[i];
    table.inv_freq.push_back(static_cast<float>(frequency));
  }
  if (config.scaling == RopeScaling::kYarn) {
    table.attention_factor = static_cast<float>(yarn_attention_factor(config));
  }
  return table;
}

}  // namespace spin::model
