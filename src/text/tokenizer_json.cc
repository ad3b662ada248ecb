// SPDX-License-Identifier: Apache-2.0
// tokenizer.json and tokenizer_config.json.
#include <algorithm>

#include <fmt/format.h>
#include <simdjson.h>

#include "base/quote.h"
#include "text/tokenizer_loader.h"
#include "text/tokenizer_parts.h"

namespace spin::text {
namespace {

using simdjson::dom::array;
using simdjson::dom::element;
using simdjson::dom::object;

constexpr size_t kMaxDepth = 64;

Status corrupt(std::string message) {
  return Status(StatusCode::kCorrupt, "tokenizer.json: " + std::move(message));
}

Status unsupported(std::string message) {
  return Status(StatusCode::kUnsupported, "tokenizer.json: " + std::move(message));
}

// A field that is null, missing, or of any type.
std::optional<element> field(const object& from, std::string_view key) {
  element value;
  if (from.at_key(key).get(value) != simdjson::SUCCESS || value.is_null()) return std::nullopt;
  return value;
}

std::string_view string_field(const object& from, std::string_view key) {
  const auto value = field(from, key);
  std::string_view text;
  if (!value || value->get(text) != simdjson::SUCCESS) return {};
  return text;
}

Result<bool> bool_field(const object& from, std::string_view key, bool missing) {
  const auto value = field(from, key);
  if (!value) return missing;
  bool flag = false;
  if (value->get(flag) != simdjson::SUCCESS) {
    return corrupt(fmt::format("\"{}\": expected true or false", key));
  }
  return flag;
}

Result<object> object_of(const std::optional<element>& value, std::string_view what) {
  object result;
  if (!value || value->get(result) != simdjson::SUCCESS) {
    return corrupt(fmt::format("\"{}\": expected an object", what));
  }
  return result;
}

// Parses `json` into `document`; the elements live in `parser`.
Status parse_document(simdjson::dom::parser& parser, std::string_view json, object& document) {
  if (json.size() > kMaxTokenizerFileBytes) {
    return corrupt(
        fmt::format("expected at most {} bytes, found {}", kMaxTokenizerFileBytes, json.size()));
  }
  if (parser.allocate(json.size(), kMaxDepth) != simdjson::SUCCESS) {
    return Status(StatusCode::kResourceExhausted, "tokenizer.json: no memory to read it");
  }
  const simdjson::padded_string padded(json);
  const auto error = parser.parse(padded).get(document);
  if (error != simdjson::SUCCESS) {
    return corrupt(fmt::format("expected a JSON object: {}", simdjson::error_message(error)));
  }
  return ok_status();
}

// A tokenizer.json on its way to TokenizerParts. Lifetime: views into the parser.
class JsonLoader {
 public:
  Result<std::unique_ptr<Tokenizer>> load(const object& document, const TokenizerConfig& config);

 private:
  Status read_model(const object& document);
  Status check_model_flags(const object& model);
  Status read_vocabulary(const object& model);
  Status read_merges(const object& model);
  Status read_added_entries(const object& document);
  Status apply_added();
  Status read_normalizer(const object& document);
  Status read_pre_tokenizer(const object& document);
  Status read_pre_tokenizer_pair(const object& first, const object& second);
  Status read_decoder(const object& document);
  Status read_post_processor(const object& document);
  Status read_template(const object& processor);
  Status read_template_token(const object& processor, const object& item, std::vector<TokenId>& to);
  Status apply_config(const TokenizerConfig& config);

