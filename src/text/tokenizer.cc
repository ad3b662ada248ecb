// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer.h"

#include <utility>

#include <fmt/format.h>

#include "base/utf8.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/normalizer.h"
#include "text/pretokenizer.h"
#include "text/token_index.h"
#include "text/tokenizer_parts.h"

namespace spin::text {
namespace {

struct TokenStrings {
  const std::vector<std::string>* tokens = nullptr;
  std::string_view operator()(TokenId id) const { return (*tokens)[id]; }
};

Status check_text(std::string_view text, size_t total_bytes) {
  if (total_bytes > kMaxEncodeBytes) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("text: expected at most {} bytes, found {}", kMaxEncodeBytes, total_bytes));
  }
  if (!base::is_valid_utf8(text)) {
    return Status(StatusCode::kInvalidArgument, "text: expected well-formed UTF-8");
  }
  return ok_status();
}

}  // namespace

struct Tokenizer::Impl {
  explicit Impl(TokenizerParts p) : parts(std::move(p)), bpe(parts.merges, parts.byte_tokens) {}

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Status prepare();
  void encode_words(std::string_view text, std::vector<TokenId>& out) const;
  void encode_plain(std::string_view text, std::vector<TokenId>& out) const;
  class PieceEncoder;

  TokenizerParts parts;  // its merges are given up once `bpe` holds them
  BpeModel bpe;
  std::vector<bool> special;           // by id
  AddedTokenMatcher raw_added;         // looked for in the text as given
  AddedTokenMatcher normalized_added;  // looked for after normalization
  TokenIndex<TokenStrings> by_text;    // all tokens; added ones first
  TokenIndex<TokenStrings> words;      // with ignore_merges: ordinary tokens
};

// Collects the text between added tokens, so that words may span the borders of pieces.
class Tokenizer::Impl::PieceEncoder {
 public:
  PieceEncoder(const Impl& impl, std::vector<TokenId>& out);
  void add_text(std::string_view text) { run_ += text; }
  void add_parsed(std::string_view text);
  void finish();

 private:
  void add_normalized(std::string_view text);

  const Impl& impl_;
  std::vector<TokenId>& out_;
  std::string run_;
};

Status Tokenizer::Impl::prepare() {
  const size_t count = parts.tokens.size();
  special.assign(count, false);
  by_text = TokenIndex<TokenStrings>(count, TokenStrings{&parts.tokens});
  for (const AddedToken& added : parts.added) {
    if (!by_text.insert(added.id)) {
      return Status(StatusCode::kCorrupt,
                    fmt::format("added token {}: its content appears twice", added.id));
    }
    if (added.special) special[added.id] = true;
    if (!added.normalized) {
      raw_added.add(added.content, added.id);
    } else {
      std::string content;
      if (parts.nfc) {
        append_nfc(added.content, content);
      } else {
        content = added.content;
      }
      normalized_added.add(content, added.id);
    }
  }
  for (const TokenId id : parts.special_ids) special[id] = true;
  for (TokenId id = 0; id < count; ++id) {
    if (!parts.tokens[id].empty()) by_text.insert(id);
  }
  if (parts.ignore_merges) {
    words = TokenIndex<TokenStrings>(count, TokenStrings{&parts.tokens});
    for (TokenId id = 0; id < count; ++id) {
      // A special token is never the reading of a user's word.
      if (parts.ordinary[id] && !special[id] && !parts.tokens[id].empty()) words.insert(id);
    }
  }
  parts.merges = {};
  return ok_status();
}

// `text` is normalized.
void Tokenizer::Impl::encode_words(std::string_view text, std::vector<TokenId>& out) const {
  while (!text.empty()) {
    const std::string_view word = text.substr(0, next_word(parts.pre_tokenizer, text));
    text.remove_prefix(word.size());
    const std::optional<TokenId> whole =
        parts.ignore_merges && word.size() <= kMaxTokenBytes ? words.find(word) : std::nullopt;
    if (whole) {
      out.push_back(*whole);
    } else {
      bpe.encode_word(word, out);
    }
  }
}

void Tokenizer::Impl::encode_plain(std::string_view text, std::vector<TokenId>& out) const {
  if (!parts.nfc || is_plain_nfc(text)) return encode_words(text, out);
  std::string normalized;
  normalized.reserve(text.size());
  append_nfc(text, normalized);
  encode_words(normalized, out);
}

Tokenizer::Impl::PieceEncoder::PieceEncoder(const Impl& impl, std::vector<TokenId>& out)
    : impl_(impl), out_(out) {}

void Tokenizer::Impl::PieceEncoder::finish() {
  impl_.encode_plain(run_, out_);
  run_.clear();
}

