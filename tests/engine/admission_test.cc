// SPDX-License-Identifier: Apache-2.0
// The limits of every field, and the numbers in refusals.
#include "engine/admission.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "engine/memory_budget.h"
#include "tests/engine/fake_support.h"
#include "tests/engine/recording_sink.h"

namespace spin::engine {
namespace {

using testing::RecordingSink;

RequestLimits limits() {
  RequestLimits made;
  made.vocab_size = 100;
  made.max_model_len = 64;
  made.memory = {1000, 20, 5000};
  made.kv_capacity_tokens = 8000;
  return made;
}

struct FieldCase {
  const char* field;
  std::function<void(SamplingParams&)> set;
  bool accepted;
};

TEST(Admission, EveryFieldHasItsRange) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto temperature = [](float x) { return [x](SamplingParams& p) { p.temperature = x; }; };
  const auto top_p = [](float x) { return [x](SamplingParams& p) { p.top_p = x; }; };
  const auto min_p = [](float x) { return [x](SamplingParams& p) { p.min_p = x; }; };
  const auto repetition = [](float x) {
    return [x](SamplingParams& p) { p.repetition_penalty = x; };
  };
  const auto presence = [](float x) { return [x](SamplingParams& p) { p.presence_penalty = x; }; };
  const auto frequency = [](float x) {
    return [x](SamplingParams& p) { p.frequency_penalty = x; };
  };
  const auto top_k = [](int64_t x) { return [x](SamplingParams& p) { p.top_k = x; }; };
  const auto n = [](uint32_t x) { return [x](SamplingParams& p) { p.n = x; }; };
  const auto logprobs = [](uint32_t x) { return [x](SamplingParams& p) { p.logprobs = x; }; };
  const auto prompt_logprobs = [](uint32_t x) {
    return [x](SamplingParams& p) { p.prompt_logprobs = x; };
  };
  const auto stops = [](size_t count, size_t bytes) {
    return [=](SamplingParams& p) { p.stop.assign(count, std::string(bytes, 'x')); };
  };
  const auto stop_ids = [](size_t count, TokenId id) {
    return [=](SamplingParams& p) { p.stop_token_ids.assign(count, id); };
  };
  const auto bias = [](size_t count, TokenId id, float x) {
    return [=](SamplingParams& p) { p.logit_bias.assign(count, {id, x}); };
  };
  const auto max_tokens = [](uint64_t x) { return [x](SamplingParams& p) { p.max_tokens = x; }; };
  const auto min_tokens = [](uint32_t low, uint64_t high) {
    return [=](SamplingParams& p) {
      p.min_tokens = low;
      p.max_tokens = high;
    };
  };
  const std::vector<FieldCase> cases = {
      {"temperature", temperature(0), true},
      {"temperature", temperature(-0.0f), true},
      {"temperature", temperature(2), true},
      {"temperature", temperature(2.0001f), false},
      {"temperature", temperature(-0.001f), false},
      {"temperature", temperature(nan), false},
      {"temperature", temperature(inf), false},
      {"top_p", top_p(1), true},
      {"top_p", top_p(1e-9f), true},
      {"top_p", top_p(0), false},
      {"top_p", top_p(1.0001f), false},
      {"top_p", top_p(nan), false},
      {"min_p", min_p(0), true},
      {"min_p", min_p(1), true},
      {"min_p", min_p(-0.1f), false},
      {"min_p", min_p(1.1f), false},
      {"min_p", min_p(nan), false},
      {"repetition_penalty", repetition(0.01f), true},
      {"repetition_penalty", repetition(100), true},
      {"repetition_penalty", repetition(1e-38f), false},
      {"repetition_penalty", repetition(0), false},
      {"repetition_penalty", repetition(101), false},
      {"repetition_penalty", repetition(nan), false},
      {"presence_penalty", presence(-2), true},
      {"presence_penalty", presence(2), true},
      {"presence_penalty", presence(2.1f), false},
      {"presence_penalty", presence(-inf), false},
      {"frequency_penalty", frequency(-2), true},
      {"frequency_penalty", frequency(2), true},
      {"frequency_penalty", frequency(-2.1f), false},
      {"frequency_penalty", frequency(nan), false},
      {"top_k", top_k(-1), true},
      {"top_k", top_k(0), true},
      {"top_k", top_k(std::numeric_limits<int64_t>::max()), true},
      {"top_k", top_k(-2), false},
      {"top_k", top_k(std::numeric_limits<int64_t>::min()), false},
      {"n", n(1), true},
      {"n", n(128), true},
      {"n", n(0), false},
      {"n", n(129), false},
      {"n", n(std::numeric_limits<uint32_t>::max()), false},
      {"logprobs", logprobs(0), true},
      {"logprobs", logprobs(20), true},
      {"logprobs", logprobs(21), false},
      {"prompt_logprobs", prompt_logprobs(20), true},
      {"prompt_logprobs", prompt_logprobs(21), false},
      {"stop", stops(16, 1024), true},
      {"stop", stops(17, 1), false},
      {"stop", stops(1, 1025), false},
      {"stop", stops(1, 0), false},
      {"stop", [](SamplingParams& p) { p.stop.emplace_back(1, static_cast<char>(0xFF)); }, false},
      {"stop_token_ids", stop_ids(64, 99), true},
      {"stop_token_ids", stop_ids(65, 1), false},
      {"stop_token_ids", stop_ids(1, 100), false},
      {"logit_bias", bias(1024, 99, 100), true},
      {"logit_bias", bias(1, 0, -100), true},
      {"logit_bias", bias(1025, 1, 1), false},
      {"logit_bias", bias(1, 100, 1), false},
      {"logit_bias", bias(1, 191'222, -100), false},
      {"logit_bias", bias(1, 1, 100.5f), false},
      {"logit_bias", bias(1, 1, nan), false},
      {"max_tokens", max_tokens(1), true},
      {"max_tokens", max_tokens(0), false},
      {"min_tokens", min_tokens(5, 5), true},
      {"min_tokens", min_tokens(6, 5), false},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    SamplingParams params;
    cases[i].set(params);
    const Status status = check_sampling(params, limits());
    EXPECT_EQ(status.ok(), cases[i].accepted) << "case " << i << ": " << status.to_string();
    if (cases[i].accepted) continue;
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.param(), cases[i].field) << "case " << i;
  }
}

GenerateRequest of_length(uint64_t prompt, std::optional<uint64_t> max_tokens) {
  GenerateRequest request;
  request.prompt.assign(prompt, 1);
  request.sampling.max_tokens = max_tokens;
  return request;
}

TEST(Admission, LengthsAreExactAtTheLimit) {
  EXPECT_TRUE(check_request(of_length(60, 3), limits()).ok());
  EXPECT_TRUE(check_request(of_length(60, 4), limits()).ok());
  const Status over = check_request(of_length(60, 5), limits());
  EXPECT_EQ(over.param(), "max_tokens");
  for (const char* part : {"context_length_exceeded", "64", "60", "5", "at most 4"}) {
    EXPECT_NE(over.message().find(part), std::string::npos) << over.message();
  }
  EXPECT_EQ(check_request(of_length(60, std::numeric_limits<uint64_t>::max()), limits()).param(),
            "max_tokens");
  EXPECT_TRUE(check_request(of_length(63, std::nullopt), limits()).ok());
  for (const uint64_t prompt : {64, 65, 7648}) {
    const Status status = check_request(of_length(prompt, std::nullopt), limits());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.param(), "prompt");
    EXPECT_NE(status.message().find("context_length_exceeded"), std::string::npos);
    EXPECT_NE(status.message().find(std::to_string(prompt)), std::string::npos);
    EXPECT_EQ(status.message().find('-'), std::string::npos) << "a negative number";
  }
  GenerateRequest request = of_length(60, std::nullopt);
  request.sampling.min_tokens = 5;
  EXPECT_EQ(check_request(request, limits()).param(), "min_tokens");
}

TEST(Admission, PromptsAreCheckedForEmptinessAndIds) {
  EXPECT_EQ(check_request(of_length(0, 1), limits()).param(), "prompt");
  GenerateRequest request = of_length(3, 1);
  request.prompt[2] = 99;
  EXPECT_TRUE(check_request(request, limits()).ok());
  for (const TokenId id : {TokenId{100}, std::numeric_limits<TokenId>::max()}) {
    request.prompt[2] = id;
    EXPECT_EQ(check_request(request, limits()).param(), "prompt");
  }
}

TEST(Admission, WithoutChunksAPromptMustFitOneStep) {
  RequestLimits whole = limits();
  whole.max_prompt_tokens = 20;
  EXPECT_TRUE(check_request(of_length(20, 1), whole).ok());
  const Status status = check_request(of_length(21, 1), whole);
  EXPECT_EQ(status.param(), "prompt");
  EXPECT_NE(status.message().find("21 tokens"), std::string::npos);
  EXPECT_NE(status.message().find("at most 20"), std::string::npos);
}

TEST(Admission, TheDefaultOutputIsWhatTheModelLeaves) {
  RequestLimits some = limits();
  EXPECT_EQ(resolved_max_tokens(of_length(10, std::nullopt), some), 54u);
  EXPECT_EQ(resolved_max_tokens(of_length(10, 7), some), 7u);
  some.default_max_tokens = 20;
  EXPECT_EQ(resolved_max_tokens(of_length(10, std::nullopt), some), 20u);
  EXPECT_EQ(resolved_max_tokens(of_length(60, std::nullopt), some), 4u);
  GenerateRequest request = of_length(10, std::nullopt);
  request.sampling.min_tokens = 30;
  EXPECT_EQ(resolved_max_tokens(request, some), 30u);
}

TEST(Admission, WhatCanNeverHaveItsPagesIsRefusedWithTheNumbers) {
  EXPECT_TRUE(check_memory({1000, 20, 5000}, of_length(10, 5), limits()).ok());
  const std::vector<std::pair<MemoryNeed, std::vector<std::string>>> lacks = {
      {{1001, 0, 0}, {"1001 pages", "1000 (8000 tokens)"}},
      {{1000, 21, 0}, {"21 extents of host memory", "are 20 in all"}},
      {{1000, 20, 5001}, {"5001 bytes for summaries", "are 5000 in all"}},
  };
  for (const auto& [need, parts] : lacks) {
    const Status status = check_memory(need, of_length(10, 5), limits());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("10 tokens of prompt and 5 of output"), std::string::npos);
    for (const std::string& part : parts) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    }
  }
}

