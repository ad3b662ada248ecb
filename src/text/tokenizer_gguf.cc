// SPDX-License-Identifier: Apache-2.0
// The tokenizer of a GGUF file's metadata.
#include <fmt/format.h>

#include "base/parse_number.h"
#include "base/quote.h"
#include "io/gguf.h"
#include "text/tokenizer_loader.h"
#include "text/tokenizer_parts.h"

namespace spin::text {
namespace {

// tokenizer.ggml.token_type
enum class GgufTokenType : int64_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

// What tokenizer.ggml.pre stands for. The file does not say whether the original tokenizer
// normalizes or ignores merges, so it is part of the name's meaning.
struct KnownPre {
  std::string_view name;
  PreTokenizer pre_tokenizer;
  bool nfc;
  bool ignore_merges;
  bool adds_bos;  // unless the file says otherwise
};

// "default" is missing on purpose: it is what converters write when they do not know.
constexpr KnownPre kKnownPre[] = {
    {"gpt-2", PreTokenizer::kGpt2, false, false, false},
    {"smollm", PreTokenizer::kSmolLm, false, false, false},
    {"qwen2", PreTokenizer::kQwen2, true, false, false},
    {"deepseek-r1-qwen", PreTokenizer::kQwen2, true, false, false},
    {"llama-bpe", PreTokenizer::kLlama3, false, true, true},
    {"llama3", PreTokenizer::kLlama3, false, true, true},
    {"llama-v3", PreTokenizer::kLlama3, false, true, true},
};

Status unsupported(std::string message) {
  return Status(StatusCode::kUnsupported, std::move(message));
}

// The byte of "<0x41>"; nothing for any other spelling.
std::optional<char> byte_of_name(std::string_view name) {
  const auto is_digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'F'); };
  if (name.size() != 6 || name.substr(0, 3) != "<0x" || name[5] != '>' || !is_digit(name[3]) ||
      !is_digit(name[4])) {
    return std::nullopt;
  }
  return static_cast<char>(*base::parse_hex(name.substr(3, 2)));
}

class GgufLoader {
 public:
  explicit GgufLoader(const io::GgufMetadata& metadata) : metadata_(metadata) {}
  Result<std::unique_ptr<Tokenizer>> load();

 private:
  Status read_kind();
  Status read_tokens();
  Status read_types();
  Status read_merges();
  Status apply_types();
  Status read_ends();
  Status read_id(std::string_view key, std::optional<TokenId>& id) const;

  const io::GgufMetadata& metadata_;
  const KnownPre* pre_ = nullptr;  // set by read_kind()
  VocabularySource source_;
  std::vector<std::string_view> names_;  // by id, as in the file
  std::vector<GgufTokenType> types_;     // by id
  TokenizerParts parts_;
};

Status GgufLoader::read_kind() {
  if (!metadata_.contains("tokenizer.ggml.model")) {
    return Status(StatusCode::kNotFound, "tokenizer.ggml.model: the file has no tokenizer");
  }
  SPIN_ASSIGN_OR_RETURN(const std::string_view model, metadata_.get_string("tokenizer.ggml.model"));
  if (model != "gpt2") {
    return unsupported(fmt::format("tokenizer.ggml.model: expected gpt2 (byte-level BPE), found {}",
                                   base::quote_text(model)));
  }
  SPIN_ASSIGN_OR_RETURN(const std::string_view name,
                        metadata_.get_string_or("tokenizer.ggml.pre", ""));
  std::string known_names;
  for (const KnownPre& known : kKnownPre) {
    if (known.name == name) pre_ = &known;
    known_names += fmt::format("{}{}", known_names.empty() ? "" : ", ", known.name);
  }
  if (pre_ == nullptr) {
    return unsupported(fmt::format("tokenizer.ggml.pre: expected one of {}; found {}", known_names,
                                   base::quote_text(name)));
  }
  parts_.pre_tokenizer = pre_->pre_tokenizer;
  parts_.nfc = pre_->nfc;
  parts_.ignore_merges = pre_->ignore_merges;
  return ok_status();
}

Status GgufLoader::read_tokens() {
  SPIN_ASSIGN_OR_RETURN(const io::GgufArray* tokens, metadata_.get_array("tokenizer.ggml.tokens"));
  if (tokens->size() > kMaxVocabulary) {
    return unsupported(fmt::format("tokenizer.ggml.tokens: expected at most {} tokens, found {}",
                                   kMaxVocabulary, tokens->size()));
  }
  names_.reserve(tokens->size());
  for (uint64_t i = 0; i < tokens->size(); ++i) {
    SPIN_ASSIGN_OR_RETURN(const std::string_view name, tokens->string_at(i));
    names_.push_back(name);
  }
  return ok_status();
}

