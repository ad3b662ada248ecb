// SPDX-License-Identifier: Apache-2.0
// Hit ratios of recorded selections over buffer sizes, by cache policy:
//
//   spin_locality_bench [--json] TRACE    a file of `spin ... --selection-trace FILE`
//   spin_locality_bench [--json] --zipf   a made-up trace with wandering popularity
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
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

void print_table(std::string_view title, const std::vector<Row>& rows) {
  fmt::print("{}\n| buffer : mandatory |", title);
  for (const auto& [policy, name] : spin::bench::kCachePolicies) fmt::print(" {} |", name);
  fmt::print("\n|---|---|---|---|\n");
  for (const Row& row : rows) {
    fmt::print("| {} |", row.ratio);
    for (const double hits : row.hit_ratios) fmt::print(" {:.2f} % |", 100 * hits);
    fmt::print("\n");
  }
}

// `heads` and `steps` are numbers; settings come from a checked file and hold no quotes.
void print_json(size_t heads, size_t steps, const std::vector<Row>& rows) {
  fmt::print("{{\"heads\": {}, \"steps\": {}, \"rows\": [", heads, steps);
  for (size_t i = 0; i < rows.size(); ++i) {
    fmt::print("{}{{\"ratio\": {}", i == 0 ? "" : ", ", rows[i].ratio);
    for (size_t p = 0; p < rows[i].hit_ratios.size(); ++p) {
      fmt::print(", \"{}\": {:.6f}", spin::bench::kCachePolicies[p].second, rows[i].hit_ratios[p]);
    }
    fmt::print("}}");
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
  bool zipf = false;
  std::string path;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--json") {
      json = true;
    } else if (argument == "--zipf") {
      zipf = true;
    } else {
      path = argument;
    }
  }
  if (zipf == !path.empty()) {
    fmt::print(stderr, "usage: {} [--json] TRACE | --zipf\n", argv[0]);
    return 2;
  }
  std::vector<HeadSteps> heads;
  std::string title = "zipf";
  if (zipf) {
    for (uint64_t seed = 1; seed <= 8; ++seed)
      heads.push_back(spin::bench::zipf_steps({.seed = seed}));
  } else {
    const auto trace = spin::sparse::parse_selection_trace(read_whole(path));
    if (!trace.ok()) {
      fmt::print(stderr, "{}: {}\n", path, trace.status().to_string());
      return 1;
    }
    heads = spin::bench::heads_of(*trace);
    title = trace->header.settings;
  }
  size_t steps = 0;
  for (const HeadSteps& head : heads) steps += head.size();
  const std::vector<Row> rows = measure(heads);
  if (json) {
    print_json(heads.size(), steps, rows);
  } else {
    print_table(fmt::format("{}: {} heads, {} steps of a head", title, heads.size(), steps), rows);
  }
  return 0;
}
