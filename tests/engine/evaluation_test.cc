// SPDX-License-Identifier: Apache-2.0
// Teacher forcing and the evaluations on top of it, with a tiny model.
#include "spin/evaluation.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "backend/cpu/cpu_device.h"
#include "engine/teacher_forcing.h"
#include "model/load.h"
#include "sparse/registry.h"
#include "tests/support/test_data.h"
#include "text/tokenizer_loader.h"

namespace spin::engine {
namespace {

using spin::testing::TempDir;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr uint64_t kPrompt = 100;  // tokens
constexpr uint64_t kTotal = 112;

// Everything is selected, as ranges: the bits of dense attention.
constexpr const char* kFull = "quest:budget=100%,block=8,local=16,dense_layers=0";
constexpr const char* kSmall = "sketch:budget=16,local=16,offset=32,values=2";

std::string tiny() { return spin::testing::test_data("tiny/llama-linear").string(); }

std::vector<TokenId> some_tokens() {
  std::vector<TokenId> tokens;
  for (uint64_t i = 0; i < kTotal; ++i) tokens.push_back(static_cast<TokenId>(3 + i * 37 % 251));
  return tokens;
}

// The logits of every row, [setting][step].
using Logits = std::map<size_t, std::vector<std::vector<float>>>;

class Forcing : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = std::move(*backend::cpu::create_cpu_device({.threads = 2}));
    auto files = model::open_model(tiny());
    ASSERT_TRUE(files.ok());
    model::LoadOptions load;
    load.max_rows = 24;  // several steps of prefill
    load.weights.dtype = layout::DType::kF32;
    auto decoder = model::load_decoder(*files, *device_, load);
    ASSERT_TRUE(decoder.ok());
    const auto geometry = files->config.kv_geometry(8, layout::DType::kF32);
    auto forcing = TeacherForcing::create(*device_, std::move(*decoder), geometry);
    ASSERT_TRUE(forcing.ok());
    forcing_ = std::move(*forcing);
  }

  AlgorithmRef algorithm(const std::string& text) {
    sparse::AlgorithmContext context;
    context.device = device_.get();
    context.shape = forcing_->shape();
    auto made = sparse::create_algorithm(*sparse::parse_sparse_spec(text), context);
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    return std::move(*made);
  }

  Logits run(const std::vector<AlgorithmRef>& settings,
             double fast_fraction,
             std::vector<SettingUse>* uses = nullptr) {
    std::vector<SettingUse> own(settings.size());
    Logits logits;
    const std::vector<TokenId> tokens = some_tokens();
    const Status status = forcing_->run(
        tokens, kPrompt, settings, fast_fraction, own,
        [&](size_t setting, uint64_t step, std::span<const float> row) {
          EXPECT_EQ(logits[setting].size(), step);
          logits[setting].emplace_back(row.begin(), row.end());
        },
        nullptr);
    EXPECT_TRUE(status.ok()) << status.to_string();
    if (uses != nullptr) *uses = own;
    return logits;
  }

  // What the model says after the text.
  TokenId likeliest_after(const std::string& text) {
    auto bundle = text::open_tokenizer(tiny());
    EXPECT_TRUE(bundle.ok());
    std::vector<TokenId> tokens = *bundle->tokenizer->encode(text);
    tokens.push_back(0);
    TokenId found = 0;
    std::vector<SettingUse> none;
    const Status status = forcing_->run(
        tokens, tokens.size() - 1, {}, 1, none,
        [&](size_t, uint64_t, std::span<const float> row) {
          found = static_cast<TokenId>(std::max_element(row.begin(), row.end()) - row.begin());
        },
        nullptr);
    EXPECT_TRUE(status.ok());
    return found;
  }

  std::unique_ptr<backend::Device> device_;
  std::unique_ptr<TeacherForcing> forcing_;
};

