// SPDX-License-Identifier: Apache-2.0
// Token ids to text, one token at a time, for streaming. Always hands out whole characters.
//
// Thread: external synchronisation (one owner per sequence).
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "spin/token.h"
#include "text/tokenizer.h"

namespace spin::text {

// States: `pending_` holds the 0 to 3 bytes of a character that later tokens may complete.
//   feed: appends the token's bytes, releases everything but an incomplete tail. Bytes that can
//         no longer become a character are released as U+FFFD (one per maximal subpart).
//   flush: releases the tail as U+FFFD and returns to the empty state.
// Ensures: the concatenation of all results equals base::utf8_replace_invalid(decode(all ids)),
// for every way to cut the ids into calls; nothing released is ever taken back or repeated.
class IncrementalDetokenizer {
 public:
  // Lifetime: `tokenizer` outlives this.
  explicit IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special = true)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}

  std::string feed(TokenId id);
  std::string feed(std::span<const TokenId> ids);
  std::string flush();

 private:
  void append(std::string_view bytes, std::string& out);

  const Tokenizer* tokenizer_;  // never null
  bool skip_special_;
  std::string pending_;
};

}  // namespace spin::text
