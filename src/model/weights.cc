// SPDX-License-Identifier: Apache-2.0
#include "model/weights.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/checked_math.h"
#include "base/quote.h"
#include "model/memory_plan.h"
#include "model/model_limits.h"
#include "model/tensor_names.h"

namespace spin::model {
namespace {

Naming naming_of(const io::TensorSource& source) {
  return source.gguf_metadata() != nullptr ? Naming::kGguf : Naming::kHuggingFace;
}

std::string shape_text(const std::vector<uint64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

Status check_tensor(const io::TensorInfo& info, const std::vector<uint64_t>& expected) {
  if (info.shape != expected) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("tensor {} has shape {}, the config calls for {}", base::quote_text(info.name),
                    shape_text(info.shape), shape_text(expected)));
  }
  if (info.type == io::ElementType::kUnsupported) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("tensor {} has element type {}, which is not supported",
                              base::quote_text(info.name), base::quote_text(info.type_name)));
  }
  return ok_status();
}

// One tensor as a part of a packed matrix.
struct Part {
  const io::TensorInfo* info = nullptr;
  // Heads whose rows GGUF has interleaved for pairwise RoPE (architecture llama); 0: rows in order.
  uint32_t interleaved_heads = 0;
};

// Row of the file that holds row `row` of a matrix for half-split RoPE: within a head of d rows,
// GGUF keeps row (s, j) of [2, d/2] at (j, s) of [d/2, 2].
uint64_t interleaved_row(uint64_t row, uint64_t rows, uint32_t heads) {
  const uint64_t head_rows = rows / heads;
  const uint64_t half = head_rows / 2;
  const uint64_t within = row % head_rows;
  return row - within + (within % half) * 2 + within / half;
}

class Loader {
 public:
  Loader(const io::TensorSource& source,
         const ModelConfig& config,
         backend::Device& device,
         const WeightOptions& options)
      : source_(source),
        config_(config),
        device_(device),
        options_(options),
        naming_(naming_of(source)),
        total_(parameter_count(config)) {}

