// SPDX-License-Identifier: Apache-2.0
// Published parameter counts and KV sizes, from the configs' numbers alone.
#include "model/memory_plan.h"

#include <gtest/gtest.h>

#include "model/decoder.h"

namespace spin::model {
namespace {

struct Published {
  const char* name;
  ModelConfig config;
  uint64_t parameters;
  uint64_t kv_bytes_per_token;  // bf16
};

ModelConfig shape(Architecture architecture,
                  uint32_t layers,
                  uint32_t hidden,
                  uint32_t intermediate,
                  uint32_t q_heads,
                  uint32_t kv_heads,
                  uint32_t head_dim,
                  uint32_t vocab,
                  bool tied) {
  ModelConfig config;
  config.architecture = architecture;
  config.layers = layers;
  config.hidden = hidden;
  config.intermediate = intermediate;
  config.q_heads = q_heads;
  config.kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.vocab_size = vocab;
  config.tie_embeddings = tied;
  config.qk_norm = architecture == Architecture::kQwen3;
  config.qkv_bias = architecture == Architecture::kQwen2;
  return config;
}

const Published kPublished[] = {
    {"Qwen3-0.6B", shape(Architecture::kQwen3, 28, 1024, 3072, 16, 8, 128, 151936, true), 596049920,
     114688},
    {"Qwen3-8B", shape(Architecture::kQwen3, 36, 4096, 12288, 32, 8, 128, 151936, false),
     8190735360, 147456},
    {"Qwen3-32B", shape(Architecture::kQwen3, 64, 5120, 25600, 64, 8, 128, 151936, false),
     32762123264, 262144},
    {"Llama-3.1-8B", shape(Architecture::kLlama, 32, 4096, 14336, 32, 8, 128, 128256, false),
     8030261248, 131072},
    {"Llama-3.1-70B", shape(Architecture::kLlama, 80, 8192, 28672, 64, 8, 128, 128256, false),
     70553706496, 327680},
    {"Qwen2.5-7B-1M", shape(Architecture::kQwen2, 28, 3584, 18944, 28, 4, 128, 152064, false),
     7615616512, 57344},
    {"SmolLM2-135M", shape(Architecture::kLlama, 30, 576, 1536, 9, 3, 64, 49152, true), 134515008,
     23040},
    {"needle-29m", shape(Architecture::kQwen3, 8, 512, 1536, 4, 2, 128, 8256, true), 29403648,
     8192},
};

TEST(MemoryPlan, CountsParametersAndKvBytesAsPublished) {
  for (const Published& model : kPublished) {
    SCOPED_TRACE(model.name);
    EXPECT_EQ(parameter_count(model.config), model.parameters);
    const MemoryPlan plan = plan_memory(model.config, {.dtype = layout::DType::kBF16,
                                                       .kv_dtype = layout::DType::kBF16,
                                                       .context_tokens = 131072});
    EXPECT_EQ(plan.kv_bytes_per_token, model.kv_bytes_per_token);
    EXPECT_EQ(plan.kv_bytes, model.kv_bytes_per_token * 131072);
  }
}

TEST(MemoryPlan, KvComesInWholePages) {
  const ModelConfig& config = kPublished[7].config;
  const layout::KvGeometry geometry = config.kv_geometry(8, layout::DType::kBF16);
  EXPECT_EQ(kv_bytes(geometry, 0), 0u);
  EXPECT_EQ(kv_bytes(geometry, 1), 8u * 8192);
  EXPECT_EQ(kv_bytes(geometry, 8), 8u * 8192);
  EXPECT_EQ(kv_bytes(geometry, 9), 16u * 8192);
}

TEST(MemoryPlan, AddsUpAndUsesTheDecodersOwnWorkspaceSize) {
  const ModelConfig& config = kPublished[6].config;
  const MemoryPlan plan = plan_memory(config, {.dtype = layout::DType::kBF16,
                                               .kv_dtype = layout::DType::kF32,
                                               .context_tokens = 8192,
                                               .rows_per_step = 256});
  EXPECT_EQ(plan.workspace_bytes, Decoder::workspace_bytes(config, 256));
  EXPECT_EQ(plan.kv_bytes, 8192u * 2 * 23040);
  EXPECT_EQ(plan.logit_bytes, 49152u * 4);
  // bf16 matrices, f32 norms: 61 norms of 576.
  EXPECT_EQ(plan.weight_bytes, 2u * (134515008 - 61 * 576) + 4u * 61 * 576);
  EXPECT_EQ(plan.total_bytes(),
            plan.weight_bytes + plan.kv_bytes + plan.workspace_bytes + plan.logit_bytes);
}

TEST(MemoryPlan, WorkspaceGrowsWithRowsButMlpDoesNotBeyondABlock) {
  const ModelConfig& config = kPublished[1].config;
  const uint64_t at_512 = Decoder::workspace_bytes(config, 512);
  const uint64_t at_8192 = Decoder::workspace_bytes(config, 8192);
  EXPECT_LT(Decoder::workspace_bytes(config, 1), at_512);
  // Only hidden, qkv and attention output grow: 4,096 + 6,144 + 4,096 floats a row.
  EXPECT_EQ(at_8192 - at_512, (8192u - 512) * 14336 * 4);
}

}  // namespace
}  // namespace spin::model
