// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer_parts.h"

#include <algorithm>

#include <fmt/format.h>
#include <xxhash.h>

#include "base/utf8.h"
#include "text/added_tokens.h"
#include "text/token_index.h"
#include "text/tokenizer.h"

namespace spin::text {
namespace {

// Byte of each of GPT-2's byte characters (all below U+0144), -1 for other characters.
constexpr size_t kByteCharacters = 0x144;

constexpr std::array<int16_t, kByteCharacters> make_byte_of_character() {
  std::array<int16_t, kByteCharacters> table = {};
  for (int16_t& byte : table) byte = -1;
  size_t next = 256;  // bytes without a visible Latin-1 character get the next free one
  for (int byte = 0; byte < 256; ++byte) {
    const bool visible = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) ||
                         (byte >= 0xAE && byte <= 0xFF);
    const size_t character = visible ? static_cast<size_t>(byte) : next++;
    table[character] = static_cast<int16_t>(byte);
  }
  return table;
}

constexpr std::array<int16_t, kByteCharacters> kByteOfCharacter = make_byte_of_character();

struct SourceStrings {
  const std::vector<std::string_view>* tokens = nullptr;
  std::string_view operator()(TokenId id) const { return (*tokens)[id]; }
};

Status resolve_merges(const VocabularySource& source,
                      const TokenIndex<SourceStrings>& index,
                      std::vector<Merge>& merges) {
  merges.reserve(source.merges.size());
  std::string joined;
  for (size_t rank = 0; rank < source.merges.size(); ++rank) {
    const auto [left, right] = source.merges[rank];
    joined.assign(left).append(right);
    const auto left_id = index.find(left);
    const auto right_id = index.find(right);
    const auto merged_id = index.find(joined);
    if (!left_id || !right_id || !merged_id) {
      return Status(StatusCode::kCorrupt,
                    fmt::format("merge {}: expected two tokens and their concatenation in the "
                                "vocabulary, found an unknown one",
                                rank));
    }
    merges.push_back({*left_id, *right_id, *merged_id});
  }
  return ok_status();
}

}  // namespace

uint64_t token_hash(std::string_view text) { return XXH3_64bits(text.data(), text.size()); }

std::optional<std::string> decode_byte_characters(std::string_view token) {
  std::string bytes;
  bytes.reserve(token.size());
  while (!token.empty()) {
    const base::Utf8Step step = base::utf8_step(token);
    if (step.kind != base::Utf8Step::Kind::kValid || step.code_point >= kByteCharacters) {
      return std::nullopt;
    }
    const int16_t byte = kByteOfCharacter[step.code_point];
    if (byte < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte));
    token.remove_prefix(step.length);
  }
  return bytes;
}

Status resolve_vocabulary(const VocabularySource& source, TokenizerParts& parts) {
  const size_t count = source.tokens.size();
  if (count > kMaxVocabulary) {
    return Status(
        StatusCode::kUnsupported,
        fmt::format("vocabulary: expected at most {} tokens, found {}", kMaxVocabulary, count));
  }
  parts.tokens.assign(count, std::string());
  parts.ordinary.assign(count, false);
  parts.byte_tokens.fill(kNoToken);
  TokenIndex<SourceStrings> index(count, SourceStrings{&source.tokens});
  for (TokenId id = 0; id < count; ++id) {
    const std::string_view text = source.tokens[id];
    if (text.empty()) continue;
    if (text.size() > kMaxTokenBytes) {
      return Status(StatusCode::kCorrupt,
                    fmt::format("token {}: expected at most {} bytes, found {}", id, kMaxTokenBytes,
                                text.size()));
    }
    const bool is_first = index.insert(id);  // of two tokens with one text the lower id is used
    std::optional<std::string> bytes = decode_byte_characters(text);
    if (is_first && bytes && bytes->size() == 1) {
      parts.byte_tokens[static_cast<uint8_t>((*bytes)[0])] = id;
    }
    parts.ordinary[id] = bytes.has_value();
    parts.tokens[id] = bytes ? *std::move(bytes) : std::string(text);
  }
  return resolve_merges(source, index, parts.merges);
}

Status add_added_token(AddedToken added, TokenizerParts& parts) {
  if (added.id >= parts.tokens.size()) {
    return Status(StatusCode::kCorrupt,
                  fmt::format("added token: expected an id below {}, found {}", parts.tokens.size(),
                              added.id));
  }
  if (added.content.empty() || added.content.size() > kMaxAddedTokenBytes) {
    return Status(StatusCode::kCorrupt,
                  fmt::format("added token {}: expected 1 to {} bytes of content, found {}",
                              added.id, kMaxAddedTokenBytes, added.content.size()));
  }
  if (parts.tokens[added.id] != added.content) parts.ordinary[added.id] = false;
  parts.tokens[added.id] = added.content;
  parts.added.push_back(std::move(added));
  return ok_status();
}

}  // namespace spin::text