TEST_F(Forcing, EverySettingGetsALogitRowForEveryStepAndAFullBudgetIsDenseBitForBit) {
  std::vector<SettingUse> uses;
  const Logits logits = run({algorithm(kFull), algorithm(kSmall), algorithm(kFull)}, 0.1, &uses);
  ASSERT_EQ(logits.size(), 4u);
  for (const auto& [setting, rows] : logits) EXPECT_EQ(rows.size(), kTotal - kPrompt) << setting;
  EXPECT_EQ(logits.at(1), logits.at(0));
  EXPECT_EQ(logits.at(3), logits.at(0));
  EXPECT_NE(logits.at(2), logits.at(0));
  const double steps = kTotal - kPrompt;
  // The mean context of the steps: each has all tokens up to its own.
  EXPECT_DOUBLE_EQ(uses[0].attended_per_head(), kPrompt + (steps - 1) / 2);
  EXPECT_LT(uses[1].attended_per_head(), 8 + 16 + 16 + 8);
  EXPECT_EQ(uses[1].steps, kTotal - kPrompt);
  EXPECT_EQ(uses[1].selections, (kTotal - kPrompt) * 3 * 2);  // layers, KV heads
}

TEST_F(Forcing, TheLastPromptTokenIsDecodedLikeTheAnswer) {
  // Dense rows are those of one pass over all tokens.
  const Logits logits = run({}, 1);
  const std::vector<TokenId> tokens = some_tokens();
  std::vector<SettingUse> none;
  std::vector<std::vector<float>> longer;
  const Status status = forcing_->run(
      tokens, kPrompt - 5, {}, 1, none,
      [&](size_t, uint64_t, std::span<const float> row) {
        longer.emplace_back(row.begin(), row.end());
      },
      nullptr);
  ASSERT_TRUE(status.ok());
  ASSERT_EQ(longer.size(), kTotal - kPrompt + 5);
  longer.erase(longer.begin(), longer.begin() + 5);
  EXPECT_EQ(logits.at(0), longer);
}

TEST_F(Forcing, FastMemoryChangesWhatIsFetchedAndNothingElse) {
  std::vector<SettingUse> little;
  std::vector<SettingUse> resident;
  const std::vector<AlgorithmRef> settings = {
      algorithm(kSmall), algorithm("sketch:budget=8,bits=1,local=8,offset=16")};
  EXPECT_EQ(run(settings, 0, &little), run(settings, 1, &resident));
  for (size_t i = 0; i < settings.size(); ++i) {
    EXPECT_GT(little[i].misses, 0u);
    EXPECT_GT(little[i].fetched_bytes, 0u);
    EXPECT_EQ(little[i].leased_pages, little[i].mandatory_pages);
    EXPECT_LT(little[i].fast_share, 0.6);
    EXPECT_EQ(resident[i].misses, 0u);
    EXPECT_EQ(resident[i].fetched_bytes, 0u);
    EXPECT_DOUBLE_EQ(resident[i].fast_share, 1);
    EXPECT_EQ(little[i].attended_tokens, resident[i].attended_tokens);
  }
}

TEST_F(Forcing, AlgorithmsThatWriteIntoThePromptDoNotHarmOthers) {
  const Logits alone = run({algorithm(kSmall)}, 0.1);
  const Logits together =
      run({algorithm("shadowkv-svd:rank=8,budget=16,local=16,outliers=0"), algorithm(kSmall)}, 0.1);
  EXPECT_EQ(together.at(0), alone.at(0));
  EXPECT_EQ(together.at(2), alone.at(1));
}

TEST_F(Forcing, SettingsOfOneAlgorithmGetInOneBatchWhatTheyGetAlone) {
  const std::string zones = ",cluster=4,update=8";
  const std::vector<AlgorithmRef> settings = {
      algorithm("retroinfer:budget=8" + zones), algorithm("retroinfer:budget=32" + zones),
      algorithm(kSmall), algorithm("retroinfer:budget=8,estimate=0" + zones),
      algorithm("retroinfer:budget=8,cluster=8,update=8")};
  for (const double fast : {0.1, 1.0}) {
    const Logits together = run(settings, fast);
    for (size_t i = 0; i < settings.size(); ++i) {
      EXPECT_EQ(together.at(i + 1), run({settings[i]}, fast).at(1)) << i << " of " << fast;
      EXPECT_NE(together.at(i + 1), together.at(0)) << i;
    }
  }
}