  VocabularySource source_;
  size_t max_tokens_ = 0;   // ordinary and added entries of the file
  std::vector<bool> seen_;  // ids that have a token
  std::vector<AddedToken> added_;
  bool has_unknown_token_ = false;
  TokenizerParts parts_;
};

Status JsonLoader::check_model_flags(const object& model) {
  if (const std::string_view type = string_field(model, "type"); !type.empty() && type != "BPE") {
    return unsupported(fmt::format("model type: expected BPE, found {}", base::quote_text(type)));
  }
  if (const auto dropout = field(model, "dropout")) {
    double value = 1;
    if (dropout->get(value) != simdjson::SUCCESS || value != 0) {
      return unsupported("BPE dropout is not supported");
    }
  }
  SPIN_ASSIGN_OR_RETURN(const bool byte_fallback, bool_field(model, "byte_fallback", false));
  if (byte_fallback) return unsupported("byte_fallback: only byte-level BPE is supported");
  for (const std::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const auto value = field(model, key);
    std::string_view text;
    if (value && (value->get(text) != simdjson::SUCCESS || !text.empty())) {
      return unsupported(fmt::format("\"{}\" is not supported", key));
    }
  }
  has_unknown_token_ = field(model, "unk_token").has_value();
  SPIN_ASSIGN_OR_RETURN(parts_.ignore_merges, bool_field(model, "ignore_merges", false));
  return ok_status();
}

Status JsonLoader::read_vocabulary(const object& model) {
  SPIN_ASSIGN_OR_RETURN(const object vocabulary, object_of(field(model, "vocab"), "vocab"));
  // Ids have no gaps, so none is as large as the number of entries.
  max_tokens_ = std::min(vocabulary.size() + added_.size(), kMaxVocabulary);
  for (const auto& [text, value] : vocabulary) {
    uint64_t id = 0;
    if (value.get(id) != simdjson::SUCCESS || id >= max_tokens_) {
      return corrupt(fmt::format("vocab: expected token ids below {} without a gap", max_tokens_));
    }
    if (id >= seen_.size()) {
      source_.tokens.resize(id + 1);
      seen_.resize(id + 1, false);
    }
    if (seen_[id]) return corrupt(fmt::format("vocab: token id {} appears twice", id));
    seen_[id] = true;
    source_.tokens[id] = text;
  }
  return ok_status();
}

Status JsonLoader::read_merges(const object& model) {
  const auto value = field(model, "merges");
  array merges;
  if (!value || value->get(merges) != simdjson::SUCCESS) {
    return corrupt("\"merges\": expected a list");
  }
  for (const element merge : merges) {
    std::string_view text;
    array pair;
    std::string_view left, right;
    if (merge.get(text) == simdjson::SUCCESS) {
      const size_t space = text.find(' ');
      if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) {
        return corrupt(fmt::format("merge {}: expected two tokens with one space between",
                                   source_.merges.size()));
      }
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else if (merge.get(pair) != simdjson::SUCCESS || pair.size() != 2 ||
               pair.at(0).get(left) != simdjson::SUCCESS ||
               pair.at(1).get(right) != simdjson::SUCCESS) {
      return corrupt(
          fmt::format("merge {}: expected a string or a pair of strings", source_.merges.size()));
    }
    source_.merges.emplace_back(left, right);
  }
  return ok_status();
}

Status JsonLoader::read_model(const object& document) {
  SPIN_ASSIGN_OR_RETURN(const object model, object_of(field(document, "model"), "model"));
  SPIN_RETURN_IF_ERROR(check_model_flags(model));
  SPIN_RETURN_IF_ERROR(read_vocabulary(model));
  return read_merges(model);
}

Status JsonLoader::read_added_entries(const object& document) {
  const auto value = field(document, "added_tokens");
  if (!value) return ok_status();
  array entries;
  if (value->get(entries) != simdjson::SUCCESS) return corrupt("\"added_tokens\": expected a list");
  for (const element entry : entries) {
    object token;
    uint64_t id = 0;
    const auto id_field = entry.get(token) == simdjson::SUCCESS ? field(token, "id") : std::nullopt;
    if (!id_field || id_field->get(id) != simdjson::SUCCESS || id >= kMaxVocabulary) {
      return corrupt(
          fmt::format("added_tokens: expected objects with an id below {}", kMaxVocabulary));
    }
    for (const std::string_view flag : {"single_word", "lstrip", "rstrip"}) {
      SPIN_ASSIGN_OR_RETURN(const bool set, bool_field(token, flag, false));
      if (set) return unsupported(fmt::format("added token {}: \"{}\" is not supported", id, flag));
    }
    AddedToken added;
    added.id = static_cast<TokenId>(id);
    added.content = std::string(string_field(token, "content"));
    SPIN_ASSIGN_OR_RETURN(added.special, bool_field(token, "special", false));
    SPIN_ASSIGN_OR_RETURN(added.normalized, bool_field(token, "normalized", !added.special));
    added_.push_back(std::move(added));
  }
  return ok_status();
}

// Puts the added tokens into the vocabulary, whose ids must then be 0, 1, 2, ... without a gap.
Status JsonLoader::apply_added() {
  for (const AddedToken& added : added_) {
    if (added.id >= max_tokens_) {
      return corrupt(fmt::format("added token {}: expected an id below {} without a gap", added.id,
                                 max_tokens_));
    }
    if (added.id >= seen_.size()) {
      parts_.tokens.resize(added.id + 1);
      parts_.ordinary.resize(added.id + 1, false);
      seen_.resize(added.id + 1, false);
    } else if (seen_[added.id] && added.id < source_.tokens.size() &&
               source_.tokens[added.id] != added.content) {
      return corrupt(
          fmt::format("added token {}: its content differs from the vocabulary's", added.id));
    }
    seen_[added.id] = true;
    SPIN_RETURN_IF_ERROR(add_added_token(added, parts_));
  }
  for (size_t id = 0; id < seen_.size(); ++id) {
    if (!seen_[id])
      return corrupt(fmt::format("vocab: expected ids without a gap, {} is missing", id));
  }
  return ok_status();
}

Status JsonLoader::read_normalizer(const object& document) {
  const auto value = field(document, "normalizer");
  if (!value) return ok_status();
  SPIN_ASSIGN_OR_RETURN(const object normalizer, object_of(value, "normalizer"));
  std::vector<object> steps = {normalizer};
  if (string_field(normalizer, "type") == "Sequence") {
    steps.clear();
    array list;
    const auto inner = field(normalizer, "normalizers");
    if (!inner || inner->get(list) != simdjson::SUCCESS) {
      return corrupt("\"normalizers\": expected a list");
    }
    for (const element step : list) {
      SPIN_ASSIGN_OR_RETURN(const object inner_step, object_of(step, "normalizers"));
      steps.push_back(inner_step);
    }
  }
  for (const object& step : steps) {
    const std::string_view type = string_field(step, "type");
    if (type != "NFC") {
      return unsupported(
          fmt::format("normalizer: expected none or NFC, found {}", base::quote_text(type)));
    }
    parts_.nfc = true;
  }
  return ok_status();
}

// A ByteLevel step that does nothing to the text but cut it (if `use_regex`).
Status check_byte_level(const object& step, bool& use_regex) {
  const std::string_view type = string_field(step, "type");
  if (type != "ByteLevel") {
    return unsupported(fmt::format("pre_tokenizer: expected ByteLevel as the last step, found {}",
                                   base::quote_text(type)));
  }
  SPIN_ASSIGN_OR_RETURN(const bool prefix_space, bool_field(step, "add_prefix_space", true));
  if (prefix_space) return unsupported("pre_tokenizer: add_prefix_space is not supported");
  SPIN_ASSIGN_OR_RETURN(use_regex, bool_field(step, "use_regex", true));
  return ok_status();
}

Status JsonLoader::read_pre_tokenizer_pair(const object& first, const object& second) {
  bool use_regex = false;
  SPIN_RETURN_IF_ERROR(check_byte_level(second, use_regex));
  const std::string_view type = string_field(first, "type");
  if (type == "Digits") {
    SPIN_ASSIGN_OR_RETURN(const bool individual, bool_field(first, "individual_digits", false));
    if (!individual || !use_regex) {
      return unsupported("pre_tokenizer: Digits needs individual_digits and ByteLevel's use_regex");
    }
    parts_.pre_tokenizer = PreTokenizer::kSmolLm;
    return ok_status();
  }
  if (type != "Split" || use_regex) {
    return unsupported(
        fmt::format("pre_tokenizer: expected Digits, or Split before ByteLevel without "
                    "use_regex, found {}",
                    base::quote_text(type)));
  }
  SPIN_ASSIGN_OR_RETURN(const object pattern, object_of(field(first, "pattern"), "pattern"));
  const std::string_view regex = string_field(pattern, "Regex");
  SPIN_ASSIGN_OR_RETURN(const bool invert, bool_field(first, "invert", false));
  const auto known = pretokenizer_by_regex(regex);
  if (!known || invert || string_field(first, "behavior") != "Isolated") {
    return unsupported(
        "pre_tokenizer: its Split is not one of the known expressions (GPT-2, Qwen2, "
        "Llama 3), isolated and not inverted");
  }
  parts_.pre_tokenizer = *known;
  return ok_status();
}

Status JsonLoader::read_pre_tokenizer(const object& document) {
  SPIN_ASSIGN_OR_RETURN(const object pre,
                        object_of(field(document, "pre_tokenizer"), "pre_tokenizer"));
  std::vector<object> steps = {pre};
  if (string_field(pre, "type") == "Sequence") {
    steps.clear();
    array list;
    const auto inner = field(pre, "pretokenizers");
    if (!inner || inner->get(list) != simdjson::SUCCESS) {
      return corrupt("\"pretokenizers\": expected a list");
    }
    for (const element step : list) {
      SPIN_ASSIGN_OR_RETURN(const object inner_step, object_of(step, "pretokenizers"));
      steps.push_back(inner_step);
    }
  }
  if (steps.size() == 2) return read_pre_tokenizer_pair(steps[0], steps[1]);
  if (steps.size() != 1) {
    return unsupported(
        fmt::format("pre_tokenizer: expected one or two steps, found {}", steps.size()));
  }
  bool use_regex = false;
  SPIN_RETURN_IF_ERROR(check_byte_level(steps[0], use_regex));
  if (!use_regex) return unsupported("pre_tokenizer: ByteLevel alone needs use_regex");
  parts_.pre_tokenizer = PreTokenizer::kGpt2;
  return ok_status();
}

Status JsonLoader::read_decoder(const object& document) {
  const auto value = field(document, "decoder");
  if (!value) return ok_status();
  SPIN_ASSIGN_OR_RETURN(const object decoder, object_of(value, "decoder"));
  const std::string_view type = string_field(decoder, "type");
  if (type != "ByteLevel") {
    return unsupported(
        fmt::format("decoder: expected ByteLevel, found {}", base::quote_text(type)));
  }
  return ok_status();
}

Status JsonLoader::read_template_token(const object& processor,
                                       const object& item,
                                       std::vector<TokenId>& to) {
  const std::string_view name = string_field(item, "id");
  SPIN_ASSIGN_OR_RETURN(const object table,
                        object_of(field(processor, "special_tokens"), "special_tokens"));
  SPIN_ASSIGN_OR_RETURN(const object entry, object_of(field(table, name), "special_tokens"));
  const auto value = field(entry, "ids");
  array ids;
  if (!value || value->get(ids) != simdjson::SUCCESS) return corrupt("\"ids\": expected a list");
  for (const element number : ids) {
    uint64_t id = 0;
    if (number.get(id) != simdjson::SUCCESS || id >= kMaxVocabulary) {
      return corrupt("post_processor: expected token ids");
    }
    to.push_back(static_cast<TokenId>(id));
  }
  return ok_status();
}

Status JsonLoader::read_template(const object& processor) {
  const auto value = field(processor, "single");
  array items;
  if (!value || value->get(items) != simdjson::SUCCESS) {
    return corrupt("post_processor: \"single\" is not a list");
  }
  bool text_seen = false;
  for (const element entry : items) {
    SPIN_ASSIGN_OR_RETURN(const object item, object_of(entry, "single"));
    object inner;
    if (const auto token = field(item, "SpecialToken");
        token && token->get(inner) == simdjson::SUCCESS) {
      SPIN_RETURN_IF_ERROR(
          read_template_token(processor, inner, text_seen ? parts_.suffix : parts_.prefix));
      continue;
    }
    const auto sequence = field(item, "Sequence");
    if (!sequence || sequence->get(inner) != simdjson::SUCCESS ||
        string_field(inner, "id") != "A" || text_seen) {
      return unsupported("post_processor: expected special tokens around one sequence A");
    }
    text_seen = true;
  }
  if (!text_seen) return unsupported("post_processor: expected a sequence A");
  return ok_status();
}

Status JsonLoader::read_post_processor(const object& document) {
  const auto value = field(document, "post_processor");
  if (!value) return ok_status();
  SPIN_ASSIGN_OR_RETURN(const object processor, object_of(value, "post_processor"));
  std::vector<object> steps = {processor};
  if (string_field(processor, "type") == "Sequence") {
    steps.clear();
    array list;
    const auto inner = field(processor, "processors");
    if (!inner || inner->get(list) != simdjson::SUCCESS) {
      return corrupt("\"processors\": expected a list");
    }
    for (const element step : list) {
      SPIN_ASSIGN_OR_RETURN(const object inner_step, object_of(step, "processors"));
      steps.push_back(inner_step);
    }
  }
  bool templated = false;
  for (const object& step : steps) {
    const std::string_view type = string_field(step, "type");
    if (type == "ByteLevel") continue;  // changes offsets only
    if (type != "TemplateProcessing" || templated) {
      return unsupported(
          fmt::format("post_processor: expected ByteLevel and at most one "
                      "TemplateProcessing, found {}",
                      base::quote_text(type)));
    }
    templated = true;
    SPIN_RETURN_IF_ERROR(read_template(step));
  }
  return ok_status();
}

Status JsonLoader::apply_config(const TokenizerConfig& config) {
  const auto id_of = [this](const std::string& text) -> std::optional<TokenId> {
    for (const AddedToken& added : parts_.added) {
      if (added.content == text) return added.id;
    }
    for (TokenId id = 0; id < source_.tokens.size(); ++id) {
      if (source_.tokens[id] == text) return id;
    }
    return std::nullopt;
  };
  if (config.bos_token) parts_.bos = id_of(*config.bos_token);
  if (config.eos_token) parts_.eos = id_of(*config.eos_token);
  if ((config.bos_token && !parts_.bos) || (config.eos_token && !parts_.eos)) {
    return Status(StatusCode::kCorrupt,
                  "tokenizer_config.json: its bos_token or eos_token is not in the vocabulary");
  }
  if (!parts_.bos && !parts_.prefix.empty()) parts_.bos = parts_.prefix.front();
  if (!parts_.eos && !parts_.suffix.empty()) parts_.eos = parts_.suffix.back();
  if (!config.add_bos_token) return ok_status();
  const bool has_bos = parts_.bos && !parts_.prefix.empty() && parts_.prefix.front() == *parts_.bos;
  if (*config.add_bos_token && !has_bos) {
    if (!parts_.bos) {
      return Status(StatusCode::kCorrupt,
                    "tokenizer_config.json: add_bos_token is set without a bos_token");
    }
    parts_.prefix.insert(parts_.prefix.begin(), *parts_.bos);
  } else if (!*config.add_bos_token && has_bos) {
    parts_.prefix.erase(parts_.prefix.begin());
  }
  return ok_status();
}

Result<std::unique_ptr<Tokenizer>> JsonLoader::load(const object& document,
                                                    const TokenizerConfig& config) {
  SPIN_RETURN_IF_ERROR(read_added_entries(document));
  SPIN_RETURN_IF_ERROR(read_model(document));
  SPIN_RETURN_IF_ERROR(read_normalizer(document));
  SPIN_RETURN_IF_ERROR(read_pre_tokenizer(document));
  SPIN_RETURN_IF_ERROR(read_decoder(document));
  SPIN_RETURN_IF_ERROR(read_post_processor(document));
  SPIN_RETURN_IF_ERROR(resolve_vocabulary(source_, parts_));
  SPIN_RETURN_IF_ERROR(apply_added());
  if (has_unknown_token_) {
    for (const TokenId id : parts_.byte_tokens) {
      if (id == kNoToken) return unsupported("unk_token needs a vocabulary with all 256 bytes");
    }
  }
  SPIN_RETURN_IF_ERROR(apply_config(config));
  return Tokenizer::create(std::move(parts_));
}

// A token given as text or as an object with "content".
std::optional<std::string> token_text(const object& document, std::string_view key) {
  const auto value = field(document, key);
  if (!value) return std::nullopt;
  std::string_view text;
  object wrapped;
  if (value->get(text) == simdjson::SUCCESS) return std::string(text);
  if (value->get(wrapped) != simdjson::SUCCESS) return std::nullopt;
  text = string_field(wrapped, "content");
  return text.empty() ? std::nullopt : std::optional<std::string>(text);
}

}  // namespace

Result<TokenizerConfig> parse_tokenizer_config(std::string_view json) {
  simdjson::dom::parser parser;
  object document;
  if (Status status = parse_document(parser, json, document); !status.ok()) {
    return Status(status.code(), "tokenizer_config.json: expected a JSON object");
  }
  TokenizerConfig config;
  config.bos_token = token_text(document, "bos_token");
  config.eos_token = token_text(document, "eos_token");
  if (field(document, "add_bos_token")) {
    SPIN_ASSIGN_OR_RETURN(config.add_bos_token, bool_field(document, "add_bos_token", false));
  }
  const auto chat = field(document, "chat_template");
  if (!chat) return config;
  std::string_view text;
  array named;
  if (chat->get(text) == simdjson::SUCCESS) {
    config.chat_template = std::string(text);
  } else if (chat->get(named) == simdjson::SUCCESS) {
    for (const element entry : named) {
      object item;
      if (entry.get(item) == simdjson::SUCCESS && string_field(item, "name") == "default") {
        config.chat_template = std::string(string_field(item, "template"));
      }
    }
  }
  return config;
}

Result<std::unique_ptr<Tokenizer>> load_tokenizer_json(std::string_view json,
                                                       const TokenizerConfig& config) {
  simdjson::dom::parser parser;
  object document;
  SPIN_RETURN_IF_ERROR(parse_document(parser, json, document));
  return JsonLoader().load(document, config);
}

}  // namespace spin::text
