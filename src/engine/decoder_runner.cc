// SPDX-License-Identifier: Apache-2.0
#include "engine/decoder_runner.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/memory_guard.h"
#include "engine/dense_attention.h"
#include "engine/sequence_table.h"
#include "kv/page_pool.h"

namespace spin::engine {
namespace {

using backend::Buffer;
using backend::MemoryKind;

class DecoderRunner final : public ModelRunner {
 public:
  DecoderRunner(backend::Device& device,
                std::unique_ptr<model::Decoder> decoder,
                const DecoderRunnerOptions& options)
      : device_(device), decoder_(std::move(decoder)), options_(options) {}

  ~DecoderRunner() override {
    // After a failed step work may still be queued, and it uses what is destroyed next.
    if (stream_) static_cast<void>(stream_->wait_idle());
  }

  Status prepare() {
    backend::MemoryResource& fast = device_.memory(MemoryKind::kFast);
    backend::MemoryResource& host = device_.memory(MemoryKind::kHost);
    kv::PagePoolOptions pool;
    pool.pages = options_.kv_pages;
    auto made = kv::PagePool::create(fast, options_.geometry, pool);
    if (!made.ok()) return made.status().with_context("KV cache");
    pool_ = std::move(*made);
    sequences_.emplace(*pool_);
    attention_.emplace(device_.ops(), *pool_);
    SPIN_ASSIGN_OR_RETURN(stream_, device_.create_stream("engine"));
    const size_t index_bytes = input_words() * sizeof(uint32_t);
    SPIN_ASSIGN_OR_RETURN(host_inputs_, Buffer::allocate(host, index_bytes));
    SPIN_ASSIGN_OR_RETURN(inputs_, Buffer::allocate(fast, index_bytes));
    const size_t logit_bytes = options_.max_logit_rows * row_bytes();
    SPIN_ASSIGN_OR_RETURN(logits_, Buffer::allocate(fast, logit_bytes));
    SPIN_ASSIGN_OR_RETURN(host_logits_, Buffer::allocate(host, logit_bytes));
    return ok_status();
  }

  uint64_t vocab_size() const override { return decoder_->config().vocab_size; }
  uint32_t max_step_tokens() const override { return static_cast<uint32_t>(decoder_->max_rows()); }
  uint32_t max_logit_rows() const override { return options_.max_logit_rows; }
  uint64_t pages_total() const override { return options_.kv_pages; }
  uint64_t pages_in_use() const override { return sequences_->pages_in_use(); }
  SequenceNeed need(const SequenceRequest& request) const override {
    SequenceNeed need;
    need.memory.pages = options_.geometry.pages_for(request.max_tokens);
    return need;
  }
  MemoryNeed total_memory() const override { return {pages_total(), 0, 0}; }
  MemoryNeed free_memory() const override { return {pages_total() - pages_in_use(), 0, 0}; }
  Result<SequenceHandle> open_sequence(const SequenceRequest& request) override {
    return sequences_->open(request.max_tokens);
  }
  void add_stats(EngineStats& stats) const override {
    const uint64_t page = options_.geometry.page_bytes();
    stats.kv_tiers = {
        {"fast", pages_total(), pages_in_use(), pages_total() * page, pages_in_use() * page}};
  }
  void close_sequence(SequenceHandle sequence) override { sequences_->close(sequence); }
  Status audit() const override { return sequences_->audit(); }

  Result<StepOutput> run(const StepBatch& batch, const StepProgress& progress) override {
    model::ForwardInputs in = stage(batch);
    step_.clear();
    step_.reserve(batch.sequences.size());
    for (const SequenceStep& step : batch.sequences) {
      step_.push_back(&sequences_->at(step.sequence));
      step_.back()->begin_step(step.tokens.size());
    }
    const auto rows = static_cast<uint64_t>(in.logit_count);
    const Status queued = base::guard_memory("a step was queued", [&] {
      enqueue_step(in, rows, progress);
      return ok_status();
    });
    // Also after a failure: what is queued uses `progress` and the sequences' pages.
    const Status ran = stream_->wait_idle();
    const Status& status = queued.ok() ? ran : queued;
    for (kv::SequenceKv* sequence : step_) {
      if (status.ok()) {
        sequence->commit_step();
      } else {
        sequence->drop_step();
      }
    }
    if (!status.ok()) return status;
    return StepOutput{{host_logits_.as<float>(), rows, vocab_size(), vocab_size()}, {}};
  }

