// SPDX-License-Identifier: Apache-2.0
// The evaluations of spin/evaluation.h: loading, reading prompts and texts, and what is made of the
// logits. The decoding itself is engine/teacher_forcing.h. Thread: one thread; blocks.
#include "spin/evaluation.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/memory_guard.h"
#include "engine/decoder_runner.h"
#include "engine/device_choice.h"
#include "engine/side_weights.h"
#include "engine/teacher_forcing.h"
#include "io/json.h"
#include "io/text_file.h"
#include "model/load.h"
#include "sparse/registry.h"
#include "spin/device_name.h"
#include "text/tokenizer_loader.h"

namespace spin {

double SettingUse::attended_per_head() const {
  const uint64_t lists = selections + dense_lists;
  return lists == 0 ? 0 : static_cast<double>(attended_tokens) / static_cast<double>(lists);
}

double SettingUse::hit_ratio() const {
  const uint64_t wanted = hits + misses;
  return wanted == 0 ? 1 : static_cast<double>(hits) / static_cast<double>(wanted);
}

namespace engine {
namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{4} << 30;

Status invalid(std::string message, std::string param) {
  return Status(StatusCode::kInvalidArgument, std::move(message), std::move(param));
}

layout::DType choose_dtype(DTypeChoice choice, const backend::Device& device) {
  if (choice == DTypeChoice::kFloat32) return layout::DType::kF32;
  if (choice == DTypeChoice::kBFloat16) return layout::DType::kBF16;
  return device.properties().fast_bf16 ? layout::DType::kBF16 : layout::DType::kF32;
}

// A model with its settings, ready to decode.
struct Subject {
  std::unique_ptr<backend::Device> device;
  std::unique_ptr<text::Tokenizer> tokenizer;
  std::unique_ptr<FileSideWeightSource> side_weights;
  std::unique_ptr<TeacherForcing> forcing;
  std::vector<AlgorithmRef> settings;
  std::vector<std::string> names;  // "dense", then those of the settings
  std::vector<SettingUse> uses;    // of the settings

