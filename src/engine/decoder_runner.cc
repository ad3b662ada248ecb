// SPDX-License-Identifier: Apache-2.0
#include "engine/decoder_runner.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include <spdlog/spdlog.h>

#include "base/check.h"
#include "base/memory_guard.h"
#include "engine/layer_prefill.h"
#include "engine/sequence_store.h"
#include "engine/sparse_attention.h"
#include "kv/page_store.h"

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
    if (trace_ == nullptr) return;
    if (const Status status = trace_->close(); !status.ok()) {
      spdlog::warn("{}", status.message());
    }
  }

  Status prepare() {
    kv::PageStoreOptions store;
    store.geometry = options_.geometry;
    store.fast_pages = options_.kv_pages;
    store.host_bytes = options_.host_bytes;
    store.extent_pages = options_.extent_pages;
    auto made = kv::PageStore::create(device_, store);
    if (!made.ok()) return made.status().with_context("KV cache");
    store_ = std::move(*made);
    SequenceStoreOptions sequences;
    sequences.shape = model_shape(*decoder_, options_.geometry);
    sequences.index_bytes = options_.index_bytes;
    sequences.buffer_ratio = options_.buffer_ratio;
    sequences_.emplace(*store_, sequences);
    if (!options_.selection_trace.empty()) {
      const layout::KvGeometry& geometry = options_.geometry;
      SPIN_ASSIGN_OR_RETURN(
          trace_, sparse::SelectionRecorder::create(
                      options_.selection_trace, {geometry.layers, geometry.kv_heads,
                                                 geometry.page_tokens, options_.trace_settings}));
    }
    attention_.emplace(*store_, sequences.shape, trace_.get());
    if (options_.sparse) {
      SPIN_ASSIGN_OR_RETURN(prefill_, LayerPrefill::create(device_, *decoder_, options_.geometry,
                                                           options_.max_prompt_tokens));
    }
    SPIN_ASSIGN_OR_RETURN(stream_, device_.create_stream("engine"));
    return allocate_buffers();
  }

  uint64_t vocab_size() const override { return decoder_->config().vocab_size; }
  uint32_t max_step_tokens() const override { return static_cast<uint32_t>(decoder_->max_rows()); }
  uint32_t max_logit_rows() const override { return options_.max_logit_rows; }
  uint64_t pages_total() const override { return options_.kv_pages; }
  uint64_t pages_in_use() const override { return sequences_->pages_in_use(); }
  SequenceNeed need(const SequenceRequest& request) const override {
    return sequences_->need(request);
  }
  MemoryNeed total_memory() const override { return sequences_->total(); }
  MemoryNeed free_memory() const override { return sequences_->free(); }
  void add_stats(EngineStats& stats) const override { sequences_->add_stats(stats); }
  Status audit() const override { return sequences_->audit(); }

  Result<SequenceHandle> open_sequence(const SequenceRequest& request) override {
    SPIN_ASSIGN_OR_RETURN(const SequenceHandle handle, sequences_->open(request, *stream_));
    const OpenSequence& sequence = sequences_->at(handle);
    if (sequence.need.exclusive_prefill) {
      SPIN_CHECK(prefill_ != nullptr && !prefilling_);
      prefill_->begin(*sequence.sparse, request.prompt);
      prefilling_ = handle;
    }
    return handle;
  }

  void close_sequence(SequenceHandle sequence) override {
    if (prefilling_ == sequence) end_prefill();
    sequences_->close(sequence);
  }

  uint64_t suspend_pages(SequenceHandle sequence) override {
    return sequences_->suspend_pages(sequence);
  }
  Status suspend_sequence(SequenceHandle sequence) override {
    return sequences_->suspend(sequence, *stream_);
  }
  MemoryNeed resume_need(SequenceHandle sequence) override {
    return sequences_->resume_need(sequence);
  }
  Status resume_sequence(SequenceHandle sequence, uint64_t promised_pages) override {
    return sequences_->resume(sequence, promised_pages, *stream_);
  }

  Result<StepOutput> run(const StepBatch& batch, const StepProgress& progress) override {
    StepOutput output;
    Step step;
    const Status queued = base::guard_memory("a step was queued", [&] {
      begin(batch, step, output);
      enqueue(step, progress);
      return ok_status();
    });
    // Also after a failure: what is queued uses `progress` and the sequences' pages.
    const Status ran = stream_->wait_idle();
    const Status& status = queued.ok() ? ran : queued;
    if (!status.ok()) {
      drop(step);
      return status;
    }
    commit(step, output);
    sequences_->tend(batch.requests_wait, *stream_);
    output.logits = {host_logits_.as<float>(), step.logit_rows, vocab_size(), vocab_size()};
    return output;
  }

 private:
  // A sequence that has begun the step.
  struct Member {
    OpenSequence* sequence = nullptr;
    uint32_t index = 0;  // in the batch
  };
  struct Step {
    std::vector<Member> dense;
    std::vector<Member> sparse;
    std::vector<DenseRows> dense_rows;
    std::vector<sparse::DecodeRow> sparse_rows;
    model::ForwardInputs forward;
    // Where the forward pass's rows of logits belong among all rows, in runs.
    struct Run {
      uint64_t from = 0;
      uint64_t to = 0;
      uint64_t count = 0;
    };
    std::vector<Run> logit_runs;
    uint64_t logit_rows = 0;
    uint64_t prefill_tokens = 0;  // of the staged prompt
    uint64_t prefill_logit_row = 0;
  };

  size_t row_bytes() const { return vocab_size() * sizeof(float); }
  // [max_rows] token ids, [max_rows] positions, [max_logit_rows] rows that want logits.
  size_t input_words() const { return 2 * uint64_t{max_step_tokens()} + options_.max_logit_rows; }

  Status allocate_buffers() {
    backend::MemoryResource& fast = device_.memory(MemoryKind::kFast);
    backend::MemoryResource& host = device_.memory(MemoryKind::kHost);
    const size_t index_bytes = input_words() * sizeof(uint32_t);
    SPIN_ASSIGN_OR_RETURN(host_inputs_, Buffer::allocate(host, index_bytes));
    SPIN_ASSIGN_OR_RETURN(inputs_, Buffer::allocate(fast, index_bytes));
    const size_t logit_bytes = options_.max_logit_rows * row_bytes();
    SPIN_ASSIGN_OR_RETURN(logits_, Buffer::allocate(fast, logit_bytes));
    SPIN_ASSIGN_OR_RETURN(host_logits_, Buffer::allocate(host, logit_bytes));
    return ok_status();
  }

  void end_prefill() {
    prefill_->end();
    prefilling_.reset();
  }

  // Begins the step of every sequence and fills host_inputs_; step.forward points to where the same
  // will lie in fast memory.
  void begin(const StepBatch& batch, Step& step, StepOutput& output) {
    const size_t count = batch.sequences.size();
    step.dense.reserve(count);
    step.sparse.reserve(count);
    uint32_t* logit_rows = host_inputs_.as<uint32_t>() + 2 * size_t{max_step_tokens()};
    int64_t row = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const SequenceStep& one = batch.sequences[i];
      OpenSequence& sequence = sequences_->at(one.sequence);
      SPIN_CHECK(one.logit_rows <= options_.max_logit_rows - step.logit_rows);
      const uint64_t first_logit = std::exchange(step.logit_rows, step.logit_rows + one.logit_rows);
      if (!sequence.fault.ok()) {
        output.faults.push_back({i, sequence.fault});
        continue;
      }
      if (prefilling_ == one.sequence) {
        step.prefill_tokens = one.tokens.size();
        step.prefill_logit_row = first_logit;
        continue;
      }
      stage_rows(one, sequence, row);
      begin_sequence({&sequence, i}, one, row, step);
      row += static_cast<int64_t>(one.tokens.size());
      for (uint32_t k = 0; k < one.logit_rows; ++k) {
        logit_rows[step.forward.logit_count + k] = static_cast<uint32_t>(row - one.logit_rows + k);
      }
      if (one.logit_rows > 0) {
        step.logit_runs.push_back(
            {static_cast<uint64_t>(step.forward.logit_count), first_logit, one.logit_rows});
      }
      step.forward.logit_count += one.logit_rows;
    }
    step.forward.rows = row;
    step.forward.token_ids = inputs_.as<uint32_t>();
    step.forward.positions = step.forward.token_ids + max_step_tokens();
    step.forward.logit_rows = step.forward.positions + max_step_tokens();
    step.forward.logits = logit_tensor(0, step.forward.logit_count);
  }

  void stage_rows(const SequenceStep& one, const OpenSequence& sequence, int64_t row) {
    SPIN_CHECK(one.tokens.size() <= static_cast<uint64_t>(max_step_tokens() - row));
    SPIN_CHECK(one.logit_rows <= one.tokens.size());
    uint32_t* ids = host_inputs_.as<uint32_t>() + row;
    uint32_t* positions = ids + max_step_tokens();
    const uint64_t first = sequence.committed_tokens();
    for (size_t i = 0; i < one.tokens.size(); ++i) {
      ids[i] = one.tokens[i];
      positions[i] = static_cast<uint32_t>(first + i);
    }
  }

  static void begin_sequence(Member member, const SequenceStep& one, int64_t row, Step& step) {
    OpenSequence& sequence = *member.sequence;
    const auto first_row = static_cast<uint64_t>(row);
    if (sequence.dense) {
      step.dense_rows.push_back({&*sequence.dense, first_row});
      step.dense.push_back(member);
      sequence.dense->begin_step(one.tokens.size());
    } else {
      SPIN_CHECK(sequence.prompt_committed && one.tokens.size() == 1);
      step.sparse_rows.push_back({sequence.sparse.get(), first_row});
      step.sparse.push_back(member);
      sequence.sparse->begin_step();
    }
  }

  backend::TensorRef logit_tensor(int64_t first, int64_t rows) const {
    const auto vocab = static_cast<int64_t>(vocab_size());
    return {logits_.as<float>() + first * vocab, layout::DType::kF32, rows, vocab, vocab};
  }

  void enqueue(Step& step, const StepProgress& progress) {
    if (step.forward.rows > 0) {
      attention_->begin_step(step.dense_rows, step.sparse_rows, progress);
      stream_->enqueue_copy(inputs_.data(), host_inputs_.data(), inputs_.size_bytes());
      decoder_->enqueue_forward(step.forward, *attention_, *stream_);
    }
    if (step.prefill_tokens > 0) {
      const int64_t row = step.forward.logit_count;
      prefill_->enqueue_slice(step.prefill_tokens, progress, logit_tensor(row, 1), *stream_);
      if (prefill_->done_tokens() == prefill_->prompt_tokens()) {
        step.logit_runs.push_back({static_cast<uint64_t>(row), step.prefill_logit_row, 1});
      }
    }
    for (const Step::Run& run : step.logit_runs) {
      stream_->enqueue_copy(host_logits_.as<float>() + run.to * vocab_size(),
                            logits_.as<float>() + run.from * vocab_size(), run.count * row_bytes());
    }
  }

  // The step's work has run.
  void commit(const Step& step, StepOutput& output) {
    for (const Member& member : step.dense) member.sequence->dense->commit_step();
    for (const Member& member : step.sparse) {
      Status status = sequences_->commit_step(*member.sequence);
      if (!status.ok()) output.faults.push_back({member.index, std::move(status)});
    }
    if (step.prefill_tokens > 0 && prefill_->done_tokens() == prefill_->prompt_tokens()) {
      sequences_->commit_prompt(sequences_->at(*prefilling_));
      end_prefill();
    }
  }

  static void drop(const Step& step) {
    for (const Member& member : step.dense) member.sequence->dense->drop_step();
    for (const Member& member : step.sparse) member.sequence->sparse->drop_step();
  }

  backend::Device& device_;
  std::unique_ptr<model::Decoder> decoder_;
  DecoderRunnerOptions options_;
  std::unique_ptr<kv::PageStore> store_;
  std::optional<SequenceStore> sequences_;
  std::unique_ptr<sparse::SelectionRecorder> trace_;  // null: selections are not recorded
  std::optional<SparseAttention> attention_;
  std::unique_ptr<LayerPrefill> prefill_;     // null without sparse sequences
  std::optional<SequenceHandle> prefilling_;  // whose prompt it works on
  Buffer host_inputs_;
  Buffer inputs_;
  Buffer logits_;       // [max_logit_rows, vocab] f32
  Buffer host_logits_;  // the same, on the host
  std::unique_ptr<backend::Stream> stream_;
};

}  // namespace

uint64_t runner_bytes(const model::ModelConfig& config,
                      uint32_t max_step_tokens,
                      uint32_t max_logit_rows) {
  const uint64_t inputs = (2 * uint64_t{max_step_tokens} + max_logit_rows) * sizeof(uint32_t);
  const uint64_t logits = uint64_t{max_logit_rows} * config.vocab_size * sizeof(float);
  return inputs + logits;
}

sparse::ModelShape model_shape(const model::Decoder& decoder, const layout::KvGeometry& geometry) {
  sparse::ModelShape shape;
  shape.geometry = geometry;
  shape.q_heads = decoder.config().q_heads;
  shape.scale = decoder.attention_scale();
  shape.rope = decoder.rope();
  return shape;
}

Result<std::unique_ptr<ModelRunner>> make_decoder_runner(backend::Device& device,
                                                         std::unique_ptr<model::Decoder> decoder,
                                                         const DecoderRunnerOptions& options) {
  auto runner = std::make_unique<DecoderRunner>(device, std::move(decoder), options);
  SPIN_RETURN_IF_ERROR(runner->prepare());
  return std::unique_ptr<ModelRunner>(std::move(runner));
}

}  // namespace spin::engine
