// SPDX-License-Identifier: Apache-2.0
#include "text/bpe.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/text/random_text.h"

namespace spin::text {
namespace {

// A vocabulary over the letters a to d with random merges, in any order: a token may be merged
// further at a lower rank than the one that makes it.
struct RandomVocabulary {
  explicit RandomVocabulary(uint64_t seed, size_t merge_count) {
    testing::SplitMix64 rng(seed);
    bytes.fill(kNoToken);
    for (const char c : {'a', 'b', 'c', 'd'}) {
      bytes[static_cast<uint8_t>(c)] = static_cast<TokenId>(tokens.size());
      tokens.emplace_back(1, c);
    }
    std::map<std::string, TokenId> ids;
    for (TokenId id = 0; id < tokens.size(); ++id) ids[tokens[id]] = id;
    while (merges.size() < merge_count) {
      const TokenId left = static_cast<TokenId>(rng.below(tokens.size()));
      const TokenId right = static_cast<TokenId>(rng.below(tokens.size()));
      const std::string joined = tokens[left] + tokens[right];
      if (joined.size() > 12) continue;
      const auto [entry, is_new] = ids.emplace(joined, static_cast<TokenId>(tokens.size()));
      if (is_new) tokens.push_back(joined);
      merges.push_back({left, right, entry->second});
    }
    for (size_t i = merges.size(); i > 1; --i) std::swap(merges[i - 1], merges[rng.below(i)]);
  }

  std::vector<std::string> tokens;
  std::array<TokenId, 256> bytes;
  std::vector<Merge> merges;
};

// The definition, one merge after another.
std::vector<TokenId> merge_naively(const RandomVocabulary& vocabulary, std::string_view word) {
  std::map<std::pair<TokenId, TokenId>, std::pair<size_t, TokenId>> table;
  for (size_t rank = 0; rank < vocabulary.merges.size(); ++rank) {
    const Merge& merge = vocabulary.merges[rank];
    table[{merge.left, merge.right}] = {rank, merge.merged};
  }
  std::vector<TokenId> ids;
  for (const char c : word) {
    const TokenId id = vocabulary.bytes[static_cast<uint8_t>(c)];
    if (id != kNoToken) ids.push_back(id);
  }
  while (true) {
    size_t best = ids.size();
    size_t best_rank = SIZE_MAX;
    TokenId merged = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto found = table.find({ids[i], ids[i + 1]});
      if (found == table.end() || found->second.first >= best_rank) continue;
      best = i;
      best_rank = found->second.first;
      merged = found->second.second;
    }
    if (best == ids.size()) return ids;
    ids[best] = merged;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

std::string random_word(testing::SplitMix64& rng, size_t length) {
  std::string word;
  for (size_t i = 0; i < length; ++i) word.push_back("aaabbcde"[rng.below(8)]);  // e has no token
  return word;
}

void expect_equal(const RandomVocabulary& vocabulary, const std::string& word) {
  const BpeModel model(vocabulary.merges, vocabulary.bytes);
  std::vector<TokenId> ids;
  model.encode_word(word, ids);
  ASSERT_EQ(ids, merge_naively(vocabulary, word)) << word.substr(0, 100);
}

TEST(Bpe, EqualsTheDefinitionForShortAndMediumWords) {
  testing::SplitMix64 rng(3);
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const RandomVocabulary vocabulary(seed, 5 + seed * 4);
    for (int i = 0; i < 10; ++i) expect_equal(vocabulary, random_word(rng, rng.below(33)));
    for (int i = 0; i < 5; ++i) expect_equal(vocabulary, random_word(rng, 33 + rng.below(200)));
  }
}

TEST(Bpe, EqualsTheDefinitionForLongWords) {
  testing::SplitMix64 rng(4);
  for (uint64_t seed = 0; seed < 3; ++seed) {
    const RandomVocabulary vocabulary(100 + seed, 60);
    expect_equal(vocabulary, random_word(rng, 4200));
  }
  const RandomVocabulary vocabulary(200, 60);
  expect_equal(vocabulary, std::string(4200, 'a'));
}

TEST(Bpe, LeavesOutBytesWithoutAToken) {
  const RandomVocabulary vocabulary(1, 20);
  const BpeModel model(vocabulary.merges, vocabulary.bytes);
  for (const size_t length : {1u, 20u, 100u, 5000u}) {
    std::vector<TokenId> ids;
    model.encode_word(std::string(length, 'z'), ids);
    EXPECT_TRUE(ids.empty());
  }
  std::vector<TokenId> ids;
  model.encode_word("", ids);
  EXPECT_TRUE(ids.empty());
}

}  // namespace
}  // namespace spin::text
