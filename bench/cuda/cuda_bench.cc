// SPDX-License-Identifier: Apache-2.0
// Speed of the CUDA backend's operations at the shape of Qwen3-14B (40 query heads, 8 KV heads of
// 128, bf16), one layer, beside what the GPU does at best: a device-to-device copy for what reads
// its own memory, the copy engine for what comes over the bus. Each row states the bytes (or
// operations) that it must move and prints its rate and that rate as a share of the ceiling.
// A sample is the time of `launches` calls, from the first queued to the stream's being idle.
//
//   spin_cuda_bench [--json FILE] [FILTER]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "backend/cuda/cuda_device.h"
#include "backend/device.h"
#include "backend/kv_ops.h"
#include "backend/ops.h"
#include "backend/sparse_ops.h"
#include "base/bf16.h"
#include "base/check.h"
#include "base/counter_rng.h"
#include "layout/residency.h"

namespace spin {
namespace {

using backend::Buffer;
using backend::MemoryKind;
using backend::TensorRef;
using layout::DType;

constexpr uint32_t kKvHeads = 8;
constexpr uint32_t kGroup = 5;
constexpr uint32_t kQHeads = kKvHeads * kGroup;
constexpr uint32_t kDim = 128;
constexpr float kScale = 0.0883883f;
constexpr uint64_t kTokenBytes = 2 * kDim * 2;  // of one KV head
constexpr int kSamples = 9;

layout::KvGeometry geometry(uint32_t page_tokens) {
  return {1, kKvHeads, kDim, page_tokens, DType::kBF16};
}

float noise(uint64_t i) {
  return static_cast<float>(static_cast<int64_t>(base::mix64(i) >> 32)) * 0x1p-31f - 1.0f;
}

struct Result {
  std::string name;
  std::string unit;             // "GB/s" or "TFLOP/s"
  double work = 0;              // bytes or operations of a call
  double ceiling = 0;           // in units of the rate
  std::vector<double> seconds;  // of a call

  double median() const {
    std::vector<double> sorted = seconds;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
  double rate() const { return work / median() / (unit == "GB/s" ? 1e9 : 1e12); }
};

class Bench {
 public:
  explicit Bench(std::string filter) : filter_(std::move(filter)) {
    auto device = backend::cuda::create_cuda_device({});
    if (!device.ok()) {
      fmt::print(stderr, "spin_cuda_bench: {}\n", device.status().message());
      std::exit(1);
    }
    device_ = std::move(*device);
    auto stream = device_->create_stream("bench");
    SPIN_CHECK(stream.ok());
    stream_ = std::move(*stream);
    std::vector<base::Bf16> values(kNoiseBytes / sizeof(base::Bf16));
    for (size_t i = 0; i < values.size(); ++i) values[i] = base::to_bf16(noise(i));
    noise_ = upload(values);
  }

  backend::Device& device() { return *device_; }
  backend::Stream& stream() { return *stream_; }
  const std::vector<Result>& results() const { return results_; }
  double memory_gbps() const { return memory_gbps_; }
  double bus_gbps() const { return bus_gbps_; }

  void wait() {
    const Status status = stream_->wait_idle();
    if (!status.ok()) {
      fmt::print(stderr, "spin_cuda_bench: {}\n", status.to_string());
      std::exit(1);
    }
  }

  Buffer fast(uint64_t bytes) { return take(MemoryKind::kFast, bytes); }
  Buffer host(uint64_t bytes) { return take(MemoryKind::kHost, bytes); }

  template <typename T>
  Buffer upload(const std::vector<T>& values) {
    Buffer buffer = fast(values.size() * sizeof(T));
    stream_->enqueue_copy(buffer.data(), values.data(), values.size() * sizeof(T));
    wait();
    return buffer;
  }
  // Random bf16 numbers, never zeros.
  void fill(Buffer& buffer) {
    for (uint64_t at = 0; at < buffer.size_bytes(); at += kNoiseBytes) {
      stream_->enqueue_copy(buffer.as<char>() + at, noise_.data(),
                            std::min<uint64_t>(kNoiseBytes, buffer.size_bytes() - at));
    }
    wait();
  }
  Buffer random(uint64_t bytes) {
    Buffer buffer = fast(bytes);
    fill(buffer);
    return buffer;
  }
  Buffer floats(uint64_t count) {
    std::vector<float> values(count);
    for (uint64_t i = 0; i < count; ++i) values[i] = noise(i);
    return upload(values);
  }

