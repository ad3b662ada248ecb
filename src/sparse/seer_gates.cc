// SPDX-License-Identifier: Apache-2.0
#include "sparse/seer_gates.h"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/parse_number.h"
#include "base/quote.h"

namespace spin::sparse {
namespace {

using backend::Pooling;
using backend::SideWeights;

constexpr uint64_t kLargestWidth = 1024;
constexpr uint64_t kWidthUnit = 16;

Result<std::string> setting_or(const SideWeights& source,
                               std::string_view key,
                               std::string_view fallback) {
  auto found = source.setting(key);
  if (!found.ok() && found.status().code() == StatusCode::kNotFound) return std::string(fallback);
  return found;
}

Result<uint32_t> integer_or(const SideWeights& source,
                            std::string_view key,
                            uint64_t fallback,
                            uint64_t least,
                            uint64_t most) {
  SPIN_ASSIGN_OR_RETURN(const std::string text,
                        setting_or(source, key, fmt::format("{}", fallback)));
  const auto value = base::parse_decimal(text);
  if (value && *value >= least && *value <= most) return static_cast<uint32_t>(*value);
  return Status(StatusCode::kInvalidArgument,
                fmt::format("gates: {} must be an integer from {} to {}, found {}", key, least,
                            most, base::quote_text(text)));
}

Result<bool> flag_or(const SideWeights& source, std::string_view key, bool fallback) {
  SPIN_ASSIGN_OR_RETURN(const std::string text,
                        setting_or(source, key, fallback ? "true" : "false"));
  if (text == "true" || text == "false") return text == "true";
  return Status(
      StatusCode::kInvalidArgument,
      fmt::format("gates: {} must be true or false, found {}", key, base::quote_text(text)));
}

// "Kmaxminavg": the poolings in the order of the projection's inputs, each once.
Status read_poolings(std::string_view text, GateConfig& config) {
  constexpr std::pair<std::string_view, Pooling> kKnown[] = {
      {"max", Pooling::kMax}, {"min", Pooling::kMin}, {"avg", Pooling::kMean}};
  config.poolings = 0;
  std::string_view rest = text;
  bool good = rest.starts_with('K');
  if (good) rest.remove_prefix(1);
  while (good && !rest.empty()) {
    const auto* known = std::find_if(std::begin(kKnown), std::end(kKnown), [&](const auto& entry) {
      return rest.starts_with(entry.first);
    });
    const auto* end = config.order.begin() + config.poolings;
    good = known != std::end(kKnown) && std::find(config.order.cbegin(), end, known->second) == end;
    if (!good) break;
    config.order[config.poolings++] = known->second;
    rest.remove_prefix(known->first.size());
  }
  if (good && config.poolings > 0) return ok_status();
  return Status(StatusCode::kUnsupported,
                fmt::format("gates: seerattn_k_seq_pooling_type must be K and then max, min and "
                            "avg in any order, each at most once, found {}",
                            base::quote_text(text)));
}

Status read_query_pooling(std::string_view text, GateConfig& config) {
  for (const auto& [name, value] :
       {std::pair<std::string_view, QueryPooling>{"Qproj", QueryPooling::kProjected},
        {"Qavgproj", QueryPooling::kMeanProjected},
        {"Qavg", QueryPooling::kMean}}) {
    if (text != name) continue;
    config.query = value;
    return ok_status();
  }
  return Status(StatusCode::kUnsupported,
                fmt::format("gates: seerattn_q_head_pooling_type must be Qproj, Qavgproj or Qavg, "
                            "found {}",
                            base::quote_text(text)));
}

std::string tensor_name(uint32_t layer, std::string_view part) {
  return fmt::format("model.layers.{}.self_attn.attn_gate.attngate_{}.weight", layer, part);
}

// Query weights of every kind as a projection per query head: [kv_heads, group, head_dim, width].
Result<std::vector<float>> read_query(const SideWeights& source,
                                      const GateConfig& config,
                                      const ModelShape& shape,
                                      uint32_t layer) {
  const int64_t heads = shape.geometry.kv_heads;
  const int64_t group = shape.group();
  const int64_t dim = shape.geometry.head_dim;
  const int64_t width = config.width;
  const std::string name = tensor_name(layer, "linear_q");
  if (config.query == QueryPooling::kProjected) {
    const int64_t wanted[] = {heads, group, dim, width};
    return source.read(name, wanted);
  }
  const auto matrix = static_cast<size_t>(dim * width);
  std::vector<float> one(static_cast<size_t>(heads) * matrix, 0.0f);
  if (config.query == QueryPooling::kMeanProjected) {
    const int64_t wanted[] = {heads, dim, width};
    SPIN_ASSIGN_OR_RETURN(one, source.read(name, wanted));
  } else {
    for (size_t i = 0; i < static_cast<size_t>(heads * dim); ++i) {
      one[i * static_cast<size_t>(width) + i % static_cast<size_t>(dim)] = 1.0f;
    }
  }
  std::vector<float> all;
  all.reserve(one.size() * static_cast<size_t>(group));
  for (size_t head = 0; head < static_cast<size_t>(heads); ++head) {
    for (int64_t g = 0; g < group; ++g) {
      std::transform(one.begin() + static_cast<ptrdiff_t>(head * matrix),
                     one.begin() + static_cast<ptrdiff_t>((head + 1) * matrix),
                     std::back_inserter(all),
                     [&](float weight) { return weight / static_cast<float>(group); });
    }
  }
  return all;
}

// The tensors of one layer, one behind the other as GateTensors keeps them.
Result<std::vector<float>> read_layer(const SideWeights& source,
                                      const GateConfig& config,
                                      const ModelShape& shape,
                                      uint32_t layer) {
  const int64_t width = config.width;
  const int64_t key_shape[] = {shape.geometry.kv_heads,
                               int64_t{config.poolings} * shape.geometry.head_dim, width};
  SPIN_ASSIGN_OR_RETURN(std::vector<float> all,
                        source.read(tensor_name(layer, "linear_k"), key_shape));
  SPIN_ASSIGN_OR_RETURN(const auto query, read_query(source, config, shape, layer));
  all.insert(all.end(), query.begin(), query.end());
  if (!config.use_norm) return all;
  for (const std::string_view part : {"knorm", "qnorm"}) {
    SPIN_ASSIGN_OR_RETURN(const auto norm, source.read(tensor_name(layer, part), {&width, 1}));
    all.insert(all.end(), norm.begin(), norm.end());
  }
  return all;
}

}  // namespace

Result<GateConfig> read_gate_config(const SideWeights& source, uint32_t head_dim) {
  GateConfig config;
  SPIN_ASSIGN_OR_RETURN(config.width, integer_or(source, "seerattn_gate_hidden_size", head_dim,
                                                 kWidthUnit, kLargestWidth));
  if (config.width % kWidthUnit != 0) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("gates: seerattn_gate_hidden_size must be a multiple of {}, found {}",
                              kWidthUnit, config.width));
  }
  SPIN_ASSIGN_OR_RETURN(const std::string poolings,
                        setting_or(source, "seerattn_k_seq_pooling_type", "Kmaxminavg"));
  SPIN_RETURN_IF_ERROR(read_poolings(poolings, config));
  SPIN_ASSIGN_OR_RETURN(const std::string query,
                        setting_or(source, "seerattn_q_head_pooling_type", "Qproj"));
  SPIN_RETURN_IF_ERROR(read_query_pooling(query, config));
  SPIN_ASSIGN_OR_RETURN(config.use_norm, flag_or(source, "seerattn_use_qk_norm", true));
  SPIN_ASSIGN_OR_RETURN(config.use_rope, flag_or(source, "seerattn_use_rope", true));
  SPIN_ASSIGN_OR_RETURN(config.start_layer,
                        integer_or(source, "seerattn_start_layer", 0, 0, UINT32_MAX));
  return config;
}

