// SPDX-License-Identifier: Apache-2.0
// From the path a user names to a decoder, in pieces: opening reads headers and configs only (what
// `spin inspect` shows), load_decoder reads the weights.
//
// Thread: any; blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "backend/device.h"
#include "io/checkpoint.h"
#include "io/tensor_source.h"
#include "model/decoder.h"
#include "model/model_config.h"
#include "model/weights.h"
#include "spin/status.h"

namespace spin::model {

// An opened checkpoint whose config and tensor list fit each other.
struct ModelFiles {
  io::CheckpointPath path;
  std::unique_ptr<io::TensorSource> source;
  ModelConfig config;           // eos_ids include those of generation_config.json
  GenerationConfig generation;  // empty when the checkpoint has none
};

// `path`: what io::locate_checkpoint accepts. config.json is read from the checkpoint's directory
// unless it is a GGUF file, which carries its own; generation_config.json is read where present.
// Errors: those of io, of the configs and of check_tensors; a GGUF file without tensors is
// kUnsupported.
Result<ModelFiles> open_model(const std::string& path);

struct LoadOptions {
  WeightOptions weights;
  int64_t max_rows = 512;  // tokens of one step
};

// Errors: those of load_weights and Decoder::create.
Result<std::unique_ptr<Decoder>> load_decoder(const ModelFiles& files,
                                              backend::Device& device,
                                              const LoadOptions& options);

}  // namespace spin::model