  bool wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }

  double run(const std::string& name,
             const char* unit,
             double work,
             double ceiling,
             int launches,
             const std::function<void()>& call) {
    for (int i = 0; i < 3; ++i) call();
    wait();
    Result result{name, unit, work, ceiling, {}};
    for (int s = 0; s < kSamples; ++s) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < launches; ++i) call();
      wait();
      const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
      result.seconds.push_back(passed.count() / launches);
    }
    const auto [least, most] = std::minmax_element(result.seconds.begin(), result.seconds.end());
    fmt::print("{:<44} {:>10.1f} us ({:.1f} to {:.1f})  {:>8.1f} {}", name, result.median() * 1e6,
               *least * 1e6, *most * 1e6, result.rate(), unit);
    if (ceiling > 0) fmt::print("  {:.2f} of {:.0f}", result.rate() / ceiling, ceiling);
    fmt::print("\n");
    std::fflush(stdout);
    results_.push_back(std::move(result));
    return results_.back().rate();
  }

  void measure_ceilings() {
    constexpr uint64_t kBytes = uint64_t{4} << 30;
    Buffer from = random(kBytes);
    Buffer to = fast(kBytes);
    memory_gbps_ = run("ceiling: device-to-device copy", "GB/s", 2.0 * kBytes, 0, 4,
                       [&] { stream_->enqueue_copy(to.data(), from.data(), kBytes); });
    constexpr uint64_t kBusBytes = uint64_t{512} << 20;
    Buffer pinned = host(kBusBytes);
    stream_->enqueue_copy(pinned.data(), from.data(), kBusBytes);
    bus_gbps_ = run("ceiling: copy engine, host to device", "GB/s", kBusBytes, 0, 2,
                    [&] { stream_->enqueue_copy(to.data(), pinned.data(), kBusBytes); });
  }

 private:
  static constexpr uint64_t kNoiseBytes = uint64_t{64} << 20;

  Buffer take(MemoryKind kind, uint64_t bytes) {
    auto buffer = Buffer::allocate(device_->memory(kind), bytes);
    if (!buffer.ok()) {
      fmt::print(stderr, "spin_cuda_bench: {}\n", buffer.status().message());
      std::exit(1);
    }
    return std::move(*buffer);
  }

  const std::string filter_;
  std::unique_ptr<backend::Device> device_;
  std::unique_ptr<backend::Stream> stream_;
  Buffer noise_;
  double memory_gbps_ = 0;
  double bus_gbps_ = 0;
  std::vector<Result> results_;
};

// 0 .. count - 1 in random order.
std::vector<uint32_t> shuffled(uint64_t count) {
  std::vector<uint32_t> slots(count);
  std::iota(slots.begin(), slots.end(), 0u);
  for (uint64_t i = count; i > 1; --i) std::swap(slots[i - 1], slots[base::mix64(i) % i]);
  return slots;
}

TensorRef rows(const Buffer& buffer, int64_t count, int64_t cols) {
  return {buffer.data(), DType::kF32, count, cols, cols};
}

// ---- Attention.

void paged_attention(Bench& bench, uint32_t page_tokens, uint64_t batch, uint64_t context) {
  const std::string name =
      fmt::format("decode attention, {} x {} tokens, pages of {}", batch, context, page_tokens);
  if (!bench.wants(name)) return;
  const auto g = geometry(page_tokens);
  const uint64_t pages = g.pages_per_head(context);
  const Buffer pool = bench.random(batch * kKvHeads * pages * g.page_bytes());
  const Buffer slots = bench.upload(shuffled(batch * kKvHeads * pages));
  const Buffer q = bench.floats(batch * kQHeads * kDim);
  const Buffer out = bench.fast(batch * kQHeads * kDim * 4);
  std::vector<layout::SequenceSlice> slices;
  for (uint64_t i = 0; i < batch; ++i) {
    slices.push_back({i, 1, context, slots.as<uint32_t>() + i * kKvHeads * pages, pages});
  }
  const auto cols = int64_t{kQHeads} * kDim;
  const auto count = static_cast<int64_t>(batch);
  bench.run(name, "GB/s", static_cast<double>(batch * kKvHeads * context * kTokenBytes),
            bench.memory_gbps(), 5, [&] {
              bench.device().ops().enqueue_paged_attention(rows(q, count, cols), slices,
                                                           {pool.data(), g}, kScale,
                                                           rows(out, count, cols), bench.stream());
            });
}