  uint64_t max_tokens() const { return forcing->decoder().config().max_positions; }
  uint64_t vocab_size() const { return forcing->decoder().config().vocab_size; }
};

Status check_options(const EvaluationOptions& options) {
  SPIN_RETURN_IF_ERROR(parse_device_name(options.device).status());
  if (!(options.fast_fraction >= 0 && options.fast_fraction <= 1)) {
    return invalid("the share of fast memory must be from 0 to 1", "fast_fraction");
  }
  if (options.max_num_seqs == 0) {
    return invalid("at least one setting decodes at a time", "max_num_seqs");
  }
  for (const std::string& text : options.sparse) {
    auto spec = sparse::parse_sparse_spec(text);
    if (!spec.ok()) return invalid(spec.status().message(), "sparse");
  }
  return ok_status();
}

Status create_settings(const EvaluationOptions& options, Subject& subject) {
  sparse::AlgorithmContext context;
  context.device = subject.device.get();
  context.shape = subject.forcing->shape();
  context.side_weights = subject.side_weights.get();
  subject.names = {"dense"};
  for (const std::string& text : options.sparse) {
    SPIN_ASSIGN_OR_RETURN(const sparse::SparseSpec spec, sparse::parse_sparse_spec(text));
    if (spec.name == "dense" && spec.options.empty()) continue;  // always there
    auto made = sparse::create_algorithm(spec, context);
    if (!made.ok()) return Status(made.status().code(), made.status().message(), "sparse");
    subject.settings.push_back(std::move(*made));
    const std::string& all = subject.settings.back()->descriptor().settings;
    subject.names.push_back(all.empty() ? spec.name : spec.name + ":" + all);
  }
  subject.uses.resize(subject.settings.size());
  return ok_status();
}

Result<std::unique_ptr<Subject>> load(const EvaluationOptions& options,
                                      const EvaluationProgress& progress) {
  SPIN_RETURN_IF_ERROR(check_options(options));
  auto subject = std::make_unique<Subject>();
  SPIN_ASSIGN_OR_RETURN(subject->device, create_device(options.device, options.threads));
  SPIN_ASSIGN_OR_RETURN(const model::ModelFiles files, model::open_model(options.model));
  auto bundle =
      text::open_tokenizer(options.tokenizer.empty() ? files.path.tokenizer : options.tokenizer);
  if (!bundle.ok()) return bundle.status().with_context("tokenizer");
  subject->tokenizer = std::move(bundle->tokenizer);
  subject->side_weights = std::make_unique<FileSideWeightSource>(files.path.directory);
  model::LoadOptions load;
  load.max_rows = options.max_num_batched_tokens;
  load.weights.dtype = choose_dtype(options.dtype, *subject->device);
  load.weights.progress = [&progress](uint64_t done, uint64_t total) {
    return !progress ||
           progress(static_cast<double>(done) / static_cast<double>(std::max<uint64_t>(total, 1)),
                    "Loading weights");
  };
  SPIN_ASSIGN_OR_RETURN(auto decoder, model::load_decoder(files, *subject->device, load));
  const layout::KvGeometry geometry =
      files.config.kv_geometry(options.page_tokens, load.weights.dtype);
  SPIN_ASSIGN_OR_RETURN(
      subject->forcing,
      TeacherForcing::create(*subject->device, std::move(decoder), geometry, options.max_num_seqs));
  SPIN_RETURN_IF_ERROR(create_settings(options, *subject));
  return subject;
}

size_t likeliest(std::span<const float> logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// RULER-like prompts.

struct Prompt {
  std::string task;
  std::vector<TokenId> tokens;  // prompt and answer
  uint64_t prompt_tokens = 0;
};

Result<std::string> text_field(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) {
    return invalid(fmt::format("expected a string \"{}\"", key), "data");
  }
  return found->get<std::string>();
}

Result<std::vector<TokenId>> answer_tokens(const nlohmann::json& object, const Subject& subject) {
  const auto found = object.find("answer_ids");
  if (found == object.end()) {
    SPIN_ASSIGN_OR_RETURN(const std::string answer, text_field(object, "answer"));
    return subject.tokenizer->encode(answer, {.add_special = false});
  }
  std::vector<TokenId> ids;
  const bool good =
      found->is_array() && std::all_of(found->begin(), found->end(), [&](const nlohmann::json& id) {
        return id.is_number_unsigned() && id.get<uint64_t>() < subject.vocab_size();
      });
  if (!good) {
    return invalid("\"answer_ids\" must be ids of the model's vocabulary", "data");
  }
  for (const nlohmann::json& id : *found) ids.push_back(id.get<TokenId>());
  return ids;
}

Result<Prompt> parse_prompt(std::string_view line, const Subject& subject) {
  SPIN_ASSIGN_OR_RETURN(const nlohmann::json object, io::parse_json(line));
  if (!object.is_object()) return invalid("expected an object", "data");
  Prompt prompt;
  SPIN_ASSIGN_OR_RETURN(prompt.task, text_field(object, "task"));
  SPIN_ASSIGN_OR_RETURN(const std::string text, text_field(object, "prompt"));
  SPIN_ASSIGN_OR_RETURN(prompt.tokens, subject.tokenizer->encode(text));
  SPIN_ASSIGN_OR_RETURN(const std::vector<TokenId> answer, answer_tokens(object, subject));
  prompt.prompt_tokens = prompt.tokens.size();
  prompt.tokens.insert(prompt.tokens.end(), answer.begin(), answer.end());
  if (prompt.prompt_tokens < 2 || answer.empty()) {
    return invalid("a prompt needs two tokens and an answer one", "data");
  }
  if (prompt.tokens.size() > subject.max_tokens()) {
    return invalid(fmt::format("{} tokens of prompt and answer are more than the model's {}",
                               prompt.tokens.size(), subject.max_tokens()),
                   "data");
  }
  return prompt;
}

uint64_t& count_of(std::vector<TaskCount>& tasks, const std::string& task) {
  auto found = std::find_if(tasks.begin(), tasks.end(),
                            [&](const TaskCount& count) { return count.task == task; });
  if (found == tasks.end()) {
    tasks.push_back({task, 0, 0});
    found = tasks.end() - 1;
  }
  return found->prompts;
}

Result<std::vector<Prompt>> read_prompts(const RulerQuestion& question, const Subject& subject) {
  SPIN_ASSIGN_OR_RETURN(const std::string data, io::read_text_file(question.data, kMaxFileBytes));
  std::vector<Prompt> prompts;
  std::vector<TaskCount> seen;
  size_t number = 0;
  for (size_t begin = 0; begin < data.size();) {
    const size_t end = std::min(data.find('\n', begin), data.size());
    const std::string_view line(data.data() + begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    auto prompt = parse_prompt(line, subject);
    if (!prompt.ok()) {
      return Status(prompt.status().code(),
                    fmt::format("line {}: {}", number, prompt.status().message()), "data");
    }
    uint64_t& count = count_of(seen, prompt->task);
    if (question.limit_per_task != 0 && count >= question.limit_per_task) continue;
    ++count;
    prompts.push_back(std::move(*prompt));
  }
  if (prompts.empty()) return invalid("the file has no prompts", "data");
  return prompts;
}

// Passes progress on: `work` of `all` tokens lie before the prompt at hand.
ForcingProgress scaled(const EvaluationProgress& progress,
                       std::string part,
                       uint64_t before,
                       uint64_t share,
                       uint64_t all) {
  if (!progress) return nullptr;
  return [&progress, part = std::move(part), before, share, all](uint64_t done, uint64_t total) {
    const double inside = static_cast<double>(done) / static_cast<double>(total);
    return progress((static_cast<double>(before) + inside * static_cast<double>(share)) /
                        static_cast<double>(all),
                    part);
  };
}

void add_answer(const Prompt& prompt, uint64_t right, RulerSetting& setting) {
  const uint64_t length = prompt.tokens.size() - prompt.prompt_tokens;
  ++count_of(setting.tasks, prompt.task);
  const auto task = std::find_if(setting.tasks.begin(), setting.tasks.end(),
                                 [&](const TaskCount& count) { return count.task == prompt.task; });
  if (right == length) {
    ++task->exact;
    ++setting.exact;
  }
  setting.token_accuracy += static_cast<double>(right) / static_cast<double>(length);
}

Result<RulerReport> run_ruler(const EvaluationOptions& options,
                              const RulerQuestion& question,
                              const EvaluationProgress& progress) {
  SPIN_ASSIGN_OR_RETURN(const auto subject, load(options, progress));
  SPIN_ASSIGN_OR_RETURN(const std::vector<Prompt> prompts, read_prompts(question, *subject));
  RulerReport report;
  report.settings.resize(subject->names.size());
  for (size_t i = 0; i < report.settings.size(); ++i) report.settings[i].sparse = subject->names[i];
  uint64_t all = 0;
  for (const Prompt& prompt : prompts) all += prompt.tokens.size();
  uint64_t before = 0;
  for (const Prompt& prompt : prompts) {
    std::vector<uint64_t> right(report.settings.size(), 0);
    const LogitsSink sink = [&](size_t setting, uint64_t step, std::span<const float> logits) {
      right[setting] += likeliest(logits) == prompt.tokens[prompt.prompt_tokens + step] ? 1 : 0;
    };
    const std::string part = fmt::format("Prompt {} of {}", report.prompts + 1, prompts.size());
    SPIN_RETURN_IF_ERROR(subject->forcing->run(
        prompt.tokens, prompt.prompt_tokens, subject->settings, options.fast_fraction,
        subject->uses, sink, scaled(progress, part, before, prompt.tokens.size(), all)));
    for (size_t i = 0; i < right.size(); ++i) add_answer(prompt, right[i], report.settings[i]);
    ++report.prompts;
    report.prompt_tokens += prompt.prompt_tokens;
    before += prompt.tokens.size();
  }
  for (size_t i = 0; i < report.settings.size(); ++i) {
    report.settings[i].token_accuracy /= static_cast<double>(report.prompts);
    if (i > 0) report.settings[i].use = subject->uses[i - 1];
  }
  report.prefill_s = subject->forcing->times().prefill_s;
  report.decode_s = subject->forcing->times().decode_s;
  return report;
}

// Text.

// Natural logarithms of the probabilities.
std::vector<double> log_softmax(std::span<const float> logits) {
  const auto most = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - most);
  const double shift = most + std::log(sum);
  std::vector<double> out(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) out[i] = static_cast<double>(logits[i]) - shift;
  return out;
}

// Sums of one setting over positions.
struct TextSums {
  double surprise = 0;  // - ln p(token)
  double divergence = 0;
  uint64_t agreed = 0;
};

class TextJudge {
 public:
  TextJudge(std::span<const TokenId> predicted, std::vector<TextSums>& sums)
      : predicted_(predicted), sums_(sums), dense_(predicted.size()) {}

