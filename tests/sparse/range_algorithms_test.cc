// SPDX-License-Identifier: Apache-2.0
// What all algorithms over token ranges promise, looked at without page store and pipeline: the
// index, the zones, the lists.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "base/bf16.h"
#include "sparse/range_partition.h"
#include "sparse/registry.h"

namespace spin::sparse {
namespace {

constexpr uint32_t kLayers = 3;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kGroup = 2;
constexpr uint32_t kDim = 64;

// Memory that holds a pattern at first and is counted.
class FilledMemory final : public backend::MemoryResource {
 public:
  explicit FilledMemory(int fill = 0) : fill_(fill) {}
  Result<void*> allocate(size_t bytes, size_t alignment) override {
    void* pointer = ::operator new (bytes, std::align_val_t{alignment});
    std::memset(pointer, fill_, bytes);
    in_use_ += bytes;
    last_ = pointer;
    return pointer;
  }
  void deallocate(void* pointer, size_t bytes, size_t alignment) override {
    ::operator delete (pointer, std::align_val_t{alignment});
    in_use_ -= bytes;
  }
  uint64_t bytes_in_use() const override { return in_use_; }
  std::vector<unsigned char> last(size_t bytes) const {
    const auto* from = static_cast<const unsigned char*>(last_);
    return {from, from + bytes};
  }

 private:
  const int fill_;
  uint64_t in_use_ = 0;
  void* last_ = nullptr;
};

// Tokens of one layer in pages, random keys. All layers see the same.
struct Tokens {
  layout::KvGeometry geometry;
  std::vector<unsigned char> pool;
  std::vector<uint32_t> slots;  // [kv_heads, pages]

  Tokens(uint32_t page_tokens, layout::DType dtype, uint64_t tokens, uint32_t seed) {
    geometry = {kLayers, kHeads, kDim, page_tokens, dtype};
    const uint64_t pages = geometry.pages_per_head(tokens);
    pool.resize(kHeads * pages * geometry.page_bytes());
    slots.resize(kHeads * pages);
    std::iota(slots.begin(), slots.end(), 0u);
    std::shuffle(slots.begin(), slots.end(), std::mt19937(seed));
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint64_t t = 0; t < tokens; ++t) {
        for (uint32_t i = 0; i < kDim; ++i) set(head, t, i, normal(random));
      }
    }
  }

  void set(uint32_t head, uint64_t token, uint32_t i, float value) {
    const uint64_t pages = slots.size() / kHeads;
    unsigned char* row =
        pool.data() + slots[head * pages + token / geometry.page_tokens] * geometry.page_bytes() +
        token % geometry.page_tokens * geometry.row_bytes();
    if (geometry.dtype == layout::DType::kF32) {
      std::memcpy(row + i * sizeof(float), &value, sizeof(float));
    } else {
      const base::Bf16 narrow = base::to_bf16(value);
      std::memcpy(row + i * sizeof(narrow), &narrow, sizeof(narrow));
    }
  }

  // Tokens [first, first + count); `first` begins a page.
  layout::PagedTokens view(uint64_t first, uint64_t count) const {
    return {reinterpret_cast<const std::byte*>(pool.data()), geometry,
            slots.data() + first / geometry.page_tokens, slots.size() / kHeads, count};
  }
};

struct Selected {
  std::vector<std::vector<uint32_t>> pages;  // [kv_heads]
  std::vector<uint64_t> attended;
  std::vector<uint64_t> partitions;
};

// One sequence under one algorithm, as the pipeline drives it.
class Driven {
 public:
  Driven(const SparseAlgorithm& algorithm,
         const Tokens& tokens,
         uint64_t max_tokens,
         backend::Stream& stream,
         int memory_fill = 0)
      : algorithm_(algorithm),
        tokens_(tokens),
        stream_(stream),
        memory_(memory_fill),
        needs_(algorithm.needs(max_tokens)),
        index_(std::move(*algorithm.create_index(max_tokens, memory_))) {}