void prefill_attention(Bench& bench, uint64_t tokens, uint64_t context) {
  const std::string name = fmt::format("prefill attention, {} of {} tokens", tokens, context);
  if (!bench.wants(name)) return;
  const auto g = geometry(8);
  const uint64_t pages = g.pages_per_head(context);
  const Buffer pool = bench.random(kKvHeads * pages * g.page_bytes());
  const Buffer slots = bench.upload(shuffled(kKvHeads * pages));
  const Buffer q = bench.floats(tokens * kQHeads * kDim);
  const Buffer out = bench.fast(tokens * kQHeads * kDim * 4);
  const layout::SequenceSlice slice{0, tokens, context, slots.as<uint32_t>(), pages};
  const auto cols = int64_t{kQHeads} * kDim;
  const auto count = static_cast<int64_t>(tokens);
  const double seen = static_cast<double>(tokens) *
                      (static_cast<double>(context) - static_cast<double>(tokens - 1) / 2);
  bench.run(name, "TFLOP/s", 4.0 * kDim * kQHeads * seen, 0, 2, [&] {
    bench.device().ops().enqueue_paged_attention(rows(q, count, cols), {&slice, 1},
                                                 {pool.data(), g}, kScale, rows(out, count, cols),
                                                 bench.stream());
  });
}

void list_attention(Bench& bench, uint64_t batch, uint32_t tokens) {
  const std::string name = fmt::format("list attention, {} x {} tokens, pages of 8", batch, tokens);
  if (!bench.wants(name)) return;
  const auto g = geometry(8);
  const uint32_t pages = tokens / 8;
  const uint64_t entries = batch * kKvHeads * pages;
  const Buffer pool = bench.random(entries * g.page_bytes());
  const Buffer slots = bench.upload(shuffled(entries));
  const Buffer valid = bench.upload(std::vector<uint8_t>(entries, 8));
  const Buffer counts = bench.upload(std::vector<uint32_t>(batch * kKvHeads, pages));
  const Buffer q = bench.floats(batch * kQHeads * kDim);
  const Buffer out = bench.fast(batch * kQHeads * kDim * 4);
  std::vector<backend::ListAttentionItem> items;
  for (uint64_t i = 0; i < batch; ++i) {
    const uint64_t first = i * kKvHeads * pages;
    backend::ListAttentionItem item;
    item.row = i;
    item.slots = slots.as<uint32_t>() + first;
    item.pages = {slots.as<uint32_t>() + first, valid.as<uint8_t>() + first,
                  counts.as<uint32_t>() + i * kKvHeads, pages};
    items.push_back(item);
  }
  const auto cols = int64_t{kQHeads} * kDim;
  const auto count = static_cast<int64_t>(batch);
  bench.run(
      name, "GB/s", static_cast<double>(entries * g.page_bytes()), bench.memory_gbps(), 20, [&] {
        bench.device().kv_ops().enqueue_list_attention(rows(q, count, cols), items,
                                                       {pool.data(), g}, kScale,
                                                       rows(out, count, cols), bench.stream());
      });
}

// ---- Select.

struct SketchStore {
  Buffer codes;
  Buffer scales;
  Buffer means;
  backend::SketchArray array;
};

SketchStore make_sketches(Bench& bench, uint64_t tokens, uint32_t bits) {
  SketchStore store;
  store.codes = bench.random(kKvHeads * tokens * backend::sketch_words(kDim, bits) * 4);
  store.scales = bench.upload(std::vector<base::Fp16>(kKvHeads * tokens, base::to_fp16(0.01f)));
  store.means = bench.floats(2 * kKvHeads * kDim);
  store.array = {store.codes.as<uint32_t>(),
                 store.scales.as<base::Fp16>(),
                 store.means.as<float>(),
                 tokens,
                 1024,
                 bits};
  return store;
}

