// SPDX-License-Identifier: Apache-2.0
// A model's shape from GGUF metadata, with llama.cpp's meaning of every key.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "base/quote.h"
#include "io/gguf.h"
#include "model/model_config.h"
#include "model/model_limits.h"

namespace spin::model {
namespace {

Status unsupported(std::string_view feature) {
  return Status(StatusCode::kUnsupported, fmt::format("{} is not supported", feature));
}

// Typed look-up of "ARCH.name".
class Keys {
 public:
  Keys(const io::GgufMetadata& metadata, Architecture architecture)
      : metadata_(metadata), prefix_(fmt::format("{}.", architecture_name(architecture))) {}

  bool has(std::string_view name) const { return metadata_.contains(full(name)); }

  Result<uint64_t> integer(std::string_view name, uint64_t high) const {
    SPIN_ASSIGN_OR_RETURN(const uint64_t value, metadata_.get_uint(full(name)));
    if (value >= 1 && value <= high) return value;
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} must be in [1, {}], found {}", full(name), high, value));
  }
  Result<uint64_t> integer_or(std::string_view name, uint64_t high, uint64_t fallback) const {
    if (!has(name)) return fallback;
    return integer(name, high);
  }
  Result<double> number_or(std::string_view name, double low, double high, double fallback) const {
    SPIN_ASSIGN_OR_RETURN(const double value, metadata_.get_float_or(full(name), fallback));
    if (value >= low && value <= high) return value;
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} must be in [{}, {}], found {}", full(name), low, high, value));
  }
  Result<uint64_t> count_or_zero(std::string_view name) const {
    return metadata_.get_uint_or(full(name), 0);
  }
  Result<std::string_view> text_or(std::string_view name, std::string_view fallback) const {
    return metadata_.get_string_or(full(name), fallback);
  }

 private:
  std::string full(std::string_view name) const { return prefix_ + std::string(name); }

  const io::GgufMetadata& metadata_;
  std::string prefix_;
};

Result<Architecture> read_architecture(const io::GgufMetadata& metadata) {
  SPIN_ASSIGN_OR_RETURN(const std::string_view name, metadata.get_string("general.architecture"));
  for (Architecture known : {Architecture::kLlama, Architecture::kQwen2, Architecture::kQwen3}) {
    if (name == architecture_name(known)) return known;
  }
  return Status(StatusCode::kUnsupported,
                fmt::format("architecture {} is not supported; supported are llama, qwen2 and "
                            "qwen3",
                            base::quote_text(name)));
}

Status read_sizes(const Keys& keys, ModelConfig& config) {
  const auto read = [&](std::string_view name, uint64_t high, auto& out) -> Status {
    SPIN_ASSIGN_OR_RETURN(const uint64_t value, keys.integer(name, high));
    out = static_cast<std::remove_reference_t<decltype(out)>>(value);
    return ok_status();
  };
  SPIN_RETURN_IF_ERROR(read("block_count", kMaxLayers, config.layers));
  SPIN_RETURN_IF_ERROR(read("embedding_length", kMaxHiddenSize, config.hidden));
  SPIN_RETURN_IF_ERROR(read("feed_forward_length", kMaxIntermediateSize, config.intermediate));
  SPIN_RETURN_IF_ERROR(read("context_length", kMaxPositions, config.max_positions));
  SPIN_RETURN_IF_ERROR(read("attention.head_count", kMaxHeads, config.q_heads));
  SPIN_ASSIGN_OR_RETURN(const uint64_t kv_heads,
                        keys.integer_or("attention.head_count_kv", kMaxHeads, config.q_heads));
  config.kv_heads = static_cast<uint32_t>(kv_heads);
  if (!keys.has("attention.layer_norm_rms_epsilon")) {
    return Status(StatusCode::kInvalidArgument, "attention.layer_norm_rms_epsilon is missing");
  }
  SPIN_ASSIGN_OR_RETURN(const double epsilon, keys.number_or("attention.layer_norm_rms_epsilon",
                                                             0.0, kMaxRmsEpsilon, 0.0));
  config.rms_epsilon = static_cast<float>(epsilon);
  return ok_status();
}

