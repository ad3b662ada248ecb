// SPDX-License-Identifier: Apache-2.0
// The decoder stack of the Llama, Qwen2 and Qwen3 family:
//
//   h = embedding[ids]
//   per layer: q|k|v = norm(h) Wqkv (+ bias); (q, k = norm per head); rope(q, k)
//              h += attention(q, k, v) Wo          through the AttentionPort
//              h += (silu(g) * u) Wdown,  g|u = norm(h) Wgate_up
//   logits = norm(h[rows asked for]) Whead
//
// Thread: engine thread only (one workspace). Lifetime: the device outlives the decoder; the
// decoder outlives the work it has queued.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/device.h"
#include "backend/ops.h"
#include "backend/tensor.h"
#include "model/attention_port.h"
#include "model/model_config.h"
#include "model/rope.h"
#include "model/weights.h"
#include "spin/status.h"

namespace spin::model {

// One pass over `rows` new tokens of any number of sequences; the port knows which is whose.
// All arrays lie in fast memory. Lifetime: alive and unchanged until the work has run.
struct ForwardInputs {
  const uint32_t* token_ids = nullptr;   // [rows], each < vocab_size
  const uint32_t* positions = nullptr;   // [rows], position of each token in its sequence
  int64_t rows = 0;                      // 1 .. max_rows
  const uint32_t* logit_rows = nullptr;  // [logit_count], each < rows; any order
  int64_t logit_count = 0;               // 0: no logits
  backend::TensorRef logits;             // out: f32 [logit_count, vocab_size]
};

class Decoder {
 public:
  // Bytes of workspace for steps of up to `max_rows` tokens. Requires: 1 <= max_rows <=
  // kMaxRowsPerStep.
  static uint64_t workspace_bytes(const ModelConfig& config, int64_t max_rows);

  // Requires: `weights` were loaded for `config` on `device`.
  // Errors: kInvalidArgument (max_rows), kResourceExhausted (workspace).
  static Result<std::unique_ptr<Decoder>> create(const ModelConfig& config,
                                                 ModelWeights weights,
                                                 backend::Device& device,
                                                 int64_t max_rows);

  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }
  int64_t max_rows() const { return max_rows_; }

  // Queues the pass; nothing blocks. Stream: all work is on `stream`, and passes of one decoder use
  // one stream. Requires: the ranges of ForwardInputs; positions < max_positions is the caller's
  // promise about quality, not memory.
  void enqueue_forward(const ForwardInputs& in,
                       AttentionPort& attention,
                       backend::StreamRef stream);

  // The same pass in parts, for a prompt that goes through one layer completely before the next.
  // `hidden`: f32 [rows, hidden] in fast memory that the caller keeps from part to part. Every row
  // gets the bits that enqueue_forward() gives it, however the rows are cut. The parts share the
  // workspace of enqueue_forward(): same stream. Requires: 1 <= hidden.rows <= max_rows.
  void enqueue_embedding(const uint32_t* token_ids,
                         backend::TensorRef hidden,
                         backend::StreamRef stream);
  void enqueue_layer(uint32_t layer,
                     const uint32_t* positions,
                     backend::TensorRef hidden,
                     AttentionPort& attention,
                     backend::StreamRef stream);
  // Logits of rows[0 .. logits.rows) of `hidden` (of any length).
  void enqueue_logits(backend::TensorRef hidden,
                      const uint32_t* rows,
                      backend::TensorRef logits,
                      backend::StreamRef stream);

  // What RoPE takes. Lifetime: that of the decoder.
  backend::RopeParams rope() const {
    return {.inv_freq = rope_.inv_freq, .attention_factor = rope_.attention_factor};
  }
  // The factor on q . k.
  float attention_scale() const;

 private:
  struct Workspace;  // the views of one pass

  Decoder(const ModelConfig& config,
          ModelWeights weights,
          backend::Device& device,
          int64_t max_rows,
          backend::Buffer workspace);
  // Requires: 1 <= hidden.rows <= max_rows.
  Workspace workspace_for(backend::TensorRef hidden) const;
  void enqueue_attention_block(uint32_t layer,
                               const uint32_t* positions,
                               const Workspace& space,
                               AttentionPort& attention,
                               backend::StreamRef stream);
  void enqueue_mlp_block(uint32_t layer, const Workspace& space, backend::StreamRef stream);

  ModelConfig config_;
  ModelWeights weights_;
  backend::Device& device_;
  int64_t max_rows_;
  backend::Buffer workspace_;
  RopeTable rope_;
};

}  // namespace spin::model
