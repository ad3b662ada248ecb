// SPDX-License-Identifier: Apache-2.0
#include "engine/sparse_attention.h"

namespace spin::engine {

void SparseAttention::begin_step(std::span<const DenseRows> dense,
                                 std::span<const sparse::DecodeRow> sparse,
                                 const StepProgress& progress) {
  progress_ = &progress;
  dense_count_ = dense.size();
  sparse_.assign(sparse.begin(), sparse.end());
  slices_.clear();
  slices_.reserve(layers_ * dense.size());
  for (uint32_t layer = 0; layer < layers_; ++layer) {
    for (const DenseRows& rows : dense) {
      slices_.push_back(rows.sequence->slice(layer, rows.first_row));
    }
  }
}

void SparseAttention::enqueue_attention(const model::AttentionCall& call,
                                        backend::StreamRef stream) {
  if (dense_count_ > 0) {
    const auto slices = std::span<const layout::SequenceSlice>(slices_).subspan(
        call.layer * dense_count_, dense_count_);
    const backend::KvPoolRef pool = store_.fast().ref();
    backend::Ops& ops = store_.device().ops();
    ops.enqueue_kv_append(call.k, call.v, slices, pool, stream);
    ops.enqueue_paged_attention(call.q, slices, pool, call.scale, call.out, stream);
  }
  if (!sparse_.empty()) {
    pipeline_.enqueue_layer(
        {.layer = call.layer, .q = call.q, .k = call.k, .v = call.v, .out = call.out}, sparse_,
        stream);
  }
  stream.enqueue_host([progress = progress_] { (*progress)(); });
}

}  // namespace spin::engine
