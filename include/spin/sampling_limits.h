// SPDX-License-Identifier: Apache-2.0
// The ranges of SamplingParams (spin/request.h). The engine checks them; front ends refuse by them
// before, in their own words. Thread: constants.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spin::sampling_limits {

inline constexpr float kMaxTemperature = 2.0f;
inline constexpr double kMinRepetitionPenalty = 0.01;  // the float next to it is allowed
inline constexpr float kMaxRepetitionPenalty = 100.0f;
inline constexpr float kMaxPresencePenalty = 2.0f;  // and its negative; frequency likewise
inline constexpr float kMaxLogitBias = 100.0f;      // and its negative
inline constexpr uint32_t kMaxChoices = 128;        // n
inline constexpr uint32_t kMaxTopLogprobs = 20;     // logprobs, prompt_logprobs
inline constexpr size_t kMaxStopStrings = 16;
inline constexpr size_t kMaxStopStringBytes = 1024;  // each
inline constexpr size_t kMaxStopTokenIds = 64;
inline constexpr size_t kMaxLogitBiasEntries = 1024;

}  // namespace spin::sampling_limits
