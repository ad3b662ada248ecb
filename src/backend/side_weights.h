// SPDX-License-Identifier: Apache-2.0
// Weights beside the model's own that an algorithm brings (gates of SeerAttention-R). The engine
// implements the source over safetensors files; layers below see names, shapes and floats.
// Thread: engine start-up. Lifetime: what open() returns stands on its own.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spin/status.h"

namespace spin::backend {

class SideWeights {
 public:
  virtual ~SideWeights() = default;

  virtual bool contains(std::string_view name) const = 0;
  // The tensor as floats, row-major. Errors: kNotFound naming the tensor, kInvalidArgument with the
  // shape wanted and found.
  virtual Result<std::vector<float>> read(std::string_view name,
                                          std::span<const int64_t> shape) const = 0;
  // An entry of the configuration beside them. Errors: kNotFound.
  virtual Result<std::string> setting(std::string_view key) const = 0;
};

// In front of a location: it is relative to the model's folder. No option of a user can begin so.
inline constexpr std::string_view kBesideModel = "model:";

class SideWeightSource {
 public:
  virtual ~SideWeightSource() = default;
  // `location`: what the user wrote, relative to the current folder; or kBesideModel and a path
  // relative to the model's. Errors: those of reading files.
  virtual Result<std::unique_ptr<SideWeights>> open(std::string_view location) = 0;
};

}  // namespace spin::backend
