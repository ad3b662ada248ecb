// SPDX-License-Identifier: Apache-2.0
// One sequence under RetroInfer without pipeline and page store: prompts and tails are arrays,
// pages are placed by hand where the maps say, so that every token can be followed. Tests only.
// Thread: test thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "backend/kv_ops.h"
#include "base/bf16.h"
#include "sparse/registry.h"

namespace spin::testing {

using layout::DType;
using sparse::SparseAlgorithm;

struct RetroShape {
  uint32_t layers = 1;
  uint32_t kv_heads = 2;
  uint32_t group = 2;
  uint32_t head_dim = 64;
  uint32_t page_tokens = 8;
  DType dtype = DType::kF32;
};

inline float stored(float value, DType dtype) {
  return dtype == DType::kF32 ? value : base::to_float(base::to_bf16(value));
}

// Keys and values of a sequence: [tokens][kv_heads * head_dim], as they are stored.
struct Content {
  std::vector<std::vector<float>> keys;
  std::vector<std::vector<float>> values;
};

inline Content random_content(const RetroShape& shape, uint64_t tokens, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  Content content;
  for (uint64_t t = 0; t < tokens; ++t) {
    std::vector<float> key(shape.kv_heads * shape.head_dim);
    std::vector<float> value(key.size());
    for (float& x : key) x = stored(2 * uniform(random), shape.dtype);
    for (float& x : value) x = stored(uniform(random), shape.dtype);
    content.keys.push_back(std::move(key));
    content.values.push_back(std::move(value));
  }
  return content;
}

// All keys are one of `kinds` directions.
inline Content kinds_of_keys(const RetroShape& shape,
                             uint64_t tokens,
                             uint32_t kinds,
                             uint32_t seed) {
  Content content = random_content(shape, tokens, seed);
  const Content directions = random_content(shape, kinds, seed + 1);
  for (uint64_t t = 0; t < tokens; ++t) content.keys[t] = directions.keys[(t * t + 3 * t) % kinds];
  return content;
}

inline std::vector<float> random_query(const RetroShape& shape, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-2, 2);
  std::vector<float> q(shape.kv_heads * shape.group * shape.head_dim);
  for (float& x : q) x = uniform(random);
  return q;
}

// What a selection did.
struct Attended {
  std::vector<std::vector<uint64_t>> tokens;  // [kv_heads] positions, in list order
  std::vector<float> out;                     // [q_heads * head_dim], parts merged
  std::vector<float> part_log_sum_exp;        // [q_heads]
  std::vector<uint64_t> counted;              // [kv_heads] attended
  std::vector<uint64_t> selected;
  std::vector<uint64_t> overflows;
};

// One sequence of one layer (others have indexes, too, and are asked by number).
class RetroSequence {
 public:
  RetroSequence(const RetroShape& shape,
                const std::string& options,
                uint64_t max_tokens,
                uint32_t threads = 1)
      : shape_(shape), max_tokens_(max_tokens) {
    device_ = std::move(*backend::cpu::create_cpu_device({.threads = threads}));
    stream_ = std::move(*device_->create_stream("retroinfer"));
    sparse::AlgorithmContext context;
    context.device = device_.get();
    context.shape.geometry = geometry();
    context.shape.q_heads = shape.kv_heads * shape.group;
    context.shape.scale = scale();
    sparse::SparseSpec spec = *sparse::parse_sparse_spec("retroinfer" + options);
    algorithm_ = std::move(*sparse::create_algorithm(spec, context));
    index_ = std::move(
        *algorithm_->create_index(max_tokens, device_->memory(backend::MemoryKind::kFast)));
    pages_.resize(shape.kv_heads);
  }

