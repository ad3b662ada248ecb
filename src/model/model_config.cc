// SPDX-License-Identifier: Apache-2.0
#include "model/model_config.h"

#include <fmt/format.h>

#include "model/model_limits.h"

namespace spin::model {
namespace {

Status check_range(std::string_view name, uint64_t value, uint64_t high) {
  if (value >= 1 && value <= high) return ok_status();
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{} must be in [1, {}], found {}", name, high, value));
}

Status check_heads(const ModelConfig& config) {
  if (config.head_dim % kHeadDimMultiple != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the head size must be a multiple of {}, found {}", kHeadDimMultiple,
                              config.head_dim));
  }
  if (config.q_heads % config.kv_heads != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the number of query heads must be a multiple of the number of KV "
                              "heads, found {} and {}",
                              config.q_heads, config.kv_heads));
  }
  if (config.q_heads / config.kv_heads > kMaxQueryGroup) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("at most {} query heads share a KV head here, found {}",
                              kMaxQueryGroup, config.q_heads / config.kv_heads));
  }
  return ok_status();
}

Status check_ids(const ModelConfig& config) {
  if (config.bos_id && *config.bos_id >= config.vocab_size) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the begin-of-sequence id {} is not below the vocabulary size {}",
                              *config.bos_id, config.vocab_size));
  }
  for (uint32_t id : config.eos_ids) {
    if (id < config.vocab_size) continue;
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the end-of-sequence id {} is not below the vocabulary size {}", id,
                              config.vocab_size));
  }
  return ok_status();
}

}  // namespace

std::string_view architecture_name(Architecture architecture) {
  switch (architecture) {
    case Architecture::kLlama:
      return "llama";
    case Architecture::kQwen2:
      return "qwen2";
    case Architecture::kQwen3:
      return "qwen3";
  }
  return "unknown";
}

Status check_config(const ModelConfig& config) {
  SPIN_RETURN_IF_ERROR(check_range("the number of layers", config.layers, kMaxLayers));
  SPIN_RETURN_IF_ERROR(check_range("the hidden size", config.hidden, kMaxHiddenSize));
  SPIN_RETURN_IF_ERROR(
      check_range("the intermediate size", config.intermediate, kMaxIntermediateSize));
  SPIN_RETURN_IF_ERROR(check_range("the number of query heads", config.q_heads, kMaxHeads));
  SPIN_RETURN_IF_ERROR(check_range("the number of KV heads", config.kv_heads, kMaxHeads));
  SPIN_RETURN_IF_ERROR(check_range("the head size", config.head_dim, kMaxHeadDim));
  SPIN_RETURN_IF_ERROR(check_range("the vocabulary size", config.vocab_size, kMaxVocabSize));
  SPIN_RETURN_IF_ERROR(check_range("the context length", config.max_positions, kMaxPositions));
  if (!(config.rms_epsilon >= static_cast<float>(kMinRmsEpsilon) &&
        config.rms_epsilon <= static_cast<float>(kMaxRmsEpsilon))) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the RMS epsilon must be in [{}, {}], found {}", kMinRmsEpsilon,
                              kMaxRmsEpsilon, config.rms_epsilon));
  }
  SPIN_RETURN_IF_ERROR(check_heads(config));
  SPIN_RETURN_IF_ERROR(check_ids(config));
  return check_rope(config.rope);
}

}  // namespace spin::model
