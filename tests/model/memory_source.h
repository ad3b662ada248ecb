// SPDX-License-Identifier: Apache-2.0
// A checkpoint in memory whose tensor list a test edits freely. Thread: one thread.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "io/tensor_source.h"
#include "model/model_config.h"
#include "model/tensor_names.h"

namespace spin::testing {

struct MemoryTensor {
  std::string name;
  std::vector<uint64_t> shape;
  float value = 0.0f;  // of every element
  io::ElementType type = io::ElementType::kF32;
};

class MemorySource : public io::TensorSource {
 public:
  explicit MemorySource(const std::vector<MemoryTensor>& tensors) {
    std::vector<io::TensorInfo> infos;
    for (const MemoryTensor& one : tensors) {
      io::TensorInfo info;
      info.name = one.name;
      info.type = one.type;
      info.type_name = one.type == io::ElementType::kF32 ? "F32" : "I64";
      info.shape = one.shape;
      for (uint64_t size : one.shape) info.elements *= size;
      info.size_bytes = info.elements * sizeof(float);
      data_[one.name].assign(info.elements, one.value);
      infos.push_back(std::move(info));
    }
    status_ = set_tensors(std::move(infos));
  }

  const Status& status() const { return status_; }
  const std::map<std::string, int>& drops() const { return drops_; }

  Result<std::span<const std::byte>> bytes(const io::TensorInfo& info) const override {
    return std::as_bytes(std::span<const float>(data_.at(info.name)));
  }
  void drop(const io::TensorInfo& info) const override { ++drops_[info.name]; }

 private:
  Status status_;
  std::map<std::string, std::vector<float>> data_;
  mutable std::map<std::string, int> drops_;
};

// Exactly the tensors that `config` calls for, under Hugging Face's names.
inline std::vector<MemoryTensor> tensors_of(const model::ModelConfig& config) {
  std::vector<MemoryTensor> tensors;
  const auto add = [&](model::TensorRole role, uint32_t layer) {
    tensors.push_back({model::tensor_name(model::Naming::kHuggingFace, role, layer),
                       model::tensor_shape(config, role), 0.5f});
  };
  for (model::TensorRole role : model::top_roles(config)) add(role, 0);
  for (uint32_t layer = 0; layer < config.layers; ++layer) {
    for (model::TensorRole role : model::layer_roles(config)) add(role, layer);
  }
  return tensors;
}

}  // namespace spin::testing
