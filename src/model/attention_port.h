// SPDX-License-Identifier: Apache-2.0
// The only door between the decoder stack and the KV cache. The model hands over a layer's queries,
// keys and values and gets attention outputs back; which tokens are attended, and where their pages
// lie, is the business of whoever implements the port (engine/sparse_attention.h).
#pragma once

#include <cstdint>

#include "backend/device.h"
#include "backend/tensor.h"

namespace spin::model {

// One layer's attention for all rows of a step. All tensors are f32 in fast memory.
struct AttentionCall {
  uint32_t layer = 0;
  backend::TensorRef q;    // [tokens, q_heads * head_dim], after qk-norm and RoPE
  backend::TensorRef k;    // [tokens, kv_heads * head_dim], after qk-norm and RoPE
  backend::TensorRef v;    // [tokens, kv_heads * head_dim]
  backend::TensorRef out;  // [tokens, q_heads * head_dim]
  float scale = 1.0f;      // on q . k, normally 1 / sqrt(head_dim)
};

// Thread: engine thread only. Stream: work is enqueued on `stream`, nothing blocks.
class AttentionPort {
 public:
  virtual ~AttentionPort() = default;
  virtual void enqueue_attention(const AttentionCall& call, backend::StreamRef stream) = 0;
};

}  // namespace spin::model
