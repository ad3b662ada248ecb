// SPDX-License-Identifier: Apache-2.0
// Hit ratios of recorded selections over buffer sizes, by cache policy:
//
//   spin_locality_bench [--json] (TRACE | --zipf)...
//
// TRACE: a file of `spin generate --selection-trace FILE`; --zipf: a made-up trace with wandering
// popularity. --json prints what tools/plot_lines.py draws.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "bench/locality_replay.h"
#include "sparse/selection_trace.h"

namespace {

using spin::bench::HeadSteps;

constexpr double kRatios[] = {0, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 7, 8};

struct Row {
  double ratio = 0;
  std::vector<double> hit_ratios;  // in the order of kCachePolicies
};

std::vector<Row> measure(const std::vector<HeadSteps>& heads) {
  std::vector<Row> rows;
  for (const double ratio : kRatios) {
    Row& row = rows.emplace_back();
    row.ratio = ratio;
    for (const auto& [policy, name] : spin::bench::kCachePolicies) {
      row.hit_ratios.push_back(spin::bench::replay_all(heads, policy, ratio).ratio());
    }
  }
  return rows;
}

struct Measured {
  std::string name;
  std::string settings;
  size_t heads = 0;
  size_t steps = 0;  // of all heads
  std::vector<Row> rows;
};

Measured measure_heads(std::string name,
                       std::string settings,
                       const std::vector<HeadSteps>& heads) {
  Measured out{std::move(name), std::move(settings), heads.size(), 0, measure(heads)};
  for (const HeadSteps& head : heads) out.steps += head.size();
  return out;
}

void print_table(const Measured& measured) {
  fmt::print("{} ({}): {} heads, {} steps in all\n| buffer : mandatory |", measured.name,
             measured.settings, measured.heads, measured.steps);
  for (const auto& [policy, name] : spin::bench::kCachePolicies) fmt::print(" {} |", name);
  fmt::print("\n|---|---|---|---|\n");
  for (const Row& row : measured.rows) {
    fmt::print("| {} |", row.ratio);
    for (const double hits : row.hit_ratios) fmt::print(" {:.2f} % |", 100 * hits);
    fmt::print("\n");
  }
}

// What tools/plot_lines.py draws; names are of files, without quotes.
void print_json(const std::vector<Measured>& all) {
  fmt::print(
      "{{\"title\": \"Hit ratio by buffer size\", \"x\": \"buffer : mandatory\", "
      "\"y\": \"hit ratio, %\", \"log_x\": false, \"series\": [");
  std::string_view separator;
  for (const Measured& measured : all) {
    for (size_t p = 0; p < std::size(spin::bench::kCachePolicies); ++p) {
      fmt::print("{}{{\"name\": \"{} {}\", \"points\": [", separator, measured.name,
                 spin::bench::kCachePolicies[p].second);
      for (size_t i = 0; i < measured.rows.size(); ++i) {
        fmt::print("{}[{}, {:.4f}]", i == 0 ? "" : ", ", measured.rows[i].ratio,
                   100 * measured.rows[i].hit_ratios[p]);
      }
      fmt::print("]}}");
      separator = ", ";
    }
  }
  fmt::print("]}}\n");
}

std::string read_whole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

}  // namespace

int main(int argc, char** argv) {
  bool json = false;
  std::vector<Measured> all;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--json") {
      json = true;
      continue;
    }
    if (argument == "--zipf") {
      std::vector<HeadSteps> heads;
      for (uint64_t seed = 1; seed <= 8; ++seed) {
        heads.push_back(spin::bench::zipf_steps({.seed = seed}));
      }
      all.push_back(measure_heads("zipf", "made up", heads));
      continue;
    }
    const auto trace = spin::sparse::parse_selection_trace(read_whole(argument));
    if (!trace.ok()) {
      fmt::print(stderr, "{}: {}\n", argument, trace.status().to_string());
      return 1;
    }
    all.push_back(measure_heads(std::filesystem::path(argument).stem().string(),
                                trace->header.settings, spin::bench::heads_of(*trace)));
  }
  if (all.empty()) {
    fmt::print(stderr, "usage: {} [--json] (TRACE | --zipf)...\n", argv[0]);
    return 2;
  }
  if (json) {
    print_json(all);
  } else {
    for (const Measured& measured : all) print_table(measured);
  }
  return 0;
}