Status GgufLoader::read_types() {
  types_.assign(names_.size(), GgufTokenType::kNormal);
  if (!metadata_.contains("tokenizer.ggml.token_type")) return ok_status();
  SPIN_ASSIGN_OR_RETURN(const io::GgufArray* types,
                        metadata_.get_array("tokenizer.ggml.token_type"));
  if (types->size() != names_.size()) {
    return Status(StatusCode::kCorrupt,
                  fmt::format("tokenizer.ggml.token_type: expected {} entries, found {}",
                              names_.size(), types->size()));
  }
  for (uint64_t i = 0; i < types->size(); ++i) {
    SPIN_ASSIGN_OR_RETURN(const int64_t type, types->int_at(i));
    if (type < 1 || type > 6) {
      return Status(StatusCode::kCorrupt,
                    fmt::format("tokenizer.ggml.token_type: expected 1 to 6, found {} for token {}",
                                type, i));
    }
    types_[i] = static_cast<GgufTokenType>(type);
  }
  return ok_status();
}

Status GgufLoader::read_merges() {
  SPIN_ASSIGN_OR_RETURN(const io::GgufArray* merges, metadata_.get_array("tokenizer.ggml.merges"));
  source_.merges.reserve(merges->size());
  for (uint64_t i = 0; i < merges->size(); ++i) {
    SPIN_ASSIGN_OR_RETURN(const std::string_view merge, merges->string_at(i));
    const size_t space = merge.find(' ');
    if (space == std::string_view::npos || merge.find(' ', space + 1) != std::string_view::npos) {
      return Status(StatusCode::kCorrupt,
                    fmt::format("tokenizer.ggml.merges: expected two tokens with one space between "
                                "in entry {}",
                                i));
    }
    source_.merges.emplace_back(merge.substr(0, space), merge.substr(space + 1));
  }
  return ok_status();
}

Status GgufLoader::apply_types() {
  for (TokenId id = 0; id < names_.size(); ++id) {
    switch (types_[id]) {
      case GgufTokenType::kNormal:
      case GgufTokenType::kUnused:  // padding of the vocabulary: no text
        break;
      case GgufTokenType::kUnknown:
        parts_.special_ids.push_back(id);
        parts_.tokens[id] = std::string(names_[id]);
        break;
      case GgufTokenType::kControl:
      case GgufTokenType::kUserDefined: {
        AddedToken added;
        added.id = id;
        added.content = std::string(names_[id]);
        added.special = types_[id] == GgufTokenType::kControl;
        SPIN_RETURN_IF_ERROR(add_added_token(std::move(added), parts_));
        break;
      }
      case GgufTokenType::kByte: {
        const std::optional<char> byte = byte_of_name(names_[id]);
        if (!byte) {
          return Status(StatusCode::kCorrupt,
                        fmt::format("token {}: a byte token is spelled <0x00> to <0xFF>", id));
        }
        parts_.tokens[id] = std::string(1, *byte);
        break;
      }
    }
  }
  return ok_status();
}

Status GgufLoader::read_id(std::string_view key, std::optional<TokenId>& id) const {
  if (!metadata_.contains(key)) return ok_status();
  SPIN_ASSIGN_OR_RETURN(const uint64_t value, metadata_.get_uint(key));
  if (value >= names_.size()) {
    return Status(StatusCode::kCorrupt, fmt::format("{}: expected a token id below {}, found {}",
                                                    key, names_.size(), value));
  }
  id = static_cast<TokenId>(value);
  return ok_status();
}

Status GgufLoader::read_ends() {
  SPIN_RETURN_IF_ERROR(read_id("tokenizer.ggml.bos_token_id", parts_.bos));
  SPIN_RETURN_IF_ERROR(read_id("tokenizer.ggml.eos_token_id", parts_.eos));
  SPIN_ASSIGN_OR_RETURN(const bool adds_bos,
                        metadata_.get_bool_or("tokenizer.ggml.add_bos_token", pre_->adds_bos));
  SPIN_ASSIGN_OR_RETURN(const bool adds_eos,
                        metadata_.get_bool_or("tokenizer.ggml.add_eos_token", false));
  if ((adds_bos && !parts_.bos) || (adds_eos && !parts_.eos)) {
    return Status(StatusCode::kCorrupt,
                  "tokenizer.ggml: add_bos_token or add_eos_token without the token's id");
  }
  if (adds_bos) parts_.prefix = {*parts_.bos};
  if (adds_eos) parts_.suffix = {*parts_.eos};
  return ok_status();
}

Result<std::unique_ptr<Tokenizer>> GgufLoader::load() {
  SPIN_RETURN_IF_ERROR(read_kind());
  SPIN_RETURN_IF_ERROR(read_tokens());
  SPIN_RETURN_IF_ERROR(read_types());
  SPIN_RETURN_IF_ERROR(read_merges());
  source_.tokens = names_;
  for (TokenId id = 0; id < names_.size(); ++id) {
    // Merges may name added tokens, so only what no merge can mean is left out.
    const bool wordless =
        types_[id] == GgufTokenType::kUnused || types_[id] == GgufTokenType::kByte;
    if (wordless) source_.tokens[id] = {};
  }
  SPIN_RETURN_IF_ERROR(resolve_vocabulary(source_, parts_));
  SPIN_RETURN_IF_ERROR(apply_types());
  SPIN_RETURN_IF_ERROR(read_ends());
  return Tokenizer::create(std::move(parts_));
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> load_tokenizer_gguf(const io::GgufFile& file) {
  return GgufLoader(file.metadata()).load();
}

}  // namespace spin::text
