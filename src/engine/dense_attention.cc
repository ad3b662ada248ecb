// SPDX-License-Identifier: Apache-2.0
#include "engine/dense_attention.h"

namespace spin::engine {

void DenseAttention::begin_step(std::span<kv::SequenceKv* const> sequences,
                                const StepProgress& progress) {
  progress_ = &progress;
  sequences_ = sequences.size();
  slices_.clear();
  for (uint32_t layer = 0; layer < pool_.geometry().layers; ++layer) {
    uint64_t first_row = 0;
    for (const kv::SequenceKv* sequence : sequences) {
      slices_.push_back(sequence->slice(layer, first_row));
      first_row += sequence->in_flight_tokens();
    }
  }
}

void DenseAttention::enqueue_attention(const model::AttentionCall& call,
                                       backend::StreamRef stream) {
  const auto slices =
      std::span<const layout::SequenceSlice>(slices_).subspan(call.layer * sequences_, sequences_);
  const backend::KvPoolRef pool = pool_.ref();
  ops_.enqueue_kv_append(call.k, call.v, slices, pool, stream);
  ops_.enqueue_paged_attention(call.q, slices, pool, call.scale, call.out, stream);
  stream.enqueue_host([progress = progress_] { (*progress)(); });
}

}  // namespace spin::engine