  layout::KvGeometry geometry() const {
    return {shape_.layers, shape_.kv_heads, shape_.head_dim, shape_.page_tokens, shape_.dtype};
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)); }
  const SparseAlgorithm& algorithm() const { return *algorithm_; }
  const std::vector<std::map<uint32_t, std::vector<uint64_t>>>& pages() const { return pages_; }
  uint64_t tail_first_token() const { return tail_first_token_; }
  uint64_t tokens() const { return content_.keys.size(); }
  const Content& content() const { return content_; }

  void prompt(Content content, uint32_t layer = 0) {
    content_ = std::move(content);
    place_prompt(
        algorithm_->enqueue_finish_prompt(*index_, layer, paged(0, tokens(), staging_), *stream_));
  }

  // The prompt of `from` with a copy of its index; false if its index is another one.
  bool copy_prompt(const RetroSequence& from, uint32_t layer = 0) {
    content_ = from.content_;
    const auto partition = algorithm_->enqueue_copy_prompt(
        *from.algorithm_, *from.index_, *index_, layer, paged(0, tokens(), staging_), *stream_);
    if (partition) place_prompt(*partition);
    return partition.has_value();
  }

  // Appends one token; whether the layer clustered a part of its tail.
  bool append(std::vector<float> key, std::vector<float> value, uint32_t layer = 0) {
    content_.keys.push_back(std::move(key));
    content_.values.push_back(std::move(value));
    const auto tail_tokens = static_cast<uint32_t>(tokens() - tail_first_token_);
    EXPECT_LE((tail_tokens + shape_.page_tokens - 1) / shape_.page_tokens,
              algorithm_->needs(max_tokens_).tail_pages);
    const layout::Tail tail{.first_page = tail_first_page_, .tokens = tail_tokens};
    const sparse::SealPlan plan = algorithm_->plan_seal(*index_, layer, tail);
    EXPECT_EQ(plan.pages, 0u);
    if (plan.repack_tokens > 0) {
      sparse::SealItem item;
      item.index = index_.get();
      item.tail = paged(tail_first_token_, tail_tokens, staging_);
      item.first_token = tail_first_token_;
      item.tokens = plan.repack_tokens;
      item.first_page_id = next_page_;
      const layout::PageMap* map = algorithm_->enqueue_seal(item, layer, *stream_);
      wait();
      add_map(*map, tail_first_token_, algorithm_->repacked_page_ids(plan.repack_tokens));
      tail_first_token_ += plan.repack_tokens;
    }
    place_tail();
    return plan.repack_tokens > 0;
  }

  Attended attend(std::vector<float> q, uint32_t layer = 0) {
    const layout::KvGeometry g = geometry();
    const sparse::SequenceNeeds needs = algorithm_->needs(max_tokens_);
    const uint32_t stride = needs.sink_pages + needs.selected_pages + needs.tail_pages;
    const uint32_t heads = shape_.kv_heads;
    const uint32_t q_heads = heads * shape_.group;
    std::vector<uint32_t> list_pages(uint64_t{heads} * stride);
    std::vector<uint8_t> list_tokens(list_pages.size());
    std::vector<uint32_t> list_counts(heads);
    Attended result;
    result.counted.assign(heads, 0);
    result.selected.assign(heads, 0);
    result.overflows.assign(heads, 0);
    sparse::SelectItem select;
    select.index = index_.get();
    select.context_tokens = tokens();
    select.tail_first_page = tail_first_page_;
    select.tail_first_token = tail_first_token_;
    select.list = {list_pages.data(), list_tokens.data(), list_counts.data(), stride};
    select.attended = result.counted.data();
    select.selected = result.selected.data();
    select.overflows = result.overflows.data();
    const auto width = static_cast<int64_t>(q.size());
    const backend::TensorRef q_ref{q.data(), DType::kF32, 1, width, width};
    algorithm_->enqueue_select(q_ref, {&select, 1}, layer, *stream_);
    wait();
    std::vector<uint32_t> slots;
    const std::vector<std::byte> pool = pool_of(select.list, slots, result.tokens);
    std::vector<float> log_sum_exp(q_heads);
    std::vector<float> part(q.size());
    result.part_log_sum_exp.resize(q_heads);
    result.out.resize(q.size());
    const backend::TensorRef out_ref{result.out.data(), DType::kF32, 1, width, width};
    const backend::ListAttentionItem exact{0, slots.data(), select.list, log_sum_exp.data()};
    // The pool is only read.
    const backend::KvPoolRef pool_ref{const_cast<std::byte*>(pool.data()), g};
    device_->kv_ops().enqueue_list_attention(q_ref, {&exact, 1}, pool_ref, scale(), out_ref,
                                             *stream_);
    const sparse::EstimateItem estimate{index_.get(), 0, select.list, part.data(),
                                        result.part_log_sum_exp.data()};
    algorithm_->enqueue_estimate(q_ref, {&estimate, 1}, layer, *stream_);
    const backend::MergeItem merge{0, log_sum_exp.data(), part.data(),
                                   result.part_log_sum_exp.data()};
    device_->kv_ops().enqueue_merge({&merge, 1}, q_heads, shape_.head_dim, out_ref, *stream_);
    wait();
    return result;
  }

  // Positions of all pages that are not of the tail, and of the tail.
  std::vector<uint64_t> all_tokens(uint32_t head) const {
    std::vector<uint64_t> all;
    for (const auto& [id, tokens_of_page] : pages_[head]) {
      all.insert(all.end(), tokens_of_page.begin(), tokens_of_page.end());
    }
    std::sort(all.begin(), all.end());
    return all;
  }

 private:
  void place_prompt(const sparse::PromptPartition& partition) {
    wait();
    const uint32_t page_tokens = shape_.page_tokens;
    tail_first_token_ = algorithm_->prompt_tail_first(tokens());
    EXPECT_EQ(tail_first_token_ % page_tokens, 0u);
    const uint64_t sinks = algorithm_->needs(max_tokens_).sink_pages;
    const uint64_t ordered = std::min(sinks, tail_first_token_ / page_tokens);
    for (auto& pages : pages_) {
      for (uint32_t p = 0; p < ordered; ++p) {
        for (uint32_t i = 0; i < page_tokens; ++i) pages[p].push_back(p * page_tokens + i);
      }
    }
    next_page_ = static_cast<uint32_t>(ordered);
    if (partition.map != nullptr) {
      EXPECT_EQ(partition.first_mapped_page, next_page_);
      add_map(*partition.map, 0, partition.mapped_page_ids);
    } else {
      EXPECT_EQ(tail_first_token_, ordered * page_tokens);
    }
    place_tail();
  }

  void wait() {
    const Status status = stream_->wait_idle();
    ASSERT_TRUE(status.ok()) << status.to_string();
  }

  void store_token(uint32_t head, uint64_t token, std::byte* key) const {
    const layout::KvGeometry g = geometry();
    for (uint32_t d = 0; d < shape_.head_dim; ++d) {
      const float values[] = {content_.keys[token][head * shape_.head_dim + d],
                              content_.values[token][head * shape_.head_dim + d]};
      for (uint32_t plane = 0; plane < 2; ++plane) {
        std::byte* to = key + plane * g.plane_bytes() + d * layout::dtype_bytes(shape_.dtype);
        const base::Bf16 narrow = base::to_bf16(values[plane]);
        if (shape_.dtype == DType::kF32) std::memcpy(to, &values[plane], 4);
        if (shape_.dtype == DType::kBF16) std::memcpy(to, &narrow, 2);
      }
    }
  }

  struct Paged {
    std::vector<std::byte> bytes;
    std::vector<uint32_t> slots;
  };
  // Tokens [first, first + count) in pages of `memory`, back to front.
  layout::PagedTokens paged(uint64_t first, uint64_t count, Paged& memory) const {
    const layout::KvGeometry g = geometry();
    const uint64_t pages = g.pages_per_head(count);
    memory.bytes.assign(pages * shape_.kv_heads * g.page_bytes(), std::byte{0xFF});
    memory.slots.resize(pages * shape_.kv_heads);
    std::iota(memory.slots.rbegin(), memory.slots.rend(), 0u);
    const layout::PagedTokens view{memory.bytes.data(), g, memory.slots.data(), pages, count};
    for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
      for (uint64_t t = 0; t < count; ++t) {
        store_token(head, first + t, const_cast<std::byte*>(view.key(head, t)));
      }
    }
    return view;
  }

  // Pages of a map from next_page_ on; its positions count from `first_token`.
  void add_map(const layout::PageMap& map, uint64_t first_token, uint32_t ids) {
    for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
      EXPECT_LE(map.counts[head], ids);
      const uint32_t* starts = map.starts + uint64_t{head} * map.page_stride;
      const uint32_t* token_ids = map.token_ids + head * map.token_stride;
      for (uint32_t i = 0; i < map.counts[head]; ++i) {
        EXPECT_LE(starts[i + 1] - starts[i], shape_.page_tokens);
        for (uint32_t k = starts[i]; k < starts[i + 1]; ++k) {
          pages_[head][next_page_ + i].push_back(first_token + token_ids[k]);
        }
      }
    }
    next_page_ += ids;
  }

  // The tail's pages get the last ids.
  void place_tail() {
    const uint64_t left = max_tokens_ - std::min(max_tokens_, tail_first_token_);
    const uint64_t ids = geometry().pages_per_head(left);
    const auto first = static_cast<uint32_t>(algorithm_->needs(max_tokens_).page_ids - ids);
    EXPECT_LE(next_page_, first);
    for (auto& pages : pages_) {
      pages.erase(pages.lower_bound(std::min(first, tail_first_page_)), pages.end());
      for (uint64_t t = tail_first_token_; t < tokens(); ++t) {
        const uint64_t page = first + (t - tail_first_token_) / shape_.page_tokens;
        pages[static_cast<uint32_t>(page)].push_back(t);
      }
    }
    tail_first_page_ = first;
  }

  // The pages of a list, and where they lie; checks that the list is in order and names them right.
  std::vector<std::byte> pool_of(const layout::PageList& list,
                                 std::vector<uint32_t>& slots,
                                 std::vector<std::vector<uint64_t>>& tokens_of_heads) const {
    const layout::KvGeometry g = geometry();
    slots.assign(uint64_t{shape_.kv_heads} * list.stride, 0);
    tokens_of_heads.assign(shape_.kv_heads, {});
    std::vector<std::byte> pool(slots.size() * g.page_bytes(), std::byte{0xFF});
    for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
      for (uint32_t i = 0; i < list.counts[head]; ++i) {
        const uint64_t at = uint64_t{head} * list.stride + i;
        slots[at] = static_cast<uint32_t>(at);
        EXPECT_TRUE(i == 0 || list.pages[at - 1] < list.pages[at]);
        const auto found = pages_[head].find(list.pages[at]);
        if (found == pages_[head].end()) {
          ADD_FAILURE() << "there is no page " << list.pages[at];
          continue;
        }
        EXPECT_EQ(found->second.size(), list.tokens[at]) << "page " << list.pages[at];
        for (size_t k = 0; k < found->second.size(); ++k) {
          store_token(head, found->second[k], &pool[at * g.page_bytes() + k * g.row_bytes()]);
          tokens_of_heads[head].push_back(found->second[k]);
        }
      }
    }
    return pool;
  }

  const RetroShape shape_;
  const uint64_t max_tokens_;
  std::unique_ptr<backend::Device> device_;
  std::unique_ptr<backend::Stream> stream_;
  std::unique_ptr<SparseAlgorithm> algorithm_;
  std::unique_ptr<sparse::SequenceIndex> index_;
  Content content_;
  Paged staging_;
  std::vector<std::map<uint32_t, std::vector<uint64_t>>> pages_;  // [kv_heads] id -> positions
  uint64_t tail_first_token_ = 0;
  uint32_t tail_first_page_ = std::numeric_limits<uint32_t>::max();
  uint32_t next_page_ = 0;
};

}  // namespace spin::testing
