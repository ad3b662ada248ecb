// SPDX-License-Identifier: Apache-2.0
// Speed of the common Index and Select operations (backend/sparse_ops.h) at the shape of needle-29m
// or of Qwen3-14B, one layer of one sequence, bf16. GB/s counts the keys or summaries read once.
// The rows of the range algorithms: PoolMeans/8, ScoreMeans/8 (shadowkv); PoolBoxes/16,
// ScoreBoxes/16 (quest); ScoreKeys/8 (oracle); Rank and Lists serve all of them.
//
//   spin_select_bench --threads=2 --benchmark_filter=Score
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "backend/cpu/cpu_device.h"
#include "backend/sparse_ops.h"
#include "base/bf16.h"
#include "base/check.h"
#include "bench/machine.h"
#include "bench/pattern.h"

namespace spin {
namespace {

using bench::Machine;

using backend::HeadVectors;
using layout::DType;

struct Shape {
  const char* name;
  uint32_t kv_heads;
  uint32_t group;
  uint32_t head_dim;
};

constexpr uint32_t kPageTokens = 8;

std::vector<base::Bf16> bf16_pattern(uint64_t count) {
  const std::vector<float> values = bench::pattern(static_cast<int64_t>(count));
  std::vector<base::Bf16> out(count);
  std::transform(values.begin(), values.end(), out.begin(), base::to_bf16);
  return out;
}

// Bf16 vectors per KV head.
struct Vectors {
  std::vector<base::Bf16> values;
  HeadVectors ref;

