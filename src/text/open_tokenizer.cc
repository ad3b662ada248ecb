// SPDX-License-Identifier: Apache-2.0
// Finds the tokenizer of a model path.
#include <system_error>

#include <fmt/format.h>

#include "io/gguf.h"
#include "io/text_file.h"
#include "text/tokenizer_loader.h"

namespace spin::text {
namespace {

namespace fs = std::filesystem;

bool path_exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

Result<TokenizerBundle> open_gguf(const fs::path& path) {
  SPIN_ASSIGN_OR_RETURN(const std::unique_ptr<io::GgufFile> file,
                        io::GgufFile::open(path.string()));
  TokenizerBundle bundle;
  auto tokenizer = load_tokenizer_gguf(*file);
  if (!tokenizer.ok()) return tokenizer.status().with_context(path.filename().string());
  bundle.tokenizer = std::move(tokenizer).value();
  if (file->metadata().contains("tokenizer.chat_template")) {
    SPIN_ASSIGN_OR_RETURN(const std::string_view text,
                          file->metadata().get_string("tokenizer.chat_template"));
    bundle.chat_template = std::string(text);
  }
  return bundle;
}

Result<TokenizerBundle> open_folder(const fs::path& folder) {
  TokenizerConfig config;
  if (const fs::path path = folder / "tokenizer_config.json"; path_exists(path)) {
    SPIN_ASSIGN_OR_RETURN(const std::string json,
                          io::read_text_file(path.string(), kMaxTokenizerFileBytes));
    SPIN_ASSIGN_OR_RETURN(config, parse_tokenizer_config(json));
  }
  if (const fs::path path = folder / "chat_template.jinja"; path_exists(path)) {
    SPIN_ASSIGN_OR_RETURN(config.chat_template,
                          io::read_text_file(path.string(), kMaxTokenizerFileBytes));
  }
  SPIN_ASSIGN_OR_RETURN(
      const std::string json,
      io::read_text_file((folder / "tokenizer.json").string(), kMaxTokenizerFileBytes));
  TokenizerBundle bundle;
  SPIN_ASSIGN_OR_RETURN(bundle.tokenizer, load_tokenizer_json(json, config));
  bundle.chat_template = std::move(config.chat_template);
  return bundle;
}

// The only .gguf file of `folder`.
Result<fs::path> single_gguf(const fs::path& folder) {
  std::error_code error;
  std::optional<fs::path> found;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path().extension() != ".gguf") continue;
    if (found) {
      return Status(StatusCode::kNotFound,
                    "model folder: expected tokenizer.json or one .gguf file, found several");
    }
    found = entry->path();
  }
  if (error) return Status(StatusCode::kIoError, "model folder: " + error.message());
  if (!found) {
    return Status(StatusCode::kNotFound,
                  "model folder: expected tokenizer.json or one .gguf file, found neither");
  }
  return *found;
}

}  // namespace

Result<TokenizerBundle> open_tokenizer(const std::filesystem::path& model_path) {
  std::error_code ignored;
  if (!fs::is_directory(model_path, ignored)) {
    if (!path_exists(model_path)) {
      return Status(StatusCode::kNotFound,
                    fmt::format("model: {} does not exist", model_path.filename().string()));
    }
    // A safetensors file has its tokenizer beside it.
    if (model_path.extension() == ".safetensors") return open_folder(model_path.parent_path());
    return open_gguf(model_path);
  }
  if (path_exists(model_path / "tokenizer.json")) return open_folder(model_path);
  SPIN_ASSIGN_OR_RETURN(const fs::path file, single_gguf(model_path));
  return open_gguf(file);
}

}  // namespace spin::text