  void prompt(uint64_t count) {
    context_ = count;
    tail_first_ = algorithm_.prompt_tail_first(count);
    ASSERT_EQ(tail_first_ % tokens_.geometry.page_tokens, 0u);
    ASSERT_LE(tail_first_, count);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const PromptPartition partition =
          algorithm_.enqueue_finish_prompt(*index_, layer, tokens_.view(0, count), stream_);
      EXPECT_EQ(partition.map, nullptr);
      pinned_ = partition.pinned;
    }
    ASSERT_TRUE(stream_.wait_idle().ok());
  }

  void append() {
    ++context_;
    const uint32_t page_tokens = tokens_.geometry.page_tokens;
    layout::Tail tail;
    tail.first_page = static_cast<uint32_t>(tail_first_ / page_tokens);
    tail.tokens = static_cast<uint32_t>(context_ - tail_first_);
    most_tail_pages_ =
        std::max<uint64_t>(most_tail_pages_, tokens_.geometry.pages_per_head(tail.tokens));
    uint64_t sealed = 0;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const SealPlan plan = algorithm_.plan_seal(*index_, layer, tail);
      EXPECT_EQ(plan.repack_tokens, 0u);
      sealed = uint64_t{plan.pages} * page_tokens;
      if (sealed == 0) continue;
      EXPECT_LE(sealed, tail.tokens);
      const SealItem item{index_.get(), tokens_.view(tail_first_, tail.tokens), tail_first_,
                          static_cast<uint32_t>(sealed), tail.first_page};
      EXPECT_EQ(algorithm_.enqueue_seal(item, layer, stream_), nullptr);
    }
    tail_first_ += sealed;
  }

  Selected select(std::vector<float> q, uint32_t layer) {
    const uint32_t stride =
        needs_.sink_pages + needs_.zone_pages + needs_.tail_pages + needs_.selected_pages +
        (layer < algorithm_.descriptor().dense_layers ? static_cast<uint32_t>(needs_.page_ids) : 0);
    std::vector<uint32_t> pages(kHeads * stride), counts(kHeads);
    std::vector<uint8_t> valid(kHeads * stride);
    Selected out;
    out.attended.resize(kHeads);
    out.partitions.resize(kHeads);
    SelectItem item;
    item.index = index_.get();
    item.context_tokens = context_;
    item.tail_first_page = static_cast<uint32_t>(tail_first_ / tokens_.geometry.page_tokens);
    item.tail_first_token = tail_first_;
    item.list = {pages.data(), valid.data(), counts.data(), stride};
    item.attended = out.attended.data();
    item.selected = out.partitions.data();
    const auto cols = static_cast<int64_t>(q.size());
    algorithm_.enqueue_select({q.data(), layout::DType::kF32, 1, cols, cols}, {&item, 1}, layer,
                              stream_);
    const Status status = stream_.wait_idle();
    EXPECT_TRUE(status.ok()) << status.to_string();
    for (uint32_t head = 0; head < kHeads; ++head) {
      out.pages.emplace_back(pages.begin() + head * stride,
                             pages.begin() + head * stride + counts[head]);
    }
    return out;
  }

  uint32_t pinned_pages(uint32_t head) const {
    return pinned_.counts == nullptr ? 0 : pinned_.counts[head];
  }
  uint64_t context() const { return context_; }
  uint64_t tail_first() const { return tail_first_; }
  uint64_t most_tail_pages() const { return most_tail_pages_; }
  const SequenceNeeds& needs() const { return needs_; }
  std::vector<unsigned char> index_memory() const { return memory_.last(needs_.index_bytes); }
  const FilledMemory& memory() const { return memory_; }

 private:
  const SparseAlgorithm& algorithm_;
  const Tokens& tokens_;
  backend::Stream& stream_;
  FilledMemory memory_;
  SequenceNeeds needs_;
  std::unique_ptr<SequenceIndex> index_;
  layout::PageList pinned_;  // of the last layer
  uint64_t context_ = 0;
  uint64_t tail_first_ = 0;
  uint64_t most_tail_pages_ = 0;
};

