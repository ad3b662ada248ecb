// SPDX-License-Identifier: Apache-2.0
#include "text/detokenizer.h"

#include <utility>

#include "base/utf8.h"

namespace spin::text {

void IncrementalDetokenizer::append(std::string_view bytes, std::string& out) {
  pending_ += bytes;
  const size_t complete = base::utf8_complete_prefix(pending_);
  out += base::utf8_replace_invalid(std::string_view(pending_).substr(0, complete));
  pending_.erase(0, complete);
}

std::string IncrementalDetokenizer::feed(TokenId id) { return feed(std::span(&id, 1)); }

std::string IncrementalDetokenizer::feed(std::span<const TokenId> ids) {
  std::string out;
  for (const TokenId id : ids) {
    if (skip_special_ && tokenizer_->is_special(id)) continue;
    append(tokenizer_->token_bytes(id), out);
  }
  return out;
}

std::string IncrementalDetokenizer::flush() {
  return base::utf8_replace_invalid(std::exchange(pending_, {}));
}

}  // namespace spin::text
