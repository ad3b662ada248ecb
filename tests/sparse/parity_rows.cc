// SPDX-License-Identifier: Apache-2.0
#include "tests/sparse/parity_rows.h"

#include <algorithm>

#include "sparse/registry.h"
#include "tests/sparse/toy_algorithm.h"

namespace spin::testing {
namespace {

constexpr ParityRow kRows[] = {
    {.name = "strided", .full = "stride=1", .small = "stride=5,recent=32"},
    {.name = "streaming",
     .full = "",
     .small = "budget=64,sinks=4",
     .full_budget = FullBudget::kZones,
     .retrieves = false},
    {.name = "quest",
     .full = "budget=100%,dense_layers=0",
     .small = "budget=32,local=32,dense_layers=0"},
    {.name = "shadowkv", .full = "budget=100%,outliers=3", .small = "budget=32,outliers=2"},
    {.name = "shadowkv-svd",
     .full = "budget=100%,outliers=3,rank=4096",
     .small = "budget=32,outliers=2,rank=24",
     .full_budget = FullBudget::kRebuilt},
    {.name = "oracle", .full = "budget=100%", .small = "budget=32,local=32"},
    {.name = "retroinfer",
     .full = "budget=100%,update=16",
     .small = "budget=48,update=16",
     .full_budget = FullBudget::kReordered,
     .least_tokens = 1200},
    {.name = "retroinfer",
     .label = "retroinfer_small_clusters",
     .full = "budget=100%,update=64",
     .small = "budget=32,cluster=8,update=16",
     .full_budget = FullBudget::kReordered,
     .least_tokens = 200},
    {.name = "seer", .full = "budget=100%,gates=random", .small = "budget=32,gates=random"},
    {.name = "sketch", .full = "budget=100%,offset=96", .small = "budget=32,offset=96"},
    {.name = "sketch",
     .label = "sketch_values",
     .full = "budget=100%,values=2,offset=96",
     .small = "budget=64,values=2,offset=96,bits=1"},
};

std::string spec(std::string_view name, std::string_view options) {
  std::string text(name);
  if (!options.empty()) text.append(":").append(options);
  return text;
}

}  // namespace

std::string ParityRow::test_name() const {
  std::string text(label.empty() ? name : label);
  std::replace(text.begin(), text.end(), '-', '_');
  return text;
}
std::string ParityRow::full_spec() const { return spec(name, full); }
std::string ParityRow::small_spec() const { return spec(name, small); }

std::span<const ParityRow> parity_rows() {
  static const bool registered = [] {
    sparse::add_algorithm(kStridedPages);
    return true;
  }();
  (void)registered;
  return kRows;
}

}  // namespace spin::testing
