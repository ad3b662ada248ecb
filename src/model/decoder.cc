// SPDX-License-Identifier: Apache-2.0
#include "model/decoder.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "model/model_limits.h"

namespace spin::model {
namespace {

using backend::TensorRef;

// Rows that go through a projection together. Enough for full speed of a matrix product; bounds the
// intermediate activations of a long prefill chunk.
constexpr int64_t kBlockRows = 512;

// Where each activation lies in the workspace, in floats. The one place that knows, for allocation
// and for use.
struct WorkspaceLayout {
  explicit WorkspaceLayout(const ModelConfig& config, int64_t rows) {
    const int64_t block = std::min(rows, kBlockRows);
    hidden = take(rows * config.hidden);
    qkv = take(rows * config.qkv_width());
    attention = take(rows * config.q_width());
    normed = take(block * config.hidden);
    gate_up = take(block * 2 * config.intermediate);
    activated = take(block * config.intermediate);
  }

  int64_t hidden = 0;     // [rows, hidden]
  int64_t qkv = 0;        // [rows, q_width + 2 kv_width]
  int64_t attention = 0;  // [rows, q_width]
  int64_t normed = 0;     // [block, hidden]
  int64_t gate_up = 0;    // [block, 2 intermediate]
  int64_t activated = 0;  // [block, intermediate]
  int64_t size = 0;

 private:
  int64_t take(int64_t floats) {
    constexpr int64_t kLineFloats = 16;
    const int64_t begin = size;
    size += (floats + kLineFloats - 1) / kLineFloats * kLineFloats;
    return begin;
  }
};

TensorRef matrix_at(float* base, int64_t offset, int64_t rows, int64_t cols) {
  return {.data = base + offset,
          .dtype = layout::DType::kF32,
          .rows = rows,
          .cols = cols,
          .row_stride = cols};
}

// Calls body(first, count) for blocks of at most kBlockRows of `rows`.
template <typename Body>
void for_blocks(int64_t rows, const Body& body) {
  for (int64_t first = 0; first < rows; first += kBlockRows) {
    body(first, std::min(kBlockRows, rows - first));
  }
}

}  // namespace

struct Decoder::Workspace {
  TensorRef hidden;     // [rows, hidden]
  TensorRef qkv;        // [rows, q_width + 2 kv_width]
  TensorRef attention;  // [rows, q_width]
  TensorRef normed;     // [block, hidden]
  TensorRef gate_up;    // [block, 2 intermediate]
  TensorRef activated;  // [block, intermediate]
};

uint64_t Decoder::workspace_bytes(const ModelConfig& config, int64_t max_rows) {
  SPIN_CHECK(max_rows >= 1 && max_rows <= kMaxRowsPerStep);
  return static_cast<uint64_t>(WorkspaceLayout(config, max_rows).size) * sizeof(float);
}

Result<std::unique_ptr<Decoder>> Decoder::create(const ModelConfig& config,
                                                 ModelWeights weights,
                                                 backend::Device& device,
                                                 int64_t max_rows) {
  if (max_rows < 1 || max_rows > kMaxRowsPerStep) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the tokens of one step must be in [1, {}], found {}",
                              kMaxRowsPerStep, max_rows));
  }
  const uint64_t bytes = workspace_bytes(config, max_rows);
  auto workspace = backend::Buffer::allocate(device.memory(backend::MemoryKind::kFast), bytes);
  if (!workspace.ok()) {
    return workspace.status().with_context(
        fmt::format("workspace for steps of {} tokens", max_rows));
  }
  return std::unique_ptr<Decoder>(
      new Decoder(config, std::move(weights), device, max_rows, std::move(*workspace)));
}

Decoder::Decoder(const ModelConfig& config,
                 ModelWeights weights,
                 backend::Device& device,
                 int64_t max_rows,
                 backend::Buffer workspace)
    : config_(config),
      weights_(std::move(weights)),
      device_(device),
      max_rows_(max_rows),
      workspace_(std::move(workspace)),
      rope_(make_rope_table(config.rope, config.head_dim, weights_.rope_divisors)) {}

Decoder::Workspace Decoder::workspace_for(TensorRef hidden) const {
  SPIN_CHECK(hidden.rows >= 1 && hidden.rows <= max_rows_ && hidden.cols == config_.hidden);
  const WorkspaceLayout layout(config_, max_rows_);
  const int64_t block = std::min(max_rows_, kBlockRows);
  float* base = workspace_.as<float>();
  return {
      .hidden = hidden,
      .qkv = matrix_at(base, layout.qkv, hidden.rows, config_.qkv_width()),
      .attention = matrix_at(base, layout.attention, hidden.rows, config_.q_width()),
      .normed = matrix_at(base, layout.normed, block, config_.hidden),
      .gate_up = matrix_at(base, layout.gate_up, block, 2 * int64_t{config_.intermediate}),
      .activated = matrix_at(base, layout.activated, block, config_.intermediate),
  };
}

