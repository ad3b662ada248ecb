// SPDX-License-Identifier: Apache-2.0
#include "engine/fake_engine.h"

#include <algorithm>
#include <utility>

#include "engine/engine_impl.h"

namespace spin::engine {
namespace {

ModelInfo fake_info(const FakeModelOptions& model,
                    const EngineOptions& options,
                    const ModelRunner& runner) {
  ModelInfo info;
  info.name = options.served_model_name.empty() ? "fake" : options.served_model_name;
  info.architecture = "fake";
  info.dtype = info.kv_dtype = "float32";
  info.device = "none";
  info.chat_format = options.chat_format == "none" ? "none" : "chatml";
  info.vocab_size = kFakeVocabulary;
  info.max_model_len = options.max_model_len == 0 ? model.max_model_len : options.max_model_len;
  SequenceRequest one_page;
  one_page.max_tokens = options.page_tokens;
  info.kv_capacity_tokens =
      runner.pages_total() / runner.need(one_page).memory.pages * options.page_tokens;
  info.max_model_len = std::min(info.max_model_len, info.kv_capacity_tokens);
  info.threads = 1;
  info.created_unix_s = 1;
  return info;
}

}  // namespace

Result<std::unique_ptr<Engine>> create_fake_engine(const FakeModelOptions& model,
                                                   const EngineOptions& options,
                                                   const base::Clock* clock) {
  SPIN_RETURN_IF_ERROR(check_engine_options(options));
  EngineParts parts;
  parts.options = options;
  SPIN_ASSIGN_OR_RETURN(parts.tokenizer, make_fake_tokenizer());
  SPIN_ASSIGN_OR_RETURN(parts.runner, make_fake_runner(model, options, logit_rows_for(options)));
  parts.info = fake_info(model, options, *parts.runner);
  parts.end_ids = {kFakeEos, kFakeTurnEnd};
  if (options.chat_format == "none") {
    parts.chat_error = Status(StatusCode::kUnsupported,
                              "this model has no chat format; choose one with --chat-format");
  } else {
    parts.chat_format = text::ChatFormat::kChatMl;
  }
  parts.own_clock = std::make_unique<base::SteadyClock>();
  parts.clock = clock != nullptr ? clock : parts.own_clock.get();
  return start_engine(std::move(parts));
}

}  // namespace spin::engine
