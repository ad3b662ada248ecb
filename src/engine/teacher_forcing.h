// SPDX-License-Identifier: Apache-2.0
// Runs one sequence of known tokens through dense attention and through any number of sparse
// settings: one dense prefill, from whose pages every setting's index is built and its KV placed,
// then decode steps in which all settings are rows of one batch. What comes of the logits is the
// caller's business (engine/evaluation.cc).
// Thread: one thread; blocks. Lifetime: the device outlives it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/device.h"
#include "engine/algorithm_set.h"
#include "engine/sparse_attention.h"
#include "kv/page_store.h"
#include "kv/sequence_kv.h"
#include "model/decoder.h"
#include "sparse/sparse_sequence.h"
#include "spin/evaluation.h"
#include "spin/status.h"
#include "spin/token.h"

namespace spin::engine {

// The logits [vocab] of a row: `setting` 0 is dense attention, setting i the algorithm i - 1;
// `step` 0 follows the last token of the prompt. Dense rows come before those of all others. A
// setting whose algorithm is dense below its minimum gets the dense rows.
using LogitsSink =
    std::function<void(size_t setting, uint64_t step, std::span<const float> logits)>;

// Tokens prefilled or decoded so far, of `total`; false cancels.
using ForcingProgress = std::function<bool(uint64_t done, uint64_t total)>;

struct ForcingTimes {
  double prefill_s = 0;
  double decode_s = 0;
};

class TeacherForcing {
 public:
  // At most `max_settings` settings decode together. Errors: kResourceExhausted.
  static Result<std::unique_ptr<TeacherForcing>> create(backend::Device& device,
                                                        std::unique_ptr<model::Decoder> decoder,
                                                        const layout::KvGeometry& geometry,
                                                        uint32_t max_settings = 64);
  ~TeacherForcing();

  const model::Decoder& decoder() const { return *decoder_; }
  const sparse::ModelShape& shape() const { return shape_; }

  // `tokens`: the first `prompt_tokens` are given, the others are predicted one after the other;
  // each of `settings` adds to its entry of `uses`. `fast_fraction` as EvaluationOptions.
  // Requires: 2 <= prompt_tokens < tokens.size(). Errors: kResourceExhausted with the numbers,
  // kCancelled, kCorrupt.
  Status run(std::span<const TokenId> tokens,
             uint64_t prompt_tokens,
             std::span<const AlgorithmRef> settings,
             double fast_fraction,
             std::span<SettingUse> uses,
             const LogitsSink& sink,
             const ForcingProgress& progress);

  const ForcingTimes& times() const { return times_; }

 private:
  // One setting while it decodes.
  struct Row {
    size_t setting = 0;  // index in `settings`
    uint64_t lease_pages = 0;
    bool tiered = false;  // does not fit into its lease
    uint64_t fast_pages = 0;
    uint64_t host_bytes = 0;  // if anybody is tiered
    uint64_t index_bytes = 0;
    std::unique_ptr<sparse::SparseSequence> sequence;
  };

  TeacherForcing(backend::Device& device,
                 std::unique_ptr<model::Decoder> decoder,
                 const layout::KvGeometry& geometry);
  Status allocate(uint32_t max_settings);

  Status prefill(std::span<const TokenId> tokens, uint64_t total);
  Status decode_dense(std::span<const TokenId> tokens, uint64_t prompt_tokens);
  Row plan_row(const sparse::SparseAlgorithm& algorithm,
               size_t setting,
               uint64_t max_tokens,
               double fast_fraction) const;
  // The next rows of `rows` that fit into memory together; at least one.
  size_t rows_that_fit(std::span<const Row> rows) const;
  Status decode_rows(std::span<Row> rows,
                     std::span<const TokenId> tokens,
                     uint64_t prompt_tokens,
                     std::span<const AlgorithmRef> settings,
                     std::span<SettingUse> uses);
  // store_ with at least these sizes.
  Status provide_store(const kv::PageStoreOptions& options);
  Status open_rows(std::span<Row> rows,
                   kv::PageStore& store,
                   uint64_t prompt_tokens,
                   uint64_t max_tokens,
                   std::span<const AlgorithmRef> settings);
  // A layer of the prompt as it lies in the dense sequence's pages, or, for algorithms that write
  // into it, a copy of that.
  layout::PagedTokens prompt_layer(uint32_t layer, uint64_t tokens) const;
  Result<layout::PagedTokens> copied(uint32_t layer, const layout::PagedTokens& source);
  // Runs one step of ids.size() rows, at one position or at consecutive ones; logits of all rows
  // lie in host_logits_ afterwards if they are asked for.
  Status forward(std::span<const TokenId> ids,
                 uint64_t first_position,
                 bool same_position,
                 bool logits,
                 SparseAttention& attention);
  void add_use(const Row& row, uint64_t max_tokens, SettingUse& use) const;
  Status report_progress(uint64_t tokens);

  backend::Device& device_;
  std::unique_ptr<model::Decoder> decoder_;
  layout::KvGeometry geometry_;
  sparse::ModelShape shape_;
  std::unique_ptr<backend::Stream> stream_;
  backend::Buffer host_inputs_;  // ids, positions, rows with logits: [max_rows] each
  backend::Buffer inputs_;
  backend::Buffer logits_;  // [max_rows of decode, vocab]
  backend::Buffer host_logits_;
  uint64_t logit_rows_ = 0;
  // Of the run at hand.
  std::unique_ptr<kv::PageStore> dense_store_;
  std::optional<kv::SequenceKv> dense_;
  // Of all settings that decode together, one batch after the other: touched memory stays.
  std::unique_ptr<kv::PageStore> store_;
  kv::PageStoreOptions store_options_;
  backend::Buffer copy_;        // a layer's pages, in order
  backend::Buffer copy_slots_;  // their slots, u32
  const LogitsSink* sink_ = nullptr;
  const ForcingProgress* progress_ = nullptr;
  uint64_t done_ = 0;
  uint64_t total_ = 0;
  ForcingTimes times_;
};

}  // namespace spin::engine