void Decoder::enqueue_forward(const ForwardInputs& in,
                              AttentionPort& attention,
                              backend::StreamRef stream) {
  SPIN_CHECK(in.rows >= 1 && in.rows <= max_rows_);
  const TensorRef hidden = matrix_at(
      workspace_.as<float>(), WorkspaceLayout(config_, max_rows_).hidden, in.rows, config_.hidden);
  enqueue_embedding(in.token_ids, hidden, stream);
  for (uint32_t layer = 0; layer < config_.layers; ++layer) {
    enqueue_layer(layer, in.positions, hidden, attention, stream);
  }
  SPIN_CHECK(in.logit_count == 0 || in.logits.rows == in.logit_count);
  if (in.logit_count > 0) enqueue_logits(hidden, in.logit_rows, in.logits, stream);
}

void Decoder::enqueue_embedding(const uint32_t* token_ids,
                                TensorRef hidden,
                                backend::StreamRef stream) {
  device_.ops().enqueue_embedding(*weights_.embedding, token_ids, hidden, stream);
}

void Decoder::enqueue_layer(uint32_t layer,
                            const uint32_t* positions,
                            TensorRef hidden,
                            AttentionPort& attention,
                            backend::StreamRef stream) {
  const Workspace space = workspace_for(hidden);
  enqueue_attention_block(layer, positions, space, attention, stream);
  enqueue_mlp_block(layer, space, stream);
}

float Decoder::attention_scale() const {
  return 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
}

void Decoder::enqueue_attention_block(uint32_t layer,
                                      const uint32_t* positions,
                                      const Workspace& space,
                                      AttentionPort& attention,
                                      backend::StreamRef stream) {
  backend::Ops& ops = device_.ops();
  const LayerWeights& weights = weights_.layers[layer];
  for_blocks(space.hidden.rows, [&](int64_t first, int64_t count) {
    const TensorRef normed = space.normed.row_range(0, count);
    ops.enqueue_rms_norm(space.hidden.row_range(first, count), weights.attention_norm,
                         config_.hidden, config_.rms_epsilon, normed, stream);
    ops.enqueue_matmul(normed, *weights.qkv, weights.qkv_bias, false,
                       space.qkv.row_range(first, count), stream);
  });
  const int64_t q_width = config_.q_width();
  const int64_t kv_width = config_.kv_width();
  const TensorRef q = space.qkv.columns(0, q_width);
  const TensorRef k = space.qkv.columns(q_width, kv_width);
  const TensorRef v = space.qkv.columns(q_width + kv_width, kv_width);
  if (config_.qk_norm) {
    ops.enqueue_rms_norm(q, weights.q_norm, config_.head_dim, config_.rms_epsilon, q, stream);
    ops.enqueue_rms_norm(k, weights.k_norm, config_.head_dim, config_.rms_epsilon, k, stream);
  }
  // q and k lie side by side and have heads of one size: one call turns both.
  ops.enqueue_rope(space.qkv.columns(0, q_width + kv_width), config_.head_dim, positions, rope(),
                   stream);
  attention.enqueue_attention(
      {.layer = layer, .q = q, .k = k, .v = v, .out = space.attention, .scale = attention_scale()},
      stream);
  ops.enqueue_matmul(space.attention, *weights.output, nullptr, true, space.hidden, stream);
}

void Decoder::enqueue_mlp_block(uint32_t layer, const Workspace& space, backend::StreamRef stream) {
  backend::Ops& ops = device_.ops();
  const LayerWeights& weights = weights_.layers[layer];
  for_blocks(space.hidden.rows, [&](int64_t first, int64_t count) {
    const TensorRef hidden = space.hidden.row_range(first, count);
    const TensorRef normed = space.normed.row_range(0, count);
    const TensorRef gate_up = space.gate_up.row_range(0, count);
    const TensorRef activated = space.activated.row_range(0, count);
    ops.enqueue_rms_norm(hidden, weights.mlp_norm, config_.hidden, config_.rms_epsilon, normed,
                         stream);
    ops.enqueue_matmul(normed, *weights.gate_up, nullptr, false, gate_up, stream);
    ops.enqueue_silu_mul(gate_up, activated, stream);
    ops.enqueue_matmul(activated, *weights.down, nullptr, true, hidden, stream);
  });
}

void Decoder::enqueue_logits(TensorRef hidden,
                             const uint32_t* rows,
                             TensorRef logits,
                             backend::StreamRef stream) {
  SPIN_CHECK(logits.cols == config_.vocab_size);
  backend::Ops& ops = device_.ops();
  // More rows than the block of the workspace (max_rows may be small, their number is not bounded
  // by it) go in turns.
  const int64_t block = std::min(max_rows_, kBlockRows);
  const TensorRef normed = matrix_at(
      workspace_.as<float>(), WorkspaceLayout(config_, max_rows_).normed, block, config_.hidden);
  for (int64_t first = 0; first < logits.rows; first += block) {
    const int64_t count = std::min(block, logits.rows - first);
    const TensorRef gathered = normed.row_range(0, count);
    ops.enqueue_gather_rows(hidden, rows + first, gathered, stream);
    ops.enqueue_rms_norm(gathered, weights_.final_norm, config_.hidden, config_.rms_epsilon,
                         gathered, stream);
    ops.enqueue_matmul(gathered, weights_.output_head(), nullptr, false,
                       logits.row_range(first, count), stream);
  }
}

}  // namespace spin::model