Status read_head_dim(const Keys& keys, ModelConfig& config) {
  if (!keys.has("attention.key_length") && config.hidden % config.q_heads != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("without attention.key_length, embedding_length must be a multiple "
                              "of attention.head_count, found {} and {}",
                              config.hidden, config.q_heads));
  }
  const uint64_t fallback = config.hidden / config.q_heads;
  SPIN_ASSIGN_OR_RETURN(const uint64_t keys_length,
                        keys.integer_or("attention.key_length", kMaxHeadDim, fallback));
  SPIN_ASSIGN_OR_RETURN(const uint64_t values_length,
                        keys.integer_or("attention.value_length", kMaxHeadDim, fallback));
  if (keys_length != values_length) return unsupported("a value size other than the key size");
  SPIN_ASSIGN_OR_RETURN(const uint64_t rotated,
                        keys.integer_or("rope.dimension_count", kMaxHeadDim, keys_length));
  if (rotated != keys_length) return unsupported("RoPE on a part of the head");
  config.head_dim = static_cast<uint32_t>(keys_length);
  return ok_status();
}

Status refuse_features(const Keys& keys, const ModelConfig& config) {
  // Some converters write 0 for what a model does not have.
  SPIN_ASSIGN_OR_RETURN(const uint64_t experts, keys.count_or_zero("expert_count"));
  if (experts != 0) return unsupported("a mixture of experts (expert_count)");
  SPIN_ASSIGN_OR_RETURN(const uint64_t window, keys.count_or_zero("attention.sliding_window"));
  if (window != 0 && window < config.max_positions) {
    return unsupported("a sliding attention window (attention.sliding_window)");
  }
  if (keys.has("rope.dimension_sections")) return unsupported("multimodal RoPE");
  return ok_status();
}

Status read_yarn(const Keys& keys, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  SPIN_ASSIGN_OR_RETURN(
      rope.original_positions,
      keys.integer_or("rope.scaling.original_context_length", kMaxPositions, config.max_positions));
  SPIN_ASSIGN_OR_RETURN(rope.beta_fast, keys.number_or("rope.scaling.yarn_beta_fast",
                                                       kMinRopeParameter, kMaxRopeParameter, 32.0));
  SPIN_ASSIGN_OR_RETURN(rope.beta_slow, keys.number_or("rope.scaling.yarn_beta_slow",
                                                       kMinRopeParameter, kMaxRopeParameter, 1.0));
  SPIN_ASSIGN_OR_RETURN(const double ramp, keys.number_or("rope.scaling.yarn_ext_factor", -1.0,
                                                          kMaxRopeParameter, 1.0));
  if (ramp >= 0.0 && ramp != 1.0) return unsupported("rope.scaling.yarn_ext_factor other than 1");
  SPIN_ASSIGN_OR_RETURN(const double log_multiplier,
                        keys.number_or("rope.scaling.yarn_log_multiplier", 0.0, 1e6, 0.0));
  if (log_multiplier != 0.0) return unsupported("rope.scaling.yarn_log_multiplier");
  double attention = 0.1 * std::log(rope.factor) + 1.0;
  for (std::string_view name : {"rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"}) {
    SPIN_ASSIGN_OR_RETURN(const double scale, keys.number_or(name, kMinRopeAttentionFactor,
                                                             kMaxRopeAttentionFactor, 1.0));
    attention *= scale;
  }
  rope.attention_factor = attention;
  return ok_status();
}