std::vector<float> random_query(uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> q(kHeads * kGroup * kDim);
  for (float& value : q) value = normal(random);
  return q;
}

class RangeAlgorithms : public ::testing::Test {
 protected:
  RangeAlgorithms()
      : device_(std::move(*backend::cpu::create_cpu_device({.threads = 2}))),
        stream_(std::move(*device_->create_stream("range"))) {}

  std::unique_ptr<SparseAlgorithm> create(const std::string& text, const Tokens& tokens) {
    AlgorithmContext context;
    context.device = device_.get();
    context.shape.geometry = tokens.geometry;
    context.shape.q_heads = kHeads * kGroup;
    context.shape.scale = 0.125f;
    auto spec = parse_sparse_spec(text);
    EXPECT_TRUE(spec.ok()) << text;
    auto algorithm = create_algorithm(*spec, context);
    EXPECT_TRUE(algorithm.ok()) << text << ": " << algorithm.status().to_string();
    return std::move(*algorithm);
  }

  std::unique_ptr<backend::Device> device_;
  std::unique_ptr<backend::Stream> stream_;
};

TEST_F(RangeAlgorithms, AnIndexOfAPromptEqualsOneMadeTokenByToken) {
  for (const char* text :
       {"quest:dense_layers=1", "quest:block=24,sinks=0,local=5", "shadowkv:outliers=0",
        "oracle:block=16", "shadowkv:outliers=0,block=9"}) {
    for (const auto& [page_tokens, dtype] :
         {std::pair(8u, layout::DType::kBF16), std::pair(16u, layout::DType::kF32)}) {
      SCOPED_TRACE(std::string(text) + ", pages of " + std::to_string(page_tokens));
      const Tokens tokens(page_tokens, dtype, 600, 1);
      const auto algorithm = create(text, tokens);
      ASSERT_TRUE(algorithm->descriptor().prefix_stable);
      Driven whole(*algorithm, tokens, 600, *stream_);
      Driven slow(*algorithm, tokens, 600, *stream_);
      whole.prompt(597);
      slow.prompt(150);
      while (slow.context() < 597) slow.append();
      ASSERT_TRUE(stream_->wait_idle().ok());
      EXPECT_EQ(whole.tail_first(), slow.tail_first());
      EXPECT_GT(whole.tail_first(), 400u);
      const auto memory = whole.index_memory();
      EXPECT_TRUE(memory == slow.index_memory());
      EXPECT_GT(std::count_if(memory.begin(), memory.end(), [](unsigned char b) { return b != 0; }),
                1000);
    }
  }
}

TEST_F(RangeAlgorithms, WhatAnIndexesMemoryHeldBeforeIsNeverRead) {
  // A sequence gets the memory of an earlier one (B148): zeros, and bytes that are NaN as floats.
  for (const char* text :
       {"quest:budget=64", "quest:budget=64,sinks=0,local=0", "shadowkv:budget=64,outliers=4",
        "shadowkv:budget=64,outliers=0", "oracle:budget=64", "streaming:budget=64"}) {
    SCOPED_TRACE(text);
    const Tokens tokens(8, layout::DType::kBF16, 420, 14);
    const auto algorithm = create(text, tokens);
    Driven clean(*algorithm, tokens, 420, *stream_);
    Driven used(*algorithm, tokens, 420, *stream_, 0xFF);
    clean.prompt(310);
    used.prompt(310);
    for (uint32_t i = 0; i < 110; ++i) {
      clean.append();
      used.append();
      if (i % 7 != 0) continue;
      const Selected selected = used.select(random_query(i), i % kLayers);
      EXPECT_EQ(selected.pages, clean.select(random_query(i), i % kLayers).pages);
      EXPECT_GT(selected.attended[0], 0u);
    }
  }
}