void score_sketch(Bench& bench, uint64_t batch, uint64_t tokens, uint32_t bits) {
  const std::string name =
      fmt::format("score sketches of {} bits, {} x {} tokens", bits, batch, tokens);
  if (!bench.wants(name)) return;
  std::vector<SketchStore> stores;
  for (uint64_t i = 0; i < batch; ++i) stores.push_back(make_sketches(bench, tokens, bits));
  const auto pages = static_cast<uint32_t>(tokens / 8);
  const Buffer q = bench.floats(batch * kQHeads * kDim);
  const Buffer scores = bench.fast(batch * kKvHeads * pages * 4);
  const Buffer ids = bench.fast(batch * kKvHeads * 16 * 4);
  const Buffer counts = bench.fast(batch * kKvHeads * 4);
  std::vector<backend::ScoreSketchItem> items;
  std::vector<backend::RankItem> ranks;
  for (uint64_t i = 0; i < batch; ++i) {
    float* const out = scores.as<float>() + i * kKvHeads * pages;
    backend::ScoreSketchItem item;
    item.row = i;
    item.keys = stores[i].array;
    item.count = pages;
    item.scores = out;
    item.score_stride = pages;
    items.push_back(item);
    backend::RankItem rank;
    rank.scores = out;
    rank.score_stride = pages;
    rank.count = pages;
    rank.most = 16;
    rank.ids = ids.as<uint32_t>() + i * kKvHeads * 16;
    rank.counts = counts.as<uint32_t>() + i * kKvHeads;
    rank.id_stride = 16;
    ranks.push_back(rank);
  }
  const auto cols = int64_t{kQHeads} * kDim;
  const auto count = static_cast<int64_t>(batch);
  const double bytes = static_cast<double>(batch * kKvHeads * tokens * (kDim * bits / 8 + 2));
  const auto score = [&] {
    bench.device().sparse_ops().enqueue_score_sketch(rows(q, count, cols), items, geometry(8),
                                                     kScale, bench.stream());
  };
  const auto rank = [&] {
    bench.device().sparse_ops().enqueue_rank(ranks, kKvHeads, bench.stream());
  };
  bench.run(name, "GB/s", bytes, bench.memory_gbps(), 10, score);
  bench.run(fmt::format("rank {} pages, {} sequences", pages, batch), "GB/s",
            static_cast<double>(batch * kKvHeads * pages * 4), bench.memory_gbps(), 10, rank);
  bench.run(name + ", and rank", "GB/s", bytes, bench.memory_gbps(), 10, [&] {
    score();
    rank();
  });
}

void score_means(Bench& bench, uint64_t batch, uint32_t partitions) {
  const std::string name = fmt::format("score means, {} x {}", batch, partitions);
  if (!bench.wants(name)) return;
  const uint64_t vectors = batch * kKvHeads * partitions;
  const Buffer means = bench.random(vectors * kDim * 2);
  const Buffer q = bench.floats(batch * kQHeads * kDim);
  const Buffer scores = bench.fast(vectors * 4);
  std::vector<backend::ScoreMeansItem> items;
  for (uint64_t i = 0; i < batch; ++i) {
    backend::ScoreMeansItem item;
    item.row = i;
    item.count = partitions;
    item.scores = scores.as<float>() + i * kKvHeads * partitions;
    item.score_stride = partitions;
    item.keys = {means.as<char>() + i * kKvHeads * partitions * kDim * 2, DType::kBF16, kDim,
                 uint64_t{partitions} * kDim};
    items.push_back(item);
  }
  const auto cols = int64_t{kQHeads} * kDim;
  const auto count = static_cast<int64_t>(batch);
  bench.run(name, "GB/s", static_cast<double>(vectors * kDim * 2), bench.memory_gbps(), 10, [&] {
    bench.device().sparse_ops().enqueue_score_means(rows(q, count, cols), items, geometry(8),
                                                    kScale, backend::Aggregation::kSoftmaxMax,
                                                    bench.stream());
  });
}

// ---- Retrieve: every wanted page is missing, since two sets take turns.

