// SPDX-License-Identifier: Apache-2.0
// Makes a Tokenizer from a checkpoint: Hugging Face's tokenizer.json or the metadata of a GGUF
// file. The one place where the engine and the command line open tokenizers.
//
// All bytes are untrusted. Whatever would change ids and is not known here (a pre-tokenizer, a
// normalizer, a flag of an added token) is refused with kUnsupported, never guessed.
// Thread: free functions, callable from any thread.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "spin/status.h"
#include "text/tokenizer.h"

namespace spin::io {
class GgufFile;
}

namespace spin::text {

// Largest tokenizer.json or tokenizer_config.json that is read.
inline constexpr size_t kMaxTokenizerFileBytes = 128u << 20;

// What tokenizer_config.json adds to tokenizer.json.
struct TokenizerConfig {
  std::optional<std::string> bos_token;  // text of an added token
  std::optional<std::string> eos_token;
  std::optional<bool> add_bos_token;  // overrides the post-processor when present
  std::optional<std::string> chat_template;
};

// Errors: kCorrupt for JSON that contradicts the format, kUnsupported for what Spin does not run.
Result<TokenizerConfig> parse_tokenizer_config(std::string_view json);

// Errors: as above.
Result<std::unique_ptr<Tokenizer>> load_tokenizer_json(std::string_view json,
                                                       const TokenizerConfig& config = {});

// Errors: as above; kNotFound if the file has no tokenizer.
Result<std::unique_ptr<Tokenizer>> load_tokenizer_gguf(const io::GgufFile& file);

struct TokenizerBundle {
  std::unique_ptr<Tokenizer> tokenizer;      // never null
  std::optional<std::string> chat_template;  // Jinja source, for detect_chat_format()
};

// `model_path`: a directory with tokenizer.json (and tokenizer_config.json, chat_template.jinja
// where present), or a .gguf file. A directory without tokenizer.json but with exactly one .gguf
// file uses that one.
// Errors: kNotFound, kIoError, and those of the loaders.
Result<TokenizerBundle> open_tokenizer(const std::filesystem::path& model_path);

}  // namespace spin::text
