// SPDX-License-Identifier: Apache-2.0
// Speed of the CPU backend's operations at the shapes of SmolLM2-135M (hidden 576, 9 query and 3 KV
// heads of 64, MLP 1536, vocabulary 49152). GFLOP/s counts multiplications and additions; GB/s the
// weights (matrix products) or keys and values (attention) read once.
//
//   spin_backend_bench --threads=2 --benchmark_filter=Matmul
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "backend/cpu/cpu_device.h"
#include "backend/ops.h"
#include "base/check.h"
#include "bench/machine.h"
#include "bench/pattern.h"

namespace spin {
namespace {

using bench::Machine;

using backend::TensorRef;
using bench::pattern;
using layout::DType;

TensorRef view(std::vector<float>& values, int64_t rows, int64_t cols) {
  return {values.data(), DType::kF32, rows, cols, cols};
}

void set_rates(benchmark::State& state, double flops, double bytes) {
  using benchmark::Counter;
  const auto iterations = static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] = Counter(flops * iterations / 1e9, Counter::kIsRate);
  state.counters["GB/s"] = Counter(bytes * iterations / 1e9, Counter::kIsRate);
}

// Enough copies of the weights that they come from memory, as they do in a decode step.
constexpr int64_t kColdBytes = 192 << 20;

void matmul(benchmark::State& state, Machine& machine, DType dtype, int64_t n, int64_t k) {
  const int64_t m = state.range(0);
  const std::vector<float> weights = pattern(n * k);
  const auto bytes = static_cast<int64_t>(layout::dtype_bytes(dtype)) * n * k;
  const int64_t copies = m > 32 ? 1 : std::max<int64_t>(1, kColdBytes / bytes);
  std::vector<std::unique_ptr<backend::PackedMatrix>> packed;
  for (int64_t i = 0; i < copies; ++i) {
    auto matrix = machine.device->ops().pack_matrix(
        n, k, dtype, [&](int64_t first, int64_t rows, std::span<float> out) {
          std::memcpy(out.data(), &weights[static_cast<size_t>(first * k)],
                      static_cast<size_t>(rows * k) * sizeof(float));
          return ok_status();
        });
    SPIN_CHECK(matrix.ok());
    packed.push_back(std::move(matrix).value());
  }
  std::vector<float> x = pattern(m * k);
  std::vector<float> out(static_cast<size_t>(m * n));
  for (auto unused : state) {
    // A batch of calls, as a step enqueues them; waiting once is not what is measured.
    for (const auto& matrix : packed) {
      machine.device->ops().enqueue_matmul(view(x, m, k), *matrix, nullptr, false, view(out, m, n),
                                           *machine.stream);
    }
    SPIN_CHECK(machine.stream->wait_idle().ok());
  }
  const auto calls = static_cast<double>(copies);
  set_rates(state, 2.0 * static_cast<double>(m * n * k) * calls,
            static_cast<double>(bytes) * calls);
}

void attention(benchmark::State& state, Machine& machine, DType dtype, int64_t queries) {
  const int64_t context = state.range(0);
  const layout::KvGeometry geometry{
      .layers = 1, .kv_heads = 3, .head_dim = 64, .page_tokens = 8, .dtype = dtype};
  const uint64_t pages = geometry.pages_per_head(static_cast<uint64_t>(context));
  // For one query, as many layers as it takes for the pages to come from memory.
  const uint64_t layer_bytes =
      geometry.pages_for(static_cast<uint64_t>(context)) * geometry.page_bytes();
  const uint64_t layers = queries > 1 ? 1 : kColdBytes / layer_bytes + 1;
  std::vector<char> pool(layers * layer_bytes);
  std::vector<uint32_t> slots(3 * pages);
  std::iota(slots.begin(), slots.end(), 0u);
  std::vector<float> kv = pattern(context * 192);
  std::vector<float> q = pattern(queries * 576);
  std::vector<float> out(q.size());
  const auto slice_of = [&](int64_t tokens) {
    return layout::SequenceSlice{.query_tokens = static_cast<uint64_t>(tokens),
                                 .context_tokens = static_cast<uint64_t>(context),
                                 .slots = slots.data(),
                                 .slot_stride = pages};
  };
  const layout::SequenceSlice all = slice_of(context);
  const layout::SequenceSlice last = slice_of(queries);
  std::vector<backend::KvPoolRef> pools;
  for (uint64_t layer = 0; layer < layers; ++layer) {
    pools.push_back({pool.data() + layer * layer_bytes, geometry});
    machine.device->ops().enqueue_kv_append(view(kv, context, 192), view(kv, context, 192),
                                            {&all, 1}, pools.back(), *machine.stream);
  }
  for (auto unused : state) {
    for (const backend::KvPoolRef& layer : pools) {
      machine.device->ops().enqueue_paged_attention(view(q, queries, 576), {&last, 1}, layer,
                                                    0.125f, view(out, queries, 576),
                                                    *machine.stream);
    }
    SPIN_CHECK(machine.stream->wait_idle().ok());
  }
  const double pairs = static_cast<double>(queries) *
                       (static_cast<double>(context) - static_cast<double>(queries - 1) / 2);
  set_rates(state, 4.0 * pairs * 576 * static_cast<double>(layers),
            static_cast<double>(layer_bytes * layers));
}

void elementwise(benchmark::State& state, Machine& machine) {
  const int64_t rows = state.range(0);
  std::vector<float> x = pattern(rows * 3072);
  std::vector<float> out(static_cast<size_t>(rows * 1536));
  for (auto unused : state) {
    machine.device->ops().enqueue_silu_mul(view(x, rows, 3072), view(out, rows, 1536),
                                           *machine.stream);
    SPIN_CHECK(machine.stream->wait_idle().ok());
  }
  set_rates(state, 0, static_cast<double>(rows) * 1536 * 12);
}

void rope(benchmark::State& state, Machine& machine) {
  const int64_t rows = state.range(0);
  std::vector<float> x = pattern(rows * 576);
  std::vector<float> inv_freq;
  for (int i = 0; i < 32; ++i) inv_freq.push_back(std::pow(1e5f, -static_cast<float>(i) / 32));
  std::vector<uint32_t> positions(static_cast<size_t>(rows));
  std::iota(positions.begin(), positions.end(), 7000u);
  for (auto unused : state) {
    machine.device->ops().enqueue_rope(view(x, rows, 576), 64, positions.data(), {inv_freq, 1.0f},
                                       *machine.stream);
    SPIN_CHECK(machine.stream->wait_idle().ok());
  }
  set_rates(state, 0, static_cast<double>(rows) * 576 * 8);
}

void empty_task(benchmark::State& state, Machine& machine) {
  for (auto unused : state) {
    machine.stream->enqueue_host([] {});
    SPIN_CHECK(machine.stream->wait_idle().ok());
  }
}

void register_all(Machine& machine) {
  using benchmark::RegisterBenchmark;
  const auto finish = [](benchmark::internal::Benchmark* one) {
    one->UseRealTime()->Unit(benchmark::kMicrosecond);
  };
  const std::pair<int64_t, int64_t> shapes[] = {
      {576, 576}, {960, 576}, {3072, 576}, {576, 1536}, {49152, 576}};
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const std::string type(layout::dtype_name(dtype));
    for (const auto& [rows, cols] : shapes) {
      const int64_t n = rows;
      const int64_t k = cols;
      const std::string name =
          "Matmul/" + type + "/n" + std::to_string(n) + "_k" + std::to_string(k);
      auto* one = RegisterBenchmark(name.c_str(), [&machine, dtype, n, k](benchmark::State& state) {
        matmul(state, machine, dtype, n, k);
      });
      one->Arg(1)->Arg(8)->Arg(32);
      if (n < 10000) one->Arg(512);
      finish(one);
    }
    finish(RegisterBenchmark(
               ("Attention/decode/" + type).c_str(),
               [&machine, dtype](benchmark::State& state) { attention(state, machine, dtype, 1); })
               ->Arg(512)
               ->Arg(8192));
    finish(RegisterBenchmark(("Attention/prefill512/" + type).c_str(),
                             [&machine, dtype](benchmark::State& state) {
                               attention(state, machine, dtype, 512);
                             })
               ->Arg(512)
               ->Arg(8192));
  }
  finish(RegisterBenchmark("SiluMul",
                           [&machine](benchmark::State& state) { elementwise(state, machine); })
             ->Arg(1)
             ->Arg(512));
  finish(RegisterBenchmark("Rope", [&machine](benchmark::State& state) { rope(state, machine); })
             ->Arg(1)
             ->Arg(512));
  finish(RegisterBenchmark("EmptyTask",
                           [&machine](benchmark::State& state) { empty_task(state, machine); }));
}

}  // namespace
}  // namespace spin

int main(int argc, char** argv) {
  return spin::bench::run_benchmarks(argc, argv, spin::register_all);
}
