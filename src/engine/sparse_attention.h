// SPDX-License-Identifier: Apache-2.0
// The model's attention port for a step whose rows belong to dense and sparse sequences: dense ones
// attend to all their tokens out of the fast tier, sparse ones go through the sparse pipeline.
//
// Thread: engine thread only. Lifetime: the store, its device and what begin_step() was given
// outlive the step's work; the slices made by it live until the next begin_step(), which comes
// after the step's work has run.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/ops.h"
#include "engine/model_runner.h"
#include "kv/page_store.h"
#include "kv/sequence_kv.h"
#include "layout/ragged_batch.h"
#include "model/attention_port.h"
#include "sparse/pipeline.h"
#include "sparse/sparse_algorithm.h"

namespace spin::engine {

// A dense sequence of a step; its tokens in flight are the rows from first_row on.
struct DenseRows {
  const kv::SequenceKv* sequence = nullptr;
  uint64_t first_row = 0;
};

class SparseAttention final : public model::AttentionPort {
 public:
  // `trace`: null, or where selections are recorded; it outlives the steps' work.
  SparseAttention(kv::PageStore& store,
                  const sparse::ModelShape& shape,
                  sparse::SelectionRecorder* trace = nullptr)
      : store_(store), layers_(shape.geometry.layers), pipeline_(store, shape, trace) {}

  // Describes a step to the kernels. Requires: each sequence has begun the step; no row belongs to
  // two of them. `progress` is called in stream order after each layer's attention; it lives until
  // the step's work has run.
  void begin_step(std::span<const DenseRows> dense,
                  std::span<const sparse::DecodeRow> sparse,
                  const StepProgress& progress);

  void enqueue_attention(const model::AttentionCall& call, backend::StreamRef stream) override;

 private:
  kv::PageStore& store_;
  uint32_t layers_;
  sparse::Pipeline pipeline_;
  size_t dense_count_ = 0;
  std::vector<layout::SequenceSlice> slices_;  // [layers, dense_count]
  std::vector<sparse::DecodeRow> sparse_;
  const StepProgress* progress_ = nullptr;
};

}  // namespace spin::engine
