// SPDX-License-Identifier: Apache-2.0
#include "sparse/sparse_spec.h"

#include <string>

#include <gtest/gtest.h>

namespace spin::sparse {
namespace {

SparseSpec parsed(std::string_view text) {
  auto spec = parse_sparse_spec(text);
  EXPECT_TRUE(spec.ok()) << text << ": " << spec.status().to_string();
  return spec.ok() ? *spec : SparseSpec{};
}

TEST(SparseSpec, NamesAndOptionsAreTakenApart) {
  EXPECT_EQ(parsed("dense").name, "dense");
  EXPECT_TRUE(parsed("dense").options.empty());
  const SparseSpec spec = parsed("shadowkv-svd:budget=1.56%,rank=160,weights=dir/a_b.c-d");
  EXPECT_EQ(spec.name, "shadowkv-svd");
  ASSERT_EQ(spec.options.size(), 3u);
  EXPECT_EQ(spec.options[0], (std::pair<std::string, std::string>("budget", "1.56%")));
  EXPECT_EQ(spec.options[1], (std::pair<std::string, std::string>("rank", "160")));
  EXPECT_EQ(spec.options[2], (std::pair<std::string, std::string>("weights", "dir/a_b.c-d")));
}

TEST(SparseSpec, AnythingElseIsRefused) {
  for (const char* text :
       {"", ":", ":a=1", "quest:", "quest:=1", "quest:a", "quest:a=", "quest:a=1,", "quest:,a=1",
        "quest:a=1,,b=2", "quest:a=1,a=2", "quest:a=1=2", "quest:a=1:b", "qu est", "quest:a=b c",
        "quest:a=\"1\"", "quest:a=\n", "\xff", "quest:\xc3\xa9=1"}) {
    const auto spec = parse_sparse_spec(text);
    ASSERT_FALSE(spec.ok()) << text;
    EXPECT_EQ(spec.status().code(), StatusCode::kInvalidArgument);
  }
  EXPECT_FALSE(parse_sparse_spec(std::string("a\0b", 3)).ok());
}

TEST(SparseSpec, LengthIsLimited) {
  const std::string longest = "q:a=" + std::string(kMaxSpecBytes - 4, '1');
  EXPECT_EQ(parsed(longest).options.front().second.size(), kMaxSpecBytes - 4);
  EXPECT_FALSE(parse_sparse_spec(longest + "1").ok());
}

TEST(TokenBudget, AShareIsRoundedDownButNeverToNothing) {
  EXPECT_EQ((TokenBudget{128, 0}.resolve(10)), 128u);
  EXPECT_EQ((TokenBudget{0, 0.0156}.resolve(131072)), 2044u);
  EXPECT_EQ((TokenBudget{0, 0.0156}.resolve(3)), 1u);
  EXPECT_EQ((TokenBudget{0, 1.0}.resolve(4097)), 4097u);
}

TEST(OptionReader, ReadsValuesAndReportsWhatWasUsed) {
  OptionReader options(parsed("x:budget=64,rate=0.25,mode=b,path=p/q"));
  EXPECT_EQ(options.integer("bits", 2, 1, 4), 2u);
  EXPECT_EQ(options.budget("budget", {0, 0.5}).tokens, 64u);
  EXPECT_EQ(options.budget("other", {0, 0.015}).share, 0.015);
  EXPECT_EQ(options.number("rate", 1, 0, 1), 0.25);
  constexpr std::string_view kModes[] = {"a", "b"};
  EXPECT_EQ(options.choice("mode", "a", kModes), "b");
  EXPECT_EQ(options.text("path", ""), "p/q");
  EXPECT_TRUE(options.finish().ok()) << options.finish().to_string();
  EXPECT_EQ(options.resolved(), "bits=2,budget=64,other=1.5%,rate=0.25,mode=b,path=p/q");
}

TEST(OptionReader, BudgetsAreTokensOrShares) {
  const auto budget_of = [](const std::string& value, TokenBudget& out) {
    OptionReader options(parsed("x:budget=" + value));
    out = options.budget("budget", {7, 0});
    return options.finish();
  };
  TokenBudget budget;
  EXPECT_TRUE(budget_of("1", budget).ok());
  EXPECT_EQ(budget.tokens, 1u);
  EXPECT_TRUE(budget_of("100%", budget).ok());
  EXPECT_EQ(budget.tokens, 0u);
  EXPECT_EQ(budget.share, 1.0);
  for (const char* wrong : {"0", "0%", "-1", "101%", "1e3", "nan%", "%", "4294967296", "1.5"}) {
    EXPECT_EQ(budget_of(wrong, budget).code(), StatusCode::kInvalidArgument) << wrong;
  }
}

TEST(OptionReader, ErrorsNameTheAlgorithmAndTheOption) {
  const auto message = [](std::string_view text) {
    OptionReader options(parsed(text));
    options.integer("bits", 2, 1, 4);
    options.number("rate", 0.5, 0, 1);
    constexpr std::string_view kModes[] = {"a", "b"};
    options.choice("mode", "a", kModes);
    const Status status = options.finish();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    return status.message();
  };
  EXPECT_EQ(message("x:bits=5"), "x: bits must be an integer from 1 to 4, found 5");
  EXPECT_EQ(message("x:bits=0,rate=9"), "x: bits must be an integer from 1 to 4, found 0");
  EXPECT_EQ(message("x:bits=two"), "x: bits must be an integer from 1 to 4, found two");
  EXPECT_EQ(message("x:rate=1.5"), "x: rate must be a number from 0 to 1, found 1.5");
  EXPECT_EQ(message("x:mode=c"), "x: mode must be one of a, b, found c");
  EXPECT_EQ(message("x:bit=2"), "x: there is no option bit");
}

}  // namespace
}  // namespace spin::sparse
