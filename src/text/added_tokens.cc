// SPDX-License-Identifier: Apache-2.0
#include "text/added_tokens.h"

namespace spin::text {

uint32_t AddedTokenMatcher::child_of(uint32_t node, char byte) const {
  uint32_t child = nodes_[node].child;
  while (child != 0 && nodes_[child].byte != byte) child = nodes_[child].sibling;
  return child;
}

void AddedTokenMatcher::add(std::string_view content, TokenId id) {
  first_[static_cast<uint8_t>(content[0])] = true;
  uint32_t node = 0;
  for (const char byte : content) {
    uint32_t child = child_of(node, byte);
    if (child == 0) {
      child = static_cast<uint32_t>(nodes_.size());
      nodes_.push_back({byte, 0, nodes_[node].child, kNoToken});
      nodes_[node].child = child;
    }
    node = child;
  }
  nodes_[node].id = id;
}

AddedTokenMatcher::Match AddedTokenMatcher::find(std::string_view text, size_t from) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!first_[static_cast<uint8_t>(text[begin])]) continue;
    Match best;
    uint32_t node = 0;
    for (size_t pos = begin; pos < text.size(); ++pos) {
      node = child_of(node, text[pos]);
      if (node == 0) break;
      if (nodes_[node].id != kNoToken) best = {begin, pos + 1 - begin, nodes_[node].id};
    }
    if (best.length != 0) return best;
  }
  return {text.size(), 0, kNoToken};
}

}  // namespace spin::text
