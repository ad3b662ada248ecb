// SPDX-License-Identifier: Apache-2.0
// config.json as transformers writes it. What differs between its versions: rope_theta and
// rope_scaling (4.x) or both inside rope_parameters (5.x), "type" or "rope_type", fields left out
// when they have the class's default.
#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "base/quote.h"
#include "io/json.h"
#include "model/json_fields.h"
#include "model/model_config.h"
#include "model/model_limits.h"
#include "spin/sampling_limits.h"

namespace spin::model {
namespace {

using nlohmann::json;

constexpr std::string_view kFile = "config.json";

Result<json> parse_config(std::string_view text, std::string_view file) {
  auto parsed = io::parse_json(
      text,
      {.max_bytes = kMaxConfigBytes, .max_depth = kMaxConfigDepth, .max_values = kMaxConfigValues});
  if (!parsed.ok()) return parsed.status().with_context(file);
  return parsed;
}

// The class that transformers would make: model_type decides, `architectures` must agree.
Architecture read_architecture(JsonFields& fields) {
  struct Known {
    Architecture architecture;
    std::string_view class_name;
  };
  constexpr Known kKnown[] = {{Architecture::kLlama, "LlamaForCausalLM"},
                              {Architecture::kQwen2, "Qwen2ForCausalLM"},
                              {Architecture::kQwen3, "Qwen3ForCausalLM"}};
  std::string class_name;
  if (const json* list = fields.find("architectures")) {
    if (!list->is_array() || list->size() != 1 || !(*list)[0].is_string()) {
      fields.fail(StatusCode::kInvalidArgument, "architectures must be a list of one string");
      return Architecture::kLlama;
    }
    class_name = (*list)[0].get<std::string>();
  }
  const std::string model_type = fields.text_or("model_type", "");
  if (model_type.empty() && class_name.empty()) {
    fields.fail(StatusCode::kInvalidArgument, "model_type and architectures are both missing");
    return Architecture::kLlama;
  }
  for (const Known& known : kKnown) {
    const bool type_fits =
        model_type.empty() || model_type == architecture_name(known.architecture);
    const bool class_fits = class_name.empty() || class_name == known.class_name;
    if (type_fits && class_fits) return known.architecture;
  }
  fields.fail(StatusCode::kUnsupported,
              fmt::format("model_type {} with architecture {} is not supported; supported are "
                          "llama, qwen2 and qwen3 causal language models",
                          base::quote_text(model_type), base::quote_text(class_name)));
  return Architecture::kLlama;
}

void refuse(JsonFields& fields, std::string_view feature) {
  fields.fail(StatusCode::kUnsupported, fmt::format("{} is not supported", feature));
}

void refuse_sliding_window(JsonFields& fields, const ModelConfig& config) {
  if (const json* types = fields.find("layer_types")) {
    const bool all_full =
        types->is_array() && std::all_of(types->begin(), types->end(),
                                         [](const json& type) { return type == "full_attention"; });
    if (!all_full) refuse(fields, "layer_types other than full_attention");
  }
  // Llama has no window; the others use theirs from layer max_window_layers on.
  if (config.architecture == Architecture::kLlama) return;
  if (!fields.flag_or("use_sliding_window", false)) return;
  const uint64_t window = fields.integer_or("sliding_window", 0, UINT64_MAX, 4096);
  const uint64_t first_layer = fields.integer_or("max_window_layers", 0, UINT64_MAX, 28);
  if (window < config.max_positions && first_layer < config.layers) {
    refuse(fields, "a sliding attention window (use_sliding_window)");
  }
}

// Features that change the arithmetic and that nobody computes here.
void refuse_features(JsonFields& fields, const ModelConfig& config) {
  if (fields.has("quantization_config")) refuse(fields, "quantization_config");
  const std::string activation = fields.text_or("hidden_act", "silu");
  if (activation != "silu") refuse(fields, "hidden_act " + base::quote_text(activation));
  if (config.architecture != Architecture::kQwen2 && fields.flag_or("attention_bias", false)) {
    refuse(fields, "attention_bias");
  }
  if (fields.flag_or("mlp_bias", false)) refuse(fields, "mlp_bias");
  for (std::string_view name : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (fields.has(name)) refuse(fields, fmt::format("a mixture of experts ({})", name));
  }
  if (fields.number_or("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0) {
    refuse(fields, "partial_rotary_factor");
  }
  refuse_sliding_window(fields, config);
}

RopeScaling read_rope_type(JsonFields& rope) {
  const std::string type = rope.text_or("rope_type", rope.text_or("type", "default"));
  if (type == "default") return RopeScaling::kNone;
  for (RopeScaling scaling : {RopeScaling::kLinear, RopeScaling::kLlama3, RopeScaling::kYarn}) {
    if (type == rope_scaling_name(scaling)) return scaling;
  }
  rope.fail(StatusCode::kUnsupported,
            "rope_type " + base::quote_text(type) +
                " is not supported; supported are default, linear, llama3 and yarn");
  return RopeScaling::kNone;
}

// In place of the type's zero or a missing value stands the default, as in transformers.
double beta_or(JsonFields& rope, std::string_view name, double fallback) {
  const double value = rope.number_or(name, 0.0, kMaxRopeParameter, 0.0);
  return value == 0.0 ? fallback : value;
}

std::optional<double> positive_number(JsonFields& rope, std::string_view name) {
  const auto value = rope.optional_number(name, 0.0, kMaxRopeParameter);
  return value == 0.0 ? std::nullopt : value;
}

void read_rope_scaling(JsonFields& rope, uint64_t default_original, RopeConfig& out) {
  out.scaling = read_rope_type(rope);
  if (rope.has("mrope_section")) refuse(rope, "multimodal RoPE (mrope_section)");
  if (rope.number_or("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0) {
    refuse(rope, "partial_rotary_factor");
  }
  if (out.scaling == RopeScaling::kNone) return;
  out.factor = rope.number("factor", 1.0, kMaxRopeFactor);
  if (out.scaling == RopeScaling::kLinear) return;
  out.original_positions =
      rope.integer_or("original_max_position_embeddings", 1, kMaxPositions, default_original);
  if (out.scaling == RopeScaling::kLlama3) {
    out.low_freq_factor = rope.number("low_freq_factor", kMinRopeParameter, kMaxRopeParameter);
    out.high_freq_factor = rope.number("high_freq_factor", kMinRopeParameter, kMaxRopeParameter);
    return;
  }
  out.beta_fast = beta_or(rope, "beta_fast", 32.0);
  out.beta_slow = beta_or(rope, "beta_slow", 1.0);
  out.truncate = rope.flag_or("truncate", true);
  out.attention_factor =
      rope.optional_number("attention_factor", kMinRopeAttentionFactor, kMaxRopeAttentionFactor);
  out.mscale = positive_number(rope, "mscale");
  out.mscale_all_dim = positive_number(rope, "mscale_all_dim");
}

Status read_rope(JsonFields& fields, ModelConfig& config) {
  config.rope.theta = fields.number_or("rope_theta", kMinRopeTheta, kMaxRopeTheta, 10000.0);
  const std::string_view name = fields.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const json* object = fields.find(name);
  if (object == nullptr || (object->is_object() && object->empty())) return ok_status();
  JsonFields rope(*object, fmt::format("{}: {}", kFile, name));
  if (object->is_object() && std::any_of(object->begin(), object->end(),
                                         [](const json& value) { return value.is_object(); })) {
    refuse(rope, "RoPE that differs between layers");
  }
  config.rope.theta = rope.number_or("rope_theta", kMinRopeTheta, kMaxRopeTheta, config.rope.theta);
  read_rope_scaling(rope, config.max_positions, config.rope);
  return rope.status();
}

// Qwen's long-context models attend in two chunk sizes beyond a threshold; up to it their attention
// is the plain one, so that is where their context ends here.
Status read_dual_chunk(JsonFields& fields, ModelConfig& config) {
  const json* object = fields.find("dual_chunk_attention_config");
  if (object == nullptr) return ok_status();
  JsonFields dual(*object, fmt::format("{}: dual_chunk_attention_config", kFile));
  const uint64_t threshold = dual.integer("original_max_position_embeddings", 1, kMaxPositions);
  config.max_positions = std::min(config.max_positions, threshold);
  return dual.status();
}

void read_heads(JsonFields& fields, ModelConfig& config) {
  config.q_heads = static_cast<uint32_t>(fields.integer("num_attention_heads", 1, kMaxHeads));
  // Only Llama's class has a default that follows the number of query heads.
  config.kv_heads = static_cast<uint32_t>(
      config.architecture == Architecture::kLlama
          ? fields.integer_or("num_key_value_heads", 1, kMaxHeads, config.q_heads)
          : fields.integer("num_key_value_heads", 1, kMaxHeads));
  if (fields.has("head_dim")) {
    config.head_dim = static_cast<uint32_t>(fields.integer("head_dim", 1, kMaxHeadDim));
  } else if (config.architecture == Architecture::kQwen3) {
    config.head_dim = 128;  // the class's default
  } else if (config.hidden % config.q_heads == 0) {
    config.head_dim = config.hidden / config.q_heads;
  } else {
    fields.fail(StatusCode::kInvalidArgument,
                fmt::format("without head_dim, hidden_size must be a multiple of "
                            "num_attention_heads, found {} and {}",
                            config.hidden, config.q_heads));
  }
}

void read_ids(JsonFields& fields, ModelConfig& config) {
  const uint64_t max_id = config.vocab_size - 1;
  const std::vector<uint32_t> bos = fields.ids("bos_token_id", max_id, kMaxStopIds);
  if (!bos.empty()) config.bos_id = bos.front();
  config.eos_ids = fields.ids("eos_token_id", max_id, kMaxStopIds);
}

}  // namespace

Result<ModelConfig> config_from_json(std::string_view text) {
  SPIN_ASSIGN_OR_RETURN(const json root, parse_config(text, kFile));
  JsonFields fields(root, std::string(kFile));
  ModelConfig config;
  config.architecture = read_architecture(fields);
  SPIN_RETURN_IF_ERROR(fields.status());
  config.layers = static_cast<uint32_t>(fields.integer("num_hidden_layers", 1, kMaxLayers));
  config.hidden = static_cast<uint32_t>(fields.integer("hidden_size", 1, kMaxHiddenSize));
  config.intermediate =
      static_cast<uint32_t>(fields.integer("intermediate_size", 1, kMaxIntermediateSize));
  config.vocab_size = static_cast<uint32_t>(fields.integer("vocab_size", 1, kMaxVocabSize));
  config.max_positions = fields.integer("max_position_embeddings", 1, kMaxPositions);
  config.rms_epsilon =
      static_cast<float>(fields.number("rms_norm_eps", kMinRmsEpsilon, kMaxRmsEpsilon));
  config.tie_embeddings = fields.flag_or("tie_word_embeddings", false);
  config.qkv_bias = config.architecture == Architecture::kQwen2;
  config.qk_norm = config.architecture == Architecture::kQwen3;
  read_heads(fields, config);
  read_ids(fields, config);
  refuse_features(fields, config);
  SPIN_RETURN_IF_ERROR(fields.status());
  SPIN_RETURN_IF_ERROR(read_rope(fields, config));
  SPIN_RETURN_IF_ERROR(read_dual_chunk(fields, config));
  SPIN_RETURN_IF_ERROR(fields.status());
  const Status status = check_config(config);
  if (!status.ok()) return status.with_context(kFile);
  return config;
}

Result<GenerationConfig> generation_config_from_json(std::string_view text) {
  constexpr std::string_view kName = "generation_config.json";
  SPIN_ASSIGN_OR_RETURN(const json root, parse_config(text, kName));
  JsonFields fields(root, std::string(kName));
  GenerationConfig config;
  config.do_sample = fields.optional_flag("do_sample");
  const auto number = [&](std::string_view name, double low, double high) {
    const auto value = fields.optional_number(name, low, high);
    return value ? std::optional<float>(static_cast<float>(*value)) : std::nullopt;
  };
  config.temperature = number("temperature", 0.0, sampling_limits::kMaxTemperature);
  config.top_p = number("top_p", std::numeric_limits<float>::min(), 1.0);
  config.min_p = number("min_p", 0.0, 1.0);
  config.repetition_penalty = number("repetition_penalty", sampling_limits::kMinRepetitionPenalty,
                                     sampling_limits::kMaxRepetitionPenalty);
  if (const auto top_k = fields.optional_integer("top_k", 0, kMaxVocabSize)) {
    config.top_k = static_cast<int64_t>(*top_k);
  }
  config.max_new_tokens = fields.optional_integer("max_new_tokens", 1, kMaxPositions);
  const std::vector<uint32_t> bos = fields.ids("bos_token_id", kMaxVocabSize - 1, kMaxStopIds);
  if (!bos.empty()) config.bos_id = bos.front();
  config.eos_ids = fields.ids("eos_token_id", kMaxVocabSize - 1, kMaxStopIds);
  SPIN_RETURN_IF_ERROR(fields.status());
  return config;
}

}  // namespace spin::model
