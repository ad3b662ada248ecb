// SPDX-License-Identifier: Apache-2.0
// The ranges that a model description must keep, whatever file it comes from. They bound what the
// loader allocates and keep every product of sizes inside 64 bits. Thread: constants.
#pragma once

#include <cstdint>

namespace spin::model {

constexpr uint64_t kMaxConfigBytes = 1 << 20;  // of config.json and generation_config.json
constexpr uint32_t kMaxConfigDepth = 16;       // nested containers in them
constexpr uint64_t kMaxConfigValues = 100'000;

constexpr uint32_t kMaxLayers = 1024;
constexpr uint32_t kMaxHiddenSize = 1 << 16;
constexpr uint32_t kMaxIntermediateSize = 1 << 20;
constexpr uint32_t kMaxHeads = 1024;
constexpr uint32_t kMaxQueryGroup = 8;  // query heads per KV head (backend/ops.h)
constexpr uint32_t kMaxHeadDim = 512;
constexpr uint32_t kHeadDimMultiple = 8;  // (backend/ops.h)
constexpr uint32_t kMaxVocabSize = 1 << 22;
constexpr uint64_t kMaxPositions = 1 << 27;
constexpr uint32_t kMaxStopIds = 64;

constexpr double kMinRmsEpsilon = 1e-12;
constexpr double kMaxRmsEpsilon = 0.1;
constexpr double kMinRopeTheta = 2.0;
constexpr double kMaxRopeTheta = 1e12;
constexpr double kMaxRopeFactor = 1024;     // of any scaling; at least 1
constexpr double kMinRopeParameter = 1e-6;  // betas, frequency factors, mscale
constexpr double kMaxRopeParameter = 1e6;
constexpr double kMinRopeAttentionFactor = 1e-3;  // on cos and sin
constexpr double kMaxRopeAttentionFactor = 16;
constexpr double kMaxRopeDivisor = 1e6;  // of rope_freqs.weight; at least 1e-6

constexpr uint32_t kMaxRowsPerStep = 1 << 20;

}  // namespace spin::model
