// SPDX-License-Identifier: Apache-2.0
// Sequences in a PageStore beside a trivial model of them: every row of a sequence's KV is a
// function of (sequence, layer, head, plane, position), and the model knows which positions each
// page holds. Whatever the store does with pages, a Retrieve must show exactly these rows. All
// that kernels read or write lies in fast memory and is reached by copies, so that the same model
// checks devices whose fast memory the host cannot touch.
// Thread: the test's.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "backend/cpu/cpu_device.h"
#include "backend/device.h"
#include "kv/page_store.h"
#include "kv/tiered_sequence.h"
#include "layout/head_pages.h"
#include "layout/paged_tokens.h"

namespace spin::testing {

using Random = std::mt19937_64;

inline uint64_t below(Random& random, uint64_t bound) { return bound == 0 ? 0 : random() % bound; }

struct RigOptions {
  layout::KvGeometry geometry{.layers = 2, .kv_heads = 2, .head_dim = 8, .page_tokens = 4};
  uint64_t fast_pages = 1024;
  uint64_t host_extents = 512;
  uint32_t extent_pages = 4;
};

// A device, a store on it and the stream on which steps run. `wrap` may put another device around
// the CPU's.
class StoreRig {
 public:
  explicit StoreRig(const RigOptions& options = {}, backend::Device* device = nullptr);

  const layout::KvGeometry& geometry() const { return options_.geometry; }
  kv::PageStore& store() { return *store_; }
  backend::Stream& stream() { return *stream_; }
  backend::Device& device() { return *device_; }
  // Row of a token as floats; exact in f32.
  void fill_row(
      uint64_t seed, uint32_t layer, uint32_t head, bool value, uint64_t token, float* row) const;
  // Number of bytes that an extent takes.
  uint64_t host_bytes() const;
  // All slots' bytes as they are now. Requires: nothing is queued. Lifetime: until the next call.
  std::span<const std::byte> slots();

 private:
  RigOptions options_;
  std::unique_ptr<backend::Device> own_device_;
  backend::Device* device_;
  std::unique_ptr<kv::PageStore> store_;
  std::unique_ptr<backend::Stream> stream_;
  std::vector<std::byte> slots_;
};

// An array of `count` elements in fast memory.
template <typename T>
class FastArray {
 public:
  FastArray() = default;
  FastArray(StoreRig& rig, size_t count) {
    backend::MemoryResource& fast = rig.device().memory(backend::MemoryKind::kFast);
    if (count > 0) buffer_ = std::move(*backend::Buffer::allocate(fast, count * sizeof(T)));
  }
  T* data() const { return buffer_.as<T>(); }
  size_t size() const { return buffer_.size_bytes() / sizeof(T); }

 private:
  backend::Buffer buffer_;
};

// What a sequence of the rig does.
struct RigShape {
  kv::SequenceShape shape;
  bool mapped = false;        // clusters: dealt out anew, repacked; else ranges with a zone
  uint32_t window_pages = 1;  // full pages that stay in the tail
  uint32_t repack_pages = 2;  // mapped: so many leave the tail at once
};

// A range or cluster shape for up to `max_tokens`.
RigShape range_shape(const layout::KvGeometry& geometry, uint64_t max_tokens);
RigShape cluster_shape(const layout::KvGeometry& geometry, uint64_t max_tokens);

class RigSequence {
 public:
  // Null when the store refuses for want of memory; any other error ends the test.
  static std::unique_ptr<RigSequence> open(StoreRig& rig,
                                           const RigShape& shape,
                                           uint64_t lease_pages,
                                           uint64_t seed);
  RigSequence(const RigSequence&) = delete;
  RigSequence& operator=(const RigSequence&) = delete;

  kv::TieredSequence& kv() { return *kv_; }
  const kv::TieredSequence& kv() const { return *kv_; }
  const RigShape& shape() const { return shape_; }
  uint64_t tokens() const { return kv_->committed_tokens(); }
  bool is_full() const { return tokens() >= shape_.shape.max_tokens; }

