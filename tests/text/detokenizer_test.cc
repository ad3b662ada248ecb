// SPDX-License-Identifier: Apache-2.0
#include "text/detokenizer.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/utf8.h"
#include "tests/support/test_data.h"
#include "tests/text/random_text.h"
#include "text/tokenizer_loader.h"

namespace spin::text {
namespace {

using testing::SplitMix64;

constexpr char kReplacement[] = "\xEF\xBF\xBD";

class Detokenizer : public ::testing::Test {
 protected:
  void SetUp() override {
    auto tokenizer =
        load_tokenizer_json(testing::read_file(testing::test_data("tokenizer/gpt2.json")));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
    tokenizer_ = std::move(tokenizer).value();
  }

  // The token of one raw byte.
  TokenId byte(uint8_t value) const {
    return *tokenizer_->find(std::string(1, static_cast<char>(value)));
  }

  std::vector<std::string> feed_bytes(std::string_view bytes) const {
    IncrementalDetokenizer detokenizer(*tokenizer_);
    std::vector<std::string> deltas;
    for (const char c : bytes) deltas.push_back(detokenizer.feed(byte(static_cast<uint8_t>(c))));
    deltas.push_back(detokenizer.flush());
    return deltas;
  }

  std::unique_ptr<Tokenizer> tokenizer_;
};

using Deltas = std::vector<std::string>;

// B102: an emoji in several tokens gives no replacement character.
TEST_F(Detokenizer, HoldsBackAnIncompleteCharacter) {
  EXPECT_EQ(feed_bytes("\U0001f600!"), (Deltas{"", "", "", "\U0001f600", "!", ""}));
}

// B105: only the invalid bytes are replaced, what follows is kept.
TEST_F(Detokenizer, ReplacesInvalidBytesAsAFullDecodeDoes) {
  EXPECT_EQ(feed_bytes("\xE4\xBD a"), (Deltas{"", "", std::string(kReplacement) + " ", "a", ""}));
  EXPECT_EQ(feed_bytes("\xFFz"), (Deltas{kReplacement, "z", ""}));
  EXPECT_EQ(feed_bytes("\xED\xA0"), (Deltas{"", std::string(kReplacement) + kReplacement, ""}));
}

TEST_F(Detokenizer, FlushGivesUpTheTail) {
  EXPECT_EQ(feed_bytes("\xF0\x9F\x98"), (Deltas{"", "", "", kReplacement}));
  IncrementalDetokenizer detokenizer(*tokenizer_);
  EXPECT_EQ(detokenizer.feed(byte(0xC3)), "");
  EXPECT_EQ(detokenizer.flush(), kReplacement);
  EXPECT_EQ(detokenizer.flush(), "");
  EXPECT_EQ(detokenizer.feed(byte('x')), "x");
}

TEST_F(Detokenizer, LeavesOutSpecialTokens) {
  const TokenId end = *tokenizer_->find("<|endoftext|>");
  const std::vector<TokenId> ids = {byte('a'), end, byte('b'), UINT32_MAX};
  EXPECT_EQ(IncrementalDetokenizer(*tokenizer_).feed(ids), "ab");
  EXPECT_EQ(IncrementalDetokenizer(*tokenizer_, false).feed(ids), "a<|endoftext|>b");
}

// B104: concat(deltas) is the full decode, whatever the cuts, and each delta is whole characters.
TEST_F(Detokenizer, DeltasConcatenateToTheFullDecode) {
  SplitMix64 rng(9);
  for (int run = 0; run < 3000; ++run) {
    std::vector<TokenId> ids;
    const size_t count = rng.below(30);
    for (size_t i = 0; i < count; ++i) {
      const bool high_byte = rng.below(2) == 0;
      ids.push_back(high_byte ? byte(static_cast<uint8_t>(0x80 + rng.below(128)))
                              : static_cast<TokenId>(rng.below(tokenizer_->vocab_size() + 2)));
    }
    IncrementalDetokenizer detokenizer(*tokenizer_);
    std::string text;
    for (size_t pos = 0; pos < ids.size();) {
      const size_t step = std::min<size_t>(1 + rng.below(3), ids.size() - pos);
      const std::string delta = detokenizer.feed(std::span(ids).subspan(pos, step));
      ASSERT_TRUE(base::is_valid_utf8(delta));
      text += delta;
      pos += step;
    }
    text += detokenizer.flush();
    ASSERT_EQ(text, base::utf8_replace_invalid(tokenizer_->decode(ids, true)));
  }
}

}  // namespace
}  // namespace spin::text