 private:
  size_t row_bytes() const { return vocab_size() * sizeof(float); }
  // [max_rows] token ids, [max_rows] positions, [max_logit_rows] rows that want logits.
  size_t input_words() const { return 2 * uint64_t{max_step_tokens()} + options_.max_logit_rows; }

  void enqueue_step(const model::ForwardInputs& in, uint64_t rows, const StepProgress& progress) {
    attention_->begin_step(step_, progress);
    stream_->enqueue_copy(inputs_.data(), host_inputs_.data(), inputs_.size_bytes());
    decoder_->enqueue_forward(in, *attention_, *stream_);
    if (rows == 0) return;
    stream_->enqueue_copy(host_logits_.data(), logits_.data(), rows * row_bytes());
  }

  // Fills host_inputs_; the result points to where the same will lie in fast memory.
  model::ForwardInputs stage(const StepBatch& batch) {
    uint32_t* ids = host_inputs_.as<uint32_t>();
    uint32_t* positions = ids + max_step_tokens();
    uint32_t* logit_rows = positions + max_step_tokens();
    uint32_t row = 0;
    uint32_t wanted = 0;
    for (const SequenceStep& step : batch.sequences) {
      SPIN_CHECK(step.tokens.size() <= max_step_tokens() - row);
      SPIN_CHECK(step.logit_rows <= step.tokens.size());
      SPIN_CHECK(step.logit_rows <= options_.max_logit_rows - wanted);
      const uint64_t first = sequences_->at(step.sequence).committed_tokens();
      const auto count = static_cast<uint32_t>(step.tokens.size());
      for (uint32_t i = 0; i < count; ++i) {
        ids[row + i] = step.tokens[i];
        positions[row + i] = static_cast<uint32_t>(first + i);
      }
      row += count;
      for (uint32_t i = row - step.logit_rows; i < row; ++i) logit_rows[wanted++] = i;
    }
    model::ForwardInputs in;
    in.token_ids = inputs_.as<uint32_t>();
    in.positions = in.token_ids + max_step_tokens();
    in.rows = row;
    in.logit_rows = in.positions + max_step_tokens();
    in.logit_count = wanted;
    const auto vocab = static_cast<int64_t>(vocab_size());
    in.logits = {logits_.data(), layout::DType::kF32, wanted, vocab, vocab};
    return in;
  }

  backend::Device& device_;
  std::unique_ptr<model::Decoder> decoder_;
  DecoderRunnerOptions options_;
  std::unique_ptr<kv::PagePool> pool_;
  std::optional<SequenceTable> sequences_;
  std::optional<DenseAttention> attention_;
  Buffer host_inputs_;
  Buffer inputs_;
  Buffer logits_;       // [max_logit_rows, vocab] f32
  Buffer host_logits_;  // the same, on the host
  std::vector<kv::SequenceKv*> step_;
  std::unique_ptr<backend::Stream> stream_;
};

}  // namespace

uint64_t runner_bytes(const model::ModelConfig& config,
                      uint32_t max_step_tokens,
                      uint32_t max_logit_rows) {
  const uint64_t inputs = (2 * uint64_t{max_step_tokens} + max_logit_rows) * sizeof(uint32_t);
  const uint64_t logits = uint64_t{max_logit_rows} * config.vocab_size * sizeof(float);
  return 2 * (inputs + logits);  // fast and host memory
}

Result<std::unique_ptr<ModelRunner>> make_decoder_runner(backend::Device& device,
                                                         std::unique_ptr<model::Decoder> decoder,
                                                         const DecoderRunnerOptions& options) {
  auto runner = std::make_unique<DecoderRunner>(device, std::move(decoder), options);
  SPIN_RETURN_IF_ERROR(runner->prepare());
  return std::unique_ptr<ModelRunner>(std::move(runner));
}

}  // namespace spin::engine