TEST_F(RangeAlgorithms, AnIndexTakesExactlyTheBytesThatAreAskedFor) {
  for (const char* text : {"streaming", "quest", "shadowkv", "shadowkv:outliers=0", "oracle"}) {
    const Tokens tokens(8, layout::DType::kBF16, 8, 1);
    const auto algorithm = create(text, tokens);
    for (const uint64_t max_tokens : {1u, 100u, 4096u, 131072u}) {
      FilledMemory memory;
      const auto index = algorithm->create_index(max_tokens, memory);
      ASSERT_TRUE(index.ok());
      EXPECT_EQ(memory.bytes_in_use(), algorithm->needs(max_tokens).index_bytes)
          << text << " " << max_tokens;
    }
  }
}

TEST_F(RangeAlgorithms, SummariesCostWhatTheirPagesSay) {
  const Tokens tokens(8, layout::DType::kBF16, 8, 1);
  const auto per_token = [&](const char* text, uint32_t layers) {
    const uint64_t n = 1 << 20;
    const double bytes = static_cast<double>(create(text, tokens)->needs(n).index_bytes);
    return bytes / (static_cast<double>(n) * kHeads * layers);
  };
  // Two vectors of 128 bytes for 16 tokens, one for 8, one for each; 4 bytes of scratch score for
  // each partition, once for all layers; sizes beside outliers.
  EXPECT_NEAR(per_token("quest:dense_layers=0", kLayers), 16 + 4.0 / 16 / kLayers, 0.1);
  EXPECT_NEAR(per_token("quest", 1), 16 + 4.0 / 16, 0.1);
  EXPECT_NEAR(per_token("shadowkv:outliers=0", kLayers), 16 + 4.0 / 8 / kLayers, 0.1);
  EXPECT_NEAR(per_token("shadowkv", kLayers), 16 + 4.0 / 8 + 4.0 / 8 / kLayers, 0.1);
  EXPECT_NEAR(per_token("oracle", kLayers), 128 + 4.0 / 8 / kLayers, 0.1);
}

// Every page on a list once; sinks and the whole tail on it; zones and selection disjoint.
void check_list(Driven& driven, const Selected& selected, const Tokens& tokens, uint64_t unit) {
  const uint64_t page_tokens = tokens.geometry.page_tokens;
  for (uint32_t head = 0; head < kHeads; ++head) {
    const std::vector<uint32_t>& pages = selected.pages[head];
    EXPECT_TRUE(std::is_sorted(pages.begin(), pages.end()));
    EXPECT_EQ(std::adjacent_find(pages.begin(), pages.end()), pages.end());
    for (uint32_t page = 0; page < driven.needs().sink_pages; ++page) {
      EXPECT_TRUE(std::binary_search(pages.begin(), pages.end(), page)) << "sink " << page;
    }
    const uint64_t last = tokens.geometry.pages_per_head(driven.context());
    for (uint64_t page = driven.tail_first() / page_tokens; page < last; ++page) {
      EXPECT_TRUE(std::binary_search(pages.begin(), pages.end(), page)) << "tail " << page;
    }
    EXPECT_EQ(selected.attended[head],
              driven.needs().sink_pages * page_tokens + driven.pinned_pages(head) * page_tokens +
                  selected.partitions[head] * unit + driven.context() - driven.tail_first());
    EXPECT_LE(selected.partitions[head] * unit, driven.needs().selected_pages * page_tokens);
  }
}

