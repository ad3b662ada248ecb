// SPDX-License-Identifier: Apache-2.0
// The tensors of a model by name and shape, in Hugging Face's and in GGUF's words. Internal to
// src/model. Thread: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/model_config.h"

namespace spin::model {

enum class Naming : uint8_t { kHuggingFace, kGguf };

enum class TensorRole : uint8_t {
  kEmbedding,
  kFinalNorm,
  kLmHead,
  kRopeDivisors,  // GGUF only
  kAttentionNorm,
  kMlpNorm,
  kQ,
  kK,
  kV,
  kOutput,
  kQBias,
  kKBias,
  kVBias,
  kQNorm,
  kKNorm,
  kGate,
  kUp,
  kDown,
};

// `layer` is ignored for roles outside the layers.
std::string tensor_name(Naming naming, TensorRole role, uint32_t layer);

// Row-major: [rows, cols] of a matrix, [size] of a vector.
std::vector<uint64_t> tensor_shape(const ModelConfig& config, TensorRole role);

// The roles that `config` has in each layer, and those outside the layers. An optional tensor
// (kRopeDivisors) is not among them.
std::vector<TensorRole> layer_roles(const ModelConfig& config);
std::vector<TensorRole> top_roles(const ModelConfig& config);

// A tensor that a checkpoint may hold and that is not read: a second copy of a tied embedding, and
// RoPE frequencies that old checkpoints store though the config determines them.
bool is_ignorable(const ModelConfig& config, Naming naming, std::string_view name);

}  // namespace spin::model
