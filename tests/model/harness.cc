// SPDX-License-Identifier: Apache-2.0
#include "tests/model/harness.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "backend/ops.h"
#include "base/check.h"

namespace spin::testing {

void TestAttention::set_step(std::span<kv::SequenceKv* const> sequences,
                             std::span<const uint64_t> first_rows) {
  slices_.assign(pool_.geometry().layers, {});
  for (uint32_t layer = 0; layer < slices_.size(); ++layer) {
    for (size_t i = 0; i < sequences.size(); ++i) {
      slices_[layer].push_back(sequences[i]->slice(layer, first_rows[i]));
    }
  }
}

void TestAttention::enqueue_attention(const model::AttentionCall& call, backend::StreamRef stream) {
  const std::vector<layout::SequenceSlice>& slices = slices_[call.layer];
  const backend::KvPoolRef pool = pool_.ref();
  device_.ops().enqueue_kv_append(call.k, call.v, slices, pool, stream);
  device_.ops().enqueue_paged_attention(call.q, slices, pool, call.scale, call.out, stream);
}

Runner::Runner(backend::Device& device,
               const std::filesystem::path& path,
               const RunnerOptions& options)
    : device_(device), options_(options) {
  auto files = model::open_model(path.string());
  EXPECT_TRUE(files.ok()) << files.status().to_string();
  model::LoadOptions load;
  load.weights.dtype = options.dtype;
  load.max_rows = options.max_rows;
  auto decoder = model::load_decoder(*files, device, load);
  EXPECT_TRUE(decoder.ok()) << decoder.status().to_string();
  decoder_ = std::move(*decoder);
  const layout::KvGeometry geometry =
      decoder_->config().kv_geometry(options.page_tokens, options.kv_dtype);
  pool_ = std::move(*kv::PagePool::create(device.memory(backend::MemoryKind::kFast), geometry,
                                          {.pages = geometry.pages_for(options.max_tokens)}));
  stream_ = std::move(*device.create_stream("test"));
  attention_ = std::make_unique<TestAttention>(device, *pool_);
  restart();
}

void Runner::restart() {
  sequence_.clear();
  sequence_.push_back(std::move(*kv::SequenceKv::reserve(*pool_, options_.max_tokens)));
}

std::vector<float> Runner::step(std::span<const uint32_t> ids, size_t logit_rows) {
  kv::SequenceKv& sequence = sequence_.front();
  std::vector<uint32_t> positions(ids.size());
  std::iota(positions.begin(), positions.end(), static_cast<uint32_t>(sequence.committed_tokens()));
  std::vector<uint32_t> rows(logit_rows);
  std::iota(rows.begin(), rows.end(), static_cast<uint32_t>(ids.size() - logit_rows));
  const int64_t vocab = decoder_->config().vocab_size;
  std::vector<float> logits(logit_rows * static_cast<size_t>(vocab));
  sequence.begin_step(ids.size());
  kv::SequenceKv* const sequences[] = {&sequence};
  const uint64_t first_rows[] = {0};
  attention_->set_step(sequences, first_rows);
  decoder_->enqueue_forward({.token_ids = ids.data(),
                             .positions = positions.data(),
                             .rows = static_cast<int64_t>(ids.size()),
                             .logit_rows = rows.data(),
                             .logit_count = static_cast<int64_t>(logit_rows),
                             .logits = {.data = logits.data(),
                                        .dtype = layout::DType::kF32,
                                        .rows = static_cast<int64_t>(logit_rows),
                                        .cols = vocab,
                                        .row_stride = vocab}},
                            *attention_, *stream_);
  const Status status = stream_->wait_idle();
  EXPECT_TRUE(status.ok()) << status.to_string();
  sequence.commit_step();
  return logits;
}

std::vector<float> Runner::feed(std::span<const uint32_t> ids, size_t chunk, size_t logit_rows) {
  while (ids.size() > chunk) {
    step(ids.first(chunk), 0);
    ids = ids.subspan(chunk);
  }
  return step(ids, logit_rows);
}

std::vector<uint32_t> Runner::greedy_from(std::span<const float> logits,
                                          size_t count,
                                          int64_t stop_id) {
  std::vector<uint32_t> ids = {argmax(logits)};
  while (ids.size() < count && ids.back() != stop_id) {
    const uint32_t last[] = {ids.back()};
    ids.push_back(argmax(feed(last, 1)));
  }
  return ids;
}

uint32_t argmax(std::span<const float> logits) {
  return static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

backend::Device& test_device() {
  static const std::unique_ptr<backend::Device> device =
      std::move(*backend::cpu::create_cpu_device({.threads = 2}));
  return *device;
}

}  // namespace spin::testing
