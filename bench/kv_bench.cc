// SPDX-License-Identifier: Apache-2.0
// Speed of the parts of a sparse decode step that find or move KV pages: one sequence at the shape
// of SmolLM2-135M (3 KV heads of 64, 3 query heads each, pages of 8 tokens, bf16) over 30 layers
// that each have tables, slots and host pages of their own, so that they come from memory as in a
// step. Time and CPU (of all threads) are those of a whole step, "us" that of one layer; GB/s
// counts the bytes that the operation must move. The manager's share is Retrieve without CopyAlone
// and EmptyTask.
//
//   spin_kv_bench --threads=2
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "backend/cpu/cpu_device.h"
#include "backend/kv_ops.h"
#include "base/check.h"
#include "base/counter_rng.h"
#include "bench/machine.h"
#include "bench/pattern.h"
#include "layout/residency.h"
#include "layout/reuse.h"

namespace spin {
namespace {

using bench::Machine;

using bench::pattern;
using layout::HeadPages;

constexpr uint32_t kLayers = 30;
constexpr uint32_t kHeads = 3;
constexpr uint32_t kGroup = 3;
constexpr uint32_t kWanted = 26;   // 16 selected pages, zones and tail
constexpr uint32_t kPages = 1024;  // of a context of 8K tokens
constexpr uint32_t kExtent = 32;
constexpr uint32_t kGhosts = layout::kGhostRatio * kWanted;

// One layer's tables and what a step asks of it.
struct Layer {
  std::vector<uint32_t> slots, pages, table;
  std::vector<uint8_t> stamps;
  std::vector<uint64_t> extents;  // [kHeads, kPages / kExtent]
  std::vector<HeadPages> heads;
  std::vector<uint32_t> wanted, wanted_slots, counts;
  std::vector<uint8_t> tokens;
  std::vector<layout::RetrieveCounters> counters;
};

class World {
 public:
  // `measured`: a Retrieve counts for a gain curve, as in a running sequence.
  World(Machine& machine, uint32_t lease, bool measured = false)
      : machine_(machine), lease_(lease) {
    if (measured) {
      reuse_.resize(kHeads);
      ghosts_.assign(layout::sampled_heads(kLayers * kHeads) * kGhosts, layout::kNoPage);
    }
    geometry_ = {.layers = kLayers,
                 .kv_heads = kHeads,
                 .head_dim = 64,
                 .page_tokens = 8,
                 .dtype = layout::DType::kBF16};
    tiers_.host = {kExtent, geometry_.page_bytes()};
    pool_.assign(uint64_t{kLayers} * kHeads * lease * geometry_.page_bytes(), 0x3C);
    host_.assign(uint64_t{kLayers} * kHeads * (kPages / kExtent) * tiers_.host.bytes(), 0x3C);
    tiers_.fast = {pool_.data(), geometry_};
    layers_.resize(kLayers);
    for (uint32_t l = 0; l < kLayers; ++l) make_layer(l);
  }

  // `fresh` of the 26 pages of each head are ones that were not used lately.
  void choose(uint32_t fresh) {
    ++step_;
    for (Layer& layer : layers_) {
      for (uint32_t h = 0; h < kHeads; ++h) {
        uint32_t* wanted = &layer.wanted[h * kWanted];
        for (uint32_t i = 0; i < kWanted; ++i) {
          // The first ones walk through the context, the others stay.
          const uint32_t page = i < fresh ? 64 + (step_ * fresh + i) % (kPages - 64) : i;
          wanted[i] = page;
        }
        std::sort(wanted, wanted + kWanted);
      }
    }
  }

  void retrieve() {
    for (uint32_t l = 0; l < kLayers; ++l) {
      Layer& layer = layers_[l];
      backend::RetrieveItem item;
      item.heads = layer.heads.data();
      item.wanted = {layer.wanted.data(), layer.tokens.data(), layer.counts.data(), kWanted};
      item.slots = layer.wanted_slots.data();
      item.counters = layer.counters.data();
      item.epoch = static_cast<uint8_t>(step_);
      if (!reuse_.empty()) {
        item.reuse = {reuse_.data(), ghosts_.data(), kGhosts, l * kHeads, kWanted};
      }
      machine_.device->kv_ops().enqueue_retrieve({&item, 1}, tiers_, *machine_.stream);
    }
    wait();
  }

