// SPDX-License-Identifier: Apache-2.0
// Parsing of algorithm specifications: every key once, every value checked against its range, and
// nothing ignored. Thread: pure functions.
#include "sparse/sparse_spec.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "base/parse_number.h"

namespace spin::sparse {
namespace {

bool is_spec_character(char c) {
  return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '.' || c == '%' || c == '/' || c == '-';
}

// Errors name the part, never repeat what the user sent: it may be any bytes.
Status check_part(std::string_view text, std::string_view what) {
  if (text.empty()) {
    return Status(StatusCode::kInvalidArgument, fmt::format("sparse: {} is empty", what));
  }
  if (!std::all_of(text.begin(), text.end(), is_spec_character)) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("sparse: {} has characters other than letters, digits and _ . % / -", what));
  }
  return ok_status();
}

// "NAME" or "a share of the context": what a budget looks like when printed.
std::string budget_text(const TokenBudget& budget) {
  return budget.tokens > 0 ? fmt::format("{}", budget.tokens)
                           : fmt::format("{:g}%", budget.share * 100);
}

std::optional<TokenBudget> parse_budget(std::string_view text) {
  if (!text.empty() && text.back() == '%') {
    const auto percent = base::parse_double(text.substr(0, text.size() - 1));
    if (!percent || !(*percent > 0) || *percent > 100) return std::nullopt;
    return TokenBudget{0, *percent / 100};
  }
  const auto tokens = base::parse_decimal(text);
  if (!tokens || *tokens == 0 || *tokens > std::numeric_limits<uint32_t>::max()) {
    return std::nullopt;
  }
  return TokenBudget{*tokens, 0};
}

}  // namespace

Result<SparseSpec> parse_sparse_spec(std::string_view text) {
  if (text.size() > kMaxSpecBytes) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("sparse: at most {} bytes, found {}", kMaxSpecBytes, text.size()));
  }
  SparseSpec spec;
  const size_t colon = text.find(':');
  spec.name = std::string(text.substr(0, colon));
  SPIN_RETURN_IF_ERROR(check_part(spec.name, "the algorithm's name"));
  if (colon == std::string_view::npos) return spec;
  std::string_view rest = text.substr(colon + 1);
  while (true) {
    const size_t comma = rest.find(',');
    const std::string_view option = rest.substr(0, comma);
    const size_t equals = option.find('=');
    const std::string_view key = option.substr(0, equals);
    SPIN_RETURN_IF_ERROR(check_part(key, "an option's name"));
    if (equals == std::string_view::npos) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("sparse: option {} has no value (key=value)", key));
    }
    const std::string_view value = option.substr(equals + 1);
    SPIN_RETURN_IF_ERROR(check_part(value, fmt::format("the value of {}", key)));
    for (const auto& [known, unused] : spec.options) {
      if (known == key) {
        return Status(StatusCode::kInvalidArgument,
                      fmt::format("sparse: option {} is given twice", key));
      }
    }
    spec.options.emplace_back(key, value);
    if (comma == std::string_view::npos) return spec;
    rest.remove_prefix(comma + 1);
  }
}

uint64_t TokenBudget::resolve(uint64_t context_tokens) const {
  if (tokens > 0) return tokens;
  // Shares are at most 1, so that the product fits; what double cannot hold exactly does not matter
  // here.
  const double part = std::floor(share * static_cast<double>(context_tokens));
  return std::max<uint64_t>(1, static_cast<uint64_t>(part));
}

OptionReader::OptionReader(const SparseSpec& spec) : name_(spec.name), left_(spec.options) {}

std::string OptionReader::take(std::string_view key, std::string fallback) {
  for (auto it = left_.begin(); it != left_.end(); ++it) {
    if (it->first != key) continue;
    std::string value = std::move(it->second);
    left_.erase(it);
    return value;
  }
  return fallback;
}

void OptionReader::refuse(std::string_view key, std::string_view expected, std::string_view found) {
  if (!status_.ok()) return;
  status_ = Status(StatusCode::kInvalidArgument,
                   fmt::format("{}: {} must be {}, found {}", name_, key, expected, found));
}

void OptionReader::record(std::string_view key, std::string_view value) {
  resolved_ += fmt::format("{}{}={}", resolved_.empty() ? "" : ",", key, value);
}

uint64_t OptionReader::integer(std::string_view key,
                               uint64_t fallback,
                               uint64_t least,
                               uint64_t most) {
  const std::string text = take(key, fmt::format("{}", fallback));
  const auto value = base::parse_decimal(text);
  if (!value || *value < least || *value > most) {
    refuse(key, fmt::format("an integer from {} to {}", least, most), text);
    return fallback;
  }
  record(key, fmt::format("{}", *value));
  return *value;
}

double OptionReader::number(std::string_view key, double fallback, double least, double most) {
  const std::string text = take(key, fmt::format("{}", fallback));
  const auto value = base::parse_double(text);
  if (!value || !(*value >= least) || !(*value <= most)) {
    refuse(key, fmt::format("a number from {} to {}", least, most), text);
    return fallback;
  }
  record(key, fmt::format("{}", *value));
  return *value;
}

TokenBudget OptionReader::budget(std::string_view key, TokenBudget fallback) {
  const std::string text = take(key, "");
  const std::optional<TokenBudget> value = text.empty() ? fallback : parse_budget(text);
  if (!value) {
    refuse(key, "tokens (1 or more) or a share of the context (above 0% up to 100%)", text);
    return fallback;
  }
  record(key, budget_text(*value));
  return *value;
}

std::string OptionReader::text(std::string_view key, std::string_view fallback) {
  std::string value = take(key, std::string(fallback));
  record(key, value);
  return value;
}

std::string OptionReader::choice(std::string_view key,
                                 std::string_view fallback,
                                 std::span<const std::string_view> allowed) {
  std::string value = take(key, std::string(fallback));
  if (std::find(allowed.begin(), allowed.end(), value) == allowed.end()) {
    refuse(key, fmt::format("one of {}", fmt::join(allowed, ", ")), value);
    return std::string(fallback);
  }
  record(key, value);
  return value;
}

Status OptionReader::finish() {
  if (status_.ok() && !left_.empty()) {
    status_ = Status(StatusCode::kInvalidArgument,
                     fmt::format("{}: there is no option {}", name_, left_.front().first));
  }
  return status_;
}

}  // namespace spin::sparse