  // Places a prompt, layer by layer, and commits it. Returns what went wrong.
  std::string prompt(uint64_t tokens, Random& random);
  // One token: append, seal or repack, retrieve a random selection, compare all of it.
  std::string step(Random& random);
  uint64_t faults() const { return faults_; }
  uint64_t hits() const { return hits_; }
  uint64_t misses() const { return misses_; }
  uint64_t evictions() const { return evictions_; }
  // Seals and repacks so far, over all layers.
  uint64_t left_tail() const { return left_tail_; }

  // The parts of a step, for tests that interleave them.
  void begin_step() { kv_->begin_step(1); }
  void enqueue_layer(uint32_t layer, Random& random, bool may_leave_tail = true);
  std::string finish_step();
  // A step whose work has run, in which nothing leaves the tail, and which then does not count.
  std::string dropped_step(Random& random);

 private:
  using Tokens = std::vector<uint64_t>;  // positions, in the order of the page's rows

  struct MapArrays {
    FastArray<uint32_t> counts, starts, tokens;
  };
  // What a layer's queued work reads and writes in a step, and the host's side of it.
  struct LayerBuffers {
    FastArray<float> k, v;  // [kv_heads * head_dim]
    FastArray<uint32_t> pages, counts, slots;
    FastArray<uint8_t> page_tokens;
    uint32_t stride = 0;
    std::vector<uint32_t> wanted_pages, found_slots;  // [kv_heads, stride]
    std::vector<std::vector<Tokens>> wanted;          // [kv_heads]
  };

  RigSequence(StoreRig& rig, const RigShape& shape, uint64_t seed);
  size_t index(uint32_t layer, uint32_t head) const {
    return size_t{layer} * rig_.geometry().kv_heads + head;
  }
  bool is_dense(uint32_t layer) const { return layer < shape_.shape.dense_layers; }
  bool is_mapped(uint32_t layer) const { return shape_.mapped && !is_dense(layer); }
  void stage(uint32_t layer, uint64_t tokens);
  void place_layer(uint32_t layer, uint64_t tokens, Random& random);
  layout::PageList pin_pages(uint32_t layer, uint32_t first, uint32_t end, Random& random);
  // Deals tokens [0, count) out to pages, differently for every head; the model learns where token
  // first_position + i went. Returns the map, whose arrays the stream fills when it comes to it.
  const layout::PageMap* deal_out(uint32_t layer,
                                  uint64_t count,
                                  uint64_t first_position,
                                  uint64_t first_token_id,
                                  uint32_t first_page,
                                  Random& random);
  // Copies `values` to `to` when the stream comes to it.
  template <typename T>
  void enqueue_write(const FastArray<T>& to, std::vector<T> values);
  Status wait_for_work();
  // Reads the tail as an index does: through the view, when the stream comes to it (at once where
  // the host cannot read fast memory).
  void enqueue_check_tail(uint32_t layer);
  void check_tail(uint32_t layer,
                  const layout::PagedTokens& tail,
                  uint64_t first,
                  const uint32_t* slots,
                  const std::byte* pool);
  void leave_tail(uint32_t layer, Random& random);
  void select(uint32_t layer, Random& random);
  std::string compare(uint32_t layer) const;

  StoreRig& rig_;
  RigShape shape_;
  uint64_t seed_;
  std::unique_ptr<kv::TieredSequence> kv_;
  std::vector<std::map<uint32_t, Tokens>> sealed_;  // [layers * kv_heads], outside the tail
  std::vector<std::vector<uint32_t>> zone_;         // [layers * kv_heads]
  // Shared by the layers, as an algorithm's buffers are: only stream order keeps them apart.
  FastArray<float> staging_;  // pages with identity slots
  FastArray<uint32_t> staging_slots_;
  MapArrays kernel_map_;
  std::vector<layout::PageMap> maps_;  // [layers]; what they point to is shared
  FastArray<uint32_t> pin_ids_, pin_counts_;
  FastArray<uint8_t> pin_tokens_;
  std::vector<LayerBuffers> layers_;
  std::vector<std::shared_ptr<const void>> kept_;  // what queued copies read
  std::string tail_error_;                         // written by the stream
  uint64_t faults_ = 0, hits_ = 0, misses_ = 0, evictions_ = 0, left_tail_ = 0;
};

// Page ids that dealing out `tokens` tokens can take: pages have P/2 tokens and more but for one.
uint32_t most_mapped_ids(const layout::KvGeometry& geometry, uint64_t tokens);

}  // namespace spin::testing