  Result<ModelWeights> load() {
    weights_.dtype = options_.dtype;
    weights_.layers.resize(config_.layers);
    SPIN_RETURN_IF_ERROR(load_vectors());
    SPIN_RETURN_IF_ERROR(load_rope_divisors());
    SPIN_RETURN_IF_ERROR(pack({part(TensorRole::kEmbedding)}, weights_.embedding));
    if (!config_.tie_embeddings) {
      SPIN_RETURN_IF_ERROR(pack({part(TensorRole::kLmHead)}, weights_.lm_head));
    }
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      SPIN_RETURN_IF_ERROR(load_layer(layer));
    }
    return std::move(weights_);
  }

 private:
  const io::TensorInfo& info(TensorRole role, uint32_t layer = 0) const {
    const io::TensorInfo* found = source_.find(tensor_name(naming_, role, layer));
    SPIN_CHECK(found != nullptr);  // check_tensors() has seen it
    return *found;
  }

  Part part(TensorRole role, uint32_t layer = 0) const {
    Part part{.info = &info(role, layer)};
    if (naming_ == Naming::kGguf && config_.architecture == Architecture::kLlama) {
      if (role == TensorRole::kQ) part.interleaved_heads = config_.q_heads;
      if (role == TensorRole::kK) part.interleaved_heads = config_.kv_heads;
    }
    return part;
  }

  Status load_layer(uint32_t layer) {
    LayerWeights& out = weights_.layers[layer];
    SPIN_RETURN_IF_ERROR(pack(
        {part(TensorRole::kQ, layer), part(TensorRole::kK, layer), part(TensorRole::kV, layer)},
        out.qkv));
    SPIN_RETURN_IF_ERROR(pack({part(TensorRole::kOutput, layer)}, out.output));
    SPIN_RETURN_IF_ERROR(
        pack({part(TensorRole::kGate, layer), part(TensorRole::kUp, layer)}, out.gate_up));
    return pack({part(TensorRole::kDown, layer)}, out.down);
  }

  Status read_rows(const Part& part, uint64_t first, uint64_t rows, std::span<float> out) const {
    if (part.interleaved_heads == 0) return source_.read_rows_f32(*part.info, first, rows, out);
    const uint64_t cols = part.info->row_elements();
    for (uint64_t i = 0; i < rows; ++i) {
      const uint64_t row = interleaved_row(first + i, part.info->rows(), part.interleaved_heads);
      SPIN_RETURN_IF_ERROR(source_.read_rows_f32(*part.info, row, 1, out.subspan(i * cols, cols)));
    }
    return ok_status();
  }

  // The parts' rows one after another as one matrix.
  Status pack(const std::vector<Part>& parts, std::unique_ptr<backend::PackedMatrix>& out) {
    const uint64_t cols = parts.front().info->row_elements();
    uint64_t total_rows = 0;
    for (const Part& one : parts) total_rows += one.info->rows();
    const backend::RowSource rows = [&](int64_t first, int64_t count,
                                        std::span<float> to) -> Status {
      uint64_t skip = static_cast<uint64_t>(first);
      uint64_t left = static_cast<uint64_t>(count);
      for (const Part& one : parts) {
        const uint64_t here = one.info->rows();
        if (skip >= here) {
          skip -= here;
          continue;
        }
        const uint64_t take = std::min(left, here - skip);
        SPIN_RETURN_IF_ERROR(read_rows(one, skip, take, to.first(take * cols)));
        to = to.subspan(take * cols);
        left -= take;
        skip = 0;
      }
      return ok_status();
    };
    SPIN_ASSIGN_OR_RETURN(
        out, device_.ops().pack_matrix(static_cast<int64_t>(total_rows), static_cast<int64_t>(cols),
                                       options_.dtype, rows));
    for (const Part& one : parts) source_.drop(*one.info);
    return report(total_rows * cols);
  }

  Status report(uint64_t parameters) {
    done_ += parameters;
    if (!options_.progress || options_.progress(done_, total_)) return ok_status();
    return Status(StatusCode::kCancelled, "loading was cancelled");
  }

  // Appends a vector to the staging area at a cache line's edge; returns its first element.
  Result<size_t> stage(std::initializer_list<TensorRole> roles, uint32_t layer) {
    constexpr size_t kLineFloats = 16;
    const size_t begin = (staging_.size() + kLineFloats - 1) / kLineFloats * kLineFloats;
    staging_.resize(begin);
    for (TensorRole role : roles) {
      const io::TensorInfo& one = info(role, layer);
      const size_t first = staging_.size();
      staging_.resize(first + one.elements);
      const std::span<float> values = std::span(staging_).subspan(first);
      SPIN_RETURN_IF_ERROR(source_.read_rows_f32(one, 0, one.rows(), values));
      SPIN_RETURN_IF_ERROR(check_finite(one, values));
      SPIN_RETURN_IF_ERROR(report(one.elements));
    }
    return begin;
  }

  static Status check_finite(const io::TensorInfo& info, std::span<const float> values) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::isfinite(values[i])) continue;
      return Status(StatusCode::kCorrupt, fmt::format("tensor {} holds {} at index {}",
                                                      base::quote_text(info.name), values[i], i));
    }
    return ok_status();
  }

  // All norms and biases, through one staging copy into fast memory.
  Status load_vectors() {
    struct Place {
      const float** pointer;
      size_t first;
    };
    std::vector<Place> places;
    const auto place = [&](const float*& pointer, std::initializer_list<TensorRole> roles,
                           uint32_t layer) -> Status {
      SPIN_ASSIGN_OR_RETURN(const size_t first, stage(roles, layer));
      places.push_back({&pointer, first});
      return ok_status();
    };
    SPIN_RETURN_IF_ERROR(place(weights_.final_norm, {TensorRole::kFinalNorm}, 0));
    for (uint32_t i = 0; i < config_.layers; ++i) {
      LayerWeights& layer = weights_.layers[i];
      SPIN_RETURN_IF_ERROR(place(layer.attention_norm, {TensorRole::kAttentionNorm}, i));
      SPIN_RETURN_IF_ERROR(place(layer.mlp_norm, {TensorRole::kMlpNorm}, i));
      if (config_.qk_norm) {
        SPIN_RETURN_IF_ERROR(place(layer.q_norm, {TensorRole::kQNorm}, i));
        SPIN_RETURN_IF_ERROR(place(layer.k_norm, {TensorRole::kKNorm}, i));
      }
      if (config_.qkv_bias) {
        SPIN_RETURN_IF_ERROR(
            place(layer.qkv_bias, {TensorRole::kQBias, TensorRole::kKBias, TensorRole::kVBias}, i));
      }
    }
    const size_t bytes = staging_.size() * sizeof(float);
    SPIN_ASSIGN_OR_RETURN(weights_.vectors, backend::Buffer::allocate(
                                                device_.memory(backend::MemoryKind::kFast), bytes));
    SPIN_ASSIGN_OR_RETURN(const auto stream, device_.create_stream("load"));
    stream->enqueue_copy(weights_.vectors.data(), staging_.data(), bytes);
    SPIN_RETURN_IF_ERROR(stream->wait_idle());
    for (const Place& one : places) *one.pointer = weights_.vectors.as<float>() + one.first;
    return ok_status();
  }

  Status load_rope_divisors() {
    if (naming_ != Naming::kGguf) return ok_status();
    const io::TensorInfo* found = source_.find(tensor_name(naming_, TensorRole::kRopeDivisors, 0));
    if (found == nullptr) return ok_status();
    weights_.rope_divisors.resize(found->elements);
    SPIN_RETURN_IF_ERROR(source_.read_rows_f32(*found, 0, found->rows(), weights_.rope_divisors));
    for (float divisor : weights_.rope_divisors) {
      if (divisor >= 1.0 / kMaxRopeDivisor && divisor <= kMaxRopeDivisor) continue;
      return Status(StatusCode::kCorrupt,
                    fmt::format("tensor {} holds {}; expected values in [{}, {}]",
                                base::quote_text(found->name), divisor, 1.0 / kMaxRopeDivisor,
                                kMaxRopeDivisor));
    }
    return ok_status();
  }

  const io::TensorSource& source_;
  const ModelConfig& config_;
  backend::Device& device_;
  const WeightOptions& options_;
  const Naming naming_;
  const uint64_t total_;
  uint64_t done_ = 0;
  std::vector<float> staging_;
  ModelWeights weights_;
};

}  // namespace

