// SPDX-License-Identifier: Apache-2.0
#include "tests/sparse/parity_rig.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <utility>

#include <gtest/gtest.h>

#include "backend/kv_ops.h"
#include "base/counter_rng.h"
#include "kv/sequence_kv.h"
#include "sparse/registry.h"
#include "sparse/sparse_spec.h"

namespace spin::testing {
namespace {

constexpr uint64_t kTopicTokens = 16;

backend::TensorRef tensor(const float* data, uint64_t rows, uint64_t cols) {
  return {.data = const_cast<float*>(data),
          .dtype = layout::DType::kF32,
          .rows = static_cast<int64_t>(rows),
          .cols = static_cast<int64_t>(cols),
          .row_stride = static_cast<int64_t>(cols)};
}

// Uniform in [-1, 1).
float uniform(uint64_t key) {
  const uint64_t bits = base::mix64(key) >> 40;
  return static_cast<float>(bits) * 0x1.0p-23f - 1.0f;
}

class RandomWeights final : public backend::SideWeights {
 public:
  bool contains(std::string_view /*name*/) const override { return true; }
  Result<std::vector<float>> read(std::string_view name,
                                  std::span<const int64_t> shape) const override {
    size_t count = 1;
    for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
    const uint64_t key = std::hash<std::string_view>()(name);
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = 0.2f * uniform(key + 31 * i);
    return values;
  }
  Result<std::string> setting(std::string_view key) const override {
    return Status(StatusCode::kNotFound, "no setting " + std::string(key));
  }
};

}  // namespace

std::string ParityShape::name() const {
  return "page" + std::to_string(page_tokens) + "_dim" + std::to_string(head_dim) + "_group" +
         std::to_string(group) + (dtype == layout::DType::kF32 ? "_f32" : "_bf16");
}

Conversation::Conversation(const ParityShape& shape, uint64_t tokens, uint64_t seed, Kind kind)
    : shape_(shape), tokens_(tokens), seed_(base::mix64(seed)) {
  const uint64_t columns = uint64_t{shape.kv_heads} * shape.head_dim;
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    std::vector<float> keys(tokens * columns);
    std::vector<float> values(tokens * columns);
    for (uint64_t i = 0; i < keys.size(); ++i) {
      const uint64_t token = i / columns;
      const auto head = static_cast<uint32_t>(i % columns / shape.head_dim);
      const auto dimension = static_cast<uint32_t>(i % shape.head_dim);
      keys[i] = topic(layer, head, token / kTopicTokens, dimension) +
                0.5f * noise(2 * layer, token, i % columns);
      values[i] = noise(2 * layer + 1, token, i % columns);
      if (kind == Kind::kEqualKeys) keys[i] = topic(layer, head, 0, dimension);
      if (kind != Kind::kNumbered) continue;
      if (dimension == 0) values[i] = static_cast<float>(token % 128);
      if (dimension == 1) values[i] = static_cast<float>(token / 128);
    }
    keys_.push_back(std::move(keys));
    values_.push_back(std::move(values));
  }
}

float Conversation::noise(uint32_t stream, uint64_t row, uint64_t column) const {
  return uniform(seed_ + (row << 20) + (column << 4) + stream);
}

float Conversation::topic(uint32_t layer, uint32_t head, uint64_t topic, uint32_t dimension) const {
  return noise(8 + layer, 0x1000000 + topic * 64 + head, dimension);
}

backend::TensorRef Conversation::keys(uint32_t layer, uint64_t first, uint64_t count) const {
  const uint64_t columns = uint64_t{shape_.kv_heads} * shape_.head_dim;
  return tensor(keys_[layer].data() + first * columns, count, columns);
}

backend::TensorRef Conversation::values(uint32_t layer, uint64_t first, uint64_t count) const {
  const uint64_t columns = uint64_t{shape_.kv_heads} * shape_.head_dim;
  return tensor(values_[layer].data() + first * columns, count, columns);
}