TEST(Admission, TheEngineRefusesAtTheLimitsAndGoesOn) {
  FakeModelOptions model;
  model.max_model_len = 64;
  const auto engine = testing::fake_engine(model);
  for (const auto& [prompt, output, accepted] : std::vector<std::tuple<uint64_t, uint64_t, bool>>{
           {40, 23, true}, {40, 24, true}, {40, 25, false}, {63, 1, true}, {64, 1, false}}) {
    auto sink = std::make_shared<RecordingSink>();
    const auto id = engine->submit(of_length(prompt, output), sink);
    EXPECT_EQ(id.ok(), accepted) << prompt << " + " << output;
    if (id.ok()) {
      EXPECT_TRUE(sink->wait().result.status.ok());
    } else {
      EXPECT_EQ(sink->now().ends, 0);
    }
  }
  testing::expect_clean(*engine);
  EXPECT_EQ(engine->stats().requests_refused, 2u);
}

TEST(EngineOptions, AreCheckedWithTheirNames) {
  const auto param = [](const std::function<void(EngineOptions&)>& set) {
    EngineOptions options;
    set(options);
    return check_engine_options(options).param();
  };
  EXPECT_EQ(param([](EngineOptions&) {}), "");
  EXPECT_EQ(param([](EngineOptions& o) { o.max_num_seqs = 0; }), "max_num_seqs");
  EXPECT_EQ(param([](EngineOptions& o) { o.max_num_seqs = 5000; }), "max_num_seqs");
  EXPECT_EQ(param([](EngineOptions& o) { o.max_num_batched_tokens = 63; }),
            "max_num_batched_tokens");
  EXPECT_EQ(param([](EngineOptions& o) { o.max_num_batched_tokens = 1 << 30; }),
            "max_num_batched_tokens");
  EXPECT_EQ(param([](EngineOptions& o) { o.page_tokens = 12; }), "page_tokens");
  EXPECT_EQ(param([](EngineOptions& o) { o.device = "gpu"; }), "device");
  EXPECT_EQ(param([](EngineOptions& o) { o.device = "cuda:1"; }), "");
  EXPECT_EQ(param([](EngineOptions& o) { o.generation_config.push_back('x'); }),
            "generation_config");
}

