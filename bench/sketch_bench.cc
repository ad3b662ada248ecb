// SPDX-License-Identifier: Apache-2.0
// Speed of sketches (backend/sketch_ops.h) at the shape of needle-29m or of Qwen3-14B, one
// sequence: Encode, Score and Estimate of one layer. GB/s counts the sketches read once (Encode:
// the keys); tokens/s those of all KV heads.
//
//   spin_sketch_bench --threads=2 --benchmark_filter=Score
#include <cmath>
#include <cstdint>
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

using backend::Plane;
using backend::SketchArray;
using backend::TensorRef;
using layout::DType;

struct Shape {
  const char* name;
  uint32_t kv_heads;
  uint32_t group;
  uint32_t head_dim;
};

constexpr uint32_t kPageTokens = 8;

// Sketches of one plane of one layer.
struct Sketches {
  std::vector<uint32_t> codes;
  std::vector<base::Fp16> scales;
  std::vector<float> means;
  SketchArray array;

  Sketches(const Shape& shape, uint64_t tokens, uint32_t bits)
      : codes(shape.kv_heads * tokens * backend::sketch_words(shape.head_dim, bits)),
        scales(shape.kv_heads * tokens),
        means(2 * size_t{shape.kv_heads} * shape.head_dim) {
    array = {codes.data(), scales.data(), means.data(), tokens, 1024, bits};
  }
};

// A layer of a sequence with its sketches.
class Layer {
 public:
  Layer(Machine& machine, const Shape& shape, uint64_t tokens, uint32_t bits)
      : machine_(machine),
        geometry_{.layers = 1,
                  .kv_heads = shape.kv_heads,
                  .head_dim = shape.head_dim,
                  .page_tokens = kPageTokens,
                  .dtype = DType::kBF16},
        pages_(tokens / kPageTokens),
        pool_(shape.kv_heads * pages_ * geometry_.page_bytes()),
        slots_(shape.kv_heads * pages_),
        keys_(shape, tokens, bits),
        values_(shape, tokens, 2) {
    std::iota(slots_.begin(), slots_.end(), 0u);
    const std::vector<float> rows = bench::pattern(static_cast<int64_t>(pool_.size() / 2));
    auto* to = reinterpret_cast<uint16_t*>(pool_.data());
    for (size_t i = 0; i < rows.size(); ++i) to[i] = base::to_bf16(rows[i]).bits;
    encode(keys_, Plane::kKeys);
    encode(values_, Plane::kValues);
  }

  uint64_t tokens() const { return pages_ * kPageTokens; }
  const layout::KvGeometry& geometry() const { return geometry_; }
  const Sketches& keys() const { return keys_; }
  const Sketches& values() const { return values_; }

  void encode(Sketches& out, Plane plane) {
    backend::EncodeSketchItem item;
    item.tokens = {pool_.data(), geometry_, slots_.data(), pages_, tokens()};
    item.count = tokens();
    item.out = out.array;
    item.plane = plane;
    machine_.device->sparse_ops().enqueue_encode_sketch({&item, 1}, *machine_.stream);
    SPIN_CHECK(machine_.stream->wait_idle().ok());
  }
  void encode_keys() { encode(keys_, Plane::kKeys); }

 private:
  Machine& machine_;
  layout::KvGeometry geometry_;
  uint64_t pages_;
  std::vector<std::byte> pool_;
  std::vector<uint32_t> slots_;
  Sketches keys_;
  Sketches values_;
};

void set_rates(benchmark::State& state, const Layer& layer, double bytes_per_token) {
  using benchmark::Counter;
  const double tokens = static_cast<double>(state.iterations()) *
                        static_cast<double>(layer.tokens() * layer.geometry().kv_heads);
  state.counters["tokens/s"] = Counter(tokens, Counter::kIsRate);
  state.counters["GB/s"] = Counter(tokens * bytes_per_token / 1e9, Counter::kIsRate);
}

