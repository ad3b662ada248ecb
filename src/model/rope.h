// SPDX-License-Identifier: Apache-2.0
// Rotary embedding: frequency tables of every scaling variant, in the words of transformers'
// modeling_rope_utils. Thread: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "spin/status.h"

namespace spin::model {

enum class RopeScaling : uint8_t { kNone, kLinear, kLlama3, kYarn };

// "none", "linear", "llama3", "yarn".
std::string_view rope_scaling_name(RopeScaling scaling);

struct RopeConfig {
  double theta = 10000.0;
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1.0;              // linear, llama3, yarn
  uint64_t original_positions = 0;  // llama3, yarn: context before scaling
  // llama3
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  // yarn
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  bool truncate = true;  // round the ends of the ramp to whole dimensions
  std::optional<double> attention_factor = std::nullopt;
  std::optional<double> mscale = std::nullopt;
  std::optional<double> mscale_all_dim = std::nullopt;
};

struct RopeTable {
  std::vector<float> inv_freq;    // [head_dim / 2]
  float attention_factor = 1.0f;  // on cos and sin
};

// Errors: kInvalidArgument: a parameter outside model_limits.h, low_freq_factor >=
// high_freq_factor, beta_fast <= beta_slow, original_positions missing.
Status check_rope(const RopeConfig& config);

// Computed in double, rounded to float once. With i < head_dim / 2, f_i = theta^(-2i / head_dim):
//   none    f_i
//   linear  f_i / factor
//   llama3  wavelength w = 2 pi / f_i; w < original / high: f_i; w > original / low: f_i / factor;
//           between, with s = (original / w - low) / (high - low): (1 - s) f_i / factor + s f_i
//   yarn    e_i f_i + (1 - e_i) f_i / factor, e_i = 1 - clamp((i - a) / (b - a), 0, 1),
//           a, b = d(beta_fast), d(beta_slow) (floor and ceil if truncate) inside
//           [0, head_dim - 1], d(r) = head_dim ln(original / (2 pi r)) / (2 ln theta);
//           attention factor as given, else g(mscale) / g(mscale_all_dim) if both are given, else
//           g(1), where g(m) = 0.1 m ln(factor) + 1
// `divisors` (GGUF's rope_freqs.weight, [head_dim / 2], or empty) divide the result.
// Requires: check_rope(config) is ok; head_dim is even; divisors are positive.
RopeTable make_rope_table(const RopeConfig& config,
                          uint32_t head_dim,
                          std::span<const float> divisors);

}  // namespace spin::model
