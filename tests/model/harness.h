// SPDX-License-Identifier: Apache-2.0
// Runs a decoder on one sequence with plain dense attention over kv::SequenceKv: the smallest
// complete user of src/model and src/kv. Thread: one thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/device.h"
#include "kv/page_pool.h"
#include "kv/sequence_kv.h"
#include "layout/dtype.h"
#include "layout/ragged_batch.h"
#include "model/attention_port.h"
#include "model/decoder.h"
#include "model/load.h"

namespace spin::testing {

// Dense attention of any number of sequences whose steps have begun.
class TestAttention : public model::AttentionPort {
 public:
  TestAttention(backend::Device& device, const kv::PagePool& pool) : device_(device), pool_(pool) {}

  // Lifetime: the slices are alive until the next call.
  void set_step(std::span<kv::SequenceKv* const> sequences, std::span<const uint64_t> first_rows);
  void enqueue_attention(const model::AttentionCall& call, backend::StreamRef stream) override;

 private:
  backend::Device& device_;
  const kv::PagePool& pool_;
  std::vector<std::vector<layout::SequenceSlice>> slices_;  // [layers][sequences]
};

struct RunnerOptions {
  layout::DType dtype = layout::DType::kF32;
  layout::DType kv_dtype = layout::DType::kF32;
  uint32_t page_tokens = 8;
  uint64_t max_tokens = 256;
  int64_t max_rows = 256;
};

// A loaded model with one sequence.
class Runner {
 public:
  Runner(backend::Device& device, const std::filesystem::path& path, const RunnerOptions& options);

  const model::Decoder& decoder() const { return *decoder_; }
  kv::PagePool& pool() { return *pool_; }

  // Forgets the sequence's tokens.
  void restart();
  // Appends tokens in steps of `chunk`; logits of the last `logit_rows` of them, row-major.
  // Requires: logit_rows fit the last chunk.
  std::vector<float> feed(std::span<const uint32_t> ids, size_t chunk, size_t logit_rows = 1);
  // Greedy tokens after the tokens fed so far, whose last logits are given: `count` of them, or
  // fewer up to `stop_id`.
  std::vector<uint32_t> greedy_from(std::span<const float> logits,
                                    size_t count,
                                    int64_t stop_id = -1);

 private:
  std::vector<float> step(std::span<const uint32_t> ids, size_t logit_rows);

  backend::Device& device_;
  RunnerOptions options_;
  std::unique_ptr<backend::Stream> stream_;
  std::unique_ptr<model::Decoder> decoder_;
  std::unique_ptr<kv::PagePool> pool_;
  std::vector<kv::SequenceKv> sequence_;  // one
  std::unique_ptr<TestAttention> attention_;
};

uint32_t argmax(std::span<const float> logits);

// One device for all tests of this executable.
backend::Device& test_device();

}  // namespace spin::testing
