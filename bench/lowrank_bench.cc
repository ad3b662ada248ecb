// SPDX-License-Identifier: Apache-2.0
// Speed of low-rank keys at 2 KV heads of 128 and rank 160, one layer: factors of a prompt, its
// keys rebuilt once, and keys of the pages that one step fetches.
//
//   spin_lowrank_bench --threads=2
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
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

using bench::pattern;
using layout::DType;

constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 128;
constexpr uint32_t kRank = 160;

// A prompt's keys, and its factors.
struct Sequence {
  Sequence(DType dtype, uint64_t count) {
    for (uint32_t i = 0; i < kDim / 2; ++i) {
      inv_freq.push_back(std::pow(1e6f, -2.0f * static_cast<float>(i) / kDim));
    }
    geometry = {
        .layers = 1, .kv_heads = kHeads, .head_dim = kDim, .page_tokens = 8, .dtype = dtype};
    const uint64_t pages = geometry.pages_per_head(count);
    slots.resize(pages * kHeads);
    std::iota(slots.begin(), slots.end(), 0u);
    pool.resize(slots.size() * geometry.page_bytes());
    const std::vector<float> values =
        pattern(static_cast<int64_t>(pool.size() / layout::dtype_bytes(dtype)));
    if (dtype == DType::kF32) {
      std::memcpy(pool.data(), values.data(), pool.size());
    } else {
      auto* out = reinterpret_cast<base::Bf16*>(pool.data());
      for (size_t i = 0; i < values.size(); ++i) out[i] = base::to_bf16(values[i]);
    }
    token_factors.resize(count * kRank * layout::dtype_bytes(dtype));
    head_factors.resize(uint64_t{kHeads} * kRank * geometry.row_bytes());
    tokens = {pool.data(), geometry, slots.data(), pages, count};
    factors = {token_factors.data(), head_factors.data(), dtype, kRank};
  }
  backend::RopeParams rope() const { return {inv_freq, 1.0f}; }

  std::vector<float> inv_freq;
  layout::KvGeometry geometry;
  std::vector<uint32_t> slots;
  std::vector<std::byte> pool;
  std::vector<std::byte> token_factors;
  std::vector<std::byte> head_factors;
  layout::PagedTokens tokens;
  backend::KeyFactors factors;
};

void factor(benchmark::State& state, Machine& machine, DType dtype) {
  Sequence sequence(dtype, static_cast<uint64_t>(state.range(0)));
  backend::FactorKeysItem item;
  item.tokens = sequence.tokens;
  item.factors = sequence.factors;
  for (auto unused : state) {
    machine.device->sparse_ops().enqueue_factor_keys(item, sequence.rope(), *machine.stream);
    SPIN_CHECK(machine.stream->wait_idle().ok());
  }
}

void rebuild_prompt(benchmark::State& state, Machine& machine, DType dtype) {
  Sequence sequence(dtype, static_cast<uint64_t>(state.range(0)));
  backend::RebuildTokensItem item;
  item.base = sequence.pool.data();
  item.tokens = sequence.tokens;
  item.end_page = static_cast<uint32_t>(state.range(0) / 8);
  item.factors = sequence.factors;
  for (auto unused : state) {
    machine.device->sparse_ops().enqueue_rebuild_tokens(item, sequence.rope(), *machine.stream);
    SPIN_CHECK(machine.stream->wait_idle().ok());
  }
}

// So many fetched pages of each KV head: what one step's misses cost.
void rebuild_pages(benchmark::State& state, Machine& machine, DType dtype) {
  Sequence sequence(dtype, 8192);
  const auto count = static_cast<uint32_t>(state.range(0));
  std::vector<uint32_t> pages(uint64_t{kHeads} * count);
  std::vector<uint32_t> fetched(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    fetched[i] = static_cast<uint32_t>(i % count);
    pages[i] = fetched[i] * 3 + 1;
  }
  std::vector<uint32_t> counts(kHeads, count);
  backend::RebuildPagesItem item;
  item.list = {pages.data(), nullptr, nullptr, count};
  item.slots = pages.data();
  item.fetched = fetched.data();
  item.fetched_counts = counts.data();
  item.end_page = 1024;
  item.factors = sequence.factors;
  for (auto unused : state) {
    machine.device->sparse_ops().enqueue_rebuild_pages(
        {&item, 1}, {sequence.pool.data(), sequence.geometry}, sequence.rope(), *machine.stream);
    SPIN_CHECK(machine.stream->wait_idle().ok());
  }
}

void register_all(Machine& machine) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const std::string type(layout::dtype_name(dtype));
    const auto add = [&](const std::string& name, auto* run, std::vector<int64_t> sizes) {
      auto* one = benchmark::RegisterBenchmark(
          (name + "/" + type).c_str(),
          [&machine, dtype, run](benchmark::State& state) { run(state, machine, dtype); });
      for (const int64_t size : sizes) one->Arg(size);
      one->UseRealTime()->Unit(benchmark::kMillisecond);
    };
    add("LowRank/factor", factor, {8192, 32768, 131072});
    add("LowRank/rebuild_prompt", rebuild_prompt, {32768});
    add("LowRank/rebuild_pages", rebuild_pages, {16, 64});
  }
}

}  // namespace
}  // namespace spin

int main(int argc, char** argv) {
  return spin::bench::run_benchmarks(argc, argv, spin::register_all);
}
