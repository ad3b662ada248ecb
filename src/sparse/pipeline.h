// SPDX-License-Identifier: Apache-2.0
// The decode step of sparse sequences, one layer at a time:
//
//   append -> Index (append, seal) -> Select -> Retrieve -> (reconstruct) -> Attention (->
//   estimate, merge)
//
// Everything is queued; the host decides nothing between Select and Attention. Sequences of
// different algorithms may share a step: they form one segment per algorithm.
// Thread: engine thread. Lifetime: the store and its device outlive the pipeline; what it is handed
// lives until the step's work has run.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/device.h"
#include "backend/tensor.h"
#include "kv/page_store.h"
#include "sparse/selection_trace.h"
#include "sparse/sparse_sequence.h"

namespace spin::sparse {

// A layer's activations of a whole step; sparse sequences own some of the rows.
struct LayerCall {
  uint32_t layer = 0;
  backend::TensorRef q;    // f32 [rows, q_heads * head_dim], after RoPE
  backend::TensorRef k;    // f32 [rows, kv_heads * head_dim], after RoPE
  backend::TensorRef v;    // f32 [rows, kv_heads * head_dim]
  backend::TensorRef out;  // f32 [rows, q_heads * head_dim]
};

struct DecodeRow {
  SparseSequence* sequence = nullptr;
  uint64_t row = 0;
};

class Pipeline {
 public:
  // `trace`: null, or where the selections of every step are recorded.
  Pipeline(kv::PageStore& store, const ModelShape& model, SelectionRecorder* trace);

  // Requires: each sequence has begun its step, and is in `rows` once.
  void enqueue_layer(const LayerCall& call,
                     std::span<const DecodeRow> rows,
                     backend::StreamRef stream);

 private:
  void enqueue_segment(const LayerCall& call,
                       std::span<const DecodeRow> rows,
                       backend::StreamRef stream);
  void enqueue_index(const LayerCall& call,
                     std::span<const DecodeRow> rows,
                     backend::StreamRef stream);
  void enqueue_selection(const LayerCall& call,
                         std::span<const DecodeRow> rows,
                         backend::StreamRef stream);
  void enqueue_trace(const LayerCall& call,
                     std::span<const DecodeRow> rows,
                     backend::StreamRef stream);
  void enqueue_retrieval(const LayerCall& call,
                         std::span<const DecodeRow> rows,
                         backend::StreamRef stream);
  void enqueue_attention(const LayerCall& call,
                         std::span<const DecodeRow> rows,
                         backend::StreamRef stream);

  kv::PageStore& store_;
  ModelShape model_;
  SelectionRecorder* trace_;
  uint32_t traced_sequences_ = 0;
};

}  // namespace spin::sparse
