// SPDX-License-Identifier: Apache-2.0
// Which tensors a checkpoint must hold, and what loading does when something goes wrong half-way.
#include "model/weights.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "model/memory_plan.h"
#include "tests/model/harness.h"
#include "tests/model/memory_source.h"

namespace spin::model {
namespace {

using testing::MemorySource;
using testing::MemoryTensor;
using testing::tensors_of;
using testing::test_device;

ModelConfig small_config(Architecture architecture = Architecture::kQwen3) {
  ModelConfig config;
  config.architecture = architecture;
  config.layers = 2;
  config.hidden = 24;
  config.intermediate = 40;
  config.q_heads = 4;
  config.kv_heads = 2;
  config.head_dim = 8;
  config.vocab_size = 48;
  config.max_positions = 64;
  config.qk_norm = architecture == Architecture::kQwen3;
  config.qkv_bias = architecture == Architecture::kQwen2;
  return config;
}

void expect_refused(const std::vector<MemoryTensor>& tensors,
                    const ModelConfig& config,
                    StatusCode code,
                    std::string_view named) {
  const MemorySource source(tensors);
  ASSERT_TRUE(source.status().ok());
  const Status status = check_tensors(source, config);
  EXPECT_EQ(status.code(), code) << status.to_string();
  EXPECT_NE(status.message().find(named), std::string::npos)
      << "expected '" << named << "' in: " << status.message();
}

TEST(Weights, TheTensorsOfTheConfigAreAccepted) {
  for (Architecture architecture :
       {Architecture::kLlama, Architecture::kQwen2, Architecture::kQwen3}) {
    const ModelConfig config = small_config(architecture);
    EXPECT_TRUE(check_tensors(MemorySource(tensors_of(config)), config).ok());
  }
}

TEST(Weights, EveryTensorIsRequired) {
  for (Architecture architecture : {Architecture::kQwen2, Architecture::kQwen3}) {
    const ModelConfig config = small_config(architecture);
    const std::vector<MemoryTensor> all = tensors_of(config);
    for (size_t i = 0; i < all.size(); ++i) {
      std::vector<MemoryTensor> tensors = all;
      tensors.erase(tensors.begin() + static_cast<ptrdiff_t>(i));
      expect_refused(tensors, config, StatusCode::kInvalidArgument, all[i].name);
    }
  }
}

TEST(Weights, EveryShapeMustBeTheConfigs) {
  const ModelConfig config = small_config();
  const std::vector<MemoryTensor> all = tensors_of(config);
  for (size_t i = 0; i < all.size(); ++i) {
    const std::vector<uint64_t> shape = all[i].shape;
    std::vector<std::vector<uint64_t>> wrong = {{}, {1}};
    for (size_t d = 0; d < shape.size(); ++d) {
      wrong.push_back(shape);
      ++wrong.back()[d];
      wrong.push_back(shape);
      --wrong.back()[d];
    }
    wrong.push_back(shape);
    wrong.back().push_back(1);
    if (shape.size() == 2 && shape[0] != shape[1]) wrong.push_back({shape[1], shape[0]});
    for (const std::vector<uint64_t>& bad : wrong) {
      std::vector<MemoryTensor> tensors = all;
      tensors[i].shape = bad;
      expect_refused(tensors, config, StatusCode::kInvalidArgument, all[i].name);
    }
  }
}

TEST(Weights, AConfigWithOtherLayersThanTheFileIsRefused) {
  ModelConfig config = small_config();
  const std::vector<MemoryTensor> tensors = tensors_of(config);
  config.layers = 1;
  expect_refused(tensors, config, StatusCode::kInvalidArgument, "model.layers.1.");
  expect_refused(tensors, config, StatusCode::kInvalidArgument, "1 layers");
  config.layers = 3;
  expect_refused(tensors, config, StatusCode::kInvalidArgument, "model.layers.2.");
}

TEST(Weights, TensorsThatNobodyReadsAreRefusedExceptKnownLeftovers) {
  ModelConfig config = small_config();
  for (const char* name : {"model.layers.0.mlp.experts.0.weight", "model.layers.0.self_attn.bias",
                           "model.layers.00.mlp.up_proj.weight", "score.weight"}) {
    std::vector<MemoryTensor> tensors = tensors_of(config);
    tensors.push_back({name, {4}});
    expect_refused(tensors, config, StatusCode::kInvalidArgument, name);
  }
  std::vector<MemoryTensor> leftovers = tensors_of(config);
  leftovers.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", {4}});
  EXPECT_TRUE(check_tensors(MemorySource(leftovers), config).ok());
  config.tie_embeddings = true;
  EXPECT_TRUE(check_tensors(MemorySource(leftovers), config).ok())
      << "a tied head may be stored a second time";
}

TEST(Weights, ElementTypesThatAreNotDecodedAreRefusedByName) {
  const ModelConfig config = small_config();
  std::vector<MemoryTensor> tensors = tensors_of(config);
  tensors[3].type = io::ElementType::kUnsupported;
  expect_refused(tensors, config, StatusCode::kUnsupported, "'I64'");
}

TEST(Weights, AreHeldOnceAndCountedRight) {
  ModelConfig config = small_config();
  config.tie_embeddings = true;
  const MemorySource source(tensors_of(config));
  auto weights = load_weights(source, config, test_device(), {});
  ASSERT_TRUE(weights.ok()) << weights.status().to_string();
  EXPECT_EQ(weights->lm_head, nullptr);
  EXPECT_EQ(&weights->output_head(), weights->embedding.get());
  EXPECT_EQ(weights->layers[0].qkv->rows(), 4 * 8 + 2 * 2 * 8);
  EXPECT_EQ(weights->layers[0].gate_up->rows(), 80);
  EXPECT_EQ(weights->layers[1].down->cols(), 40);
  EXPECT_EQ(weights->final_norm[23], 0.5f);
  EXPECT_EQ(weights->layers[1].k_norm[7], 0.5f);
  EXPECT_EQ(weights->layers[1].qkv_bias, nullptr);
  EXPECT_GE(weights->size_bytes(), weight_bytes(config, layout::DType::kF32));
}

TEST(Weights, EveryMatrixIsDroppedFromTheFileOnceItIsPacked) {
  const ModelConfig config = small_config();
  const MemorySource source(tensors_of(config));
  ASSERT_TRUE(load_weights(source, config, test_device(), {}).ok());
  for (const io::TensorInfo& info : source.tensors()) {
    const auto it = source.drops().find(info.name);
    const int drops = it == source.drops().end() ? 0 : it->second;
    EXPECT_EQ(drops, info.shape.size() == 2 ? 1 : 0) << info.name;
  }
}

TEST(Weights, ProgressEndsAtTheParameterCount) {
  const ModelConfig config = small_config();
  const MemorySource source(tensors_of(config));
  uint64_t last = 0;
  uint64_t total = 0;
  WeightOptions options;
  options.progress = [&](uint64_t done, uint64_t all) {
    EXPECT_GT(done, last);
    last = done;
    total = all;
    return true;
  };
  ASSERT_TRUE(load_weights(source, config, test_device(), options).ok());
  EXPECT_EQ(last, total);
  EXPECT_EQ(total, parameter_count(config));
}

TEST(Weights, CancellingAtAnyPointLeavesNoMemoryBehind) {
  const ModelConfig config = small_config();
  const MemorySource source(tensors_of(config));
  const uint64_t before = test_device().memory(backend::MemoryKind::kFast).bytes_in_use();
  for (int allowed = 0;; ++allowed) {
    int calls = 0;
    WeightOptions options;
    options.progress = [&](uint64_t, uint64_t) { return calls++ < allowed; };
    const auto weights = load_weights(source, config, test_device(), options);
    if (weights.ok()) {
      EXPECT_GT(allowed, 10);
      break;
    }
    EXPECT_EQ(weights.status().code(), StatusCode::kCancelled);
    EXPECT_EQ(test_device().memory(backend::MemoryKind::kFast).bytes_in_use(), before);
  }
}

TEST(Weights, NormsThatAreNotNumbersAreCorrupt) {
  const ModelConfig config = small_config();
  for (float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<MemoryTensor> tensors = tensors_of(config);
    for (MemoryTensor& one : tensors) {
      if (one.name == "model.layers.1.self_attn.k_norm.weight") one.value = bad;
    }
    const auto weights = load_weights(MemorySource(tensors), config, test_device(), {});
    EXPECT_EQ(weights.status().code(), StatusCode::kCorrupt);
    EXPECT_NE(weights.status().message().find("layers.1.self_attn.k_norm"), std::string::npos);
  }
}

TEST(Weights, TooLittleMemoryIsAnErrorAndNothingStays) {
  const ModelConfig config = small_config();
  const MemorySource source(tensors_of(config));
  for (uint64_t bytes = 1024; bytes < 64 * 1024; bytes *= 2) {
    auto device =
        std::move(*backend::cpu::create_cpu_device({.threads = 1, .fast_memory_bytes = bytes}));
    const auto weights = load_weights(source, config, *device, {});
    if (bytes < weight_bytes(config, layout::DType::kF32)) {
      EXPECT_EQ(weights.status().code(), StatusCode::kResourceExhausted) << bytes;
      EXPECT_EQ(device->memory(backend::MemoryKind::kFast).bytes_in_use(), 0u);
    }
  }
}

}  // namespace
}  // namespace spin::model
