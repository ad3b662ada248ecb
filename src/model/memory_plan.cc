// SPDX-License-Identifier: Apache-2.0
#include "model/memory_plan.h"

#include "model/decoder.h"

namespace spin::model {
namespace {

// Norms and biases; see LayerWeights.
uint64_t vector_parameter_count(const ModelConfig& config) {
  uint64_t per_layer = 2 * uint64_t{config.hidden};
  if (config.qk_norm) per_layer += 2 * uint64_t{config.head_dim};
  if (config.qkv_bias) per_layer += config.qkv_width();
  return config.layers * per_layer + config.hidden;
}

}  // namespace

uint64_t matrix_parameter_count(const ModelConfig& config) {
  const uint64_t hidden = config.hidden;
  const uint64_t per_layer =
      hidden * config.qkv_width() + hidden * config.q_width() + 3 * hidden * config.intermediate;
  const uint64_t embeddings = config.tie_embeddings ? 1 : 2;
  return config.layers * per_layer + embeddings * hidden * config.vocab_size;
}

uint64_t parameter_count(const ModelConfig& config) {
  return matrix_parameter_count(config) + vector_parameter_count(config);
}

uint64_t weight_bytes(const ModelConfig& config, layout::DType dtype) {
  return matrix_parameter_count(config) * layout::dtype_bytes(dtype) +
         vector_parameter_count(config) * sizeof(float);
}

uint64_t kv_bytes(const layout::KvGeometry& geometry, uint64_t tokens) {
  return geometry.pages_for(tokens) * geometry.page_bytes();
}

MemoryPlan plan_memory(const ModelConfig& config, const MemoryQuestion& question) {
  const layout::KvGeometry geometry = config.kv_geometry(question.page_tokens, question.kv_dtype);
  MemoryPlan plan;
  plan.weight_bytes = weight_bytes(config, question.dtype);
  plan.kv_bytes_per_token = geometry.token_bytes();
  plan.kv_bytes = kv_bytes(geometry, question.context_tokens);
  plan.workspace_bytes = Decoder::workspace_bytes(config, question.rows_per_step);
  plan.logit_bytes = uint64_t{config.vocab_size} * sizeof(float);
  return plan;
}

}  // namespace spin::model