  void take(size_t setting, uint64_t step, std::span<const float> logits) {
    const std::vector<double> log_p = log_softmax(logits);
    TextSums& sums = sums_[setting];
    sums.surprise -= log_p[predicted_[step]];
    if (setting == 0) dense_[step].assign(logits.begin(), logits.end());
    const std::vector<double> dense = log_softmax(dense_[step]);
    for (size_t i = 0; i < dense.size(); ++i) {
      sums.divergence += std::exp(dense[i]) * (dense[i] - log_p[i]);
    }
    sums.agreed += likeliest(logits) == likeliest(dense_[step]) ? 1 : 0;
  }

 private:
  std::span<const TokenId> predicted_;
  std::vector<TextSums>& sums_;
  std::vector<std::vector<float>> dense_;  // logits by step
};

Status check_text(const TextQuestion& question, const Subject& subject) {
  if (question.positions == 0 || question.windows == 0) {
    return invalid("at least one window and one position", "positions");
  }
  if (question.window_tokens > subject.max_tokens()) {
    return invalid(fmt::format("windows of {} tokens are longer than the model's {}",
                               question.window_tokens, subject.max_tokens()),
                   "window_tokens");
  }
  if (question.window_tokens < question.positions + 2) {
    return invalid(fmt::format("a window of {} tokens has no room for {} positions behind two "
                               "tokens",
                               question.window_tokens, question.positions),
                   "positions");
  }
  return ok_status();
}

Result<TextReport> run_text(const EvaluationOptions& options,
                            const TextQuestion& question,
                            const EvaluationProgress& progress) {
  SPIN_ASSIGN_OR_RETURN(const auto subject, load(options, progress));
  SPIN_RETURN_IF_ERROR(check_text(question, *subject));
  SPIN_ASSIGN_OR_RETURN(const std::string text, io::read_text_file(question.text, kMaxFileBytes));
  SPIN_ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, subject->tokenizer->encode(text));
  TextReport report;
  report.windows = std::min(question.windows, tokens.size() / question.window_tokens);
  if (report.windows == 0) {
    return invalid(
        fmt::format("the text has {} tokens, a window {}", tokens.size(), question.window_tokens),
        "window_tokens");
  }
  std::vector<TextSums> sums(subject->names.size());
  for (uint64_t w = 0; w < report.windows; ++w) {
    const auto window =
        std::span(tokens).subspan(w * question.window_tokens, question.window_tokens);
    TextJudge judge(window.last(question.positions), sums);
    const LogitsSink sink = [&](size_t setting, uint64_t step, std::span<const float> logits) {
      judge.take(setting, step, logits);
    };
    const std::string part = fmt::format("Window {} of {}", w + 1, report.windows);
    SPIN_RETURN_IF_ERROR(subject->forcing->run(
        window, question.window_tokens - question.positions, subject->settings,
        options.fast_fraction, subject->uses, sink, scaled(progress, part, w, 1, report.windows)));
    report.positions += question.positions;
  }
  const auto count = static_cast<double>(report.positions);
  for (size_t i = 0; i < sums.size(); ++i) {
    TextSetting setting;
    setting.sparse = subject->names[i];
    setting.perplexity = std::exp(sums[i].surprise / count);
    setting.divergence = sums[i].divergence / count;
    setting.agreement = static_cast<double>(sums[i].agreed) / count;
    if (i > 0) setting.use = subject->uses[i - 1];
    report.settings.push_back(setting);
  }
  report.prefill_s = subject->forcing->times().prefill_s;
  report.decode_s = subject->forcing->times().decode_s;
  return report;
}

}  // namespace
}  // namespace engine

Result<RulerReport> evaluate_ruler(const EvaluationOptions& options,
                                   const RulerQuestion& question,
                                   const EvaluationProgress& progress) {
  return base::guard_memory("the evaluation",
                            [&] { return engine::run_ruler(options, question, progress); });
}

Result<TextReport> evaluate_text(const EvaluationOptions& options,
                                 const TextQuestion& question,
                                 const EvaluationProgress& progress) {
  return base::guard_memory("the evaluation",
                            [&] { return engine::run_text(options, question, progress); });
}

}  // namespace spin
