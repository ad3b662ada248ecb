// SPDX-License-Identifier: Apache-2.0
// The dense implementation of the model's attention port: every query attends to all tokens of its
// sequence, out of the pages of one pool.
//
// Thread: engine thread only. Lifetime: the device's ops and the pool outlive this; the slices made
// by begin_step() live until the next begin_step(), which comes after the step's work has run.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/ops.h"
#include "engine/model_runner.h"
#include "kv/page_pool.h"
#include "kv/sequence_kv.h"
#include "layout/ragged_batch.h"
#include "model/attention_port.h"

namespace spin::engine {

class DenseAttention final : public model::AttentionPort {
 public:
  DenseAttention(backend::Ops& ops, const kv::PagePool& pool) : ops_(ops), pool_(pool) {}

  // Describes a step to the kernels: sequence s has its tokens in flight as the rows that follow
  // those of sequence s - 1. Requires: each sequence has begun the step. `progress` is called in
  // stream order after each layer's attention; it lives until the step's work has run.
  void begin_step(std::span<kv::SequenceKv* const> sequences, const StepProgress& progress);

  void enqueue_attention(const model::AttentionCall& call, backend::StreamRef stream) override;

 private:
  backend::Ops& ops_;
  const kv::PagePool& pool_;
  size_t sequences_ = 0;
  std::vector<layout::SequenceSlice> slices_;  // [layers, sequences]
  const StepProgress* progress_ = nullptr;
};

}  // namespace spin::engine
