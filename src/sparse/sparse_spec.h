// SPDX-License-Identifier: Apache-2.0
// "NAME[:key=value,...]": an algorithm and its options as text, and the reading of options with
// their ranges. Thread: plain data, pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spin/status.h"

namespace spin::sparse {

struct SparseSpec {
  std::string name;
  std::vector<std::pair<std::string, std::string>> options;  // each key once, in order given
};

// Errors: kInvalidArgument (empty name or key, a key twice, longer than kMaxSpecBytes, characters
// other than [A-Za-z0-9_.%/-] in names, keys and values).
inline constexpr size_t kMaxSpecBytes = 1024;
Result<SparseSpec> parse_sparse_spec(std::string_view text);

// A budget as users give it: tokens ("128") or a share of the context ("1.56%").
struct TokenBudget {
  uint64_t tokens = 0;
  double share = 0;  // of the context; used when tokens == 0
  // At least one.
  uint64_t resolve(uint64_t context_tokens) const;
};

// Takes options off a spec one by one; finish() refuses what was not taken. The first error stays.
class OptionReader {
 public:
  explicit OptionReader(const SparseSpec& spec);

  uint64_t integer(std::string_view key, uint64_t fallback, uint64_t least, uint64_t most);
  double number(std::string_view key, double fallback, double least, double most);
  TokenBudget budget(std::string_view key, TokenBudget fallback);
  std::string text(std::string_view key, std::string_view fallback);
  std::string choice(std::string_view key,
                     std::string_view fallback,
                     std::span<const std::string_view> allowed);

  // Errors: kInvalidArgument naming algorithm and option.
  Status finish();
  // "budget=128,bits=2": everything taken, with resolved values, in order of taking.
  const std::string& resolved() const { return resolved_; }

 private:
  std::string take(std::string_view key, std::string fallback);
  void refuse(std::string_view key, std::string_view expected, std::string_view found);
  void record(std::string_view key, std::string_view value);

  std::string name_;
  std::vector<std::pair<std::string, std::string>> left_;
  Status status_;
  std::string resolved_;
};

}  // namespace spin::sparse
