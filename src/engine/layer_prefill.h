// SPDX-License-Identifier: Apache-2.0
// Layer-major prefill of one prompt: it goes through a layer completely before the next, so that an
// index sees the whole prompt and only one layer's keys and values need fast memory at a time. They
// lie in a staging buffer (a small pool of pages, docs/decisions/0008-staging-in-pages.md); between
// layers the hidden states of all tokens are kept.
//
// The work is cut by tokens: a prompt of n tokens in a model of L layers is n * L token-layers of
// work in layer order, and a slice of t tokens is the next t * L of them.
//
// Thread: engine thread only. Lifetime: device and decoder outlive it; the sequence outlives the
// prefill and the work queued for it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>

#include "backend/device.h"
#include "engine/model_runner.h"
#include "layout/kv_geometry.h"
#include "layout/paged_tokens.h"
#include "layout/ragged_batch.h"
#include "model/attention_port.h"
#include "model/decoder.h"
#include "sparse/sparse_sequence.h"
#include "spin/status.h"
#include "spin/token.h"

namespace spin::engine {

class LayerPrefill final : private model::AttentionPort {
 public:
  // Fast memory of the buffers for prompts of up to `max_tokens`.
  static uint64_t fast_bytes(const model::ModelConfig& config,
                             const layout::KvGeometry& geometry,
                             uint64_t max_tokens);

  // Errors: kResourceExhausted.
  static Result<std::unique_ptr<LayerPrefill>> create(backend::Device& device,
                                                      model::Decoder& decoder,
                                                      const layout::KvGeometry& geometry,
                                                      uint64_t max_tokens);

  bool is_active() const { return sequence_ != nullptr; }
  // Requires: no prefill is active; 1 <= prompt.size() <= max_tokens.
  void begin(sparse::SparseSequence& sequence, std::span<const TokenId> prompt);
  // Forgets the prefill. Requires: nothing of it is queued.
  void end() { sequence_ = nullptr; }

  uint64_t prompt_tokens() const { return tokens_; }
  uint64_t done_tokens() const { return done_tokens_; }

  // Queues the slice of `tokens` more tokens; with the last one the logits of the prompt's last
  // token too, into `logits` [1, vocab]. `progress` is called in stream order now and then; it
  // lives until the work has run. Requires: the work of earlier slices has run; tokens fit.
  void enqueue_slice(uint64_t tokens,
                     const StepProgress& progress,
                     backend::TensorRef logits,
                     backend::StreamRef stream);

 private:
  LayerPrefill(backend::Device& device,
               model::Decoder& decoder,
               const layout::KvGeometry& geometry,
               uint64_t max_tokens);
  Status allocate();
  backend::TensorRef hidden_rows(uint64_t first, uint64_t count) const;
  // The first `tokens` of the prompt as they lie in the staging buffer.
  layout::PagedTokens staged(uint64_t tokens) const;
  void enqueue_chunk(uint32_t layer, uint64_t first, uint64_t count, backend::StreamRef stream);
  void enqueue_attention(const model::AttentionCall& call, backend::StreamRef stream) override;

  backend::Device& device_;
  model::Decoder& decoder_;
  layout::KvGeometry geometry_;  // of one layer
  uint64_t max_tokens_;
  uint64_t max_pages_;           // per head
  backend::Buffer hidden_;       // [max_tokens, hidden] f32
  backend::Buffer staging_;      // [kv_heads * max_pages] pages
  backend::Buffer slots_;        // [kv_heads, max_pages] u32, slot i is i
  backend::Buffer inputs_;       // [max_tokens] ids, [max_tokens] positions, one row number
  backend::Buffer host_inputs_;  // the same, on the host
  sparse::SparseSequence* sequence_ = nullptr;
  uint64_t tokens_ = 0;
  uint64_t done_tokens_ = 0;
  const StepProgress* progress_ = nullptr;
  std::deque<layout::SequenceSlice> slices_;  // of the chunks queued
};

}  // namespace spin::engine