void Tokenizer::Impl::PieceEncoder::add_normalized(std::string_view text) {
  if (impl_.normalized_added.empty()) return add_text(text);
  std::string normalized;
  if (impl_.parts.nfc) {
    append_nfc(text, normalized);
    text = normalized;
  }
  size_t pos = 0;
  while (true) {
    const AddedTokenMatcher::Match match = impl_.normalized_added.find(text, pos);
    add_text(text.substr(pos, match.begin - pos));
    if (match.length == 0) return;
    finish();
    out_.push_back(match.id);
    pos = match.begin + match.length;
  }
}

void Tokenizer::Impl::PieceEncoder::add_parsed(std::string_view text) {
  size_t pos = 0;
  while (true) {
    const AddedTokenMatcher::Match match = impl_.raw_added.find(text, pos);
    add_normalized(text.substr(pos, match.begin - pos));
    if (match.length == 0) return;
    finish();
    out_.push_back(match.id);
    pos = match.begin + match.length;
  }
}

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

Result<std::unique_ptr<Tokenizer>> Tokenizer::create(TokenizerParts parts) {
  const size_t count = parts.tokens.size();
  const auto check_id = [count](TokenId id, std::string_view what) {
    if (id < count) return ok_status();
    return Status(StatusCode::kCorrupt,
                  fmt::format("{}: expected a token id below {}, found {}", what, count, id));
  };
  if (count == 0) return Status(StatusCode::kCorrupt, "vocabulary: expected tokens, found none");
  for (const TokenId id : parts.prefix) SPIN_RETURN_IF_ERROR(check_id(id, "prefix token"));
  for (const TokenId id : parts.suffix) SPIN_RETURN_IF_ERROR(check_id(id, "suffix token"));
  for (const TokenId id : parts.special_ids) SPIN_RETURN_IF_ERROR(check_id(id, "special token"));
  if (parts.bos) SPIN_RETURN_IF_ERROR(check_id(*parts.bos, "bos token"));
  if (parts.eos) SPIN_RETURN_IF_ERROR(check_id(*parts.eos, "eos token"));
  auto impl = std::make_unique<Impl>(std::move(parts));
  SPIN_RETURN_IF_ERROR(impl->prepare());
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(impl)));
}

Result<std::vector<TokenId>> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  SPIN_RETURN_IF_ERROR(check_text(text, text.size()));
  std::vector<TokenId> ids;
  if (options.add_special) ids = impl_->parts.prefix;
  if (options.parse_special) {
    Impl::PieceEncoder encoder(*impl_, ids);
    encoder.add_parsed(text);
    encoder.finish();
  } else {
    impl_->encode_plain(text, ids);
  }
  if (options.add_special) {
    ids.insert(ids.end(), impl_->parts.suffix.begin(), impl_->parts.suffix.end());
  }
  return ids;
}

Result<std::vector<TokenId>> Tokenizer::encode_pieces(std::span<const TextPiece> pieces) const {
  size_t total_bytes = 0;
  for (const TextPiece& piece : pieces) {
    total_bytes += piece.text.size();
    SPIN_RETURN_IF_ERROR(check_text(piece.text, total_bytes));
  }
  std::vector<TokenId> ids;
  Impl::PieceEncoder encoder(*impl_, ids);
  for (const TextPiece& piece : pieces) {
    if (piece.parse_special) {
      encoder.add_parsed(piece.text);
    } else {
      encoder.add_text(piece.text);
    }
  }
  encoder.finish();
  return ids;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special) const {
  std::string bytes;
  for (const TokenId id : ids) {
    if (skip_special && is_special(id)) continue;
    bytes += token_bytes(id);
  }
  return bytes;
}

std::string_view Tokenizer::token_bytes(TokenId id) const {
  return contains(id) ? std::string_view(impl_->parts.tokens[id]) : std::string_view();
}

bool Tokenizer::is_special(TokenId id) const { return contains(id) && impl_->special[id]; }
size_t Tokenizer::vocab_size() const { return impl_->parts.tokens.size(); }
std::optional<TokenId> Tokenizer::bos_id() const { return impl_->parts.bos; }
std::optional<TokenId> Tokenizer::eos_id() const { return impl_->parts.eos; }

bool Tokenizer::adds_bos() const {
  return impl_->parts.bos && !impl_->parts.prefix.empty() &&
         impl_->parts.prefix.front() == *impl_->parts.bos;
}

std::optional<TokenId> Tokenizer::find(std::string_view token_text) const {
  return impl_->by_text.find(token_text);
}

}  // namespace spin::text
