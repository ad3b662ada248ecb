// SPDX-License-Identifier: Apache-2.0
#include "engine/layer_prefill.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "backend/ops.h"
#include "base/check.h"

namespace spin::engine {
namespace {

using backend::Buffer;
using backend::MemoryKind;
using backend::TensorRef;

layout::KvGeometry one_layer(layout::KvGeometry geometry) {
  geometry.layers = 1;
  return geometry;
}

uint64_t hidden_bytes(const model::ModelConfig& config, uint64_t tokens) {
  return tokens * config.hidden * sizeof(float);
}

// Ids, positions and one row number.
uint64_t input_bytes(uint64_t tokens) { return (2 * tokens + 1) * sizeof(uint32_t); }

}  // namespace

uint64_t LayerPrefill::fast_bytes(const model::ModelConfig& config,
                                  const layout::KvGeometry& geometry,
                                  uint64_t max_tokens) {
  const uint64_t pages = one_layer(geometry).pages_for(max_tokens);
  return hidden_bytes(config, max_tokens) + pages * (geometry.page_bytes() + sizeof(uint32_t)) +
         input_bytes(max_tokens);
}

Result<std::unique_ptr<LayerPrefill>> LayerPrefill::create(backend::Device& device,
                                                           model::Decoder& decoder,
                                                           const layout::KvGeometry& geometry,
                                                           uint64_t max_tokens) {
  std::unique_ptr<LayerPrefill> prefill(
      new LayerPrefill(device, decoder, one_layer(geometry), max_tokens));
  const Status status = prefill->allocate();
  if (!status.ok()) return status.with_context("staging of prompts");
  return prefill;
}

LayerPrefill::LayerPrefill(backend::Device& device,
                           model::Decoder& decoder,
                           const layout::KvGeometry& geometry,
                           uint64_t max_tokens)
    : device_(device),
      decoder_(decoder),
      geometry_(geometry),
      max_tokens_(max_tokens),
      max_pages_(geometry.pages_per_head(max_tokens)) {}

// The system backs the memory when a prompt first uses it.
Status LayerPrefill::allocate() {
  backend::MemoryResource& fast = device_.memory(MemoryKind::kFast);
  const uint64_t pages = geometry_.pages_for(max_tokens_);
  SPIN_ASSIGN_OR_RETURN(hidden_,
                        Buffer::allocate(fast, hidden_bytes(decoder_.config(), max_tokens_)));
  SPIN_ASSIGN_OR_RETURN(staging_, Buffer::allocate(fast, pages * geometry_.page_bytes()));
  SPIN_ASSIGN_OR_RETURN(slots_, Buffer::allocate(fast, pages * sizeof(uint32_t)));
  SPIN_ASSIGN_OR_RETURN(inputs_, Buffer::allocate(fast, input_bytes(max_tokens_)));
  SPIN_ASSIGN_OR_RETURN(
      host_inputs_, Buffer::allocate(device_.memory(MemoryKind::kHost), input_bytes(max_tokens_)));
  std::vector<uint32_t> slots(pages);
  std::iota(slots.begin(), slots.end(), 0u);
  SPIN_ASSIGN_OR_RETURN(const auto stream, device_.create_stream("staging"));
  stream->enqueue_copy(slots_.data(), slots.data(), pages * sizeof(uint32_t));
  return stream->wait_idle();
}

void LayerPrefill::begin(sparse::SparseSequence& sequence, std::span<const TokenId> prompt) {
  SPIN_CHECK(!is_active() && !prompt.empty() && prompt.size() <= max_tokens_);
  sequence_ = &sequence;
  tokens_ = prompt.size();
  done_tokens_ = 0;
  uint32_t* inputs = host_inputs_.as<uint32_t>();
  std::copy(prompt.begin(), prompt.end(), inputs);
  for (uint64_t i = 0; i < tokens_; ++i) inputs[max_tokens_ + i] = static_cast<uint32_t>(i);
  inputs[2 * max_tokens_] = 0;
}

TensorRef LayerPrefill::hidden_rows(uint64_t first, uint64_t count) const {
  const int64_t width = decoder_.config().hidden;
  return {.data = hidden_.as<float>() + first * static_cast<uint64_t>(width),
          .dtype = layout::DType::kF32,
          .rows = static_cast<int64_t>(count),
          .cols = width,
          .row_stride = width};
}

layout::PagedTokens LayerPrefill::staged(uint64_t tokens) const {
  return {.base = staging_.as<std::byte>(),
          .geometry = geometry_,
          .slots = slots_.as<uint32_t>(),
          .slot_stride = max_pages_,
          .tokens = tokens};
}

void LayerPrefill::enqueue_slice(uint64_t tokens,
                                 const StepProgress& progress,
                                 TensorRef logits,
                                 backend::StreamRef stream) {
  SPIN_CHECK(is_active() && tokens > 0 && tokens <= tokens_ - done_tokens_);
  progress_ = &progress;
  slices_.clear();
  if (done_tokens_ == 0) {
    stream.enqueue_copy(inputs_.data(), host_inputs_.data(), inputs_.size_bytes());
  }
  const uint64_t layers = decoder_.config().layers;
  const auto most = static_cast<uint64_t>(decoder_.max_rows());
  uint64_t work = done_tokens_ * layers;
  const uint64_t end = (done_tokens_ + tokens) * layers;
  while (work < end) {
    const auto layer = static_cast<uint32_t>(work / tokens_);
    const uint64_t first = work % tokens_;
    const uint64_t count = std::min({tokens_ - first, end - work, most});
    enqueue_chunk(layer, first, count, stream);
    work += count;
  }
  done_tokens_ += tokens;
  if (done_tokens_ < tokens_) return;
  decoder_.enqueue_logits(hidden_rows(tokens_ - 1, 1), inputs_.as<uint32_t>() + 2 * max_tokens_,
                          logits, stream);
}

void LayerPrefill::enqueue_chunk(uint32_t layer,
                                 uint64_t first,
                                 uint64_t count,
                                 backend::StreamRef stream) {
  const uint32_t* ids = inputs_.as<uint32_t>();
  const uint32_t* positions = ids + max_tokens_;
  const TensorRef hidden = hidden_rows(first, count);
  if (layer == 0) decoder_.enqueue_embedding(ids + first, hidden, stream);
  slices_.push_back({.first_row = 0,
                     .query_tokens = count,
                     .context_tokens = first + count,
                     .slots = slots_.as<uint32_t>(),
                     .slot_stride = max_pages_});
  decoder_.enqueue_layer(layer, positions + first, hidden, *this, stream);
  sequence_->enqueue_prompt_chunk(layer, staged(first + count), first, count, stream);
  if (first + count == tokens_) {
    sequence_->enqueue_finish_prompt_layer(layer, staged(tokens_), stream);
  }
  stream.enqueue_host([progress = progress_] { (*progress)(); });
}

void LayerPrefill::enqueue_attention(const model::AttentionCall& call, backend::StreamRef stream) {
  const std::span<const layout::SequenceSlice> slice(&slices_.back(), 1);
  const backend::KvPoolRef pool = {staging_.data(), geometry_};
  backend::Ops& ops = device_.ops();
  ops.enqueue_kv_append(call.k, call.v, slice, pool, stream);
  ops.enqueue_paged_attention(call.q, slice, pool, call.scale, call.out, stream);
}

}  // namespace spin::engine
