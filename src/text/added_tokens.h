// SPDX-License-Identifier: Apache-2.0
// Finds added tokens ("<|im_end|>") in text: leftmost first, the longest at a place.
//
// Thread: immutable once filled.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "spin/token.h"
#include "text/tokenizer_parts.h"

namespace spin::text {

// Longest content of an added token; bounds the work per byte of text.
inline constexpr size_t kMaxAddedTokenBytes = 1024;

class AddedTokenMatcher {
 public:
  AddedTokenMatcher() { first_.fill(false); }

  // Requires: content is not empty and at most kMaxAddedTokenBytes long.
  void add(std::string_view content, TokenId id);
  bool empty() const { return nodes_.size() == 1; }

  struct Match {
    size_t begin = 0;  // text.size(): none
    size_t length = 0;
    TokenId id = kNoToken;
  };
  // The first match at or after `from`.
  Match find(std::string_view text, size_t from) const;

 private:
  // A trie in child-sibling form; the root is node 0.
  struct Node {
    char byte = 0;
    uint32_t child = 0;    // 0: none
    uint32_t sibling = 0;  // 0: none
    TokenId id = kNoToken;
  };
  uint32_t child_of(uint32_t node, char byte) const;

  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::array<bool, 256> first_;
};

}  // namespace spin::text
