// SPDX-License-Identifier: Apache-2.0
#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <queue>
#include <unordered_map>

namespace spin::text {
namespace {

// Both queues hand out (rank, position) in increasing order. A merge does not take entries out: the
// caller recognises stale ones when they come up.
struct QueueEntry {
  uint32_t rank;
  uint32_t position;
};

class HeapQueue {
 public:
  explicit HeapQueue(size_t capacity) { heap_.reserve(capacity); }
  bool empty() const { return heap_.empty(); }
  void push(uint32_t rank, uint32_t position) {
    heap_.push_back((static_cast<uint64_t>(rank) << 32) | position);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }
  QueueEntry pop() {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    const uint64_t entry = heap_.back();
    heap_.pop_back();
    return {static_cast<uint32_t>(entry >> 32), static_cast<uint32_t>(entry)};
  }

 private:
  std::vector<uint64_t> heap_;  // rank << 32 | position
};

// One list of positions per rank. A trained vocabulary makes a token before it merges it further,
// so a rank is worked through once, from left to right: sequential memory, where a heap of millions
// of entries misses the cache at every step.
class BucketQueue {
 public:
  explicit BucketQueue(size_t) {}
  bool empty() const { return ranks_.empty(); }

  void push(uint32_t rank, uint32_t position) {
    Bucket& bucket = buckets_[rank];
    if (bucket.next == bucket.positions.size()) {
      bucket = {};
      ranks_.push(rank);
    }
    bucket.sorted &= bucket.positions.empty() || bucket.positions.back() <= position;
    bucket.positions.push_back(position);
  }

  QueueEntry pop() {
    const uint32_t rank = ranks_.top();
    Bucket& bucket = buckets_[rank];
    if (!bucket.sorted) {
      std::sort(bucket.positions.begin() + static_cast<std::ptrdiff_t>(bucket.next),
                bucket.positions.end());
      bucket.sorted = true;
    }
    const uint32_t position = bucket.positions[bucket.next++];
    if (bucket.next == bucket.positions.size()) {
      ranks_.pop();
      bucket = {};
    }
    return {rank, position};
  }

 private:
  struct Bucket {
    std::vector<uint32_t> positions;
    size_t next = 0;     // positions before it are done
    bool sorted = true;  // from `next` on
  };
  std::unordered_map<uint32_t, Bucket> buckets_;
  std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>>
      ranks_;  // of buckets not done
};

}  // namespace

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

template <typename Queue>
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

  Queue queue(symbols.size());
  const auto rank_at = [&](uint32_t i) {
    if (symbols[i].id == kNoToken || symbols[i].next == kNone) return kNoRank;
    return find(symbols[i].id, symbols[symbols[i].next].id).rank;
  };
  const auto push = [&](uint32_t i) {
    const uint32_t rank = rank_at(i);
    if (rank != kNoRank) queue.push(rank, i);
  };
  for (uint32_t i = 0; i + 1 < symbols.size(); ++i) push(i);
  while (!queue.empty()) {
    const auto [rank, i] = queue.pop();
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

void BpeModel::encode_word(std::string_view word, std::vector<TokenId>& out) const {
  if (word.size() <= kShortWord) {
    encode_short(word, out);
  } else if (word.size() <= kMediumWord) {
    encode_long<HeapQueue>(word, out);
  } else {
    encode_long<BucketQueue>(word, out);
  }
}

}  // namespace spin::text