std::vector<float> Conversation::query(uint32_t layer, uint64_t token) const {
  const uint64_t columns = uint64_t{shape_.kv_heads} * shape_.head_dim;
  std::vector<float> q(uint64_t{shape_.q_heads()} * shape_.head_dim);
  for (uint32_t head = 0; head < shape_.q_heads(); ++head) {
    const uint32_t kv_head = head / shape_.group;
    // Every other query head of a token looks for a token of its own.
    const bool is_needle = (head + token) % 2 == 0;
    const uint64_t wanted = base::mix64(seed_ + 977 * token + head) % token;
    const float* key = keys_[layer].data() + wanted * columns + kv_head * shape_.head_dim;
    for (uint32_t d = 0; d < shape_.head_dim; ++d) {
      const float random = noise(15, token * 64 + head, d + 1024 * layer);
      q[head * shape_.head_dim + d] = is_needle ? 2.0f * key[d] + 0.5f * random : 0.5f * random;
    }
  }
  return q;
}

Outputs dense_outputs(backend::Device& device,
                      const ParityShape& shape,
                      const Conversation& conversation,
                      uint64_t first) {
  const layout::KvGeometry geometry = shape.geometry();
  auto pool = kv::PagePool::create(device.memory(backend::MemoryKind::kFast), geometry,
                                   {.pages = geometry.pages_for(conversation.tokens())});
  EXPECT_TRUE(pool.ok()) << pool.status().to_string();
  auto sequence = kv::SequenceKv::reserve(**pool, conversation.tokens());
  auto stream = device.create_stream("dense");
  EXPECT_TRUE(sequence.ok() && stream.ok());
  const uint64_t columns = uint64_t{shape.q_heads()} * shape.head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  Outputs outputs;
  for (uint64_t token = 0; token < conversation.tokens();) {
    const uint64_t count = token < first ? first : 1;
    sequence->begin_step(count);
    std::vector<float> out(shape.layers * columns);
    std::deque<layout::SequenceSlice> all_slices;  // until their work has run
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      all_slices.push_back(sequence->slice(layer, 0));
      const std::span<const layout::SequenceSlice> slices(&all_slices.back(), 1);
      device.ops().enqueue_kv_append(conversation.keys(layer, token, count),
                                     conversation.values(layer, token, count), slices,
                                     (*pool)->ref(), **stream);
      if (token >= first) {
        const std::vector<float> q = conversation.query(layer, token);
        device.ops().enqueue_paged_attention(tensor(q.data(), 1, columns), slices, (*pool)->ref(),
                                             scale, tensor(&out[layer * columns], 1, columns),
                                             **stream);
        EXPECT_TRUE((*stream)->wait_idle().ok());
      }
    }
    EXPECT_TRUE((*stream)->wait_idle().ok());
    sequence->commit_step();
    if (token >= first) outputs.push_back(std::move(out));
    token += count;
  }
  return outputs;
}

Result<std::unique_ptr<backend::SideWeights>> RandomSideWeights::open(
    std::string_view /*location*/) {
  return std::unique_ptr<backend::SideWeights>(std::make_unique<RandomWeights>());
}

RigOptions rig_options(const ParityShape& shape, uint64_t tokens) {
  RigOptions options;
  const layout::KvGeometry geometry = shape.geometry();
  // Clusters take more ids than their tokens fill pages.
  const uint64_t head_pages = 4 * geometry.pages_per_head(tokens) + 64;
  options.fast_pages = 2 * head_pages * geometry.kv_heads * geometry.layers;
  options.host_bytes = options.fast_pages * (geometry.page_bytes() + 64);
  return options;
}

uint64_t lease_pages(const sparse::SparseAlgorithm& algorithm,
                     const sparse::ModelShape& model,
                     uint64_t max_tokens,
                     const Lease& lease) {
  const kv::SequenceShape shape = sparse::sequence_shape(algorithm, model, max_tokens);
  if (lease.resident) return shape.max_page_ids;
  const uint64_t mandatory = shape.mandatory_pages(model.geometry.layers - 1);
  return std::min(mandatory + lease.extra, shape.max_page_ids);
}

