// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include "base/quote.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/statistics.h"
#include "cli/terminal.h"
#include "io/tensor_source.h"
#include "layout/dtype.h"
#include "model/load.h"
#include "model/memory_plan.h"
#include "model/model_config.h"
#include "text/chat_template.h"
#include "text/tokenizer_loader.h"

namespace spin::cli {
namespace {

using base::printable_text;
using Json = nlohmann::ordered_json;

std::string format_name(io::CheckpointKind kind) {
  return kind == io::CheckpointKind::kGguf               ? "GGUF"
         : kind == io::CheckpointKind::kSafetensorsIndex ? "safetensors, several files"
                                                         : "safetensors";
}

Json architecture_json(const model::ModelConfig& config) {
  Json out;
  out["architecture"] = model::architecture_name(config.architecture);
  out["layers"] = config.layers;
  out["hidden"] = config.hidden;
  out["intermediate"] = config.intermediate;
  out["query_heads"] = config.q_heads;
  out["kv_heads"] = config.kv_heads;
  out["head_dim"] = config.head_dim;
  out["vocab_size"] = config.vocab_size;
  out["max_positions"] = config.max_positions;
  out["rope_theta"] = config.rope.theta;
  out["rope_scaling"] = model::rope_scaling_name(config.rope.scaling);
  out["rope_factor"] = config.rope.factor;
  out["tied_embeddings"] = config.tie_embeddings;
  out["qkv_bias"] = config.qkv_bias;
  out["qk_norm"] = config.qk_norm;
  return out;
}

Json tensors_json(const io::TensorSource& source) {
  Json out = Json::array();
  for (const io::TensorInfo& info : source.tensors()) {
    out.push_back({{"name", printable_text(info.name)},
                   {"type", printable_text(info.type_name)},
                   {"shape", info.shape},
                   {"bytes", info.size_bytes}});
  }
  return out;
}

// Bytes in the file per element type.
std::map<std::string, std::pair<uint64_t, uint64_t>> type_totals(const io::TensorSource& source) {
  std::map<std::string, std::pair<uint64_t, uint64_t>> totals;
  for (const io::TensorInfo& info : source.tensors()) {
    auto& [count, bytes] = totals[printable_text(info.type_name)];
    ++count;
    bytes += info.size_bytes;
  }
  return totals;
}

Json tokenizer_json(const std::string& path) {
  Result<text::TokenizerBundle> bundle = text::open_tokenizer(std::filesystem::path(path));
  if (!bundle.ok()) {
    const std::string why = printable_text(bundle.status().message());
    spdlog::warn("no tokenizer: {}", why);
    return {{"error", why}};
  }
  const text::Tokenizer& tokenizer = *bundle->tokenizer;
  Json out;
  out["vocab_size"] = tokenizer.vocab_size();
  const auto token = [&tokenizer](std::optional<TokenId> id) -> Json {
    if (!id) return nullptr;
    return {{"id", *id}, {"text", printable_text(tokenizer.token_bytes(*id))}};
  };
  out["bos"] = token(tokenizer.bos_id());
  out["eos"] = token(tokenizer.eos_id());
  out["adds_bos"] = tokenizer.adds_bos();
  if (!bundle->chat_template) {
    out["chat_format"] = nullptr;
  } else {
    Result<text::ChatFormat> format = text::detect_chat_format(*bundle->chat_template);
    out["chat_format"] = format.ok() ? Json(text::chat_format_name(*format)) : Json("unknown");
  }
  return out;
}

std::vector<layout::DType> dtypes(DTypeChoice choice) {
  switch (choice) {
    case DTypeChoice::kFloat32:
      return {layout::DType::kF32};
    case DTypeChoice::kBFloat16:
      return {layout::DType::kBF16};
    case DTypeChoice::kAuto:
      break;
  }
  return {layout::DType::kF32, layout::DType::kBF16};
}

// One plan per type of the weights; the KV cache has the same type.
Json memory_json(const model::ModelConfig& config, const InspectOptions& options) {
  model::MemoryQuestion question;
  question.page_tokens = options.page_tokens;
  question.context_tokens = options.context != 0 ? options.context : config.max_positions;
  Json plans = Json::array();
  for (const layout::DType dtype : dtypes(options.dtype)) {
    question.dtype = dtype;
    question.kv_dtype = dtype;
    const model::MemoryPlan plan = model::plan_memory(config, question);
    plans.push_back({{"dtype", layout::dtype_name(dtype)},
                     {"context_tokens", question.context_tokens},
                     {"kv_bytes_per_token", plan.kv_bytes_per_token},
                     {"weight_bytes", plan.weight_bytes},
                     {"kv_bytes", plan.kv_bytes},
                     {"workspace_bytes", plan.workspace_bytes},
                     {"logit_bytes", plan.logit_bytes},
                     {"total_bytes", plan.total_bytes()}});
  }
  return plans;
}

Json report(const model::ModelFiles& files, const InspectOptions& options) {
  Json out;
  out["model"] = printable_text(options.model);
  out["format"] = format_name(files.path.kind);
  out.update(architecture_json(files.config));
  out["parameters"] = model::parameter_count(files.config);
  Json types = Json::object();
  for (const auto& [type, total] : type_totals(*files.source)) {
    types[type] = {{"tensors", total.first}, {"bytes", total.second}};
  }
  out["types"] = types;
  out["tokenizer"] =
      tokenizer_json(options.tokenizer.empty() ? files.path.tokenizer : options.tokenizer);
  out["memory"] = memory_json(files.config, options);
  if (options.tensors) out["tensors"] = tensors_json(*files.source);
  return out;
}

std::string tokenizer_text(const Json& tokenizer) {
  if (tokenizer.contains("error")) return tokenizer["error"].get<std::string>();
  const auto token = [&tokenizer](const char* name) {
    const Json& entry = tokenizer[name];
    if (entry.is_null()) return fmt::format("no {}", name);
    return fmt::format("{} {} {}", name, entry["id"].get<uint64_t>(),
                       base::quote_text(entry["text"].get<std::string>()));
  };
  const Json& chat = tokenizer["chat_format"];
  return fmt::format("{} tokens, {}, {}, {}, chat format {}",
                     tokenizer["vocab_size"].get<uint64_t>(), token("bos"), token("eos"),
                     tokenizer["adds_bos"].get<bool>() ? "adds bos" : "adds no bos",
                     chat.is_null() ? "none" : chat.get<std::string>());
}

std::string memory_text(const Json& plans) {
  const std::vector<std::pair<std::string, const char*>> rows = {
      {"KV per token", "kv_bytes_per_token"},
      {"weights", "weight_bytes"},
      {"KV cache", "kv_bytes"},
      {"one step", "workspace_bytes"},
      {"logits", "logit_bytes"},
      {"total", "total_bytes"}};
  std::string out = fmt::format("\nmemory for one sequence of {} tokens\n  {:14}",
                                plans[0]["context_tokens"].get<uint64_t>(), "");
  for (const Json& plan : plans) out += fmt::format("{:>14}", plan["dtype"].get<std::string>());
  out += "\n";
  for (const auto& [label, key] : rows) {
    out += fmt::format("  {:14}", label);
    for (const Json& plan : plans) {
      out += fmt::format("{:>14}", bytes_text(plan[key].get<uint64_t>()));
    }
    out += "\n";
  }
  return out;
}

std::string tensors_text(const Json& tensors) {
  std::string out = fmt::format("\ntensors: {}\n", tensors.size());
  for (const Json& tensor : tensors) {
    out +=
        fmt::format("  {:44} {:>6} {:>12} [{}]\n", tensor["name"].get<std::string>(),
                    tensor["type"].get<std::string>(), bytes_text(tensor["bytes"].get<uint64_t>()),
                    fmt::join(tensor["shape"].get<std::vector<uint64_t>>(), ", "));
  }
  return out;
}

std::string report_text(const Json& r) {
  std::string out;
  const auto line = [&out](std::string_view key, const std::string& value) {
    out += fmt::format("{:14} {}\n", key, value);
  };
  const auto number = [&r](const char* key) { return r[key].get<uint64_t>(); };
  line("model", r["model"].get<std::string>());
  line("format", r["format"].get<std::string>());
  line("architecture", fmt::format("{}, {} layers, hidden {}, intermediate {}{}",
                                   r["architecture"].get<std::string>(), number("layers"),
                                   number("hidden"), number("intermediate"),
                                   r["tied_embeddings"].get<bool>() ? ", tied embeddings" : ""));
  line("attention", fmt::format("{} query heads, {} KV heads of {}{}{}", number("query_heads"),
                                number("kv_heads"), number("head_dim"),
                                r["qk_norm"].get<bool>() ? ", q and k normed" : "",
                                r["qkv_bias"].get<bool>() ? ", q, k and v biased" : ""));
  line("rope", fmt::format("theta {}, scaling {}, factor {}", r["rope_theta"].get<double>(),
                           r["rope_scaling"].get<std::string>(), r["rope_factor"].get<double>()));
  line("context", fmt::format("{} tokens", number("max_positions")));
  line("vocabulary", fmt::format("{} tokens", number("vocab_size")));
  line("parameters", fmt::format("{}", number("parameters")));
  for (const auto& [type, total] : r["types"].items()) {
    line(fmt::format("stored {}", type),
         fmt::format("{} tensors, {}", total["tensors"].get<uint64_t>(),
                     bytes_text(total["bytes"].get<uint64_t>())));
  }
  line("tokenizer", tokenizer_text(r["tokenizer"]));
  out += memory_text(r["memory"]);
  if (r.contains("tensors")) out += tensors_text(r["tensors"]);
  return out;
}

int fail(const Status& status) {
  InspectOptions unused;
  print_error(describe(status, inspect_flags(unused)));
  return kExitFailure;
}

}  // namespace

int run_inspect(const InspectOptions& options) {
  Result<model::ModelFiles> files = model::open_model(options.model);
  if (!files.ok()) return fail(files.status());
  const Json r = report(*files, options);
  const Status written = write_all(
      STDOUT_FILENO,
      options.json ? r.dump(2, ' ', false, Json::error_handler_t::replace) + "\n" : report_text(r));
  return written.ok() ? kExitOk : fail(written.with_context("standard output"));
}

}  // namespace spin::cli