uint64_t ModelWeights::size_bytes() const {
  uint64_t bytes = vectors.size_bytes() + embedding->size_bytes();
  if (lm_head) bytes += lm_head->size_bytes();
  for (const LayerWeights& layer : layers) {
    bytes += layer.qkv->size_bytes() + layer.output->size_bytes() + layer.gate_up->size_bytes() +
             layer.down->size_bytes();
  }
  return bytes;
}

Status check_tensors(const io::TensorSource& source, const ModelConfig& config) {
  const Naming naming = naming_of(source);
  std::unordered_set<std::string_view> known;
  const auto check = [&](TensorRole role, uint32_t layer, bool required) -> Status {
    const std::string name = tensor_name(naming, role, layer);
    const io::TensorInfo* info = source.find(name);
    if (info == nullptr && !required) return ok_status();
    if (info == nullptr) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("tensor {} is missing; the config calls for {} layers and shape {}",
                                base::quote_text(name), config.layers,
                                shape_text(tensor_shape(config, role))));
    }
    known.insert(info->name);
    return check_tensor(*info, tensor_shape(config, role));
  };
  for (TensorRole role : top_roles(config)) SPIN_RETURN_IF_ERROR(check(role, 0, true));
  if (naming == Naming::kGguf) {
    SPIN_RETURN_IF_ERROR(check(TensorRole::kRopeDivisors, 0, false));
  }
  const std::vector<TensorRole> roles = layer_roles(config);
  for (uint32_t layer = 0; layer < config.layers; ++layer) {
    for (TensorRole role : roles) SPIN_RETURN_IF_ERROR(check(role, layer, true));
  }
  for (const io::TensorInfo& info : source.tensors()) {
    if (known.contains(info.name) || is_ignorable(config, naming, info.name)) continue;
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("tensor {} is not part of a {} model of {} layers", base::quote_text(info.name),
                    architecture_name(config.architecture), config.layers));
  }
  return ok_status();
}

Result<ModelWeights> load_weights(const io::TensorSource& source,
                                  const ModelConfig& config,
                                  backend::Device& device,
                                  const WeightOptions& options) {
  SPIN_RETURN_IF_ERROR(check_tensors(source, config));
  return Loader(source, config, device, options).load();
}

}  // namespace spin::model
