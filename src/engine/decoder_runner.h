// SPDX-License-Identifier: Apache-2.0
// The runner of real models: a decoder stack, a pool of KV pages, dense attention, one stream.
// Thread: as ModelRunner. Lifetime: the device outlives the runner.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/device.h"
#include "engine/model_runner.h"
#include "layout/kv_geometry.h"
#include "model/decoder.h"
#include "spin/status.h"

namespace spin::engine {

struct DecoderRunnerOptions {
  layout::KvGeometry geometry;
  uint64_t kv_pages = 0;
  uint32_t max_logit_rows = 0;
};

// Memory that the runner takes beside weights, workspace and KV: the step's inputs and logits.
uint64_t runner_bytes(const model::ModelConfig& config,
                      uint32_t max_step_tokens,
                      uint32_t max_logit_rows);

// Errors: kResourceExhausted (pool, buffers, stream).
Result<std::unique_ptr<ModelRunner>> make_decoder_runner(backend::Device& device,
                                                         std::unique_ptr<model::Decoder> decoder,
                                                         const DecoderRunnerOptions& options);

}  // namespace spin::engine