Status read_rope(const Keys& keys, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  SPIN_ASSIGN_OR_RETURN(rope.theta,
                        keys.number_or("rope.freq_base", kMinRopeTheta, kMaxRopeTheta, 10000.0));
  // A factor of 0 means 1; scale_linear is the key of older files.
  SPIN_ASSIGN_OR_RETURN(const double old_factor,
                        keys.number_or("rope.scale_linear", 0.0, kMaxRopeFactor, 0.0));
  SPIN_ASSIGN_OR_RETURN(const double factor,
                        keys.number_or("rope.scaling.factor", 0.0, kMaxRopeFactor, old_factor));
  rope.factor = factor == 0.0 ? 1.0 : factor;
  SPIN_ASSIGN_OR_RETURN(const std::string_view type, keys.text_or("rope.scaling.type", "linear"));
  if (type == "yarn") {
    rope.scaling = RopeScaling::kYarn;
    return read_yarn(keys, config);
  }
  if (type != "linear" && type != "none") {
    return unsupported("rope.scaling.type " + base::quote_text(type));
  }
  rope.scaling = type == "linear" && rope.factor != 1.0 ? RopeScaling::kLinear : RopeScaling::kNone;
  return ok_status();
}

// The end-of-turn and end-of-message tokens end a reply like the end-of-sequence token.
Status read_ids(const io::GgufMetadata& metadata, ModelConfig& config) {
  const auto read = [&](std::string_view name) -> Result<std::optional<uint32_t>> {
    const std::string key = fmt::format("tokenizer.ggml.{}", name);
    if (!metadata.contains(key)) return std::optional<uint32_t>();
    SPIN_ASSIGN_OR_RETURN(const uint64_t id, metadata.get_uint(key));
    if (id < config.vocab_size) return std::optional<uint32_t>(static_cast<uint32_t>(id));
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} must be below the vocabulary size {}, found {}", key,
                              config.vocab_size, id));
  };
  SPIN_ASSIGN_OR_RETURN(config.bos_id, read("bos_token_id"));
  for (std::string_view name : {"eos_token_id", "eot_token_id", "eom_token_id"}) {
    SPIN_ASSIGN_OR_RETURN(const std::optional<uint32_t> id, read(name));
    if (!id) continue;
    if (std::find(config.eos_ids.begin(), config.eos_ids.end(), *id) == config.eos_ids.end()) {
      config.eos_ids.push_back(*id);
    }
  }
  return ok_status();
}

Status read_tensors(const io::TensorSource& tensors, ModelConfig& config) {
  const io::TensorInfo* embedding = tensors.find("token_embd.weight");
  if (embedding == nullptr) {
    return Status(StatusCode::kUnsupported,
                  "tensor token_embd.weight is missing; a file with only a vocabulary can "
                  "tokenize but not generate");
  }
  if (embedding->shape.size() != 2 || embedding->shape[0] > kMaxVocabSize) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("token_embd.weight must have two dimensions and at most {} rows",
                              kMaxVocabSize));
  }
  config.vocab_size = static_cast<uint32_t>(embedding->shape[0]);
  config.tie_embeddings = tensors.find("output.weight") == nullptr;
  return ok_status();
}

Result<ModelConfig> read_config(const io::GgufMetadata& metadata, const io::TensorSource& tensors) {
  ModelConfig config;
  SPIN_ASSIGN_OR_RETURN(config.architecture, read_architecture(metadata));
  const Keys keys(metadata, config.architecture);
  SPIN_RETURN_IF_ERROR(read_tensors(tensors, config));
  SPIN_RETURN_IF_ERROR(read_sizes(keys, config));
  SPIN_RETURN_IF_ERROR(read_head_dim(keys, config));
  SPIN_RETURN_IF_ERROR(refuse_features(keys, config));
  SPIN_RETURN_IF_ERROR(read_rope(keys, config));
  SPIN_RETURN_IF_ERROR(read_ids(metadata, config));
  config.qkv_bias = config.architecture == Architecture::kQwen2;
  config.qk_norm = config.architecture == Architecture::kQwen3;
  SPIN_RETURN_IF_ERROR(check_config(config));
  return config;
}

}  // namespace

Result<ModelConfig> config_from_gguf(const io::GgufMetadata& metadata,
                                     const io::TensorSource& tensors) {
  auto config = read_config(metadata, tensors);
  if (!config.ok()) return config.status().with_context("GGUF metadata");
  return config;
}

}  // namespace spin::model
