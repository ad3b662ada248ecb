// SPDX-License-Identifier: Apache-2.0
// The same products as backend_bench.cc by oneDNN, with weights packed in the layout that oneDNN
// chooses for each number of rows, for docs/decisions/0003-own-matrix-products.md. Also says
// whether a row keeps its bits when the number of rows changes. Threads: OMP_NUM_THREADS.
#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include <benchmark/benchmark.h>
#include <oneapi/dnnl/dnnl.hpp>

namespace {

using dnnl::memory;

std::vector<float> pattern(int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  uint32_t state = 1;
  for (float& value : out) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
  return out;
}

// x [m, k] bf16 times w [n, k] bf16 gives f32 [m, n].
class Product {
 public:
  Product(int64_t m, int64_t n, int64_t k)
      : engine_(dnnl::engine::kind::cpu, 0),
        stream_(engine_),
        x_({{m, k}, memory::data_type::bf16, memory::format_tag::ab}, engine_),
        out_({{m, n}, memory::data_type::f32, memory::format_tag::ab}, engine_) {
    const memory::desc any({k, n}, memory::data_type::bf16, memory::format_tag::any);
    const dnnl::matmul::desc desc(x_.get_desc(), any, out_.get_desc());
    const dnnl::matmul::primitive_desc chosen(desc, engine_);
    product_ = dnnl::matmul(chosen);
    weights_ = memory(chosen.weights_desc(), engine_);
    fill({{m, k}, memory::data_type::f32, memory::format_tag::ab}, pattern(m * k), x_);
    fill({{k, n}, memory::data_type::f32, memory::format_tag::ba}, pattern(n * k), weights_);
  }

  void run() {
    product_.execute(stream_,
                     {{DNNL_ARG_SRC, x_}, {DNNL_ARG_WEIGHTS, weights_}, {DNNL_ARG_DST, out_}});
    stream_.wait();
  }

  const float* out() const { return static_cast<const float*>(out_.get_data_handle()); }
  memory::desc weights_layout() const { return weights_.get_desc(); }

 private:
  void fill(const memory::desc& desc, std::vector<float> values, memory& to) {
    memory from(desc, engine_, values.data());
    dnnl::reorder(from, to).execute(stream_, from, to);
    stream_.wait();
  }

  dnnl::engine engine_;
  dnnl::stream stream_;
  memory x_;
  memory out_;
  memory weights_;
  dnnl::matmul product_;
};

void product(benchmark::State& state) {
  const int64_t m = state.range(0);
  const int64_t n = state.range(1);
  const int64_t k = state.range(2);
  const int64_t copies = m > 32 ? 1 : std::max<int64_t>(1, (int64_t{192} << 20) / (2 * n * k));
  std::vector<Product> products;
  for (int64_t i = 0; i < copies; ++i) products.emplace_back(m, n, k);
  for (auto unused : state) {
    for (Product& one : products) one.run();
  }
  using benchmark::Counter;
  const auto calls = static_cast<double>(copies) * static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] =
      Counter(2e-9 * static_cast<double>(m * n * k) * calls, Counter::kIsRate);
  state.counters["GB/s"] = Counter(2e-9 * static_cast<double>(n * k) * calls, Counter::kIsRate);
}

// Compares row 0 of products of m rows with the product of that row alone.
void report_invariance() {
  const int64_t n = 576;
  const int64_t k = 576;
  Product alone(1, n, k);
  alone.run();
  for (const int64_t m : {2, 3, 8, 16, 64, 512}) {
    Product many(m, n, k);
    many.run();
    int64_t different = 0;
    for (int64_t j = 0; j < n; ++j) {
      if (std::memcmp(alone.out() + j, many.out() + j, sizeof(float)) != 0) ++different;
    }
    std::printf("m %lld: %lld of %lld elements of row 0 differ from m 1, weights' layout %s\n",
                static_cast<long long>(m), static_cast<long long>(different),
                static_cast<long long>(n),
                many.weights_layout() == alone.weights_layout() ? "the same" : "another");
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  report_invariance();
  for (const auto& [n, k] :
       {std::pair<int64_t, int64_t>{576, 576}, {3072, 576}, {576, 1536}, {49152, 576}}) {
    for (const int64_t m : {1, 8, 32, 512}) {
      if (n > 10000 && m > 32) continue;
      const std::string name = "dnnl/bfloat16/n" + std::to_string(n) + "_k" + std::to_string(k);
      benchmark::RegisterBenchmark(name.c_str(), product)
          ->Args({m, n, k})
          ->UseRealTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
