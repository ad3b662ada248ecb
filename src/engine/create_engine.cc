// SPDX-License-Identifier: Apache-2.0
// From options to a running engine: device, checkpoint, tokenizer, memory plan, weights, threads.
// Everything that can be refused is refused before the weights are read.
#include "engine/create_engine.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/checked_math.h"
#include "base/memory_guard.h"
#include "engine/decoder_runner.h"
#include "engine/device_choice.h"
#include "engine/engine_impl.h"
#include "engine/layer_prefill.h"
#include "engine/memory_budget.h"
#include "engine/side_weights.h"
#include "kv/table_bytes.h"
#include "model/load.h"
#include "model/memory_plan.h"
#include "model/rope.h"
#include "sparse/sparse_sequence.h"
#include "spin/engine.h"
#include "text/tokenizer_loader.h"

namespace spin::engine {
namespace {

// The process beside weights, workspace, logits and KV: code, tokenizer, requests.
constexpr uint64_t kProcessReserveBytes = uint64_t{128} << 20;
// With a GPU: the driver's own memory, what weights pass through, and what cannot be pinned because
// the rest of the machine needs it.
constexpr uint64_t kGpuProcessReserveBytes = uint64_t{2} << 30;

layout::DType choose_dtype(DTypeChoice choice, const backend::Device& device) {
  switch (choice) {
    case DTypeChoice::kFloat32:
      return layout::DType::kF32;
    case DTypeChoice::kBFloat16:
      return layout::DType::kBF16;
    case DTypeChoice::kAuto:
      break;
  }
  return device.properties().fast_bf16 ? layout::DType::kBF16 : layout::DType::kF32;
}

std::string served_name(const EngineOptions& options) {
  if (!options.served_model_name.empty()) return options.served_model_name;
  std::filesystem::path path(options.model);
  if (path.filename().empty()) path = path.parent_path();  // "dir/"
  const std::string name = path.filename().string();
  return name.empty() ? options.model : name;
}

Result<text::TokenizerBundle> load_tokenizer(const EngineOptions& options,
                                             const model::ModelFiles& files) {
  auto bundle =
      text::open_tokenizer(options.tokenizer.empty() ? files.path.tokenizer : options.tokenizer);
  if (!bundle.ok()) return bundle.status().with_context("tokenizer");
  return bundle;
}

Status choose_chat_format(const EngineOptions& options,
                          const std::optional<std::string>& chat_template,
                          EngineParts& parts) {
  parts.chat_error = Status(StatusCode::kUnsupported,
                            "this model has no chat template that Spin knows; choose a format "
                            "with --chat-format");
  if (options.chat_format != "auto") {
    auto format = text::parse_chat_format(options.chat_format);
    if (!format.ok()) {
      return Status(StatusCode::kInvalidArgument, format.status().message(), "chat_format");
    }
    parts.chat_format = *format;
  } else if (chat_template) {
    auto format = text::detect_chat_format(*chat_template);
    if (format.ok()) {
      parts.chat_format = *format;
    } else {
      parts.chat_error = format.status();
    }
  }
  parts.info.chat_format =
      parts.chat_format ? std::string(text::chat_format_name(*parts.chat_format)) : "none";
  return ok_status();
}

SamplingParams default_sampling(const model::GenerationConfig& generation) {
  SamplingParams params;
  if (generation.temperature) params.temperature = *generation.temperature;
  if (generation.top_k) params.top_k = *generation.top_k;
  if (generation.top_p) params.top_p = *generation.top_p;
  if (generation.min_p) params.min_p = *generation.min_p;
  if (generation.repetition_penalty) params.repetition_penalty = *generation.repetition_penalty;
  if (generation.do_sample == false) params.temperature = 0;
  return params;
}

std::vector<TokenId> all_end_ids(const model::ModelFiles& files, const text::Tokenizer& tokenizer) {
  std::vector<TokenId> ids(files.config.eos_ids.begin(), files.config.eos_ids.end());
  ids.insert(ids.end(), files.generation.eos_ids.begin(), files.generation.eos_ids.end());
  if (tokenizer.eos_id()) ids.push_back(*tokenizer.eos_id());
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

Status check_vocabulary(const model::ModelConfig& config, const text::Tokenizer& tokenizer) {
  if (tokenizer.vocab_size() <= config.vocab_size) return ok_status();
  return Status(StatusCode::kInvalidArgument,
                fmt::format("the tokenizer has {} tokens, but the model only {}: they do not "
                            "belong together",
                            tokenizer.vocab_size(), config.vocab_size),
                "tokenizer");
}

int64_t unix_now_s() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void fill_info(const EngineOptions& options,
               const model::ModelConfig& config,
               const KvBudget& budget,
               layout::DType dtype,
               EngineParts& parts) {
  ModelInfo& info = parts.info;
  info.name = served_name(options);
  info.architecture = model::architecture_name(config.architecture);
  info.dtype = layout::dtype_name(dtype);
  info.kv_dtype = info.dtype;
  info.device = parts.device->properties().name;
  info.parameters = model::parameter_count(config);
  // Rows of the matrix beyond the tokenizer's vocabulary are padding and never chosen.
  info.vocab_size = std::min<uint64_t>(config.vocab_size, parts.tokenizer->vocab_size());
  info.max_model_len = budget.max_model_len;
  info.kv_capacity_tokens = budget.capacity_tokens;
  info.kv_cache_bytes = budget.bytes;
  info.host_cache_bytes = budget.host_bytes;
  info.index_bytes = budget.index_bytes;
  if (budget.host_bytes > 0) {
    info.kv_buffer_ratio =
        options.kv_buffer_ratio ? fmt::format("{}", *options.kv_buffer_ratio) : "auto";
  }
  info.threads = parts.device->properties().threads;
  info.created_unix_s = unix_now_s();
}

uint32_t extent_pages(const EngineOptions& options, const model::ModelConfig& config) {
  const uint64_t length = options.max_model_len != 0 ? options.max_model_len : config.max_positions;
  return kv::extent_pages_for(base::ceil_div<uint64_t>(length, options.page_tokens));
}

// Most tokens of a sparse request, all of which may go through the staging buffer.
uint64_t sparse_tokens(const EngineOptions& options, const model::ModelConfig& config) {
  if (options.sparse.empty()) return 0;
  const uint64_t length = options.max_model_len != 0 ? options.max_model_len : config.max_positions;
  return std::min<uint64_t>(length, config.max_positions);
}

Result<KvBudget> plan_memory(const EngineOptions& options,
                             const model::ModelConfig& config,
                             layout::DType dtype,
                             uint64_t sparse_pages_per_head,
                             const backend::Device& device) {
  BudgetQuestion question;
  question.sparse_pages_per_head = sparse_pages_per_head;
  question.geometry = config.kv_geometry(options.page_tokens, dtype);
  question.extent_pages = extent_pages(options, config);
  question.model_positions = config.max_positions;
  const backend::DeviceProperties& properties = device.properties();
  question.unified_memory = properties.unified_memory;
  question.memory_bytes = properties.memory_bytes;
  question.host_memory_bytes = properties.host_memory_bytes;
  question.weight_bytes = model::weight_bytes(config, dtype);
  const uint64_t step_bytes =
      runner_bytes(config, options.max_num_batched_tokens, logit_rows_for(options));
  question.reserve_bytes =
      model::Decoder::workspace_bytes(config, options.max_num_batched_tokens) + step_bytes;
  question.host_reserve_bytes =
      step_bytes + (properties.unified_memory ? kProcessReserveBytes : kGpuProcessReserveBytes);
  if (!options.sparse.empty()) {
    question.reserve_bytes +=
        LayerPrefill::fast_bytes(config, question.geometry, sparse_tokens(options, config));
  }
  return plan_kv_budget(question, options);
}

// Everything about the algorithms that can be refused without the weights; most pages that a head
// of one sequence reserves under any of them.
Result<uint64_t> check_algorithms(const EngineOptions& options,
                                  const model::ModelConfig& config,
                                  layout::DType dtype,
                                  EngineParts& parts) {
  const model::RopeTable rope = model::make_rope_table(config.rope, config.head_dim, {});
  sparse::AlgorithmContext context;
  context.device = parts.device.get();
  context.shape.geometry = config.kv_geometry(options.page_tokens, dtype);
  context.shape.q_heads = config.q_heads;
  context.shape.rope = {.inv_freq = rope.inv_freq, .attention_factor = rope.attention_factor};
  context.side_weights = parts.side_weights.get();
  SPIN_ASSIGN_OR_RETURN(const auto set, AlgorithmSet::create(options.sparse, context));
  uint64_t pages = 0;
  for (const AlgorithmRef& algorithm : set->started()) {
    const kv::SequenceShape shape =
        sparse::sequence_shape(*algorithm, context.shape, sparse_tokens(options, config));
    pages = std::max(pages, shape.max_page_ids);
  }
  return pages;
}

Status create_algorithms(const EngineOptions& options,
                         const sparse::ModelShape& shape,
                         EngineParts& parts) {
  sparse::AlgorithmContext context;
  context.device = parts.device.get();
  context.shape = shape;
  context.side_weights = parts.side_weights.get();
  SPIN_ASSIGN_OR_RETURN(parts.algorithms, AlgorithmSet::create(options.sparse, context));
  parts.info.sparse = parts.algorithms->describe();
  return ok_status();
}

Result<std::unique_ptr<ModelRunner>> load_runner(const EngineOptions& options,
                                                 const model::ModelFiles& files,
                                                 const KvBudget& budget,
                                                 layout::DType dtype,
                                                 const LoadProgress& progress,
                                                 EngineParts& parts) {
  model::LoadOptions load;
  load.max_rows = options.max_num_batched_tokens;
  load.weights.dtype = dtype;
  if (progress) {
    load.weights.progress = [&progress](uint64_t done, uint64_t total) {
      return progress(static_cast<double>(done) / static_cast<double>(std::max<uint64_t>(total, 1)),
                      "weights");
    };
  }
  SPIN_ASSIGN_OR_RETURN(auto decoder, model::load_decoder(files, *parts.device, load));
  parts.info.weight_bytes = decoder->weights().size_bytes();
  DecoderRunnerOptions runner;
  runner.geometry = files.config.kv_geometry(options.page_tokens, dtype);
  runner.kv_pages = budget.pages;
  runner.max_logit_rows = logit_rows_for(options);
  if (!options.sparse.empty()) {
    SPIN_RETURN_IF_ERROR(create_algorithms(options, model_shape(*decoder, runner.geometry), parts));
    runner.sparse = true;
    runner.max_prompt_tokens = budget.max_model_len;
    runner.host_bytes = budget.host_bytes;
    runner.extent_pages = extent_pages(options, files.config);
    runner.index_bytes = budget.index_bytes;
    runner.buffer_ratio = options.kv_buffer_ratio;
    runner.selection_trace = options.selection_trace;
    runner.trace_settings = fmt::format("{}", fmt::join(parts.info.sparse, " "));
    parts.info.staging_bytes =
        LayerPrefill::fast_bytes(files.config, runner.geometry, budget.max_model_len);
  }
  return make_decoder_runner(*parts.device, std::move(decoder), runner);
}

Result<std::unique_ptr<Engine>> load_and_start(const EngineOptions& options,
                                               const EngineTuning& tuning,
                                               const LoadProgress& progress) {
  SPIN_RETURN_IF_ERROR(check_engine_options(options));
  EngineParts parts;
  parts.min_decoded_tokens = tuning.min_decoded_tokens;
  parts.options = options;
  SPIN_ASSIGN_OR_RETURN(parts.device, tuning.make_device
                                          ? tuning.make_device()
                                          : create_device(options.device, options.threads));
  SPIN_ASSIGN_OR_RETURN(const model::ModelFiles files, model::open_model(options.model));
  SPIN_ASSIGN_OR_RETURN(text::TokenizerBundle bundle, load_tokenizer(options, files));
  SPIN_RETURN_IF_ERROR(check_vocabulary(files.config, *bundle.tokenizer));
  parts.tokenizer = std::move(bundle.tokenizer);
  SPIN_RETURN_IF_ERROR(choose_chat_format(options, bundle.chat_template, parts));

  const layout::DType dtype = choose_dtype(options.dtype, *parts.device);
  parts.side_weights = std::make_unique<FileSideWeightSource>(files.path.directory);
  SPIN_ASSIGN_OR_RETURN(const uint64_t sparse_pages,
                        check_algorithms(options, files.config, dtype, parts));
  SPIN_ASSIGN_OR_RETURN(const KvBudget budget,
                        plan_memory(options, files.config, dtype, sparse_pages, *parts.device));
  fill_info(options, files.config, budget, dtype, parts);
  parts.end_ids = all_end_ids(files, *parts.tokenizer);
  if (options.generation_config == "auto") {
    parts.defaults = default_sampling(files.generation);
    parts.default_max_tokens = files.generation.max_new_tokens.value_or(0);
  }
  SPIN_ASSIGN_OR_RETURN(parts.runner, load_runner(options, files, budget, dtype, progress, parts));
  parts.own_clock = std::make_unique<base::SteadyClock>();
  parts.clock = parts.own_clock.get();
  return start_engine(std::move(parts));
}

}  // namespace

Result<std::unique_ptr<Engine>> create_tuned_engine(const EngineOptions& options,
                                                    const EngineTuning& tuning,
                                                    const LoadProgress& progress) {
  return base::guard_memory("loading the model",
                            [&] { return load_and_start(options, tuning, progress); });
}

}  // namespace spin::engine

namespace spin {

Result<std::unique_ptr<Engine>> create_engine(const EngineOptions& options,
                                              const LoadProgress& progress) {
  return engine::create_tuned_engine(options, {}, progress);
}

}  // namespace spin
