// SPDX-License-Identifier: Apache-2.0
// What the parity suite knows of each algorithm: how to make it select everything, how to make it
// select little, and how near "everything" comes to dense attention. Tests only.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace spin::testing {

// Attention over everything against dense attention.
enum class FullBudget : uint8_t {
  kBits,       // ranges: the same tokens in the same order, the same bits
  kReordered,  // clusters: the same tokens in another order
  kRebuilt,    // keys rebuilt from factors of full rank
  kZones,      // no budget: never everything
};

struct ParityRow {
  std::string_view name;        // as in the registry
  std::string_view label = "";  // of a further row of the same algorithm; "" for the first
  std::string_view full;        // options under which all partitions are selected; "" with kZones
  std::string_view small;       // options under which few are
  FullBudget full_budget = FullBudget::kBits;
  uint64_t least_tokens = 0;  // a prompt that is not dense under `small` has at least so many
  bool retrieves = true;      // `small` selects pages beyond the zones

  std::string test_name() const;
  std::string full_spec() const;
  std::string small_spec() const;
};

// Every registered algorithm has one or more rows; the toy is registered by the first call.
std::span<const ParityRow> parity_rows();

}  // namespace spin::testing
