// SPDX-License-Identifier: Apache-2.0
// A model's parameters in the device's packed form. Projections that read the same input are packed
// as one matrix; a tied embedding is held once and serves both ends.
//
// Thread: immutable after loading. Lifetime: the device outlives the weights.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "backend/device.h"
#include "backend/ops.h"
#include "io/tensor_source.h"
#include "layout/dtype.h"
#include "model/model_config.h"
#include "spin/status.h"

namespace spin::model {

struct LayerWeights {
  // f32 in fast memory, inside ModelWeights::vectors.
  const float* attention_norm = nullptr;  // [hidden]
  const float* mlp_norm = nullptr;        // [hidden]
  const float* q_norm = nullptr;          // [head_dim] or null
  const float* k_norm = nullptr;          // [head_dim] or null
  const float* qkv_bias = nullptr;        // [q_width + 2 kv_width] or null

  std::unique_ptr<backend::PackedMatrix> qkv;      // [q_width + 2 kv_width, hidden]: q, k, v rows
  std::unique_ptr<backend::PackedMatrix> output;   // [hidden, q_width]
  std::unique_ptr<backend::PackedMatrix> gate_up;  // [2 intermediate, hidden]: gate, up rows
  std::unique_ptr<backend::PackedMatrix> down;     // [hidden, intermediate]
};

struct ModelWeights {
  layout::DType dtype = layout::DType::kF32;         // of the matrices
  backend::Buffer vectors;                           // all norms and biases
  std::unique_ptr<backend::PackedMatrix> embedding;  // [vocab, hidden]
  std::unique_ptr<backend::PackedMatrix> lm_head;    // [vocab, hidden]; null: the embedding
  const float* final_norm = nullptr;                 // [hidden]
  std::vector<LayerWeights> layers;
  std::vector<float> rope_divisors;  // [head_dim / 2] or empty

  const backend::PackedMatrix& output_head() const { return lm_head ? *lm_head : *embedding; }
  // Bytes of everything above.
  uint64_t size_bytes() const;
};

struct WeightOptions {
  layout::DType dtype = layout::DType::kF32;
  // Called after each matrix with the parameters loaded so far and in all; false cancels.
  std::function<bool(uint64_t done, uint64_t total)> progress;
};

// Checks that `source` holds exactly the tensors that `config` calls for, under Hugging Face's or
// GGUF's names, each with its shape. Reads metadata only.
// Errors: kInvalidArgument: a tensor missing, of another shape, or left over (a config with fewer
// layers than the file); kUnsupported: an element type that io does not decode.
Status check_tensors(const io::TensorSource& source, const ModelConfig& config);

// Loads everything; blocks. Rows are converted in pieces and the file's pages are given back after
// each tensor, so the peak is the packed size plus a few megabytes.
// Errors: those of check_tensors, of the source and of the device; kCancelled; kCorrupt for a norm,
// bias or RoPE divisor that is not finite.
Result<ModelWeights> load_weights(const io::TensorSource& source,
                                  const ModelConfig& config,
                                  backend::Device& device,
                                  const WeightOptions& options);

}  // namespace spin::model
