// SPDX-License-Identifier: Apache-2.0
// models/needle-29m (Q8_0 GGUF) against fp32 arithmetic on its dequantised weights: the answers of
// tests/data/needle/vectors_q8_0.json token by token. A wrong page, head or position loses the
// needle. The prompts of 4K tokens are in the slow group, which `make eval` runs.
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/model/harness.h"
#include "tests/support/test_data.h"

namespace spin::model {
namespace {

using testing::Runner;

std::vector<nlohmann::json> vectors() {
  const auto file =
      nlohmann::json::parse(testing::read_file(testing::test_data("needle/vectors_q8_0.json")));
  auto items = file["items"].get<std::vector<nlohmann::json>>();
  EXPECT_EQ(items.size(), 13u);
  return items;
}

std::filesystem::path model_path() {
  return testing::source_path("models/needle-29m/needle-29m-q8_0.gguf");
}

void check_item(Runner& runner, const nlohmann::json& item) {
  SCOPED_TRACE(item["task"].get<std::string>());
  const auto prompt = item["prompt_ids"].get<std::vector<uint32_t>>();
  const auto answer = item["answer_ids"].get<std::vector<uint32_t>>();
  runner.restart();
  const std::vector<float> logits = runner.feed(prompt, 512);
  for (const auto& [id, logit] : item["first_pos_top5"].get<std::vector<std::pair<int, float>>>()) {
    // Eight layers of sums of up to 1,536 terms in another order; the values have four decimals.
    EXPECT_NEAR(logits[static_cast<size_t>(id)], logit, 2e-3) << "token " << id;
  }
  EXPECT_EQ(runner.greedy(prompt, 512, answer.size(), answer.back()), answer);
}

class NeedleModel : public ::testing::Test {
 protected:
  static void run(size_t first, size_t end, uint64_t max_tokens) {
    Runner runner(testing::test_device(), model_path(),
                  {.max_tokens = max_tokens, .max_rows = 512});
    const std::vector<nlohmann::json> items = vectors();
    for (size_t i = first; i < end; ++i) check_item(runner, items[i]);
  }
};

#ifdef SPIN_SANITIZED
constexpr size_t kShortPrompts = 1;
#else
constexpr size_t kShortPrompts = 9;
#endif

TEST_F(NeedleModel, AnswersShortPromptsExactly) { run(0, kShortPrompts, 640); }

TEST_F(NeedleModel, AnswersPromptsOf4KTokensExactly) { run(9, 13, 4352); }

}  // namespace
}  // namespace spin::model
