// SPDX-License-Identifier: Apache-2.0
// Our matrix products beside oneDNN's, in one run, for docs/decisions/0003-own-matrix-products.md:
// the best of many calls of each, alternating, with weights that come from memory for few rows.
// Also says whether oneDNN keeps a row's bits and the weights' layout when the number of rows
// changes.
//
//   OMP_NUM_THREADS=1 spin_dnnl_comparison 1
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <span>
#include <vector>

#include <oneapi/dnnl/dnnl.hpp>

#include "backend/cpu/cpu_device.h"
#include "backend/ops.h"
#include "base/check.h"
#include "base/parse_number.h"
#include "bench/pattern.h"

namespace spin {
namespace {

using bench::pattern;
using dnnl::memory;
using layout::DType;

memory::data_type dnnl_type(DType dtype) {
  return dtype == DType::kBF16 ? memory::data_type::bf16 : memory::data_type::f32;
}

// x [m, k] times w [n, k], both of one type, gives f32 [m, n].
class DnnlProduct {
 public:
  DnnlProduct(DType dtype, int64_t m, int64_t n, int64_t k)
      : engine_(dnnl::engine::kind::cpu, 0),
        stream_(engine_),
        x_({{m, k}, dnnl_type(dtype), memory::format_tag::ab}, engine_),
        out_({{m, n}, memory::data_type::f32, memory::format_tag::ab}, engine_) {
    const memory::desc any({k, n}, dnnl_type(dtype), memory::format_tag::any);
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

// Row 0 of products of m rows against the product of that row alone.
void report_invariance(DType dtype, int64_t n, int64_t k) {
  DnnlProduct alone(dtype, 1, n, k);
  alone.run();
  std::printf("oneDNN %s n %lld k %lld:", layout::dtype_name(dtype).data(),
              static_cast<long long>(n), static_cast<long long>(k));
  for (const int64_t m : {2, 3, 8, 17, 64, 512}) {
    DnnlProduct many(dtype, m, n, k);
    many.run();
    int64_t different = 0;
    for (int64_t j = 0; j < n; ++j) {
      if (std::memcmp(alone.out() + j, many.out() + j, sizeof(float)) != 0) ++different;
    }
    std::printf(" m%lld %lld%s", static_cast<long long>(m), static_cast<long long>(different),
                many.weights_layout() == alone.weights_layout() ? "" : " (other layout)");
  }
  std::printf("  [elements of row 0 that differ from m1]\n");
}

double seconds_of(const auto& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Ours: a batch of calls in one wait, over `copies` matrices.
class SpinProduct {
 public:
  SpinProduct(backend::Device& device, DType dtype, int64_t m, int64_t n, int64_t k, int64_t copies)
      : device_(device), m_(m), n_(n), k_(k), x_(pattern(m * k)), out_(static_cast<size_t>(m * n)) {
    auto stream = device.create_stream("bench");
    SPIN_CHECK(stream.ok());
    stream_ = std::move(stream).value();
    const std::vector<float> weights = pattern(n * k);
    for (int64_t i = 0; i < copies; ++i) {
      auto packed = device.ops().pack_matrix(
          n, k, dtype, [&](int64_t first, int64_t rows, std::span<float> out) {
            std::copy_n(weights.begin() + first * k, rows * k, out.begin());
            return ok_status();
          });
      SPIN_CHECK(packed.ok());
      packed_.push_back(std::move(packed).value());
    }
  }

  void run(int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; ++i) {
      device_.ops().enqueue_matmul({x_.data(), DType::kF32, m_, k_, k_},
                                   *packed_[static_cast<size_t>(i)], nullptr, false,
                                   {out_.data(), DType::kF32, m_, n_, n_}, *stream_);
    }
    SPIN_CHECK(stream_->wait_idle().ok());
  }

 private:
  backend::Device& device_;
  int64_t m_, n_, k_;
  std::vector<float> x_;
  std::vector<float> out_;
  std::unique_ptr<backend::Stream> stream_;
  std::vector<std::unique_ptr<backend::PackedMatrix>> packed_;
};

// Seconds of repeated calls.
class Times {
 public:
  void add(double seconds) { seconds_.push_back(seconds); }
  double best() const { return *std::min_element(seconds_.begin(), seconds_.end()); }
  double median() {
    const auto middle = seconds_.begin() + static_cast<int64_t>(seconds_.size() / 2);
    std::nth_element(seconds_.begin(), middle, seconds_.end());
    return *middle;
  }

 private:
  std::vector<double> seconds_;
};

void compare(backend::Device& device, DType dtype, int64_t m, int64_t n, int64_t k) {
  const auto bytes = static_cast<int64_t>(layout::dtype_bytes(dtype)) * n * k;
  // Weights come from memory where a step would read them from there, and one wait covers many
  // calls as it does in a step.
  const int64_t copies = m > 32 ? 1 : std::max<int64_t>(1, (int64_t{96} << 20) / bytes);
  const int64_t batch = std::max<int64_t>(1, copies / 4);
  SpinProduct ours(device, dtype, m, n, k, copies);
  std::vector<DnnlProduct> theirs;
  for (int64_t i = 0; i < copies; ++i) theirs.emplace_back(dtype, m, n, k);
  Times our_times;
  Times their_times;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1500);
  int64_t first = 0;
  while (std::chrono::steady_clock::now() < end) {
    our_times.add(seconds_of([&] { ours.run(first, batch); }));
    their_times.add(seconds_of([&] {
      for (int64_t i = first; i < first + batch; ++i) theirs[static_cast<size_t>(i)].run();
    }));
    first = first + 2 * batch <= copies ? first + batch : 0;
  }
  const double flops = 2.0 * static_cast<double>(m * n * k * batch) / 1e9;
  const double gb = static_cast<double>(bytes * batch) / 1e9;
  const double rate = m > 8 ? flops : gb;
  std::printf(
      "%-8s m %3lld n %4lld k %4lld %-7s | spin best %5.1f median %5.1f | oneDNN best %5.1f "
      "median %5.1f\n",
      layout::dtype_name(dtype).data(), static_cast<long long>(m), static_cast<long long>(n),
      static_cast<long long>(k), m > 8 ? "GFLOP/s" : "GB/s", rate / our_times.best(),
      rate / our_times.median(), rate / their_times.best(), rate / their_times.median());
  std::fflush(stdout);
}

int run(uint32_t threads) {
  auto device = backend::cpu::create_cpu_device({.threads = threads});
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", device.status().to_string().c_str());
    return 1;
  }
  std::printf("%s\n", (*device)->properties().name.c_str());
  const std::pair<int64_t, int64_t> shapes[] = {{576, 576}, {3072, 576}, {576, 1536}, {64, 4096}};
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const auto& [n, k] : shapes) report_invariance(dtype, n, k);
  }
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{576, 576}, {3072, 576}, {576, 1536}}) {
      for (const int64_t m : {1, 8, 32, 256}) compare(**device, dtype, m, n, k);
    }
  }
  return 0;
}

}  // namespace
}  // namespace spin

int main(int argc, char** argv) {
  const auto threads = argc > 1 ? spin::base::parse_decimal(argv[1]) : 1;
  return spin::run(static_cast<uint32_t>(threads.value_or(1)));
}
