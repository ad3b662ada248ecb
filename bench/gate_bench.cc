// SPDX-License-Identifier: Apache-2.0
// Speed of the gates of SeerAttention-R at 2 KV heads of 128 with 2 query heads each and gates of
// 128 (needle-29m), one layer, blocks of 32: summaries of a prompt, and scores of one row.
//
//   spin_gate_bench --threads=2
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "backend/cpu/cpu_device.h"
#include "backend/sparse_ops.h"
#include "base/check.h"
#include "bench/machine.h"
#include "bench/pattern.h"

namespace spin {
namespace {

using bench::Machine;

using bench::pattern;
using layout::DType;

constexpr uint32_t kHeads = 2;
constexpr uint32_t kGroup = 2;
constexpr uint32_t kDim = 128;
constexpr uint32_t kBlock = 32;

// Weights of one layer.
struct Gate {
  Gate() {
    for (uint32_t i = 0; i < kDim / 2; ++i) {
      inv_freq.push_back(std::pow(1e6f, -2.0f * static_cast<float>(i) / kDim));
    }
    weights.key = key.data();
    weights.query = query.data();
    weights.key_norm = weights.query_norm = norm.data();
    weights.width = kDim;
    weights.poolings = 3;
    weights.order = {backend::Pooling::kMax, backend::Pooling::kMin, backend::Pooling::kMean};
    weights.model_rope = weights.gate_rope = {inv_freq, 1.0f};
  }
  std::vector<float> key = pattern(int64_t{kHeads} * 3 * kDim * kDim);
  std::vector<float> query = pattern(int64_t{kHeads} * kGroup * kDim * kDim);
  std::vector<float> norm = pattern(kDim);
  std::vector<float> inv_freq;
  backend::GateWeights weights;
};

// Keys and gate vectors of `tokens` tokens; all bits of the memory are 0.
struct Sequence {
  Sequence(DType dtype, uint64_t count) {
    geometry = {
        .layers = 1, .kv_heads = kHeads, .head_dim = kDim, .page_tokens = 8, .dtype = dtype};
    const uint64_t pages = geometry.pages_per_head(count);
    slots.resize(pages * kHeads);
    std::iota(slots.begin(), slots.end(), 0u);
    pool.resize(slots.size() * geometry.page_bytes());
    blocks = static_cast<uint32_t>(count / kBlock);
    vectors.resize(uint64_t{kHeads} * blocks * geometry.row_bytes());
    tokens = {pool.data(), geometry, slots.data(), pages, count};
    keys = {vectors.data(), dtype, kDim, uint64_t{blocks} * kDim};
  }
  layout::KvGeometry geometry;
  std::vector<uint32_t> slots;
  std::vector<std::byte> pool;
  std::vector<std::byte> vectors;
  uint32_t blocks = 0;
  layout::PagedTokens tokens;
  backend::HeadVectors keys;
};

void prompt(benchmark::State& state, Machine& machine, DType dtype) {
  const Gate gate;
  Sequence sequence(dtype, static_cast<uint64_t>(state.range(0)));
  backend::GateKeysItem item;
  item.tokens = sequence.tokens;
  item.block_tokens = kBlock;
  item.count = sequence.blocks;
  item.out = sequence.keys;
  for (auto unused : state) {
    machine.device->sparse_ops().enqueue_gate_keys({&item, 1}, gate.weights, *machine.stream);
    SPIN_CHECK(machine.stream->wait_idle().ok());
  }
  state.counters["tokens/s"] = benchmark::Counter(
      static_cast<double>(state.range(0) * state.iterations()), benchmark::Counter::kIsRate);
}

void select(benchmark::State& state, Machine& machine, DType dtype) {
  const Gate gate;
  Sequence sequence(dtype, static_cast<uint64_t>(state.range(0)));
  std::vector<float> q = pattern(int64_t{kHeads} * kGroup * kDim);
  std::vector<float> scores(uint64_t{kHeads} * sequence.blocks);
  backend::GateScoreItem item;
  item.position = static_cast<uint64_t>(state.range(0));
  item.count = sequence.blocks;
  item.keys = sequence.keys;
  item.scores = scores.data();
  item.score_stride = sequence.blocks;
  const auto cols = static_cast<int64_t>(q.size());
  for (auto unused : state) {
    machine.device->sparse_ops().enqueue_gate_scores({q.data(), DType::kF32, 1, cols, cols},
                                                     {&item, 1}, gate.weights, sequence.geometry,
                                                     *machine.stream);
    SPIN_CHECK(machine.stream->wait_idle().ok());
  }
}

void register_all(Machine& machine) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const std::string type(layout::dtype_name(dtype));
    const auto add = [&](const std::string& name, auto* run, benchmark::TimeUnit unit) {
      benchmark::RegisterBenchmark(
          (name + "/" + type).c_str(),
          [&machine, dtype, run](benchmark::State& state) { run(state, machine, dtype); })
          ->Arg(8192)
          ->Arg(32768)
          ->Arg(131072)
          ->UseRealTime()
          ->Unit(unit);
    };
    add("Gate/prompt", prompt, benchmark::kMillisecond);
    add("Gate/score", select, benchmark::kMicrosecond);
  }
}

}  // namespace
}  // namespace spin

int main(int argc, char** argv) {
  return spin::bench::run_benchmarks(argc, argv, spin::register_all);
}
