// SPDX-License-Identifier: Apache-2.0
// config.json, generation_config.json and GGUF metadata: any bytes give a config inside its limits
// or an error.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "io/gguf.h"
#include "model/memory_plan.h"
#include "model/model_config.h"
#include "model/rope.h"

namespace {

void use(const spin::model::ModelConfig& config) {
  if (!spin::model::check_config(config).ok()) __builtin_trap();
  const auto table = spin::model::make_rope_table(config.rope, config.head_dim, {});
  if (table.inv_freq.size() * 2 != config.head_dim) __builtin_trap();
  for (float frequency : table.inv_freq) {
    if (!(frequency >= 0.0f && frequency <= 1.0f)) __builtin_trap();
  }
  if (spin::model::parameter_count(config) == 0) __builtin_trap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto config = spin::model::config_from_json(text); config.ok()) use(*config);
  (void)spin::model::generation_config_from_json(text).ok();
  auto file = spin::io::GgufFile::parse(
      spin::io::MappedFile::borrow(std::as_bytes(std::span(data, size)), "fuzz.gguf"));
  if (file.ok()) {
    const auto config = spin::model::config_from_gguf((*file)->metadata(), **file);
    if (config.ok()) use(*config);
  }
  return 0;
}