TEST_F(RangeAlgorithms, SinksAndNewestPagesStayAroundTheBudgetsLimit) {
  // What can be ranked at 300 tokens, give or take one token: (B144 of docs/failure_cases.md)
  const Tokens tokens(8, layout::DType::kF32, 420, 3);
  for (const std::string name : {"quest:dense_layers=0,block=16", "shadowkv:outliers=0",
                                 "shadowkv:outliers=3", "oracle:block=16"}) {
    const uint64_t unit = name.find("16") != std::string::npos ? 16 : 8;
    const auto probe = create(name + ",sinks=10,local=40", tokens);
    const uint64_t ranked = probe->prompt_tail_first(300) - 16;
    for (const uint64_t budget : {ranked - 1, ranked, ranked + 1, uint64_t{8}, uint64_t{1}}) {
      SCOPED_TRACE(name + " budget " + std::to_string(budget));
      const auto algorithm =
          create(name + ",sinks=10,local=40,budget=" + std::to_string(budget), tokens);
      Driven driven(*algorithm, tokens, 420, *stream_);
      driven.prompt(290);
      while (driven.context() < 420) {
        driven.append();
        const Selected selected = driven.select(random_query(7), 1);
        check_list(driven, selected, tokens, unit);
        const uint64_t wanted = std::max<uint64_t>(1, budget / unit);
        for (uint32_t head = 0; head < kHeads; ++head) {
          const uint64_t able = (driven.tail_first() - 16 - driven.pinned_pages(head) * 8) / unit;
          EXPECT_EQ(selected.partitions[head], std::min(wanted, able));
        }
      }
      EXPECT_LE(driven.most_tail_pages(), driven.needs().tail_pages);
    }
  }
}

TEST_F(RangeAlgorithms, ABudgetOfTheWholeContextListsEveryPage) {
  for (const uint32_t page_tokens : {1u, 8u, 16u, 64u}) {
    const Tokens tokens(page_tokens, layout::DType::kF32, 500, 4);
    for (const char* text : {"quest:budget=100%", "shadowkv:budget=100%,outliers=5",
                             "oracle:budget=1000000", "streaming:budget=100%"}) {
      SCOPED_TRACE(std::string(text) + ", pages of " + std::to_string(page_tokens));
      const auto algorithm = create(text, tokens);
      Driven driven(*algorithm, tokens, 500, *stream_);
      driven.prompt(430);
      for (int i = 0; i < 70; ++i) driven.append();
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        const Selected selected = driven.select(random_query(8), layer);
        for (uint32_t head = 0; head < kHeads; ++head) {
          EXPECT_EQ(selected.attended[head], 500u);
          EXPECT_EQ(selected.pages[head].size(), tokens.geometry.pages_per_head(500));
        }
      }
    }
  }
}

TEST_F(RangeAlgorithms, TheNeedlesPageIsSelected) {
  Tokens tokens(8, layout::DType::kBF16, 1000, 5);
  const std::vector<float> q = random_query(9);
  // One token's key lies along the first query of each head: token 333 + 100 * head.
  for (uint32_t head = 0; head < kHeads; ++head) {
    for (uint32_t i = 0; i < kDim; ++i) {
      tokens.set(head, 333 + 100 * head, i, 4 * q[head * kGroup * kDim + i]);
    }
  }
  for (const char* text : {"quest:budget=16", "shadowkv:budget=8,outliers=0",
                           "shadowkv:budget=8,outliers=1", "oracle:budget=8"}) {
    SCOPED_TRACE(text);
    const auto algorithm = create(text, tokens);
    Driven driven(*algorithm, tokens, 1000, *stream_);
    driven.prompt(1000);
    const Selected selected = driven.select(q, 2);
    for (uint32_t head = 0; head < kHeads; ++head) {
      const uint32_t page = (333 + 100 * head) / 8;
      EXPECT_TRUE(
          std::binary_search(selected.pages[head].begin(), selected.pages[head].end(), page));
      EXPECT_EQ(selected.partitions[head], 1u);
    }
  }
}

TEST_F(RangeAlgorithms, BothCornersOfABoxCount) {
  Tokens tokens(8, layout::DType::kBF16, 600, 15);
  for (const float sign : {1.0f, -1.0f}) {
    // The token of greatest product lies at one end of its block's box, that of least at the other.
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint32_t i = 0; i < kDim; ++i) {
        tokens.set(head, 200, i, 8 * sign);
        tokens.set(head, 400, i, -8 * sign);
      }
    }
    const auto algorithm = create("quest:budget=16,dense_layers=0", tokens);
    Driven driven(*algorithm, tokens, 600, *stream_);
    driven.prompt(600);
    const Selected selected = driven.select(std::vector<float>(kHeads * kGroup * kDim, sign), 0);
    for (uint32_t head = 0; head < kHeads; ++head) {
      const auto& pages = selected.pages[head];
      EXPECT_TRUE(std::binary_search(pages.begin(), pages.end(), 25u));
      EXPECT_FALSE(std::binary_search(pages.begin(), pages.end(), 50u));
    }
  }
}

