// SPDX-License-Identifier: Apache-2.0
#include "sparse/sparse_sequence.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/checked_math.h"

namespace spin::sparse {
namespace {

// Entries of the longest list that a step can attend to.
uint64_t most_list_pages(const kv::SequenceShape& shape, const layout::KvGeometry& geometry) {
  const uint64_t sparse = uint64_t{shape.pinned_pages()} + shape.selected_pages;
  if (shape.dense_layers == 0) return sparse;
  return std::max(sparse, geometry.pages_per_head(shape.max_tokens));
}

// Deals out one buffer to arrays, each aligned to a cache line.
class Carver {
 public:
  // Returns the array's offset.
  uint64_t add(uint64_t count, uint64_t element_bytes) {
    const uint64_t begin = bytes_.value_or(0);
    const std::optional<uint64_t> size = base::checked_mul(count, element_bytes);
    if (bytes_ && size) {
      bytes_ = base::checked_add(begin, *size);
      if (bytes_) bytes_ = base::checked_align_up(*bytes_, 64);
    } else {
      bytes_ = std::nullopt;
    }
    return begin;
  }
  // Nothing when the sizes overflow.
  std::optional<uint64_t> bytes() const { return bytes_; }

 private:
  std::optional<uint64_t> bytes_ = 0;
};

template <typename T>
T* at(const backend::Buffer& buffer, uint64_t offset) {
  return reinterpret_cast<T*>(buffer.as<std::byte>() + offset);
}

void add_counters(SparseCounters& sum, const SparseCounters& step) {
  sum.steps += step.steps;
  sum.selections += step.selections;
  sum.dense += step.dense;
  sum.attended_tokens += step.attended_tokens;
  sum.selected_partitions += step.selected_partitions;
  sum.overflows += step.overflows;
  sum.retrieve.hits += step.retrieve.hits;
  sum.retrieve.misses += step.retrieve.misses;
  sum.retrieve.evictions += step.retrieve.evictions;
  sum.retrieve.bytes += step.retrieve.bytes;
  sum.retrieve.stall_ns += step.retrieve.stall_ns;
  sum.retrieve.faults += step.retrieve.faults;
  sum.sealed_pages += step.sealed_pages;
  sum.repacks += step.repacks;
}

}  // namespace

kv::SequenceShape sequence_shape(const SparseAlgorithm& algorithm,
                                 const ModelShape& model,
                                 uint64_t max_tokens) {
  const SequenceNeeds needs = algorithm.needs(max_tokens);
  const Descriptor& descriptor = algorithm.descriptor();
  kv::SequenceShape shape;
  shape.max_tokens = max_tokens;
  shape.max_page_ids = needs.page_ids;
  shape.sink_pages = needs.sink_pages;
  shape.zone_pages = needs.zone_pages;
  shape.tail_pages = needs.tail_pages;
  shape.dense_layers = descriptor.dense_layers;
  // Below the minimum length a step reads everything; sinks and the open page are pinned.
  uint64_t selected = needs.selected_pages;
  if (descriptor.minimum_tokens > 0) {
    const uint64_t dense_pages =
        model.geometry.pages_per_head(std::min(descriptor.minimum_tokens - 1, max_tokens));
    const uint64_t pinned = uint64_t{needs.sink_pages} + 1;
    selected = std::max(selected, dense_pages > pinned ? dense_pages - pinned : 0);
  }
  shape.selected_pages = static_cast<uint32_t>(selected);
  return shape;
}

Result<std::unique_ptr<SparseSequence>> SparseSequence::open(
    kv::PageStore& store,
    std::shared_ptr<const SparseAlgorithm> algorithm,
    const ModelShape& model,
    uint64_t max_tokens,
    uint64_t lease_pages) {
  const kv::SequenceShape shape = sequence_shape(*algorithm, model, max_tokens);
  std::unique_ptr<SparseSequence> sequence(new SparseSequence);
  sequence->store_ = &store;
  sequence->model_ = model;
  SPIN_ASSIGN_OR_RETURN(
      sequence->index_,
      algorithm->create_index(max_tokens, store.device().memory(backend::MemoryKind::kFast)));
  SPIN_ASSIGN_OR_RETURN(sequence->kv_, kv::TieredSequence::open(store, shape, lease_pages));
  sequence->algorithm_ = std::move(algorithm);
  SPIN_RETURN_IF_ERROR(sequence->allocate_buffers());
  return sequence;
}

SparseSequence::~SparseSequence() = default;

Status SparseSequence::allocate_buffers() {
  const Descriptor& descriptor = algorithm_->descriptor();
  const uint64_t heads = model_.geometry.kv_heads;
  const uint64_t stride = most_list_pages(kv_->shape(), model_.geometry);
  const uint64_t entries = heads * stride;
  const bool rebuilds = descriptor.planes == layout::Planes::kValuesOnly;
  const uint64_t parts = descriptor.estimates ? model_.q_heads : 0;
  Carver carver;
  const uint64_t pages = carver.add(entries, sizeof(uint32_t));
  const uint64_t slots = carver.add(entries, sizeof(uint32_t));
  const uint64_t fetched = carver.add(rebuilds ? entries : 0, sizeof(uint32_t));
  const uint64_t tokens = carver.add(entries, 1);
  const uint64_t list_counts = carver.add(heads, sizeof(uint32_t));
  const uint64_t fetched_counts = carver.add(heads, sizeof(uint32_t));
  const uint64_t log_sum_exp = carver.add(parts, sizeof(float));
  const uint64_t part_log_sum_exp = carver.add(parts, sizeof(float));
  const uint64_t part = carver.add(parts * model_.geometry.head_dim, sizeof(float));
  if (!carver.bytes() || stride > UINT32_MAX) {
    return Status(StatusCode::kResourceExhausted,
                  "selection buffers of " + std::to_string(stride) + " pages are too large");
  }
  backend::Device& device = store_->device();
  SPIN_ASSIGN_OR_RETURN(buffers_, backend::Buffer::allocate(
                                      device.memory(backend::MemoryKind::kFast), *carver.bytes()));
  SPIN_ASSIGN_OR_RETURN(counts_,
                        backend::Buffer::allocate(device.memory(backend::MemoryKind::kHost),
                                                  3 * heads * sizeof(uint64_t)));
  list_.pages = at<uint32_t>(buffers_, pages);
  list_.tokens = at<uint8_t>(buffers_, tokens);
  list_.counts = at<uint32_t>(buffers_, list_counts);
  list_.stride = static_cast<uint32_t>(stride);
  slots_ = at<uint32_t>(buffers_, slots);
  if (rebuilds) {
    fetched_ = at<uint32_t>(buffers_, fetched);
    fetched_counts_ = at<uint32_t>(buffers_, fetched_counts);
  }
  if (descriptor.estimates) {
    log_sum_exp_ = at<float>(buffers_, log_sum_exp);
    part_ = at<float>(buffers_, part);
    part_log_sum_exp_ = at<float>(buffers_, part_log_sum_exp);
  }
  attended_ = counts_.as<uint64_t>();
  selected_ = attended_ + heads;
  overflows_ = selected_ + heads;
  return ok_status();
}

void SparseSequence::enqueue_prompt_chunk(uint32_t layer,
                                          const layout::PagedTokens& prompt,
                                          uint64_t first,
                                          uint64_t count,
                                          backend::StreamRef stream) {
  algorithm_->enqueue_prompt_chunk(*index_, layer, prompt, first, count, stream);
}

void SparseSequence::enqueue_finish_prompt_layer(uint32_t layer,
                                                 const layout::PagedTokens& prompt,
                                                 backend::StreamRef stream) {
  enqueue_place(layer, prompt, algorithm_->enqueue_finish_prompt(*index_, layer, prompt, stream),
                stream);
}

bool SparseSequence::enqueue_copy_prompt_layer(const SparseSequence& from,
                                               uint32_t layer,
                                               const layout::PagedTokens& prompt,
                                               backend::StreamRef stream) {
  SPIN_CHECK(kv_->shape().max_tokens == from.kv_->shape().max_tokens);
  const std::optional<PromptPartition> partition = algorithm_->enqueue_copy_prompt(
      *from.algorithm_, *from.index_, *index_, layer, prompt, stream);
  if (!partition) return false;
  enqueue_place(layer, prompt, *partition, stream);
  return true;
}

void SparseSequence::enqueue_place(uint32_t layer,
                                   const layout::PagedTokens& prompt,
                                   const PromptPartition& partition,
                                   backend::StreamRef stream) {
  // A dense layer attends to [0, tail) by token order.
  SPIN_CHECK(partition.map == nullptr || layer >= algorithm_->descriptor().dense_layers);
  const backend::PlaceItem item =
      kv_->place_item(layer, prompt, algorithm_->prompt_tail_first(prompt.tokens), partition.map,
                      partition.mapped_page_ids, partition.pinned, stream);
  SPIN_CHECK(partition.map == nullptr || item.first_mapped_page == partition.first_mapped_page);
  store_->device().kv_ops().enqueue_place(item, store_->ref(), stream);
}

void SparseSequence::commit_prompt(uint64_t tokens) { kv_->commit_prompt(tokens); }

void SparseSequence::begin_step() {
  kv_->begin_step(1);
  step_ = SparseCounters();
  std::memset(counts_.data(), 0, counts_.size_bytes());
}

Status SparseSequence::commit_step() {
  step_.steps = 1;
  step_.retrieve = kv_->take_counters();
  for (uint32_t head = 0; head < model_.geometry.kv_heads; ++head) {
    step_.attended_tokens += attended_[head];
    step_.selected_partitions += selected_[head];
    step_.overflows += overflows_[head];
  }
  add_counters(counters_, step_);
  if (step_.retrieve.faults > 0) {
    kv_->drop_step();
    return Status(StatusCode::kCorrupt, std::to_string(step_.retrieve.faults) +
                                            " pages on the host are missing or not the ones "
                                            "expected");
  }
  kv_->commit_step();
  return ok_status();
}

void SparseSequence::drop_step() {
  // What its kernels counted is not of any step that counts.
  (void)kv_->take_counters();
  kv_->drop_step();
}

}  // namespace spin::sparse
