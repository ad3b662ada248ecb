// SPDX-License-Identifier: Apache-2.0
// What the tests of sparse requests share: a tiny checkpoint made to take long contexts, engines
// and runners upon it, greedy requests, and what is compared of their outcomes. Thread: any.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "backend/cpu/cpu_device.h"
#include "backend/device.h"
#include "backend/separate_memory.h"
#include "engine/algorithm_set.h"
#include "engine/decoder_runner.h"
#include "model/load.h"
#include "spin/engine.h"
#include "tests/engine/recording_sink.h"
#include "tests/support/test_data.h"

namespace spin::testing {

// 3 layers with 2 KV heads of 64 fp32 values: pages of 8 tokens have 4 KiB.
inline constexpr uint64_t kTinyColumns = 6;
inline constexpr uint64_t kTinyPageBytes = 4096;

// A copy of the tiny checkpoint that takes 4,096 tokens.
class LongTinyCheckpoint {
 public:
  LongTinyCheckpoint() {
    const auto source = test_data("tiny/llama-linear");
    nlohmann::json config = nlohmann::json::parse(read_file(source / "config.json"));
    config["max_position_embeddings"] = 4096;
    dir_.write("config.json", config.dump());
    for (const auto& entry : std::filesystem::directory_iterator(source)) {
      const std::string name = entry.path().filename().string();
      const bool weights = name.ends_with(".safetensors") || name.ends_with(".index.json");
      if (weights || name == "tokenizer.json") dir_.write(name, read_file(entry.path()));
    }
  }
  const TempDir& dir() const { return dir_; }

 private:
  TempDir dir_;
};

// A runner upon the tiny checkpoint, with the algorithms that its sequences may use.
struct TinyRunner {
  std::unique_ptr<engine::AlgorithmSet> algorithms;
  std::unique_ptr<engine::ModelRunner> runner;
};

// Of `options` the geometry is set here.
inline TinyRunner make_tiny_runner(backend::Device& device,
                                   const std::vector<std::string>& specs,
                                   engine::DecoderRunnerOptions options) {
  const auto files = std::move(*model::open_model(test_data("tiny/llama-linear").string()));
  model::LoadOptions load;
  load.max_rows = 256;
  auto decoder = std::move(*model::load_decoder(files, device, load));
  options.geometry = decoder->config().kv_geometry(8, layout::DType::kF32);
  sparse::AlgorithmContext context;
  context.device = &device;
  context.shape = engine::model_shape(*decoder, options.geometry);
  TinyRunner made;
  made.algorithms = std::move(*engine::AlgorithmSet::create(specs, context));
  made.runner = std::move(*engine::make_decoder_runner(device, std::move(decoder), options));
  return made;
}

// The CPU as a device whose fast memory the host cannot touch.
inline Result<std::unique_ptr<backend::Device>> separate_memory_device(uint32_t threads) {
  SPIN_ASSIGN_OR_RETURN(auto cpu, backend::cpu::create_cpu_device({.threads = threads}));
  SPIN_ASSIGN_OR_RETURN(auto device,
                        backend::SeparateMemoryDevice::create(std::move(cpu), uint64_t{64} << 30));
  return std::unique_ptr<backend::Device>(std::move(device));
}

inline std::unique_ptr<Engine> open_engine(const EngineOptions& options) {
  auto engine = create_engine(options);
  EXPECT_TRUE(engine.ok()) << engine.status().to_string();
  return engine.ok() ? std::move(*engine) : nullptr;
}

inline std::vector<TokenId> prompt_of(size_t length, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<TokenId> prompt(length);
  for (TokenId& id : prompt) id = random() % 300;
  return prompt;
}

inline GenerateRequest greedy(std::vector<TokenId> prompt, uint64_t max_tokens) {
  GenerateRequest request;
  request.prompt = std::move(prompt);
  request.sampling.temperature = 0;
  request.sampling.max_tokens = max_tokens;
  request.sampling.ignore_eos = true;
  request.sampling.logprobs = 1;
  return request;
}

// Tokens and the bits of their log-probabilities.
using Scored = std::vector<std::pair<TokenId, float>>;

inline Scored scored(const Outcome& outcome) {
  Scored out;
  if (outcome.choices.count(0) == 0) return out;
  for (const TokenLogprob& one : outcome.choices.at(0).logprobs) {
    out.emplace_back(one.id, one.logprob);
  }
  return out;
}

}  // namespace spin::testing