  void attend(std::vector<float>& q, std::vector<float>& out) {
    const int64_t cols = kHeads * kGroup * geometry_.head_dim;
    for (Layer& layer : layers_) {
      const backend::ListAttentionItem item{
          .slots = layer.wanted_slots.data(),
          .pages = {layer.wanted.data(), layer.tokens.data(), layer.counts.data(), kWanted}};
      machine_.device->kv_ops().enqueue_list_attention(
          {q.data(), layout::DType::kF32, 1, cols, cols}, {&item, 1}, tiers_.fast, 0.125f,
          {out.data(), layout::DType::kF32, 1, cols, cols}, *machine_.stream);
    }
    wait();
  }

  void empty_tasks() {
    for (uint32_t l = 0; l < kLayers; ++l) machine_.stream->enqueue_host([] {});
    wait();
  }

  // The same bytes as a Retrieve of `pages` pages per head, from and to scattered places.
  void copy(uint32_t pages) {
    ++step_;
    for (uint32_t l = 0; l < kLayers; ++l) {
      for (uint32_t h = 0; h < kHeads; ++h) {
        const HeadPages& head = layers_[l].heads[h];
        for (uint32_t i = 0; i < pages; ++i) {
          const uint32_t page = (step_ * pages + i) % kPages;
          const uint64_t slot = head.slots[(step_ * pages + i) % lease_];
          std::memcpy(pool_.data() + slot * geometry_.page_bytes(),
                      tiers_.host.page(head.extents[page / kExtent], page), geometry_.page_bytes());
        }
      }
    }
  }

  uint32_t victims(uint32_t count) {
    uint32_t chosen[kWanted];
    uint32_t sum = 0;
    for (Layer& layer : layers_) {
      for (const HeadPages& head : layer.heads) {
        sum += layout::choose_victims(head, static_cast<uint8_t>(step_ + 1), count, chosen);
      }
    }
    return sum;
  }

  uint32_t look_up() {
    uint32_t found = 0;
    for (Layer& layer : layers_) {
      for (uint32_t h = 0; h < kHeads; ++h) {
        for (uint32_t i = 0; i < kWanted; ++i) {
          found += layout::find_entry(layer.heads[h], layer.wanted[h * kWanted + i]) != 0 ? 1u : 0u;
        }
      }
    }
    return found;
  }

  uint64_t page_bytes() const { return geometry_.page_bytes(); }

 private:
  void wait() { SPIN_CHECK(machine_.stream->wait_idle().ok()); }

  void make_layer(uint32_t l) {
    Layer& layer = layers_[l];
    const uint64_t table_size = layout::residency_table_size(lease_);
    layer.slots.resize(kHeads * lease_);
    // Neighbours in the lease are no neighbours in memory.
    const uint32_t first_slot = l * kHeads * lease_;
    for (uint32_t i = 0; i < kHeads * lease_; ++i) {
      layer.slots[i] = first_slot + i;
    }
    for (uint32_t i = kHeads * lease_; i > 1; --i) {
      std::swap(layer.slots[i - 1], layer.slots[base::mix64(first_slot + i) % i]);
    }
    layer.pages.resize(kHeads * lease_);
    layer.stamps.resize(kHeads * lease_);
    layer.table.resize(kHeads * table_size);
    layer.heads.resize(kHeads);
    layer.counters.resize(kHeads);
    layer.wanted.resize(kHeads * kWanted);
    layer.wanted_slots.resize(kHeads * kWanted);
    layer.tokens.assign(kHeads * kWanted, 8);
    layer.counts.assign(kHeads, kWanted);
    const uint32_t extents = kPages / kExtent;
    layer.extents.resize(kHeads * extents);
    for (uint32_t h = 0; h < kHeads; ++h) {
      HeadPages& head = layer.heads[h];
      head.slots = &layer.slots[h * lease_];
      head.pages = &layer.pages[h * lease_];
      head.stamps = &layer.stamps[h * lease_];
      head.table = &layer.table[h * table_size];
      head.extents = &layer.extents[h * extents];
      head.owner = 7;
      head.lease_pages = lease_;
      head.table_size = static_cast<uint32_t>(table_size);
      head.extent_count = extents;
      layout::clear_residency(head, 0);
      for (uint32_t e = 0; e < extents; ++e) {
        const uint64_t number = (uint64_t{l} * kHeads + h) * extents + e;
        head.extents[e] = reinterpret_cast<uint64_t>(host_.data() + number * tiers_.host.bytes());
        for (uint32_t p = e * kExtent; p < (e + 1) * kExtent; ++p) {
          *tiers_.host.tag(head.extents[e], p) = {7, p, 8};
        }
      }
    }
  }