TEST_F(RangeAlgorithms, EqualScoresAreRankedByTheirIds) {
  Tokens tokens(8, layout::DType::kF32, 400, 6);
  for (uint32_t head = 0; head < kHeads; ++head) {
    for (uint64_t t = 0; t < 400; ++t) {
      for (uint32_t i = 0; i < kDim; ++i) tokens.set(head, t, i, 0.5f);
    }
  }
  for (const char* text :
       {"quest:budget=32,local=8,dense_layers=0", "shadowkv:budget=32,local=8,outliers=0,sinks=16",
        "oracle:budget=32,local=8,block=16"}) {
    SCOPED_TRACE(text);
    const auto algorithm = create(text, tokens);
    Driven driven(*algorithm, tokens, 400, *stream_);
    driven.prompt(392);
    const Selected selected = driven.select(random_query(10), 0);
    for (uint32_t head = 0; head < kHeads; ++head) {
      EXPECT_EQ(
          std::vector<uint32_t>(selected.pages[head].begin(), selected.pages[head].begin() + 6),
          (std::vector<uint32_t>{0, 1, 2, 3, 4, 5}));
    }
  }
}

TEST_F(RangeAlgorithms, OutliersArePinnedAndNotRankedTwice) {
  Tokens tokens(8, layout::DType::kF32, 640, 7);
  // Chunks of like keys, except chunks 20 + head and 31: those hold opposite ones.
  for (uint32_t head = 0; head < kHeads; ++head) {
    for (uint64_t t = 0; t < 640; ++t) {
      const bool odd = t / 8 == 20 + head || t / 8 == 31;
      for (uint32_t i = 0; i < kDim; ++i) {
        const float direction = i % 7 == t / 8 % 7 ? 1.0f : 0.2f;
        tokens.set(head, t, i, odd && t % 2 == 1 ? -0.5f * direction : direction);
      }
    }
  }
  const auto algorithm = create("shadowkv:outliers=2,budget=512,local=8", tokens);
  Driven driven(*algorithm, tokens, 640, *stream_);
  driven.prompt(400);
  EXPECT_EQ(driven.pinned_pages(0), 2u);
  const auto narrow = create("shadowkv:outliers=2,budget=8,local=8", tokens);
  Driven few(*narrow, tokens, 640, *stream_);
  few.prompt(400);
  while (few.context() < 640) few.append();
  const Selected selected = few.select(random_query(11), 1);
  for (uint32_t head = 0; head < kHeads; ++head) {
    const auto& pages = selected.pages[head];
    EXPECT_TRUE(std::binary_search(pages.begin(), pages.end(), 20 + head));
    EXPECT_TRUE(std::binary_search(pages.begin(), pages.end(), 31u));
    EXPECT_EQ(selected.partitions[head], 1u);
    EXPECT_EQ(selected.attended[head], 8 + 16 + 8 + (640 - few.tail_first()));
  }
  // Everything else can be selected, chunks sealed while decoding included.
  while (driven.context() < 640) driven.append();
  check_list(driven, driven.select(random_query(12), 1), tokens, 8);
}

TEST_F(RangeAlgorithms, FewerChunksThanOutliersAreAllPinned) {
  const Tokens tokens(8, layout::DType::kF32, 200, 8);
  const auto algorithm = create("shadowkv", tokens);
  Driven driven(*algorithm, tokens, 200, *stream_);
  driven.prompt(200);
  const Selected selected = driven.select(random_query(13), 0);
  EXPECT_EQ(driven.pinned_pages(0), (driven.tail_first() - 8) / 8);
  EXPECT_EQ(selected.attended[0], 200u);
  EXPECT_EQ(selected.partitions[0], 0u);
}