ParityRig::ParityRig(backend::Device& device, const ParityShape& shape, const RigOptions& options)
    : device_(device), shape_(shape) {
  for (uint32_t i = 0; i < shape.head_dim / 2; ++i) {
    inv_freq_.push_back(
        std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(shape.head_dim)));
  }
  model_.geometry = shape.geometry();
  model_.q_heads = shape.q_heads();
  model_.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  model_.rope = {.inv_freq = inv_freq_, .attention_factor = 1.0f};
  kv::PageStoreOptions store_options;
  store_options.geometry = model_.geometry;
  store_options.fast_pages = options.fast_pages;
  store_options.host_bytes = options.host_bytes;
  store_options.extent_pages = options.extent_pages;
  auto store = kv::PageStore::create(device, store_options);
  EXPECT_TRUE(store.ok()) << store.status().to_string();
  store_ = std::move(store).value();
  auto stream = device.create_stream("parity");
  EXPECT_TRUE(stream.ok());
  stream_ = std::move(stream).value();
  if (!options.trace_path.empty()) {
    auto trace = sparse::SelectionRecorder::create(
        options.trace_path, {shape.layers, shape.kv_heads, shape.page_tokens, "parity"});
    EXPECT_TRUE(trace.ok()) << trace.status().to_string();
    trace_ = std::move(trace).value();
  }
  pipeline_ = std::make_unique<sparse::Pipeline>(*store_, model_, trace_.get());
}

ParityRig::~ParityRig() { EXPECT_TRUE(stream_->wait_idle().ok()); }

std::shared_ptr<const sparse::SparseAlgorithm> ParityRig::algorithm(const std::string& spec) {
  auto parsed = sparse::parse_sparse_spec(spec);
  EXPECT_TRUE(parsed.ok()) << parsed.status().to_string();
  if (!parsed.ok()) return nullptr;
  auto made = sparse::create_algorithm(*parsed, {&device_, model_, &side_weights_});
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  if (!made.ok()) return nullptr;
  return std::shared_ptr<const sparse::SparseAlgorithm>(std::move(made).value());
}

Result<std::unique_ptr<sparse::SparseSequence>> ParityRig::open(
    std::shared_ptr<const sparse::SparseAlgorithm> algorithm,
    uint64_t max_tokens,
    uint64_t lease_pages) {
  return sparse::SparseSequence::open(*store_, std::move(algorithm), model_, max_tokens,
                                      lease_pages);
}

layout::PagedTokens ParityRig::staged(uint64_t tokens) const {
  layout::PagedTokens prompt;
  prompt.base = staging_.data();
  prompt.geometry = model_.geometry;
  prompt.geometry.layers = 1;
  prompt.slots = staging_slots_.data();
  prompt.slot_stride = staging_pages_;
  prompt.tokens = tokens;
  return prompt;
}

void ParityRig::prompt(sparse::SparseSequence& sequence,
                       const Conversation& conversation,
                       uint64_t tokens,
                       uint64_t chunk_tokens) {
  layout::KvGeometry geometry = model_.geometry;
  geometry.layers = 1;
  staging_pages_ = geometry.pages_per_head(tokens);
  const uint64_t pages = staging_pages_ * geometry.kv_heads;
  // What nobody wrote reads as NaN.
  staging_.assign(pages * geometry.page_bytes(), std::byte{0xFF});
  staging_slots_.clear();
  for (uint32_t slot = 0; slot < pages; ++slot) staging_slots_.push_back(slot);
  const backend::KvPoolRef pool{staging_.data(), geometry};
  std::deque<layout::SequenceSlice> slices;  // until their work has run
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    for (uint64_t first = 0; first < tokens; first += chunk_tokens) {
      const uint64_t count = std::min(chunk_tokens, tokens - first);
      slices.push_back({0, count, first + count, staging_slots_.data(), staging_pages_});
      device_.ops().enqueue_kv_append(conversation.keys(layer, first, count),
                                      conversation.values(layer, first, count), {&slices.back(), 1},
                                      pool, *stream_);
      sequence.enqueue_prompt_chunk(layer, staged(first + count), first, count, *stream_);
    }
    sequence.enqueue_finish_prompt_layer(layer, staged(tokens), *stream_);
  }
  const Status status = stream_->wait_idle();
  EXPECT_TRUE(status.ok()) << status.to_string();
  sequence.commit_prompt(tokens);
  // Nobody may read it from now on.
  std::memset(staging_.data(), 0xFF, staging_.size());
}