class RetrieveBench {
 public:
  RetrieveBench(Bench& bench, uint32_t sequences, uint32_t wanted)
      : bench_(bench), sequences_(sequences), wanted_(wanted) {
    const uint64_t heads = uint64_t{sequences} * kKvHeads;
    const uint32_t pages = 2 * wanted;
    const auto g = geometry(8);
    tiers_.host = {kExtent, g.page_bytes()};
    pool_ = bench.random(heads * wanted * g.page_bytes());
    tiers_.fast = {pool_.data(), g};
    const uint32_t extents = pages / kExtent;
    arena_ = bench.host(heads * extents * tiers_.host.bytes());
    bench.fill(arena_);
    table_size_ = static_cast<uint32_t>(layout::residency_table_size(wanted));
    slots_ = bench.upload(shuffled(heads * wanted));
    ids_ = bench.upload(std::vector<uint32_t>(heads * wanted, layout::kNoPage));
    stamps_ = bench.upload(std::vector<uint8_t>(heads * wanted, 255));
    table_ = bench.upload(std::vector<uint32_t>(heads * table_size_, 0));
    counters_ = bench.host(heads * sizeof(layout::RetrieveCounters));
    std::memset(counters_.data(), 0, counters_.size_bytes());
    found_ = bench.fast(heads * wanted * 4);
    valid_ = bench.upload(std::vector<uint8_t>(heads * wanted, 8));
    counts_ = bench.upload(std::vector<uint32_t>(heads, wanted));
    std::vector<uint64_t> extent_of(heads * extents);
    std::vector<layout::HeadPages> tables(heads);
    std::vector<uint32_t> lists[2];
    for (uint64_t h = 0; h < heads; ++h) {
      for (uint32_t e = 0; e < extents; ++e) {
        const uint64_t extent =
            reinterpret_cast<uint64_t>(arena_.data()) + (h * extents + e) * tiers_.host.bytes();
        extent_of[h * extents + e] = extent;
        for (uint32_t p = e * kExtent; p < (e + 1) * kExtent; ++p) {
          *tiers_.host.tag(extent, p) = {7, p, 8};
        }
      }
      for (uint32_t p = 0; p < pages; ++p) lists[p % 2].push_back(p);
    }
    extents_ = bench.upload(extent_of);
    for (uint64_t h = 0; h < heads; ++h) {
      layout::HeadPages& head = tables[h];
      head.slots = slots_.as<uint32_t>() + h * wanted;
      head.pages = ids_.as<uint32_t>() + h * wanted;
      head.stamps = stamps_.as<uint8_t>() + h * wanted;
      head.table = table_.as<uint32_t>() + h * table_size_;
      head.extents = extents_.as<uint64_t>() + h * extents;
      head.owner = 7;
      head.lease_pages = wanted;
      head.table_size = table_size_;
      head.extent_count = extents;
    }
    heads_ = bench.upload(tables);
    for (int i = 0; i < 2; ++i) lists_[i] = bench.upload(lists[i]);
  }

  void retrieve(bool other_pages) {
    turn_ += other_pages ? 1 : 0;
    ++epoch_;
    std::vector<backend::RetrieveItem> items;
    for (uint32_t i = 0; i < sequences_; ++i) {
      const uint64_t first = uint64_t{i} * kKvHeads * wanted_;
      backend::RetrieveItem item;
      item.heads = heads_.as<layout::HeadPages>() + uint64_t{i} * kKvHeads;
      item.wanted = {lists_[turn_ % 2].as<uint32_t>() + first, valid_.as<uint8_t>() + first,
                     counts_.as<uint32_t>() + uint64_t{i} * kKvHeads, wanted_};
      item.slots = found_.as<uint32_t>() + first;
      item.counters = counters_.as<layout::RetrieveCounters>() + uint64_t{i} * kKvHeads;
      item.epoch = epoch_;
      items.push_back(item);
    }
    bench_.device().kv_ops().enqueue_retrieve(items, tiers_, bench_.stream());
  }

  uint64_t bytes() const { return uint64_t{sequences_} * kKvHeads * wanted_ * 8 * kTokenBytes; }
  uint64_t misses() const { return sum(&layout::RetrieveCounters::misses); }
  uint64_t faults() const { return sum(&layout::RetrieveCounters::faults); }

 private:
  static constexpr uint32_t kExtent = 32;

  uint64_t sum(uint64_t layout::RetrieveCounters::*field) const {
    uint64_t total = 0;
    for (uint64_t h = 0; h < uint64_t{sequences_} * kKvHeads; ++h) {
      total += counters_.as<layout::RetrieveCounters>()[h].*field;
    }
    return total;
  }

  Bench& bench_;
  const uint32_t sequences_;
  const uint32_t wanted_;
  uint32_t table_size_ = 0;
  backend::TieredPoolRef tiers_;
  Buffer pool_, arena_, slots_, ids_, stamps_, table_, counters_, found_, valid_, counts_, extents_;
  Buffer heads_;
  Buffer lists_[2];
  uint32_t turn_ = 0;
  uint8_t epoch_ = 0;
};

