// SPDX-License-Identifier: Apache-2.0
// Side weights from files: a folder with one safetensors checkpoint and a config.json beside it, as
// gates are published. The files are hostile until checked.
// Thread: engine start-up; what open() returns is immutable.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "backend/side_weights.h"
#include "spin/status.h"

namespace spin::engine {

class FileSideWeightSource final : public backend::SideWeightSource {
 public:
  // `model_directory`: where locations that begin with backend::kBesideModel start
  // (io::CheckpointPath::directory).
  explicit FileSideWeightSource(std::string model_directory)
      : model_directory_(std::move(model_directory)) {}

  // A folder, or the .safetensors file in it. Errors: kNotFound, kInvalidArgument (several files;
  // a configuration that is not a flat object), kUnsupported (pickle and GGUF files), kCorrupt,
  // kIoError, kResourceExhausted.
  Result<std::unique_ptr<backend::SideWeights>> open(std::string_view location) override;

 private:
  std::string model_directory_;
};

}  // namespace spin::engine
