// SPDX-License-Identifier: Apache-2.0
#include "text/bpe.h"

#include <bit>
#include <functional>
#include <queue>

namespace spin::text {

BpeModel::BpeModel(std::span<const Merge> merges, const std::array<TokenId, 256>& byte_tokens)
    : entries_(std::bit_ceil(2 * merges.size() + 2)), byte_tokens_(byte_tokens) {
  uint32_t rank = 0;
  for (const Merge& merge : merges) {
    entries_[slot_of(merge.left, merge.right)] = {merge.left, merge.right, rank++, merge.merged};
  }
}

// The entry of the pair, or the free one where it would stand.
size_t BpeModel::slot_of(TokenId left, TokenId right) const {
  const size_t mask = entries_.size() - 1;
  const uint64_t key = (static_cast<uint64_t>(left) << 32) | right;
  uint64_t hash = key * 0x9E3779B97F4A7C15ull;
  hash ^= hash >> 32;
  size_t slot = hash & mask;
  while (entries_[slot].rank != kNoRank &&
         (entries_[slot].left != left || entries_[slot].right != right)) {
    slot = (slot + 1) & mask;
  }
  return slot;
}

const BpeModel::Entry& BpeModel::find(TokenId left, TokenId right) const {
  return entries_[slot_of(left, right)];
}

void BpeModel::encode_word(std::string_view word, std::vector<TokenId>& out) const {
  if (word.size() <= kShortWord) {
    encode_short(word, out);
  } else {
    encode_long(word, out);
  }
}

void BpeModel::encode_short(std::string_view word, std::vector<TokenId>& out) const {
  std::array<TokenId, kShortWord> ids;
  std::array<uint32_t, kShortWord> ranks;  // of the pair (i, i + 1)
  std::array<TokenId, kShortWord> merged;  // what that pair becomes
  size_t count = 0;
  for (const char c : word) {
    const TokenId id = byte_tokens_[static_cast<uint8_t>(c)];
    if (id != kNoToken) ids[count++] = id;
  }
  const auto look_up = [&](size_t i) {
    const Entry& entry = find(ids[i], ids[i + 1]);
    ranks[i] = entry.rank;
    merged[i] = entry.merged;
  };
  for (size_t i = 0; i + 1 < count; ++i) look_up(i);
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      if (ranks[i] < ranks[best]) best = i;
    }
    if (ranks[best] == kNoRank) break;
    ids[best] = merged[best];
    --count;
    for (size_t i = best + 1; i < count; ++i) ids[i] = ids[i + 1];
    for (size_t i = best + 1; i + 1 < count; ++i) {
      ranks[i] = ranks[i + 1];
      merged[i] = merged[i + 1];
    }
    if (best + 1 < count) look_up(best);
    if (best > 0) look_up(best - 1);
  }
  out.insert(out.end(), ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(count));
}

void BpeModel::encode_long(std::string_view word, std::vector<TokenId>& out) const {
  constexpr uint32_t kNone = UINT32_MAX;
  struct Symbol {
    TokenId id;  // kNoToken: merged into a symbol to the left
    uint32_t previous;
    uint32_t next;
  };
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  for (const char c : word) {
    const TokenId id = byte_tokens_[static_cast<uint8_t>(c)];
    if (id == kNoToken) continue;
    const uint32_t i = static_cast<uint32_t>(symbols.size());
    symbols.push_back({id, i == 0 ? kNone : i - 1, i + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = kNone;

  // rank << 32 | position: the smallest is the lowest rank, leftmost first. Entries are not taken
  // out when a merge makes them stale; they are recognised when they come up.
  std::vector<uint64_t> storage;
  storage.reserve(symbols.size());
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> queue(std::greater<>(),
                                                                             std::move(storage));
  const auto rank_at = [&](uint32_t i) {
    if (symbols[i].id == kNoToken || symbols[i].next == kNone) return kNoRank;
    return find(symbols[i].id, symbols[symbols[i].next].id).rank;
  };
  const auto push = [&](uint32_t i) {
    const uint32_t rank = rank_at(i);
    if (rank != kNoRank) queue.push((static_cast<uint64_t>(rank) << 32) | i);
  };
  for (uint32_t i = 0; i + 1 < symbols.size(); ++i) push(i);
  while (!queue.empty()) {
    const uint32_t rank = static_cast<uint32_t>(queue.top() >> 32);
    const uint32_t i = static_cast<uint32_t>(queue.top());
    queue.pop();
    if (rank_at(i) != rank) continue;
    Symbol& left = symbols[i];
    Symbol& right = symbols[left.next];
    left.id = find(left.id, right.id).merged;
    left.next = right.next;
    right.id = kNoToken;
    if (left.next != kNone) symbols[left.next].previous = i;
    push(i);
    if (left.previous != kNone) push(left.previous);
  }
  for (uint32_t i = 0; i != kNone; i = symbols[i].next) out.push_back(symbols[i].id);
}

}  // namespace spin::text