Status check_gate_block(const SideWeights& source, uint64_t block_tokens) {
  SPIN_ASSIGN_OR_RETURN(const uint32_t trained, integer_or(source, "seerattn_gate_block_size",
                                                           block_tokens, 1, UINT32_MAX));
  if (trained == block_tokens) return ok_status();
  return Status(StatusCode::kInvalidArgument,
                fmt::format("gates: seerattn_gate_block_size is {}, but the block is {}", trained,
                            block_tokens));
}

Result<GateTensors> GateTensors::load(const SideWeights& source,
                                      const GateConfig& config,
                                      const ModelShape& shape,
                                      uint32_t first_layer,
                                      backend::Device& device) {
  const uint64_t dim = shape.geometry.head_dim;
  GateTensors gates;
  gates.config_ = config;
  gates.model_rope_ = shape.rope;
  gates.first_layer_ = first_layer;
  gates.key_floats_ = uint64_t{shape.geometry.kv_heads} * config.poolings * dim * config.width;
  gates.query_floats_ = uint64_t{shape.q_heads} * dim * config.width;
  if (config.query == QueryPooling::kMean && config.width != dim) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("gates: Qavg needs a gate as wide as a head, found {} and {}",
                              config.width, dim));
  }
  if (config.use_rope) {
    // A head of width w has the frequencies theta^(-2i/w): every (dim/w)-th of the model's.
    if (dim % config.width != 0) {
      return Status(StatusCode::kUnsupported,
                    fmt::format("gates: with RoPE the gate's width must divide the head's, found "
                                "{} and {}",
                                config.width, dim));
    }
    const uint64_t step = dim / config.width;
    for (uint64_t i = 0; i < config.width / 2; ++i) {
      gates.gate_inv_freq_.push_back(shape.rope.inv_freq[i * step]);
    }
  }
  SPIN_ASSIGN_OR_RETURN(const auto stream, device.create_stream("gates"));
  for (uint32_t layer = first_layer; layer < shape.geometry.layers; ++layer) {
    SPIN_ASSIGN_OR_RETURN(const auto values, read_layer(source, config, shape, layer));
    const size_t bytes = values.size() * sizeof(float);
    SPIN_ASSIGN_OR_RETURN(
        auto buffer, backend::Buffer::allocate(device.memory(backend::MemoryKind::kFast), bytes));
    stream->enqueue_copy(buffer.data(), values.data(), bytes);
    SPIN_RETURN_IF_ERROR(stream->wait_idle());
    gates.layers_.push_back(std::move(buffer));
  }
  return gates;
}

backend::GateWeights GateTensors::layer(uint32_t layer) const {
  const float* floats = layers_[layer - first_layer_].as<float>();
  backend::GateWeights weights;
  weights.key = floats;
  weights.query = floats + key_floats_;
  if (config_.use_norm) {
    weights.key_norm = weights.query + query_floats_;
    weights.query_norm = weights.key_norm + config_.width;
  }
  weights.width = config_.width;
  weights.poolings = config_.poolings;
  weights.order = config_.order;
  weights.model_rope = model_rope_;
  if (config_.use_rope) weights.gate_rope = {gate_inv_freq_, model_rope_.attention_factor};
  return weights;
}

}  // namespace spin::sparse
