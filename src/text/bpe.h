// SPDX-License-Identifier: Apache-2.0
// The merge step of byte-level BPE: a word's bytes to token ids.
//
// Thread: immutable after construction.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "spin/token.h"
#include "text/tokenizer_parts.h"

namespace spin::text {

class BpeModel {
 public:
  // `merges` in order of rank; of two for the same pair the later one counts, as in `tokenizers`.
  BpeModel(std::span<const Merge> merges, const std::array<TokenId, 256>& byte_tokens);

  // Appends the tokens of `word`: again and again the pair of neighbours with the lowest rank, the
  // leftmost first, becomes one token. Bytes without a token are left out beforehand.
  // Time O(n log n), near to linear in practice, and about 28 n bytes for long words. Requires:
  // word.size() < 2^31.
  void encode_word(std::string_view word, std::vector<TokenId>& out) const;

 private:
  // Open addressing, load at most 0.5; `rank` == kNoRank marks a free entry.
  struct Entry {
    TokenId left = 0;
    TokenId right = 0;
    uint32_t rank = UINT32_MAX;
    TokenId merged = 0;
  };
  static constexpr uint32_t kNoRank = UINT32_MAX;
  // Up to here a scan of all pairs per merge is faster than a queue, and up to kMediumWord (whose
  // working memory stays in the cache) a heap is faster than buckets.
  static constexpr size_t kShortWord = 32;
  static constexpr size_t kMediumWord = 4096;

  size_t slot_of(TokenId left, TokenId right) const;
  const Entry& find(TokenId left, TokenId right) const;
  void encode_short(std::string_view word, std::vector<TokenId>& out) const;
  template <typename Queue>
  void encode_long(std::string_view word, std::vector<TokenId>& out) const;

  std::vector<Entry> entries_;  // a power of two
  std::array<TokenId, 256> byte_tokens_;
};

}  // namespace spin::text