void retrieve(Bench& bench, uint32_t sequences, uint32_t wanted) {
  const std::string name =
      fmt::format("retrieve {} x {} pages of 4 KiB per head", sequences, wanted);
  if (!bench.wants(name)) return;
  RetrieveBench world(bench, sequences, wanted);
  bench.run(name + ", all missing", "GB/s", static_cast<double>(world.bytes()), bench.bus_gbps(), 4,
            [&] { world.retrieve(true); });
  const uint64_t calls = 3 + 4 * kSamples;
  SPIN_CHECK(world.faults() == 0);
  SPIN_CHECK(world.misses() == calls * sequences * kKvHeads * wanted);
  bench.run(name + ", all resident", "GB/s", static_cast<double>(world.bytes()) / 512, 0, 4,
            [&] { world.retrieve(false); });
  SPIN_CHECK(world.misses() == calls * sequences * kKvHeads * wanted);
}

// ---- Products.

void matmul(Bench& bench, int64_t n, int64_t k) {
  const std::string name = fmt::format("product with {} x {}", n, k);
  if (!bench.wants(name)) return;
  const backend::RowSource source = [&](int64_t first, int64_t count, std::span<float> out) {
    (void)count;
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = noise(static_cast<uint64_t>(first * k) + i);
    }
    return ok_status();
  };
  auto packed = bench.device().ops().pack_matrix(n, k, DType::kBF16, source);
  if (!packed.ok()) {
    fmt::print("{}: {}\n", name, packed.status().to_string());
    return;
  }
  for (const int64_t m : {1, 8, 64, 256, 2048}) {
    const Buffer x = bench.floats(static_cast<uint64_t>(m * k));
    const Buffer out = bench.fast(static_cast<uint64_t>(m * n) * 4);
    const auto call = [&] {
      bench.device().ops().enqueue_matmul(rows(x, m, k), **packed, nullptr, false, rows(out, m, n),
                                          bench.stream());
    };
    const std::string row = fmt::format("{}, {} rows", name, m);
    if (m <= 64) {
      bench.run(row, "GB/s", static_cast<double>(n * k * 2), bench.memory_gbps(), 10, call);
    } else {
      bench.run(row, "TFLOP/s", 2.0 * static_cast<double>(m * n) * static_cast<double>(k), 0, 10,
                call);
    }
  }
}

void run_all(Bench& bench) {
  bench.measure_ceilings();
  paged_attention(bench, 8, 64, 16384);
  paged_attention(bench, 64, 64, 16384);
  paged_attention(bench, 8, 4, 131072);
  prefill_attention(bench, 2048, 8192);
  list_attention(bench, 256, 200);
  list_attention(bench, 128, 2048);
  for (const uint32_t bits : {1u, 2u, 4u}) score_sketch(bench, 8, 131072, bits);
  score_sketch(bench, 1, 131072, 2);
  score_means(bench, 16, 16384);
  retrieve(bench, 8, 1024);
  retrieve(bench, 32, 32);
  for (const auto& [n, k] :
       {std::pair<int64_t, int64_t>{7168, 5120}, {5120, 5120}, {34816, 5120}, {5120, 17408}}) {
    matmul(bench, n, k);
  }
}

bool write_json(const Bench& bench, const std::string& device, const std::string& path) {
  std::ofstream file(path);
  file << fmt::format("{{\"device\": \"{}\", \"results\": [", device);
  const char* comma = "";
  for (const Result& result : bench.results()) {
    file << fmt::format(
        "{}\n{{\"name\": \"{}\", \"work\": {}, \"unit\": \"{}\", \"ceiling\": {}, "
        "\"seconds\": [{}]}}",
        comma, result.name, result.work, result.unit, result.ceiling,
        fmt::join(result.seconds, ", "));
    comma = ",";
  }
  file << "\n]}\n";
  file.close();
  return file.good();
}

int run_program(int argc, char** argv) {
  std::string json;
  std::string filter;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (text == "--json" && i + 1 < argc) {
      json = argv[++i];
    } else {
      filter = text;
    }
  }
  Bench bench(filter);
  fmt::print("{}\n", bench.device().properties().name);
  run_all(bench);
  if (!json.empty() && !write_json(bench, bench.device().properties().name, json)) {
    fmt::print(stderr, "spin_cuda_bench: cannot write {}\n", json);
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace spin

int main(int argc, char** argv) { return spin::run_program(argc, argv); }
