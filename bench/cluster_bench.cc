// SPDX-License-Identifier: Apache-2.0
// Speed of clustering and of RetroInfer on top of it, at 2 KV heads of 128 with 4 query heads each.
// GFLOP/s counts what backend/cluster_items.h states: 2 head_dim tokens clusters
// (iterations / segments + 1) per KV head. Keys are spread around one direction per 16 tokens.
//
//   spin_cluster_bench --threads=2
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "backend/cpu/cpu_device.h"
#include "base/bf16.h"
#include "base/check.h"
#include "bench/machine.h"
#include "bench/pattern.h"
#include "sparse/registry.h"

namespace spin {
namespace {

using bench::Machine;

using bench::pattern;
using layout::DType;

constexpr uint32_t kHeads = 2;
constexpr uint32_t kGroup = 4;
constexpr uint32_t kDim = 128;

// One sequence of one layer under RetroInfer.
class Sequence {
 public:
  Sequence(Machine& machine, DType dtype, uint64_t tokens, const std::string& options)
      : machine_(machine), tokens_(tokens) {
    geometry_ = {
        .layers = 1, .kv_heads = kHeads, .head_dim = kDim, .page_tokens = 8, .dtype = dtype};
    sparse::AlgorithmContext context;
    context.device = machine.device.get();
    context.shape.geometry = geometry_;
    context.shape.q_heads = kHeads * kGroup;
    context.shape.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
    auto spec = sparse::parse_sparse_spec("retroinfer" + options);
    SPIN_CHECK(spec.ok());
    auto algorithm = sparse::create_algorithm(*spec, context);
    SPIN_CHECK(algorithm.ok());
    algorithm_ = std::move(algorithm).value();
    fill();
    renew_index();
  }

  void renew_index() {
    auto index =
        algorithm_->create_index(2 * tokens_, machine_.device->memory(backend::MemoryKind::kFast));
    SPIN_CHECK(index.ok());
    index_ = std::move(index).value();
  }

  void prompt() {
    algorithm_->enqueue_finish_prompt(*index_, 0, view_, *machine_.stream);
    SPIN_CHECK(machine_.stream->wait_idle().ok());
  }

  // Clusters the first `tokens` tokens as a tail that leaves.
  void update(uint32_t tokens) {
    sparse::SealItem item;
    item.index = index_.get();
    item.tail = view_;
    item.tokens = tokens;
    algorithm_->enqueue_seal(item, 0, *machine_.stream);
    SPIN_CHECK(machine_.stream->wait_idle().ok());
  }

  // Select and the estimate of one step.
  void step() {
    const sparse::SequenceNeeds needs = algorithm_->needs(2 * tokens_);
    const uint32_t stride = needs.sink_pages + needs.selected_pages + needs.tail_pages;
    list_pages_.resize(uint64_t{kHeads} * stride);
    list_tokens_.resize(list_pages_.size());
    list_counts_.resize(kHeads);
    sparse::SelectItem select;
    select.index = index_.get();
    select.context_tokens = tokens_;
    select.tail_first_token = algorithm_->prompt_tail_first(tokens_);
    select.tail_first_page = static_cast<uint32_t>(needs.page_ids) - needs.tail_pages;
    select.list = {list_pages_.data(), list_tokens_.data(), list_counts_.data(), stride};
    const auto width = static_cast<int64_t>(q_.size());
    const backend::TensorRef q{q_.data(), DType::kF32, 1, width, width};
    algorithm_->enqueue_select(q, {&select, 1}, 0, *machine_.stream);
    const sparse::EstimateItem estimate{index_.get(), 0, select.list, part_.data(),
                                        log_sum_exp_.data()};
    algorithm_->enqueue_estimate(q, {&estimate, 1}, 0, *machine_.stream);
    SPIN_CHECK(machine_.stream->wait_idle().ok());
  }