TEST(MemoryBudget, TakesWhatIsNeededOrItsShare) {
  BudgetQuestion question;
  question.geometry = {2, 3, 64, 8, layout::DType::kF32};  // a page: 4 KiB; 6 of them per column
  question.model_positions = 1000;
  question.memory_bytes = uint64_t{1} << 30;
  question.weight_bytes = uint64_t{100} << 20;
  question.reserve_bytes = uint64_t{24} << 20;
  EngineOptions options;
  options.max_num_seqs = 4;
  const auto enough = plan_kv_budget(question, options);
  ASSERT_TRUE(enough.ok());
  EXPECT_EQ(enough->capacity_tokens, 4u * 1000u);
  EXPECT_EQ(enough->pages, 4u * 125u * 6u);
  EXPECT_EQ(enough->bytes, enough->pages * 4096);
  EXPECT_EQ(enough->max_model_len, 1000u);
  question.model_positions = 1'000'000;
  const auto share = plan_kv_budget(question, options);
  ASSERT_TRUE(share.ok());
  EXPECT_LE(share->bytes, (uint64_t{900} << 20) * 6 / 10);
  EXPECT_GT(share->bytes, (uint64_t{900} << 20) * 59 / 100);
  EXPECT_EQ(share->max_model_len, share->capacity_tokens);
  // Longer than the machine can hold, and said so.
  options.max_model_len = 500'000;
  const auto refused = plan_kv_budget(question, options);
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.status().param(), "max_model_len");
  for (const char* part : {"500000 tokens", "1464.8 MiB", "memory 1024.0 MiB", "weights 100.0 MiB",
                           "reserve 24.0 MiB"}) {
    EXPECT_NE(refused.status().message().find(part), std::string::npos)
        << refused.status().message();
  }
}