void ParityRig::step(std::span<Row> rows, const std::function<void(uint32_t)>& after_layer) {
  const uint64_t q_columns = uint64_t{shape_.q_heads()} * shape_.head_dim;
  const uint64_t kv_columns = uint64_t{shape_.kv_heads} * shape_.head_dim;
  // One set of activations per layer, so that layers may run behind each other.
  std::vector<std::vector<float>> q(shape_.layers);
  std::vector<std::vector<float>> k(shape_.layers);
  std::vector<std::vector<float>> v(shape_.layers);
  std::vector<std::vector<float>> out(shape_.layers);
  std::vector<sparse::DecodeRow> decode;
  for (size_t r = 0; r < rows.size(); ++r) {
    const uint64_t token = rows[r].sequence->kv().committed_tokens();
    rows[r].sequence->begin_step();
    decode.push_back({rows[r].sequence, r});
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const std::vector<float> query = rows[r].conversation->query(layer, token);
      q[layer].insert(q[layer].end(), query.begin(), query.end());
      const auto* key = static_cast<const float*>(rows[r].conversation->keys(layer, token, 1).data);
      const auto* value =
          static_cast<const float*>(rows[r].conversation->values(layer, token, 1).data);
      k[layer].insert(k[layer].end(), key, key + kv_columns);
      v[layer].insert(v[layer].end(), value, value + kv_columns);
      out[layer].resize(q[layer].size(), std::nanf(""));
    }
  }
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const sparse::LayerCall call{layer, tensor(q[layer].data(), rows.size(), q_columns),
                                 tensor(k[layer].data(), rows.size(), kv_columns),
                                 tensor(v[layer].data(), rows.size(), kv_columns),
                                 tensor(out[layer].data(), rows.size(), q_columns)};
    pipeline_->enqueue_layer(call, decode, *stream_);
    if (after_layer) {
      const Status status = stream_->wait_idle();
      ASSERT_TRUE(status.ok()) << status.to_string();
      after_layer(layer);
    }
  }
  const Status status = stream_->wait_idle();
  ASSERT_TRUE(status.ok()) << status.to_string();
  for (size_t r = 0; r < rows.size(); ++r) {
    rows[r].status = rows[r].sequence->commit_step();
    if (rows[r].out == nullptr) continue;
    rows[r].out->clear();
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const float* begin = out[layer].data() + r * q_columns;
      rows[r].out->insert(rows[r].out->end(), begin, begin + q_columns);
    }
  }
}

std::vector<uint64_t> ParityRig::attended(const sparse::SparseSequence& sequence,
                                          uint32_t kv_head) const {
  const layout::KvGeometry& geometry = model_.geometry;
  const backend::KvPoolRef pool = store_->ref().fast;
  const layout::PageList& list = sequence.list();
  std::vector<uint64_t> positions;
  for (uint32_t i = 0; i < list.counts[kv_head]; ++i) {
    const uint64_t at = uint64_t{kv_head} * list.stride + i;
    const auto* page = static_cast<const std::byte*>(pool.base) +
                       sequence.list_slots()[at] * geometry.page_bytes();
    for (uint32_t t = 0; t < list.tokens[at]; ++t) {
      const std::byte* value = page + geometry.plane_bytes() + t * geometry.row_bytes();
      float number[2] = {};
      if (geometry.dtype == layout::DType::kF32) {
        std::memcpy(number, value, sizeof(number));
      } else {
        uint16_t bits[2] = {};
        std::memcpy(bits, value, sizeof(bits));
        for (int i2 = 0; i2 < 2; ++i2) {
          const uint32_t wide = uint32_t{bits[i2]} << 16;
          std::memcpy(&number[i2], &wide, sizeof(wide));
        }
      }
      positions.push_back(static_cast<uint64_t>(number[0]) +
                          128 * static_cast<uint64_t>(number[1]));
    }
  }
  return positions;
}

}  // namespace spin::testing