TEST_F(Forcing, PromptsBelowAnAlgorithmsMinimumAreDenseAndCountedAsSuch) {
  std::vector<SettingUse> uses;
  const Logits logits = run({algorithm("sketch:budget=100")}, 0.1, &uses);
  EXPECT_EQ(logits.at(1), logits.at(0));
  EXPECT_EQ(uses[0].prompts, 1u);
  EXPECT_EQ(uses[0].dense_prompts, 1u);
  EXPECT_EQ(uses[0].steps, 0u);
  EXPECT_EQ(uses[0].attended_per_head(), 0);
}

// The public functions.

EvaluationOptions options_with(std::vector<std::string> sparse) {
  EvaluationOptions options;
  options.model = tiny();
  options.dtype = DTypeChoice::kFloat32;
  options.sparse = std::move(sparse);
  return options;
}

std::string prompt_text() {
  std::string text;
  for (int i = 0; text.size() < 90; ++i) text += std::to_string(i * i % 97) + " ";
  return text;
}

nlohmann::json record(const std::string& task, TokenId answer) {
  return {{"task", task}, {"prompt", prompt_text()}, {"answer_ids", {answer}}, {"answer", "?"}};
}

TEST_F(Forcing, RulerCountsExactAnswersPerTaskAndSetting) {
  const TempDir dir;
  const TokenId right = likeliest_after(prompt_text());
  const TokenId wrong = right == 5 ? 6 : 5;
  std::string lines = record("a", right).dump() + "\n\n" + record("b", wrong).dump() + "\n";
  lines += record("a", right).dump() + "\n" + record("a", wrong).dump();
  RulerQuestion question;
  question.data = dir.write("some.jsonl", lines).string();
  double last = -1;
  const auto report = evaluate_ruler(options_with({kFull, "dense", kSmall}), question,
                                     [&](double fraction, std::string_view part) {
                                       if (part.find("Prompt") == 0) {
                                         EXPECT_GE(fraction, last);
                                         last = fraction;
                                       }
                                       return true;
                                     });
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_DOUBLE_EQ(last, 1);
  EXPECT_EQ(report->prompts, 4u);
  ASSERT_EQ(report->settings.size(), 3u);  // dense is always there
  EXPECT_EQ(report->settings[0].sparse, "dense");
  EXPECT_THAT(report->settings[1].sparse, StartsWith("quest:budget="));
  for (const size_t i : {0, 1}) {
    const RulerSetting& setting = report->settings[i];
    ASSERT_EQ(setting.tasks.size(), 2u);
    EXPECT_EQ(setting.tasks[0].task, "a");
    EXPECT_EQ(setting.tasks[0].exact, 2u);
    EXPECT_EQ(setting.tasks[0].prompts, 3u);
    EXPECT_EQ(setting.tasks[1].exact, 0u);
    EXPECT_EQ(setting.exact, 2u);
    EXPECT_DOUBLE_EQ(setting.token_accuracy, 0.5);
  }
  EXPECT_EQ(report->settings[1].use.prompts, 4u);
  question.limit_per_task = 1;
  const auto limited = evaluate_ruler(options_with({}), question);
  ASSERT_TRUE(limited.ok());
  EXPECT_EQ(limited->prompts, 2u);
}

TEST(Evaluation, AnAnswerWithoutIdsIsTokenised) {
  const TempDir dir;
  nlohmann::json one = record("a", 0);
  one.erase("answer_ids");
  one["answer"] = "some more text";
  RulerQuestion question;
  question.data = dir.write("p.jsonl", one.dump()).string();
  const auto report = evaluate_ruler(options_with({}), question);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report->prompts, 1u);
}