TEST(MemoryBudget, RefusesWhatCannotBe) {
  BudgetQuestion question;
  question.geometry = {2, 3, 64, 8, layout::DType::kF32};
  question.model_positions = 1000;
  question.memory_bytes = uint64_t{100} << 20;
  question.weight_bytes = uint64_t{90} << 20;
  question.reserve_bytes = uint64_t{20} << 20;
  EngineOptions options;
  const auto too_big = plan_kv_budget(question, options);
  EXPECT_EQ(too_big.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(too_big.status().message().find("need 90.0 MiB"), std::string::npos);
  question.reserve_bytes = 0;
  options.kv_cache_memory_bytes = uint64_t{10} << 20;
  EXPECT_TRUE(plan_kv_budget(question, options).ok());
  ++options.kv_cache_memory_bytes;
  EXPECT_EQ(plan_kv_budget(question, options).status().param(), "kv_cache_memory_bytes");
  options.kv_cache_memory_bytes = 4096;  // not one page for each head
  EXPECT_EQ(plan_kv_budget(question, options).status().code(), StatusCode::kResourceExhausted);
  options.kv_cache_memory_bytes = 0;
  options.max_model_len = 1;
  EXPECT_EQ(plan_kv_budget(question, options).status().param(), "max_model_len");
  options.max_model_len = 1001;
  EXPECT_EQ(plan_kv_budget(question, options).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace spin::engine