void encode(benchmark::State& state, Machine& machine, const Shape& shape, uint32_t bits) {
  Layer layer(machine, shape, static_cast<uint64_t>(state.range(0)), bits);
  for (auto unused : state) layer.encode_keys();
  set_rates(state, layer, static_cast<double>(layer.geometry().row_bytes()));
}

void score(benchmark::State& state, Machine& machine, const Shape& shape, uint32_t bits) {
  Layer layer(machine, shape, static_cast<uint64_t>(state.range(0)), bits);
  std::vector<float> q = bench::pattern(int64_t{shape.kv_heads} * shape.group * shape.head_dim);
  const auto width = static_cast<int64_t>(q.size());
  std::vector<float> scores(shape.kv_heads * layer.tokens() / kPageTokens);
  backend::ScoreSketchItem item;
  item.keys = layer.keys().array;
  item.count = static_cast<uint32_t>(layer.tokens() / kPageTokens);
  item.scores = scores.data();
  item.score_stride = item.count;
  for (auto unused : state) {
    machine.device->sparse_ops().enqueue_score_sketch({q.data(), DType::kF32, 1, width, width},
                                                      {&item, 1}, layer.geometry(), 0.1f,
                                                      *machine.stream);
    SPIN_CHECK(machine.stream->wait_idle().ok());
  }
  set_rates(state, layer, shape.head_dim * bits / 8.0 + 2);
}

void estimate(benchmark::State& state, Machine& machine, const Shape& shape) {
  Layer layer(machine, shape, static_cast<uint64_t>(state.range(0)), 2);
  std::vector<float> q = bench::pattern(int64_t{shape.kv_heads} * shape.group * shape.head_dim);
  const auto width = static_cast<int64_t>(q.size());
  std::vector<float> part(q.size());
  std::vector<float> log_sum_exp(size_t{shape.kv_heads} * shape.group);
  std::vector<uint32_t> pages(size_t{shape.kv_heads} * 16);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<uint32_t>(i % 16 * 7);
  std::vector<uint32_t> counts(shape.kv_heads, 16);
  backend::EstimateSketchItem item;
  item.keys = layer.keys().array;
  item.values = layer.values().array;
  item.tokens = layer.tokens();
  item.list = {pages.data(), nullptr, counts.data(), 16};
  item.part = part.data();
  item.log_sum_exp = log_sum_exp.data();
  for (auto unused : state) {
    machine.device->sparse_ops().enqueue_estimate_sketch({q.data(), DType::kF32, 1, width, width},
                                                         {&item, 1}, layer.geometry(), 0.1f,
                                                         *machine.stream);
    SPIN_CHECK(machine.stream->wait_idle().ok());
  }
  set_rates(state, layer, 2 * (shape.head_dim / 4.0 + 2));
}

void register_all(Machine& machine) {
  using benchmark::RegisterBenchmark;
  static constexpr Shape kShapes[] = {{"needle29m", 2, 2, 128}, {"qwen3-14b", 8, 5, 128}};
  const auto finish = [](benchmark::internal::Benchmark* one) {
    one->UseRealTime()->Unit(benchmark::kMicrosecond)->Arg(8192)->Arg(32768);
  };
  for (const Shape& shape : kShapes) {
    const std::string name = shape.name;
    for (const uint32_t bits : {1u, 2u, 4u}) {
      const std::string suffix = "/" + name + "/bits" + std::to_string(bits);
      finish(RegisterBenchmark(("Encode" + suffix).c_str(), [&, bits](benchmark::State& state) {
        encode(state, machine, shape, bits);
      }));
      finish(RegisterBenchmark(("Score" + suffix).c_str(), [&, bits](benchmark::State& state) {
        score(state, machine, shape, bits);
      }));
    }
    finish(RegisterBenchmark(("Estimate/" + name).c_str(),
                             [&](benchmark::State& state) { estimate(state, machine, shape); }));
  }
}

}  // namespace
}  // namespace spin

int main(int argc, char** argv) {
  return spin::bench::run_benchmarks(argc, argv, spin::register_all);
}
