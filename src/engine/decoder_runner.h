// SPDX-License-Identifier: Apache-2.0
// The runner of real models: a decoder stack, a page store of one or two tiers, dense and sparse
// attention, one stream.
// Thread: as ModelRunner. Lifetime: the device outlives the runner.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "backend/device.h"
#include "engine/model_runner.h"
#include "layout/kv_geometry.h"
#include "model/decoder.h"
#include "sparse/sparse_algorithm.h"
#include "spin/status.h"

namespace spin::engine {

struct DecoderRunnerOptions {
  layout::KvGeometry geometry;
  uint64_t kv_pages = 0;  // of the fast tier
  uint32_t max_logit_rows = 0;
  // Sparse sequences; without them there is neither a host tier nor a staging buffer.
  bool sparse = false;
  uint64_t max_prompt_tokens = 0;  // of a sparse sequence
  uint64_t host_bytes = 0;
  uint32_t extent_pages = 32;  // of the host tier
  uint64_t index_bytes = 0;
  std::optional<double> buffer_ratio;
  std::string selection_trace;  // file for the selections of sparse sequences; "": none
  std::string trace_settings;   // what its header says of the algorithms
};

// Memory of each kind that the runner takes beside weights, workspace and KV: the step's inputs and
// logits.
uint64_t runner_bytes(const model::ModelConfig& config,
                      uint32_t max_step_tokens,
                      uint32_t max_logit_rows);

// The model as sparse algorithms see it. Lifetime: its RoPE arrays are the decoder's.
sparse::ModelShape model_shape(const model::Decoder& decoder, const layout::KvGeometry& geometry);

// Errors: kResourceExhausted (pools, buffers, stream).
Result<std::unique_ptr<ModelRunner>> make_decoder_runner(backend::Device& device,
                                                         std::unique_ptr<model::Decoder> decoder,
                                                         const DecoderRunnerOptions& options);

}  // namespace spin::engine
