// SPDX-License-Identifier: Apache-2.0
#include "engine/side_weights.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "io/checkpoint.h"
#include "io/json.h"
#include "io/tensor_source.h"
#include "io/text_file.h"
#include "model/model_limits.h"

namespace spin::engine {
namespace {

constexpr std::string_view kConfigName = "config.json";
// A gate of the largest model is some megabytes a layer; nothing near this is one.
constexpr uint64_t kMostElements = uint64_t{1} << 30;

using Settings = std::map<std::string, std::string, std::less<>>;

// The scalar entries of the configuration as text; others are no settings.
Result<Settings> read_settings(const std::string& directory) {
  SPIN_ASSIGN_OR_RETURN(
      const std::string text,
      io::read_text_file(directory + "/" + std::string(kConfigName), model::kMaxConfigBytes));
  auto parsed = io::parse_json(text, {.max_bytes = model::kMaxConfigBytes,
                                      .max_depth = model::kMaxConfigDepth,
                                      .max_values = model::kMaxConfigValues});
  if (!parsed.ok()) return parsed.status().with_context(kConfigName);
  if (!parsed->is_object()) {
    return Status(StatusCode::kInvalidArgument, fmt::format("{}: expected an object", kConfigName));
  }
  Settings settings;
  for (const auto& [key, value] : parsed->items()) {
    if (value.is_string()) {
      settings.emplace(key, value.get<std::string>());
    } else if (value.is_boolean() || value.is_number()) {
      settings.emplace(key, value.dump());
    }
  }
  return settings;
}

// Errors: kInvalidArgument with both shapes, kUnsupported.
Status check_tensor(const io::TensorInfo& info, std::span<const int64_t> shape) {
  const bool same = std::equal(shape.begin(), shape.end(), info.shape.begin(), info.shape.end(),
                               [](int64_t wanted, uint64_t found) {
                                 return wanted >= 0 && static_cast<uint64_t>(wanted) == found;
                               });
  if (!same) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{}: expected shape [{}], found [{}]", info.name,
                              fmt::join(shape, ", "), fmt::join(info.shape, ", ")));
  }
  if (info.elements > kMostElements) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{}: expected at most {} elements, found {}", info.name,
                              kMostElements, info.elements));
  }
  return ok_status();
}

class FileSideWeights final : public backend::SideWeights {
 public:
  FileSideWeights(std::unique_ptr<io::TensorSource> tensors, Settings settings)
      : tensors_(std::move(tensors)), settings_(std::move(settings)) {}

  bool contains(std::string_view name) const override { return tensors_->find(name) != nullptr; }

  Result<std::vector<float>> read(std::string_view name,
                                  std::span<const int64_t> shape) const override {
    const io::TensorInfo* info = tensors_->find(name);
    if (info == nullptr) {
      return Status(StatusCode::kNotFound, fmt::format("there is no tensor {}", name));
    }
    SPIN_RETURN_IF_ERROR(check_tensor(*info, shape));
    std::vector<float> values(info->elements);
    SPIN_RETURN_IF_ERROR(
        tensors_->read_rows_f32(*info, 0, info->rows(), values).with_context(name));
    tensors_->drop(*info);
    const auto bad = std::find_if(values.begin(), values.end(),
                                  [](float value) { return !std::isfinite(value); });
    if (bad != values.end()) {
      return Status(StatusCode::kCorrupt, fmt::format("{}: element {} is not a finite number", name,
                                                      bad - values.begin()));
    }
    return values;
  }

  Result<std::string> setting(std::string_view key) const override {
    const auto found = settings_.find(key);
    if (found != settings_.end()) return found->second;
    return Status(StatusCode::kNotFound, fmt::format("{}: there is no {}", kConfigName, key));
  }

 private:
  std::unique_ptr<io::TensorSource> tensors_;
  Settings settings_;
};

}  // namespace

Result<std::unique_ptr<backend::SideWeights>> FileSideWeightSource::open(
    std::string_view location) {
  std::string path(location);
  if (location.substr(0, backend::kBesideModel.size()) == backend::kBesideModel) {
    path = model_directory_ + "/" + std::string(location.substr(backend::kBesideModel.size()));
  }
  SPIN_ASSIGN_OR_RETURN(const io::CheckpointPath where, io::locate_checkpoint(path));
  if (where.kind == io::CheckpointKind::kGguf) {
    return Status(StatusCode::kUnsupported, "expected a safetensors file, found a GGUF file");
  }
  SPIN_ASSIGN_OR_RETURN(auto tensors, io::open_checkpoint(where));
  SPIN_ASSIGN_OR_RETURN(auto settings, read_settings(where.directory));
  return std::unique_ptr<backend::SideWeights>(
      std::make_unique<FileSideWeights>(std::move(tensors), std::move(settings)));
}

}  // namespace spin::engine