 private:
  void fill() {
    const uint64_t pages = geometry_.pages_per_head(tokens_);
    pool_.resize(pages * kHeads * geometry_.page_bytes());
    slots_.resize(pages * kHeads);
    std::iota(slots_.begin(), slots_.end(), 0u);
    view_ = {pool_.data(), geometry_, slots_.data(), pages, tokens_};
    const std::vector<float> noise = pattern(1 << 20);
    uint64_t at = 0;
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint64_t t = 0; t < tokens_; ++t) {
        for (uint32_t d = 0; d < 2 * kDim; ++d) {
          const uint64_t topic = (t / 16 * 7919 + head) * kDim + d;
          const float value = noise[at++ % noise.size()] + 2 * noise[topic * 31 % noise.size()];
          const std::byte* source = d < kDim ? view_.key(head, t) : view_.value(head, t);
          std::byte* row = pool_.data() + (source - pool_.data());
          if (geometry_.dtype == DType::kF32) {
            reinterpret_cast<float*>(row)[d % kDim] = value;
          } else {
            reinterpret_cast<base::Bf16*>(row)[d % kDim] = base::to_bf16(value);
          }
        }
      }
    }
  }

  Machine& machine_;
  uint64_t tokens_;
  layout::KvGeometry geometry_;
  std::unique_ptr<sparse::SparseAlgorithm> algorithm_;
  std::unique_ptr<sparse::SequenceIndex> index_;
  std::vector<std::byte> pool_;
  std::vector<uint32_t> slots_;
  layout::PagedTokens view_;
  std::vector<float> q_ = pattern(int64_t{kHeads} * kGroup * kDim);
  std::vector<float> part_ = std::vector<float>(q_.size());
  std::vector<float> log_sum_exp_ = std::vector<float>(uint64_t{kHeads} * kGroup);
  std::vector<uint32_t> list_pages_;
  std::vector<uint8_t> list_tokens_;
  std::vector<uint32_t> list_counts_;
};

// Of a prompt of so many tokens at the default options.
double prompt_flops(double tokens) {
  const double clusters = tokens / 16;
  const double segments = std::max(1.0, std::round(tokens / 8192));
  return kHeads * 2.0 * kDim * tokens * clusters * (9 / segments + 1);
}

void prompt(benchmark::State& state, Machine& machine, DType dtype) {
  const auto tokens = static_cast<uint64_t>(state.range(0));
  Sequence sequence(machine, dtype, tokens, "");
  for (auto unused : state) {
    state.PauseTiming();
    sequence.renew_index();
    state.ResumeTiming();
    sequence.prompt();
  }
  state.counters["GFLOP/s"] = benchmark::Counter(
      prompt_flops(static_cast<double>(tokens)) / 1e9 * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
}

void update(benchmark::State& state, Machine& machine, DType dtype) {
  const auto tokens = static_cast<uint32_t>(state.range(0));
  Sequence sequence(machine, dtype, tokens, ":update=" + std::to_string(tokens));
  for (auto unused : state) {
    state.PauseTiming();
    sequence.renew_index();
    state.ResumeTiming();
    sequence.update(tokens);
  }
  state.counters["GFLOP/s"] =
      benchmark::Counter(kHeads * 2.0 * kDim * tokens * (tokens / 16.0) * 10 / 1e9 *
                             static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
}

void step(benchmark::State& state, Machine& machine, DType dtype) {
  Sequence sequence(machine, dtype, static_cast<uint64_t>(state.range(0)), "");
  sequence.prompt();
  for (auto unused : state) sequence.step();
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
    add("RetroInfer/prompt", prompt, {8192, 32768, 131072});
    add("RetroInfer/update", update, {1024});
    add("RetroInfer/select", step, {8192, 32768, 131072});
  }
}

}  // namespace
}  // namespace spin

int main(int argc, char** argv) {
  return spin::bench::run_benchmarks(argc, argv, spin::register_all);
}
