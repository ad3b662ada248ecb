// SPDX-License-Identifier: Apache-2.0
// Drives sparse sequences through the pipeline without a model: keys, values and queries are made
// up, prompts go through a staging pool of one layer, steps through Pipeline::enqueue_layer().
// Tests only. Thread: test thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/device.h"
#include "backend/side_weights.h"
#include "kv/page_store.h"
#include "layout/dtype.h"
#include "layout/paged_tokens.h"
#include "sparse/pipeline.h"
#include "sparse/sparse_algorithm.h"
#include "sparse/sparse_sequence.h"
#include "spin/status.h"

namespace spin::testing {

struct ParityShape {
  uint32_t layers = 1;
  uint32_t kv_heads = 2;
  uint32_t group = 2;
  uint32_t head_dim = 64;
  uint32_t page_tokens = 8;
  layout::DType dtype = layout::DType::kF32;

  uint32_t q_heads() const { return kv_heads * group; }
  layout::KvGeometry geometry() const { return {layers, kv_heads, head_dim, page_tokens, dtype}; }
  std::string name() const;  // "page8_dim64_group2_f32"
};

// Keys, values and queries of one sequence. Keys come in runs of 16 that share a topic; a query
// either looks for one token far back (needle) or for nothing in particular (diffuse).
class Conversation {
 public:
  enum class Kind : uint8_t {
    kTopics,
    // Values 0 and 1 of every head of token t are t % 128 and t / 128, so that a page tells whose
    // tokens it holds.
    kNumbered,
    kEqualKeys,  // one key for all tokens of a head
  };
  Conversation(const ParityShape& shape, uint64_t tokens, uint64_t seed, Kind kind = Kind::kTopics);

  uint64_t tokens() const { return tokens_; }
  // Rows of one layer, f32, as TensorRef of `count` tokens from `first` on.
  backend::TensorRef keys(uint32_t layer, uint64_t first, uint64_t count) const;
  backend::TensorRef values(uint32_t layer, uint64_t first, uint64_t count) const;
  // [q_heads * head_dim] of the token.
  std::vector<float> query(uint32_t layer, uint64_t token) const;

 private:
  float noise(uint32_t stream, uint64_t row, uint64_t column) const;
  // Direction of a topic in one head, entries in [-1, 1).
  float topic(uint32_t layer, uint32_t head, uint64_t topic, uint32_t dimension) const;

  ParityShape shape_;
  uint64_t tokens_;
  uint64_t seed_;
  std::vector<std::vector<float>> keys_;    // [layers][tokens, kv_heads * head_dim]
  std::vector<std::vector<float>> values_;  // [layers][tokens, kv_heads * head_dim]
};

// [steps][layers * q_heads * head_dim]
using Outputs = std::vector<std::vector<float>>;

// Attention over everything, by enqueue_paged_attention: the outputs of tokens [first, tokens).
Outputs dense_outputs(backend::Device& device,
                      const ParityShape& shape,
                      const Conversation& conversation,
                      uint64_t first);

// Random weights for whatever an algorithm asks for, and no settings.
class RandomSideWeights final : public backend::SideWeightSource {
 public:
  Result<std::unique_ptr<backend::SideWeights>> open(std::string_view location) override;
};

struct RigOptions {
  uint64_t fast_pages = 1;
  uint64_t host_bytes = 0;
  uint32_t extent_pages = 4;
  std::string trace_path = "";  // no trace
};

// Both tiers hold two sequences of `tokens`, however their tokens are dealt out to pages.
RigOptions rig_options(const ParityShape& shape, uint64_t tokens);

// Pages of a head's lease: all there can be, or so many beyond the mandatory ones.
struct Lease {
  bool resident = true;
  uint64_t extra = 0;
};
uint64_t lease_pages(const sparse::SparseAlgorithm& algorithm,
                     const sparse::ModelShape& model,
                     uint64_t max_tokens,
                     const Lease& lease);

// A page store, a pipeline and a staging pool.
class ParityRig {
 public:
  ParityRig(backend::Device& device, const ParityShape& shape, const RigOptions& options);
  ~ParityRig();

  kv::PageStore& store() { return *store_; }
  const sparse::ModelShape& model() const { return model_; }
  backend::Stream& stream() { return *stream_; }
  sparse::SelectionRecorder* trace() { return trace_.get(); }

  // Fails the test if there is none.
  std::shared_ptr<const sparse::SparseAlgorithm> algorithm(const std::string& spec);
  Result<std::unique_ptr<sparse::SparseSequence>> open(
      std::shared_ptr<const sparse::SparseAlgorithm> algorithm,
      uint64_t max_tokens,
      uint64_t lease_pages);

  // Gives tokens [0, tokens) as a prompt, layer by layer in chunks.
  void prompt(sparse::SparseSequence& sequence,
              const Conversation& conversation,
              uint64_t tokens,
              uint64_t chunk_tokens = 100);

  struct Row {
    sparse::SparseSequence* sequence = nullptr;
    const Conversation* conversation = nullptr;
    std::vector<float>* out = nullptr;  // [layers * q_heads * head_dim]
    Status status;                      // of commit_step()
  };
  // One step of all rows; each appends the token that follows its committed ones. `after_layer`
  // runs with the stream drained.
  void step(std::span<Row> rows, const std::function<void(uint32_t)>& after_layer = nullptr);

  // Positions that the last layer's list attends to, read out of the pages of a numbered
  // conversation, in the order of the list.
  std::vector<uint64_t> attended(const sparse::SparseSequence& sequence, uint32_t kv_head) const;

 private:
  layout::PagedTokens staged(uint64_t tokens) const;

  backend::Device& device_;
  ParityShape shape_;
  std::vector<float> inv_freq_;
  sparse::ModelShape model_;
  RandomSideWeights side_weights_;
  std::unique_ptr<kv::PageStore> store_;
  std::unique_ptr<backend::Stream> stream_;
  std::unique_ptr<sparse::SelectionRecorder> trace_;
  std::unique_ptr<sparse::Pipeline> pipeline_;
  std::vector<std::byte> staging_;
  std::vector<uint32_t> staging_slots_;  // [kv_heads, staging_pages_]
  uint64_t staging_pages_ = 0;
};

}  // namespace spin::testing