  Vectors(const Shape& shape, uint64_t count)
      : values(bf16_pattern(shape.kv_heads * count * shape.head_dim)),
        ref{values.data(), DType::kBF16, shape.head_dim, count * shape.head_dim} {}
};

layout::KvGeometry geometry_of(const Shape& shape) {
  return {1, shape.kv_heads, shape.head_dim, kPageTokens, DType::kBF16};
}

void set_rate(benchmark::State& state, double bytes) {
  state.counters["GB/s"] = benchmark::Counter(static_cast<double>(state.iterations()) * bytes / 1e9,
                                              benchmark::Counter::kIsRate);
}

void pool(benchmark::State& state, Machine& machine, const Shape& shape, bool boxes) {
  const auto tokens = static_cast<uint64_t>(state.range(0));
  const layout::KvGeometry geometry = geometry_of(shape);
  const uint64_t pages = tokens / kPageTokens;
  const auto rows = bf16_pattern(shape.kv_heads * tokens * shape.head_dim * 2);
  std::vector<uint32_t> slots(shape.kv_heads * pages);
  std::iota(slots.begin(), slots.end(), 0u);
  backend::PoolKeysItem item;
  item.tokens = {reinterpret_cast<const std::byte*>(rows.data()), geometry, slots.data(), pages,
                 tokens};
  item.partition_tokens = boxes ? 16 : 8;
  item.count = static_cast<uint32_t>(tokens / item.partition_tokens);
  const Vectors first(shape, item.count);
  const Vectors second(shape, item.count);
  if (boxes) {
    item.min = first.ref;
    item.max = second.ref;
  } else {
    item.mean = first.ref;
  }
  for (auto unused : state) {
    machine.device->sparse_ops().enqueue_pool_keys({&item, 1}, *machine.stream);
    machine.wait();
  }
  set_rate(state, static_cast<double>(shape.kv_heads * tokens * geometry.row_bytes()));
}

enum class Kind { kMeans, kBoxes, kKeys };

void score(benchmark::State& state, Machine& machine, const Shape& shape, Kind kind) {
  const auto tokens = static_cast<uint32_t>(state.range(0));
  const uint32_t vectors = kind == Kind::kKeys ? tokens : tokens / (kind == Kind::kMeans ? 8 : 16);
  const Vectors low(shape, vectors);
  const Vectors high(shape, kind == Kind::kBoxes ? vectors : 1);
  std::vector<float> q = bench::pattern(int64_t{shape.kv_heads} * shape.group * shape.head_dim);
  const auto width = static_cast<int64_t>(q.size());
  backend::ScoreItem item;
  item.count = kind == Kind::kKeys ? vectors / 8 : vectors;
  std::vector<float> scores(uint64_t{shape.kv_heads} * item.count);
  item.scores = scores.data();
  item.score_stride = item.count;
  const backend::ScoreMeansItem means{item, low.ref, kind == Kind::kKeys ? 8u : 1u};
  const backend::ScoreBoxesItem boxes{item, low.ref, high.ref};
  const backend::TensorRef q_ref{q.data(), DType::kF32, 1, width, width};
  for (auto unused : state) {
    if (kind == Kind::kBoxes) {
      machine.device->sparse_ops().enqueue_score_boxes(q_ref, {&boxes, 1}, geometry_of(shape), 0.1f,
                                                       backend::Aggregation::kSoftmaxMax,
                                                       *machine.stream);
    } else {
      machine.device->sparse_ops().enqueue_score_means(q_ref, {&means, 1}, geometry_of(shape), 0.1f,
                                                       backend::Aggregation::kSoftmaxMax,
                                                       *machine.stream);
    }
    machine.wait();
  }
  set_rate(state, static_cast<double>(vectors) * (kind == Kind::kBoxes ? 2 : 1) * shape.kv_heads *
                      shape.head_dim * sizeof(base::Bf16));
}

// 1/64 of the scores, as a budget of 1.56 % takes.
void rank(benchmark::State& state, Machine& machine, const Shape& shape) {
  const auto count = static_cast<uint32_t>(state.range(0)) / 8;
  const std::vector<float> scores = bench::pattern(int64_t{shape.kv_heads} * count);
  std::vector<uint32_t> ids(uint64_t{shape.kv_heads} * count);
  std::vector<uint32_t> counts(shape.kv_heads);
  backend::RankItem item;
  item.scores = scores.data();
  item.score_stride = count;
  item.count = count;
  item.most = count / 64;
  item.ids = ids.data();
  item.counts = counts.data();
  item.id_stride = count;
  for (auto unused : state) {
    machine.device->sparse_ops().enqueue_rank({&item, 1}, shape.kv_heads, *machine.stream);
    machine.wait();
  }
  state.counters["scores/s"] =
      benchmark::Counter(static_cast<double>(state.iterations()) * count * shape.kv_heads,
                         benchmark::Counter::kIsRate);
}

void lists(benchmark::State& state, Machine& machine, const Shape& shape) {
  const auto selected = static_cast<uint32_t>(state.range(0)) / 8 / 64;
  std::vector<uint32_t> ids(uint64_t{shape.kv_heads} * selected);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint32_t>(1 + i % selected * 60);
  std::vector<uint32_t> counts(shape.kv_heads, selected);
  const uint32_t stride = selected + 10;
  std::vector<uint32_t> pages(uint64_t{shape.kv_heads} * stride);
  std::vector<uint8_t> valid(pages.size());
  std::vector<uint32_t> list_counts(shape.kv_heads);
  backend::BuildListItem item;
  item.sink_pages = 1;
  item.ids = ids.data();
  item.counts = counts.data();
  item.id_stride = selected;
  item.pages_per_partition = 1;
  item.tail_first_page = static_cast<uint32_t>(state.range(0)) / 8;
  item.tail_tokens = 67;
  item.list = {pages.data(), valid.data(), list_counts.data(), stride};
  for (auto unused : state) {
    machine.device->sparse_ops().enqueue_build_lists({&item, 1}, geometry_of(shape),
                                                     *machine.stream);
    machine.wait();
  }
}

void register_all(Machine& machine) {
  static constexpr Shape kShapes[] = {{"needle29m", 2, 2, 128}, {"qwen3-14b", 8, 5, 128}};
  const auto add = [](const std::string& name, const std::function<void(benchmark::State&)>& run) {
    benchmark::RegisterBenchmark(name.c_str(), run)
        ->UseRealTime()
        ->Unit(benchmark::kMicrosecond)
        ->Arg(8192)
        ->Arg(32768);
  };
  for (const Shape& shape : kShapes) {
    const std::string name = std::string("/") + shape.name;
    const auto with = [&](auto function, auto... arguments) {
      return [&machine, &shape, function, arguments...](benchmark::State& state) {
        function(state, machine, shape, arguments...);
      };
    };
    add("PoolMeans/8" + name, with(pool, false));
    add("PoolBoxes/16" + name, with(pool, true));
    add("ScoreMeans/8" + name, with(score, Kind::kMeans));
    add("ScoreBoxes/16" + name, with(score, Kind::kBoxes));
    add("ScoreKeys/8" + name, with(score, Kind::kKeys));
    add("Rank" + name, with(rank));
    add("Lists" + name, with(lists));
  }
}

}  // namespace
}  // namespace spin

int main(int argc, char** argv) {
  return spin::bench::run_benchmarks(argc, argv, spin::register_all);
}
