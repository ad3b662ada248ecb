// SPDX-License-Identifier: Apache-2.0
// What a checkpoint says about its model, checked. A ModelConfig that exists is inside
// model_limits.h and describes a model that the decoder runs; everything else is an error that
// names the field.
//
// Thread: plain data, pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/tensor_source.h"
#include "layout/dtype.h"
#include "layout/kv_geometry.h"
#include "model/rope.h"
#include "spin/status.h"

namespace spin::model {

enum class Architecture : uint8_t { kLlama, kQwen2, kQwen3 };

// "llama", "qwen2", "qwen3".
std::string_view architecture_name(Architecture architecture);

struct ModelConfig {
  Architecture architecture = Architecture::kLlama;
  uint32_t layers = 0;
  uint32_t hidden = 0;
  uint32_t intermediate = 0;
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;  // q_heads * head_dim need not equal hidden
  uint32_t vocab_size = 0;
  float rms_epsilon = 1e-6f;
  RopeConfig rope;
  bool tie_embeddings = false;
  bool qkv_bias = false;  // q, k and v projections carry a bias
  bool qk_norm = false;   // RMS norm of q and k per head, before RoPE
  uint64_t max_positions = 0;
  std::optional<uint32_t> bos_id;
  std::vector<uint32_t> eos_ids;  // [0, kMaxStopIds]

  uint32_t q_width() const { return q_heads * head_dim; }
  uint32_t kv_width() const { return kv_heads * head_dim; }
  uint32_t qkv_width() const { return q_width() + 2 * kv_width(); }

  layout::KvGeometry kv_geometry(uint32_t page_tokens, layout::DType dtype) const {
    return {layers, kv_heads, head_dim, page_tokens, dtype};
  }
};

// The ranges of model_limits.h, and that the parts fit each other. Both readers below end with it.
// Errors: kInvalidArgument.
Status check_config(const ModelConfig& config);

// From the text of config.json, as transformers 4.x or 5.x writes it. `auto_map` and fields that do
// not change the arithmetic are ignored.
// Errors: kInvalidArgument (not JSON; a field missing, of the wrong type or out of range),
// kUnsupported (a feature that changes the arithmetic and that Spin does not compute).
Result<ModelConfig> config_from_json(std::string_view text);

// From the metadata of a GGUF file. `tensors` tells what the metadata leaves out (tied embeddings,
// biases, the vocabulary size). Errors: as above.
Result<ModelConfig> config_from_gguf(const io::GgufMetadata& metadata,
                                     const io::TensorSource& tensors);

// generation_config.json: sampling defaults that the model's makers recommend.
struct GenerationConfig {
  std::optional<bool> do_sample;  // false: greedy, whatever the temperature
  std::optional<float> temperature;
  std::optional<int64_t> top_k;
  std::optional<float> top_p;
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
  std::optional<uint64_t> max_new_tokens;
  std::optional<uint32_t> bos_id;
  std::vector<uint32_t> eos_ids;  // [0, kMaxStopIds]; empty: not given
};

// Errors: kInvalidArgument (not JSON; a field of the wrong type or out of the range of
// SamplingParams). Fields not listed above are ignored.
Result<GenerationConfig> generation_config_from_json(std::string_view text);

}  // namespace spin::model