TEST(Evaluation, BadPromptsAreRefusedWithTheirLine) {
  const TempDir dir;
  nlohmann::json no_task = record("a", 1);
  no_task.erase("task");
  nlohmann::json far = record("a", 1);
  far["answer_ids"] = {320};
  nlohmann::json negative = record("a", 1);
  negative["answer_ids"] = {-1};
  nlohmann::json empty = record("a", 1);
  empty["answer_ids"] = nlohmann::json::array();
  nlohmann::json longer = record("a", 1);
  longer["prompt"] = prompt_text() + prompt_text() + prompt_text();
  const std::pair<std::string, std::string> cases[] = {
      {"{\"task\": ", "line 2"},
      {"[1]", "object"},
      {no_task.dump(), "\"task\""},
      {far.dump(), "answer_ids"},
      {negative.dump(), "answer_ids"},
      {empty.dump(), "an answer"},
      {longer.dump(), "more than the model's 128"}};
  for (const auto& [line, words] : cases) {
    RulerQuestion question;
    question.data = dir.write("bad.jsonl", record("a", 1).dump() + "\n" + line + "\n").string();
    const auto report = evaluate_ruler(options_with({}), question);
    ASSERT_FALSE(report.ok()) << line;
    EXPECT_EQ(report.status().param(), "data");
    EXPECT_THAT(report.status().message(), HasSubstr("line 2"));
    EXPECT_THAT(report.status().message(), HasSubstr(words));
  }
  RulerQuestion question;
  question.data = dir.write("none.jsonl", "\n\n").string();
  EXPECT_EQ(evaluate_ruler(options_with({}), question).status().code(),
            StatusCode::kInvalidArgument);
  question.data = (dir.path() / "missing").string();
  EXPECT_EQ(evaluate_ruler(options_with({}), question).status().code(), StatusCode::kNotFound);
}

TEST(Evaluation, SettingsThatDoNotExistAreRefused) {
  RulerQuestion question;
  question.data = "unread";
  for (const char* spec : {"nothing", "sketch:bits=7", "sketch:budget=1,budget=2", "dense:x=1"}) {
    const auto report = evaluate_ruler(options_with({spec}), question);
    ASSERT_FALSE(report.ok()) << spec;
    EXPECT_EQ(report.status().code(), StatusCode::kInvalidArgument) << spec;
    EXPECT_EQ(report.status().param(), "sparse") << spec;
  }
}

TEST(Evaluation, TextWithAFullBudgetAgreesWithDenseAttentionCompletely) {
  const TempDir dir;
  TextQuestion question;
  question.text = dir.write("text", prompt_text() + prompt_text() + prompt_text()).string();
  question.window_tokens = 100;
  question.positions = 20;
  question.windows = 5;
  const auto report = evaluate_text(options_with({kFull, kSmall}), question);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_GE(report->windows, 1u);
  EXPECT_LT(report->windows, 5u);  // as many as the text has
  EXPECT_EQ(report->positions, report->windows * 20);
  ASSERT_EQ(report->settings.size(), 3u);
  EXPECT_EQ(report->settings[0].divergence, 0);
  EXPECT_EQ(report->settings[0].agreement, 1);
  EXPECT_GT(report->settings[0].perplexity, 1);
  EXPECT_EQ(report->settings[1].divergence, 0);
  EXPECT_EQ(report->settings[1].agreement, 1);
  EXPECT_EQ(report->settings[1].perplexity, report->settings[0].perplexity);
  EXPECT_GT(report->settings[2].divergence, 0);
  EXPECT_EQ(report->settings[2].use.steps, report->positions);
}

TEST(Evaluation, WindowsThatCannotBeAreRefused) {
  const TempDir dir;
  TextQuestion question;
  question.text = dir.write("text", prompt_text()).string();
  const auto refused = [&](uint64_t window, uint64_t positions) {
    question.window_tokens = window;
    question.positions = positions;
    const auto report = evaluate_text(options_with({}), question);
    EXPECT_EQ(report.status().code(), StatusCode::kInvalidArgument) << window << " " << positions;
    return std::string(report.status().param());
  };
  EXPECT_EQ(refused(129, 5), "window_tokens");  // longer than the model allows
  EXPECT_EQ(refused(128, 5), "window_tokens");  // longer than the text
  EXPECT_EQ(refused(50, 49), "positions");
  EXPECT_EQ(refused(50, 0), "positions");
}

TEST(Evaluation, CanBeCancelled) {
  const TempDir dir;
  RulerQuestion question;
  question.data = dir.write("p.jsonl", record("a", 1).dump()).string();
  const auto report =
      evaluate_ruler(options_with({kSmall}), question,
                     [](double, std::string_view part) { return part.find("Prompt") != 0; });
  EXPECT_EQ(report.status().code(), StatusCode::kCancelled);
}

}  // namespace
}  // namespace spin::engine
