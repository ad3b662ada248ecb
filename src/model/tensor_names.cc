// SPDX-License-Identifier: Apache-2.0
#include "model/tensor_names.h"

#include <fmt/format.h>

namespace spin::model {
namespace {

struct Names {
  TensorRole role;
  bool in_layer;
  std::string_view hugging_face;  // after "model.layers.N." for the layers
  std::string_view gguf;          // after "blk.N."
};

constexpr Names kNames[] = {
    {TensorRole::kEmbedding, false, "model.embed_tokens.weight", "token_embd.weight"},
    {TensorRole::kFinalNorm, false, "model.norm.weight", "output_norm.weight"},
    {TensorRole::kLmHead, false, "lm_head.weight", "output.weight"},
    {TensorRole::kRopeDivisors, false, "", "rope_freqs.weight"},
    {TensorRole::kAttentionNorm, true, "input_layernorm.weight", "attn_norm.weight"},
    {TensorRole::kMlpNorm, true, "post_attention_layernorm.weight", "ffn_norm.weight"},
    {TensorRole::kQ, true, "self_attn.q_proj.weight", "attn_q.weight"},
    {TensorRole::kK, true, "self_attn.k_proj.weight", "attn_k.weight"},
    {TensorRole::kV, true, "self_attn.v_proj.weight", "attn_v.weight"},
    {TensorRole::kOutput, true, "self_attn.o_proj.weight", "attn_output.weight"},
    {TensorRole::kQBias, true, "self_attn.q_proj.bias", "attn_q.bias"},
    {TensorRole::kKBias, true, "self_attn.k_proj.bias", "attn_k.bias"},
    {TensorRole::kVBias, true, "self_attn.v_proj.bias", "attn_v.bias"},
    {TensorRole::kQNorm, true, "self_attn.q_norm.weight", "attn_q_norm.weight"},
    {TensorRole::kKNorm, true, "self_attn.k_norm.weight", "attn_k_norm.weight"},
    {TensorRole::kGate, true, "mlp.gate_proj.weight", "ffn_gate.weight"},
    {TensorRole::kUp, true, "mlp.up_proj.weight", "ffn_up.weight"},
    {TensorRole::kDown, true, "mlp.down_proj.weight", "ffn_down.weight"},
};

const Names& names_of(TensorRole role) {
  static_assert(std::size(kNames) == static_cast<size_t>(TensorRole::kDown) + 1);
  return kNames[static_cast<size_t>(role)];
}

}  // namespace

std::string tensor_name(Naming naming, TensorRole role, uint32_t layer) {
  const Names& names = names_of(role);
  if (naming == Naming::kGguf) {
    return names.in_layer ? fmt::format("blk.{}.{}", layer, names.gguf) : std::string(names.gguf);
  }
  return names.in_layer ? fmt::format("model.layers.{}.{}", layer, names.hugging_face)
                        : std::string(names.hugging_face);
}

std::vector<uint64_t> tensor_shape(const ModelConfig& config, TensorRole role) {
  const uint64_t hidden = config.hidden;
  const uint64_t q = config.q_width();
  const uint64_t kv = config.kv_width();
  switch (role) {
    case TensorRole::kEmbedding:
    case TensorRole::kLmHead:
      return {config.vocab_size, hidden};
    case TensorRole::kFinalNorm:
    case TensorRole::kAttentionNorm:
    case TensorRole::kMlpNorm:
      return {hidden};
    case TensorRole::kRopeDivisors:
      return {config.head_dim / 2};
    case TensorRole::kQ:
      return {q, hidden};
    case TensorRole::kK:
    case TensorRole::kV:
      return {kv, hidden};
    case TensorRole::kOutput:
      return {hidden, q};
    case TensorRole::kQBias:
      return {q};
    case TensorRole::kKBias:
    case TensorRole::kVBias:
      return {kv};
    case TensorRole::kQNorm:
    case TensorRole::kKNorm:
      return {config.head_dim};
    case TensorRole::kGate:
    case TensorRole::kUp:
      return {config.intermediate, hidden};
    case TensorRole::kDown:
      return {hidden, config.intermediate};
  }
  return {};
}

std::vector<TensorRole> layer_roles(const ModelConfig& config) {
  std::vector<TensorRole> roles = {TensorRole::kAttentionNorm,
                                   TensorRole::kMlpNorm,
                                   TensorRole::kQ,
                                   TensorRole::kK,
                                   TensorRole::kV,
                                   TensorRole::kOutput,
                                   TensorRole::kGate,
                                   TensorRole::kUp,
                                   TensorRole::kDown};
  if (config.qkv_bias) {
    for (TensorRole role : {TensorRole::kQBias, TensorRole::kKBias, TensorRole::kVBias}) {
      roles.push_back(role);
    }
  }
  if (config.qk_norm) {
    for (TensorRole role : {TensorRole::kQNorm, TensorRole::kKNorm}) roles.push_back(role);
  }
  return roles;
}

std::vector<TensorRole> top_roles(const ModelConfig& config) {
  std::vector<TensorRole> roles = {TensorRole::kEmbedding, TensorRole::kFinalNorm};
  if (!config.tie_embeddings) roles.push_back(TensorRole::kLmHead);
  return roles;
}

bool is_ignorable(const ModelConfig& config, Naming naming, std::string_view name) {
  if (naming == Naming::kGguf) return false;
  if (config.tie_embeddings && name == names_of(TensorRole::kLmHead).hugging_face) return true;
  return name.ends_with(".rotary_emb.inv_freq");
}

}  // namespace spin::model