  Machine& machine_;
  uint32_t lease_;
  layout::KvGeometry geometry_;
  backend::TieredPoolRef tiers_;
  std::vector<char> pool_;
  std::vector<char> host_;
  std::vector<Layer> layers_;
  std::vector<layout::ReuseCounters> reuse_;  // [kHeads]; empty: not measured
  std::vector<uint32_t> ghosts_;
  uint32_t step_ = 0;
};

// Time of one layer, and the rate of `bytes` that one layer moves.
void report(benchmark::State& state, uint64_t bytes) {
  using benchmark::Counter;
  const double layers = static_cast<double>(state.iterations()) * kLayers;
  state.counters["us"] = Counter(layers / 1e6, Counter::kIsRate | Counter::kInvert);
  if (bytes == 0) return;
  state.counters["GB/s"] = Counter(layers * static_cast<double>(bytes) / 1e9, Counter::kIsRate);
}

void retrieve_in(benchmark::State& state, World& world) {
  const auto fresh = static_cast<uint32_t>(state.range(0));
  for (int i = 0; i < 20; ++i) {
    world.choose(fresh);
    world.retrieve();
  }
  for (auto unused : state) {
    state.PauseTiming();
    world.choose(fresh);
    state.ResumeTiming();
    world.retrieve();
  }
  report(state, fresh * kHeads * world.page_bytes());
}

void retrieve(benchmark::State& state, Machine& machine, uint32_t lease) {
  World world(machine, lease);
  retrieve_in(state, world);
}

void retrieve_measured(benchmark::State& state, Machine& machine, uint32_t lease) {
  World world(machine, lease, true);
  retrieve_in(state, world);
}

void copy(benchmark::State& state, Machine& machine, uint32_t lease) {
  const auto fresh = static_cast<uint32_t>(state.range(0));
  World world(machine, lease);
  for (auto unused : state) world.copy(fresh);
  report(state, fresh * kHeads * world.page_bytes());
}

void look_up(benchmark::State& state, Machine& machine, uint32_t lease) {
  World world(machine, lease);
  world.choose(2);
  world.retrieve();
  for (auto unused : state) benchmark::DoNotOptimize(world.look_up());
  report(state, 0);
}

void victims(benchmark::State& state, Machine& machine, uint32_t lease) {
  const auto count = static_cast<uint32_t>(state.range(0));
  World world(machine, lease);
  for (int i = 0; i < 100; ++i) {
    world.choose(count);
    world.retrieve();
  }
  for (auto unused : state) benchmark::DoNotOptimize(world.victims(count));
  report(state, 0);
}

void attention(benchmark::State& state, Machine& machine, uint32_t lease) {
  World world(machine, lease);
  world.choose(8);
  world.retrieve();
  std::vector<float> q = pattern(kHeads * kGroup * 64);
  std::vector<float> out(q.size());
  for (auto unused : state) world.attend(q, out);
  report(state, kWanted * kHeads * world.page_bytes());
}

void empty_task(benchmark::State& state, Machine& machine) {
  World world(machine, kWanted);
  for (auto unused : state) world.empty_tasks();
  report(state, 0);
}

void register_all(Machine& machine) {
  using Body = void (*)(benchmark::State&, Machine&, uint32_t);
  const auto add = [&machine](const std::string& name, Body body, uint32_t lease) {
    return benchmark::RegisterBenchmark(
               name.c_str(),
               [&machine, body, lease](benchmark::State& state) { body(state, machine, lease); })
        ->MeasureProcessCPUTime()
        ->UseRealTime()
        ->Unit(benchmark::kMicrosecond);
  };
  for (const uint32_t lease : {kWanted + 4, 5 * kWanted, 9 * kWanted}) {
    const std::string suffix = "/lease" + std::to_string(lease);
    add("LookUp" + suffix, look_up, lease);
    add("Victims" + suffix, victims, lease)->Arg(2)->Arg(8);
    add("Retrieve" + suffix, retrieve, lease)->Arg(0)->Arg(2)->Arg(8)->Arg(26);
    add("RetrieveMeasured" + suffix, retrieve_measured, lease)->Arg(0)->Arg(2)->Arg(8)->Arg(26);
    add("ListAttention26" + suffix, attention, lease);
  }
  add("CopyAlone", copy, 5 * kWanted)->Arg(2)->Arg(8)->Arg(26);
  add(
      "EmptyTask", [](benchmark::State& state, Machine& m, uint32_t) { empty_task(state, m); }, 0);
}

}  // namespace
}  // namespace spin

int main(int argc, char** argv) {
  return spin::bench::run_benchmarks(argc, argv, spin::register_all);
}
