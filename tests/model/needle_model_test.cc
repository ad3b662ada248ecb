// SPDX-License-Identifier: Apache-2.0
// models/needle-29m (Q8_0 GGUF): 13 prompts of 0.5K and 4K tokens, answers token by token. A wrong
// page, head or position loses the needle. Golden data: fp32 arithmetic on the dequantised Q8_0
// weights (vectors_q8_0.json) and on the bf16 weights it was made from (vectors.json).
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/model/harness.h"
#include "tests/support/test_data.h"

namespace spin::model {
namespace {

using testing::Runner;

std::vector<nlohmann::json> vectors(const char* name) {
  const auto file = nlohmann::json::parse(testing::read_file(testing::test_data(name)));
  auto items = file["items"].get<std::vector<nlohmann::json>>();
  EXPECT_EQ(items.size(), 13u);
  return items;
}

std::filesystem::path model_path() {
  return testing::source_path("models/needle-29m/needle-29m-q8_0.gguf");
}

void expect_top_logits(std::span<const float> logits, const nlohmann::json& item, float tolerance) {
  const auto top = item["first_pos_top5"].get<std::vector<std::pair<uint32_t, float>>>();
  ASSERT_EQ(top.size(), 5u);
  EXPECT_EQ(testing::argmax(logits), top.front().first);
  for (const auto& [id, logit] : top) EXPECT_NEAR(logits[id], logit, tolerance) << "token " << id;
}

void check_item(Runner& runner, const nlohmann::json& q8, const nlohmann::json& bf16) {
  SCOPED_TRACE(q8["task"].get<std::string>());
  const auto prompt = q8["prompt_ids"].get<std::vector<uint32_t>>();
  const auto answer = q8["answer_ids"].get<std::vector<uint32_t>>();
  ASSERT_EQ(bf16["prompt_ids"].get<std::vector<uint32_t>>(), prompt);
  ASSERT_EQ(bf16["answer_ids"].get<std::vector<uint32_t>>(), answer);
  runner.restart();
  const std::vector<float> logits = runner.feed(prompt, 512);
  // Logits of about 20, eight layers of sums of up to 1,536 terms in another order (2^-24 * 39 per
  // product, some 30 products), written with four decimals.
  expect_top_logits(logits, q8, 2e-3f);
  // The two golden files differ by up to 0.044: what Q8_0 does to the weights.
  expect_top_logits(logits, bf16, 0.05f);
  EXPECT_EQ(runner.greedy_from(logits, answer.size(), answer.back()), answer);
}

void check_items(size_t first, size_t end, uint64_t max_tokens) {
  Runner runner(testing::test_device(), model_path(), {.max_tokens = max_tokens, .max_rows = 512});
  const std::vector<nlohmann::json> q8 = vectors("needle/vectors_q8_0.json");
  const std::vector<nlohmann::json> bf16 = vectors("needle/vectors.json");
  for (size_t i = first; i < end; ++i) check_item(runner, q8[i], bf16[i]);
}

#if defined(SPIN_SANITIZED) || !defined(NDEBUG)
TEST(NeedleModel, AnswersAShortPromptExactly) { check_items(0, 1, 640); }
#else
TEST(NeedleModel, AnswersShortPromptsExactly) { check_items(0, 9, 640); }

TEST(NeedleModel, AnswersPromptsOf4KTokensExactly) { check_items(9, 13, 4352); }
#endif

}  // namespace
}  // namespace spin::model
