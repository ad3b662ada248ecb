// SPDX-License-Identifier: Apache-2.0
// Token text to id: a hash table of 4 bytes per slot over strings that live elsewhere.
//
// Thread: const calls from any thread once it is filled.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "spin/token.h"
#include "text/tokenizer_parts.h"

namespace spin::text {

uint64_t token_hash(std::string_view text);

// `Strings` gives the text of an id: `std::string_view operator()(TokenId) const`.
template <typename Strings>
class TokenIndex {
 public:
  TokenIndex() = default;
  TokenIndex(size_t capacity, Strings strings)
      : slots_(std::bit_ceil(2 * capacity + 2), kNoToken), strings_(strings) {}

  // Returns false and changes nothing if the text is there already.
  // Requires: at most `capacity` insertions.
  bool insert(TokenId id) {
    TokenId& slot = slots_[slot_of(strings_(id))];
    if (slot != kNoToken) return false;
    slot = id;
    return true;
  }

  std::optional<TokenId> find(std::string_view text) const {
    if (slots_.empty()) return std::nullopt;
    const TokenId id = slots_[slot_of(text)];
    if (id == kNoToken) return std::nullopt;
    return id;
  }

 private:
  size_t slot_of(std::string_view text) const {
    const size_t mask = slots_.size() - 1;
    size_t slot = token_hash(text) & mask;
    while (slots_[slot] != kNoToken && strings_(slots_[slot]) != text) slot = (slot + 1) & mask;
    return slot;
  }

  std::vector<TokenId> slots_;
  Strings strings_ = {};
};

}  // namespace spin::text