TEST_F(RangeAlgorithms, DenseLayersListEverything) {
  const Tokens tokens(8, layout::DType::kF32, 300, 9);
  const auto algorithm = create("quest:budget=16,dense_layers=2", tokens);
  Driven driven(*algorithm, tokens, 300, *stream_);
  driven.prompt(300);
  EXPECT_EQ(driven.select(random_query(1), 0).attended[0], 300u);
  EXPECT_EQ(driven.select(random_query(1), 1).attended[1], 300u);
  EXPECT_LT(driven.select(random_query(1), 2).attended[0], 150u);
}

TEST_F(RangeAlgorithms, TheStreamingWindowHoldsTheNewestTokens) {
  for (const uint32_t page_tokens : {1u, 8u, 16u}) {
    const Tokens tokens(page_tokens, layout::DType::kF32, 700, 10);
    for (const char* text : {"streaming:budget=64", "streaming:budget=10%", "streaming:budget=1",
                             "streaming:budget=33%,sinks=0"}) {
      SCOPED_TRACE(std::string(text) + ", pages of " + std::to_string(page_tokens));
      const auto algorithm = create(text, tokens);
      const auto spec = parse_sparse_spec(text);
      OptionReader options(*spec);
      const TokenBudget budget = options.budget("budget", {});
      Driven driven(*algorithm, tokens, 700, *stream_);
      driven.prompt(180);
      while (driven.context() < 700) {
        const uint64_t before = driven.tail_first();
        driven.append();
        EXPECT_GE(driven.tail_first(), before);
        const uint64_t window = budget.resolve(driven.context());
        EXPECT_GE(driven.context() - driven.tail_first(), window);
        EXPECT_LT(driven.context() - driven.tail_first(), window + page_tokens);
        EXPECT_EQ(driven.tail_first(), algorithm->prompt_tail_first(driven.context()));
      }
      check_list(driven, driven.select(random_query(2), 0), tokens, page_tokens);
      EXPECT_LE(driven.most_tail_pages(), driven.needs().tail_pages);
    }
  }
}

TEST(RangePartition, ZonesAreWholePartitions) {
  const RangePartition partition({.page_tokens = 8,
                                  .partition_tokens = 20,  // three pages
                                  .sink_tokens = 25,
                                  .local_tokens = 10});
  EXPECT_EQ(partition.partition_tokens(), 24u);
  EXPECT_EQ(partition.sink_pages(), 6u);
  EXPECT_EQ(partition.first_ranked(), 2u);
  EXPECT_EQ(partition.local_tokens(), 16u);
  EXPECT_EQ(partition.tail_pages(), 5u);
  EXPECT_EQ(partition.prompt_tail_first(64), 48u);
  EXPECT_EQ(partition.prompt_tail_first(87), 48u);
  EXPECT_EQ(partition.prompt_tail_first(88), 72u);
  EXPECT_EQ(partition.ranked(48), 0u);
  EXPECT_EQ(partition.ranked(72), 1u);
  EXPECT_EQ(partition.plan_seal({.tokens = 39}).pages, 0u);
  EXPECT_EQ(partition.plan_seal({.tokens = 40}).pages, 3u);
  EXPECT_EQ(partition.plan_seal({.tokens = 64}).pages, 6u);
}

TEST(RangePartition, BudgetsBuyWholePartitionsAndAtLeastOne) {
  const RangePartition partition({.page_tokens = 8, .partition_tokens = 16});
  EXPECT_EQ(partition.budget_partitions({1, 0}, 1000), 1u);
  EXPECT_EQ(partition.budget_partitions({31, 0}, 1000), 1u);
  EXPECT_EQ(partition.budget_partitions({32, 0}, 1000), 2u);
  EXPECT_EQ(partition.budget_partitions({0, 0.1}, 1000), 6u);
  EXPECT_EQ(partition.most_selected({1u << 30, 0}, 1000), 62u);
}

}  // namespace
}  // namespace spin::sparse
