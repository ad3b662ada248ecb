// SPDX-License-Identifier: Apache-2.0
// Any bytes as tokenizer.json, or as a GGUF file if they begin like one. What loads must encode any
// text without a fault and decode any id.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "io/gguf.h"
#include "text/tokenizer.h"
#include "text/tokenizer_loader.h"

namespace {

spin::Result<std::unique_ptr<spin::text::Tokenizer>> load(std::string_view bytes) {
  if (!bytes.starts_with("GGUF")) return spin::text::load_tokenizer_json(bytes);
  auto file = spin::io::GgufFile::parse(
      spin::io::MappedFile::borrow(std::as_bytes(std::span(bytes)), "fuzz.gguf"));
  if (!file.ok()) return file.status();
  return spin::text::load_tokenizer_gguf(**file);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using spin::TokenId;
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  (void)spin::text::parse_tokenizer_config(json).ok();
  const auto loaded = load(json);
  if (!loaded.ok()) return 0;
  const spin::text::Tokenizer& tokenizer = **loaded;
  SPIN_CHECK(tokenizer.vocab_size() > 0);
  // The file's own front is text that fits its tokens.
  const std::string_view texts[] = {"Hello, it's 42\n\n \u00e9\u4f60e\u0301 <|im_end|>",
                                    json.substr(0, 4096)};
  for (const std::string_view text : texts) {
    for (const bool parse_special : {false, true}) {
      spin::text::EncodeOptions options;
      options.parse_special = parse_special;
      const auto ids = tokenizer.encode(text, options);
      if (!ids.ok()) continue;
      for (const TokenId id : *ids) SPIN_CHECK(tokenizer.contains(id));
      // A text comes back at most 3 times as long (NFC's bound), twice that where an added token
      // spells a byte character.
      options.add_special = false;
      const auto bare = tokenizer.encode(text, options);
      SPIN_CHECK(bare.ok());
      if (!parse_special) SPIN_CHECK(tokenizer.decode(*bare, false).size() <= 6 * text.size());
    }
  }
  for (const TokenId id : {0u, 1u, 255u, 4294967295u}) {
    const std::string_view bytes = tokenizer.token_bytes(id);
    SPIN_CHECK(bytes.size() <= spin::text::kMaxTokenBytes);
    if (!bytes.empty()) SPIN_CHECK(tokenizer.find(bytes).has_value());
  }
  return 0;
}
