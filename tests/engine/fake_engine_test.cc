// SPDX-License-Identifier: Apache-2.0
// Requests from submit() to their end on the fake model.
#include "engine/fake_engine.h"

#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/utf8.h"
#include "engine/admission.h"
#include "engine/engine_impl.h"
#include "tests/engine/fake_support.h"
#include "tests/engine/recording_sink.h"

namespace spin::engine {
namespace {

using testing::ChoiceOutput;
using testing::expect_clean;
using testing::fake_engine;
using testing::free_request;
using testing::kReducedCounts;
using testing::Outcome;
using testing::RecordingSink;
using testing::run_request;
using testing::say;

TEST(FakeEngine, SaysWhatItIsToldAndStopsAtTheEndToken) {
  const auto engine = fake_engine();
  const Outcome outcome = run_request(*engine, say("Hello \xF0\x9F\x98\x80!"));
  const ChoiceOutput& choice = outcome.choices.at(0);
  EXPECT_EQ(choice.text, "Hello \xF0\x9F\x98\x80!");
  EXPECT_EQ(choice.finish, FinishReason::kStop);
  EXPECT_EQ(choice.stop_string, std::nullopt);
  EXPECT_EQ(choice.stop_token, std::nullopt);
  EXPECT_EQ(choice.completion_tokens, 12u);  // 11 bytes and the end token
  EXPECT_EQ(choice.tokens.size(), 12u);
  EXPECT_EQ(outcome.result.usage.completion_tokens, 12u);
  EXPECT_EQ(outcome.result.usage.prompt_tokens, 13u);
  EXPECT_TRUE(outcome.result.status.ok());
  EXPECT_EQ(outcome.ends, 1);
  expect_clean(*engine);
}

void expect_same(const Outcome& a, const Outcome& b, uint64_t seed) {
  ASSERT_EQ(a.choices.size(), b.choices.size()) << seed;
  for (const auto& [index, left] : a.choices) {
    const ChoiceOutput& right = b.choices.at(index);
    EXPECT_EQ(left.text, right.text) << seed;
    EXPECT_EQ(left.tokens, right.tokens) << seed;
    EXPECT_EQ(left.finish, right.finish) << seed;
    EXPECT_EQ(left.stop_string, right.stop_string) << seed;
    EXPECT_EQ(left.stop_token, right.stop_token) << seed;
    EXPECT_EQ(left.completion_tokens, right.completion_tokens) << seed;
    EXPECT_EQ(left.finishes, 1) << seed;
    EXPECT_EQ(right.finishes, 1) << seed;
    ASSERT_EQ(left.logprobs.size(), right.logprobs.size()) << seed;
    for (size_t i = 0; i < left.logprobs.size(); ++i) {
      EXPECT_EQ(left.logprobs[i].id, right.logprobs[i].id);
      EXPECT_EQ(left.logprobs[i].logprob, right.logprobs[i].logprob);
      EXPECT_EQ(left.logprobs[i].bytes, right.logprobs[i].bytes);
      ASSERT_EQ(left.logprobs[i].top.size(), right.logprobs[i].top.size());
      for (size_t j = 0; j < left.logprobs[i].top.size(); ++j) {
        EXPECT_EQ(left.logprobs[i].top[j].id, right.logprobs[i].top[j].id);
        EXPECT_EQ(left.logprobs[i].top[j].logprob, right.logprobs[i].top[j].logprob);
      }
    }
  }
  EXPECT_EQ(a.result.usage.completion_tokens, b.result.usage.completion_tokens) << seed;
  EXPECT_EQ(a.result.usage.prompt_tokens, b.result.usage.prompt_tokens) << seed;
}

GenerateRequest varied_request(uint64_t seed) {
  GenerateRequest request = free_request(seed, 8 + seed % 33);
  SamplingParams& sampling = request.sampling;
  if (seed % 2 == 0) sampling.stop = {"stop", "et", "\nUser", "\xF0\x9F\x98\x80", "\xEF\xBF\xBD"};
  if (seed % 3 == 0) sampling.logprobs = seed % 5;
  if (seed % 5 == 0) sampling.n = 1 + seed % 3;
  if (seed % 7 == 0) sampling.min_tokens = 4;
  if (seed % 11 == 0) sampling.stop_token_ids = {'e', 'a'};
  if (seed % 13 == 0) sampling.include_stop_str_in_output = true;
  if (seed % 17 == 0) sampling.skip_special_tokens = false;
  if (seed % 19 == 0) sampling.repetition_penalty = 1.2f;
  if (seed % 4 == 0) sampling.top_p = 0.9f;
  if (seed % 6 == 0) sampling.top_k = 20;
  return request;
}

// The text that a naive reader makes of all tokens.
std::string naive_text(const GenerateRequest& request,
                       const ChoiceOutput& choice,
                       const Engine& engine) {
  std::vector<TokenId> ids = choice.tokens;
  const SamplingParams& sampling = request.sampling;
  const bool ended_by_id = choice.finish == FinishReason::kStop && !choice.stop_string;
  if (ended_by_id && !sampling.include_stop_str_in_output) ids.pop_back();
  std::string text = *engine.detokenize(ids, sampling.skip_special_tokens);
  if (choice.stop_string) {
    // The first stop to end after the text of min_tokens tokens.
    size_t end = std::string::npos;
    size_t begin = 0;
    for (const std::string& stop : sampling.stop) {
      const size_t at = text.find(stop);
      if (at == std::string::npos || at + stop.size() > end) continue;
      if (at + stop.size() == end && at > begin) continue;
      begin = at;
      end = at + stop.size();
    }
    text.resize(sampling.include_stop_str_in_output ? end : begin);
  }
  return text;
}

TEST(FakeEngine, StreamedOutputEqualsUnstreamedOutput) {
  constexpr uint64_t kOutputs = kReducedCounts ? 600 : 10'000;
  const auto engine = fake_engine();
  constexpr uint64_t kWave = 100;
  int stops = 0;
  int streamed_stops_in_text = 0;
  for (uint64_t first = 0; first < kOutputs; first += kWave) {
    std::vector<std::shared_ptr<RecordingSink>> streamed;
    std::vector<std::shared_ptr<RecordingSink>> whole;
    for (uint64_t seed = first; seed < first + kWave; ++seed) {
      for (const bool stream : {true, false}) {
        GenerateRequest request = varied_request(seed);
        request.stream = stream;
        auto sink = std::make_shared<RecordingSink>();
        (stream ? streamed : whole).push_back(sink);
        ASSERT_TRUE(engine->submit(std::move(request), std::move(sink)).ok());
      }
    }
    for (uint64_t i = 0; i < kWave; ++i) {
      const uint64_t seed = first + i;
      const Outcome a = streamed[i]->wait();
      const Outcome b = whole[i]->wait();
      expect_same(a, b, seed);
      const GenerateRequest request = varied_request(seed);
      for (const auto& [index, choice] : a.choices) {
        EXPECT_TRUE(base::is_valid_utf8(choice.text));
        if (request.sampling.min_tokens == 0) {
          EXPECT_EQ(choice.text, naive_text(request, choice, *engine)) << seed;
        }
        if (!choice.stop_string) continue;
        ++stops;
        if (!request.sampling.include_stop_str_in_output && request.sampling.min_tokens == 0 &&
            choice.text.find(*choice.stop_string) != std::string::npos) {
          ++streamed_stops_in_text;
        }
      }
      for (const auto& [index, choice] : b.choices) EXPECT_EQ(choice.deltas, 1);
      if (::testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(stops, static_cast<int>(kOutputs / 10));
  EXPECT_EQ(streamed_stops_in_text, 0);
  expect_clean(*engine);
}

TEST(FakeEngine, StopsAtTheFirstTokenWithEmptyText) {
  const auto engine = fake_engine();
  const Outcome outcome = run_request(*engine, say(""));
  EXPECT_EQ(outcome.choices.at(0).text, "");
  EXPECT_EQ(outcome.choices.at(0).finish, FinishReason::kStop);
  EXPECT_EQ(outcome.result.usage.completion_tokens, 1u);  // the end token
  expect_clean(*engine);
}

struct StopCase {
  std::vector<std::string> stops;
  bool include;
  uint32_t min_tokens;
  const char* text;
  const char* stop;
  uint64_t tokens;
};

TEST(FakeEngine, StopStringsAreFoundAcrossTokensAndNeverSent) {
  const auto engine = fake_engine();
  const std::string said = "abc DEFGHIJ xyz \xF0\x9F\x98\x80 end";
  const std::vector<StopCase> cases = {
      {{"DEFGHIJ"}, false, 0, "abc ", "DEFGHIJ", 11},
      {{"DEFGHIJ"}, true, 0, "abc DEFGHIJ", "DEFGHIJ", 11},
      {{"DEFX", "GHI"}, false, 0, "abc DEF", "GHI", 10},
      {{"bc D", "c"}, false, 0, "ab", "c", 3},
      {{"\xF0\x9F\x98\x80"}, false, 0, "abc DEFGHIJ xyz ", "\xF0\x9F\x98\x80", 20},
      {{"c", "xyz"}, false, 5, "abc DEFGHIJ ", "xyz", 15},
      {{"nothing"}, false, 0, said.c_str(), nullptr, 25},
      {{"end!"}, false, 0, said.c_str(), nullptr, 25},  // what was held back comes at the end
  };
  for (const StopCase& c : cases) {
    for (const bool stream : {true, false}) {
      GenerateRequest request = say(said);
      request.stream = stream;
      request.sampling.stop = c.stops;
      request.sampling.include_stop_str_in_output = c.include;
      request.sampling.min_tokens = c.min_tokens;
      const ChoiceOutput choice = run_request(*engine, request).choices.at(0);
      const std::string wanted = c.text;
      EXPECT_EQ(choice.text, c.include || c.stop ? wanted : said);
      EXPECT_EQ(choice.finish, FinishReason::kStop);
      EXPECT_EQ(choice.stop_string.value_or("-"), c.stop ? c.stop : "-");
      EXPECT_EQ(choice.completion_tokens, c.tokens) << c.stops[0];
      EXPECT_EQ(choice.tokens.size(), c.tokens);
    }
  }
  expect_clean(*engine);
}

TEST(FakeEngine, EndTokensObeyMinTokensIgnoreEosAndStopTokenIds) {
  const auto engine = fake_engine();
  const std::vector<TokenId> script = {'a', kFakeTurnEnd, 'b', kFakeEos, 'c', 'd', 'e'};
  GenerateRequest request;
  request.prompt = fake_say_prompt(script);
  request.sampling.temperature = 0;
  EXPECT_EQ(run_request(*engine, request).choices.at(0).text, "a");  // the second end id as well
  request.sampling.ignore_eos = true;
  request.sampling.max_tokens = 7;
  ChoiceOutput choice = run_request(*engine, request).choices.at(0);
  EXPECT_EQ(choice.text, "abcde");
  EXPECT_EQ(choice.finish, FinishReason::kLength);
  request.sampling.skip_special_tokens = false;
  EXPECT_EQ(run_request(*engine, request).choices.at(0).text, "a<|im_end|>b<|endoftext|>cde");
  // The user's own stop ids are not covered by ignore_eos.
  request.sampling.stop_token_ids = {'d', kFakeEos};
  choice = run_request(*engine, request).choices.at(0);
  EXPECT_EQ(choice.text, "a<|im_end|>b");
  EXPECT_EQ(choice.stop_token, TokenId{kFakeEos});
  EXPECT_EQ(choice.completion_tokens, 4u);
  request.sampling.include_stop_str_in_output = true;
  EXPECT_EQ(run_request(*engine, request).choices.at(0).text, "a<|im_end|>b<|endoftext|>");
  // Before min_tokens no end id is chosen, whatever the model wants; the prompt does not count.
  request.sampling = {};
  request.sampling.temperature = 0;
  request.sampling.min_tokens = 5;
  request.sampling.stop_token_ids = {'c'};
  choice = run_request(*engine, request).choices.at(0);
  ASSERT_GE(choice.tokens.size(), 6u);
  for (int i = 0; i < 5; ++i) {
    EXPECT_LT(choice.tokens[i], kFakeVocabulary);
    EXPECT_NE(choice.tokens[i], kFakeEos);
    EXPECT_NE(choice.tokens[i], kFakeTurnEnd);
    EXPECT_NE(choice.tokens[i], TokenId{'c'});
  }
}

// A draw must not write a script by chance: one with "nan" in it would fail its request.
TEST(FakeEngine, DrawnTokensAreNeverThoseOfScripts) {
  const auto engine = fake_engine();
  for (uint64_t seed = 0; seed < 10; ++seed) {
    GenerateRequest request = testing::endless_request(seed);
    request.sampling.temperature = 2;
    request.sampling.seed = seed;
    request.sampling.max_tokens = 400;
    const Outcome outcome = run_request(*engine, request);
    ASSERT_TRUE(outcome.result.status.ok()) << outcome.result.status.to_string();
    for (const TokenId id : outcome.choices.at(0).tokens) {
      EXPECT_TRUE(id != kFakeSay && id != kFakeEnd && id != kFakeNan) << id;
    }
  }
}

TEST(FakeEngine, OutputEndsAtMaxTokensAndAtTheModelsLength) {
  FakeModelOptions model;
  model.max_model_len = 100;
  const auto engine = fake_engine(model);
  GenerateRequest request = testing::endless_request(4);
  request.prompt.resize(60, 'x');
  Outcome outcome = run_request(*engine, request);
  EXPECT_EQ(outcome.result.usage.completion_tokens, 40u);
  EXPECT_EQ(outcome.choices.at(0).finish, FinishReason::kLength);
  EXPECT_TRUE(outcome.result.status.ok());
  request.sampling.max_tokens = 1;
  outcome = run_request(*engine, request);
  EXPECT_EQ(outcome.result.usage.completion_tokens, 1u);
  EXPECT_EQ(outcome.choices.at(0).deltas, 1);
}

TEST(FakeEngine, EveryChoiceIsItsOwnAndAllOfThemCome) {
  const auto engine = fake_engine();
  for (const uint32_t n : {2u, 3u, 4u, 8u, 10u}) {
    for (const bool stream : {true, false}) {
      GenerateRequest request = free_request(7 + n);
      request.sampling.n = n;
      request.sampling.ignore_eos = true;
      request.stream = stream;
      const Outcome outcome = run_request(*engine, request);
      ASSERT_EQ(outcome.choices.size(), n);
      std::set<std::vector<TokenId>> different;
      uint64_t tokens = 0;
      for (const auto& [index, choice] : outcome.choices) {
        EXPECT_LT(index, n);
        EXPECT_EQ(choice.finishes, 1);
        EXPECT_EQ(choice.tokens.size(), 40u);
        different.insert(choice.tokens);
        tokens += choice.completion_tokens;
      }
      EXPECT_EQ(different.size(), n);  // seeds differ per index
      EXPECT_EQ(outcome.result.usage.completion_tokens, tokens);
      EXPECT_EQ(outcome.result.usage.prompt_tokens, request.prompt.size());
    }
  }
  // More choices than seats.
  EngineOptions options;
  options.max_num_seqs = 3;
  const auto small = fake_engine({}, options);
  GenerateRequest request = free_request(1);
  request.sampling.n = 20;
  EXPECT_EQ(run_request(*small, request).choices.size(), 20u);
  expect_clean(*small);
  expect_clean(*engine);
}

TEST(FakeEngine, SeedsDecideTokens) {
  EngineOptions options;
  options.seed = 42;
  const auto engine = fake_engine({}, options);
  const auto tokens = [&engine](std::optional<uint64_t> seed) {
    GenerateRequest request = free_request(3);
    request.sampling.seed = seed;
    request.sampling.ignore_eos = true;
    return run_request(*engine, request).choices.at(0).tokens;
  };
  EXPECT_EQ(tokens(5), tokens(5));
  EXPECT_NE(tokens(5), tokens(6));
  EXPECT_EQ(tokens(std::nullopt), tokens(std::nullopt));  // the engine's own seed
  EXPECT_EQ(tokens(std::nullopt), tokens(42));
  const auto unseeded = fake_engine();
  GenerateRequest request = free_request(3);
  request.sampling.seed.reset();
  request.sampling.ignore_eos = true;
  EXPECT_NE(run_request(*unseeded, request).choices.at(0).tokens,
            run_request(*unseeded, request).choices.at(0).tokens);
}

TEST(FakeEngine, PenaltiesReachTheModelsOutput) {
  const auto engine = fake_engine();
  GenerateRequest request = say("aaaaaaaaaaaaaaaa");
  request.sampling.max_tokens = 16;
  EXPECT_EQ(run_request(*engine, request).choices.at(0).text, "aaaaaaaaaaaaaaaa");
  GenerateRequest frequency = request;
  frequency.sampling.frequency_penalty = 2;
  EXPECT_NE(run_request(*engine, frequency).choices.at(0).text, "aaaaaaaaaaaaaaaa");
  GenerateRequest repetition = request;
  repetition.sampling.repetition_penalty = 100;
  EXPECT_NE(run_request(*engine, repetition).choices.at(0).tokens.at(0), TokenId{'a'});
}

TEST(FakeEngine, LogprobsAndEchoHaveOneEntryPerToken) {
  EngineOptions options;
  options.max_num_batched_tokens = 64;  // the prompt takes several steps
  const auto engine = fake_engine({}, options);
  for (const uint32_t n : {1u, 3u}) {
    GenerateRequest request = free_request(11);
    request.prompt.resize(150, 'q');
    request.sampling.n = n;
    request.sampling.prompt_logprobs = 2;
    request.sampling.logprobs = 5;
    const Outcome outcome = run_request(*engine, request);
    ASSERT_EQ(outcome.prompt_logprobs.size(), 1u);
    EXPECT_FALSE(outcome.early_delta);
    const auto& prompt = outcome.prompt_logprobs[0].tokens;
    ASSERT_EQ(prompt.size(), request.prompt.size());
    EXPECT_TRUE(std::isnan(prompt[0].logprob));
    EXPECT_TRUE(prompt[0].top.empty());
    for (size_t i = 0; i < prompt.size(); ++i) {
      EXPECT_EQ(prompt[i].id, request.prompt[i]);
      EXPECT_EQ(prompt[i].bytes, engine->token_bytes(prompt[i].id));
      if (i == 0) continue;
      EXPECT_LT(prompt[i].logprob, 0.0f);
      ASSERT_EQ(prompt[i].top.size(), 2u);
      EXPECT_GE(prompt[i].top[0].logprob, prompt[i].top[1].logprob);
    }
    for (const auto& [index, choice] : outcome.choices) {
      ASSERT_EQ(choice.logprobs.size(), choice.tokens.size());
      for (size_t i = 0; i < choice.tokens.size(); ++i) {
        EXPECT_EQ(choice.logprobs[i].id, choice.tokens[i]);
        ASSERT_EQ(choice.logprobs[i].top.size(), 5u);
        for (const Alternative& top : choice.logprobs[i].top) {
          EXPECT_LT(top.id, kFakeVocabulary);  // padding has the largest logits, and no chance
          EXPECT_EQ(top.bytes, engine->token_bytes(top.id));
          if (top.id == choice.tokens[i]) {
            EXPECT_EQ(top.logprob, choice.logprobs[i].logprob);
          }
        }
      }
    }
  }
  expect_clean(*engine);
}

TEST(FakeEngine, PrefillProgressRisesToThePromptsLength) {
  EngineOptions options;
  options.max_num_batched_tokens = 64;
  const auto engine = fake_engine({}, options);
  GenerateRequest request = free_request(2);
  request.prompt.resize(150, 'q');
  const Outcome outcome = run_request(*engine, request);
  EXPECT_EQ(outcome.progress,
            (std::vector<std::pair<uint64_t, uint64_t>>{{64, 150}, {128, 150}, {150, 150}}));
}

TEST(FakeEngine, ALabelMayBeUsedTwiceAtOnce) {
  const auto engine = fake_engine();
  auto a = std::make_shared<RecordingSink>();
  auto b = std::make_shared<RecordingSink>();
  GenerateRequest request = say("first");
  request.label = "the same";
  const auto id_a = engine->submit(request, a);
  request.prompt = fake_say_prompt("second");
  const auto id_b = engine->submit(request, b);
  ASSERT_TRUE(id_a.ok() && id_b.ok());
  EXPECT_FALSE(*id_a == *id_b);
  EXPECT_EQ(a->wait().choices.at(0).text, "first");
  EXPECT_EQ(b->wait().choices.at(0).text, "second");
  expect_clean(*engine);
}

TEST(FakeEngine, CountersAndTimesAddUp) {
  base::ManualClock clock;
  FakeModelOptions model;
  model.before_step = [&clock](uint64_t) {
    clock.advance_s(0.25);
    return ok_status();
  };
  auto made = create_fake_engine(model, {}, &clock);
  ASSERT_TRUE(made.ok());
  Engine& engine = **made;
  const Outcome outcome = run_request(engine, say("abc"));  // four tokens in four steps
  EXPECT_DOUBLE_EQ(outcome.result.timing.queued, 0.0);
  EXPECT_DOUBLE_EQ(outcome.result.timing.first_token, 0.25);
  EXPECT_DOUBLE_EQ(outcome.result.timing.finished, 1.0);
  EngineStats stats = engine.stats();
  EXPECT_EQ(stats.requests_received, 1u);
  EXPECT_EQ(stats.requests_finished[0], 1u);
  EXPECT_EQ(stats.prompt_tokens, 5u);
  EXPECT_EQ(stats.generation_tokens, 4u);
  EXPECT_EQ(stats.steps, 4u);
  EXPECT_DOUBLE_EQ(stats.time_to_first_token_s.sum, 0.25);
  EXPECT_DOUBLE_EQ(stats.inter_token_latency_s.sum, 0.75);
  EXPECT_DOUBLE_EQ(stats.e2e_latency_s.sum, 1.0);
  EXPECT_DOUBLE_EQ(stats.prefill_time_s.sum, 0.25);
  EXPECT_DOUBLE_EQ(stats.decode_time_s.sum, 0.75);
  EXPECT_DOUBLE_EQ(stats.inference_time_s.sum, 1.0);
  EXPECT_DOUBLE_EQ(stats.iteration_tokens.sum, 5 + 3);
  EXPECT_DOUBLE_EQ(stats.generation_tokens_per_request.sum, 4);
  EXPECT_DOUBLE_EQ(stats.prompt_tokens_per_request.sum, 5);
  EXPECT_EQ(stats.preemptions, 0u);
  // Usage equals the engine's own count, for stops too.
  GenerateRequest stopped = say("abcdef");
  stopped.sampling.stop = {"cd"};
  EXPECT_EQ(run_request(engine, stopped).result.usage.completion_tokens, 4u);
  EXPECT_EQ(engine.stats().generation_tokens, 8u);
  expect_clean(engine);
}

TEST(FakeEngine, TokenizesDetokenizesAndFormatsChats) {
  const auto engine = fake_engine();
  const auto ids = engine->tokenize("h\xC3\xA9 <|im_end|>", true);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(ids->size(), 15u);  // BOS, and the control token's text is only text
  EXPECT_EQ(ids->front(), kFakeBos);
  EXPECT_EQ(*engine->detokenize(*ids, true), "h\xC3\xA9 <|im_end|>");
  EXPECT_EQ(*engine->detokenize(std::vector<TokenId>{0xC3}, true), "\xEF\xBF\xBD");
  EXPECT_EQ(engine->detokenize(std::vector<TokenId>{kFakeVocabulary}, true).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_FALSE(engine->tokenize("\xFF", true).ok());
  const std::vector<ChatMessage> messages = {{"user", "hi"}};
  const auto chat = engine->encode_chat(messages, {});
  ASSERT_TRUE(chat.ok()) << chat.status().to_string();
  EXPECT_EQ(*engine->detokenize(*chat, false),
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
  EngineOptions options;
  options.chat_format = "none";
  const auto without = fake_engine({}, options);
  EXPECT_EQ(without->encode_chat(messages, {}).status().code(), StatusCode::kUnsupported);
}

// The fake is only worth something if a wrong page changes its output.
TEST(FakeModel, ReadsWhatItWroteFromThePagesOfItsSequence) {
  EngineOptions options;
  auto runner = make_fake_runner({}, options, 8);
  ASSERT_TRUE(runner.ok());
  ModelRunner& model = **runner;
  SequenceRequest of_64;
  of_64.max_tokens = 64;
  const auto logits_of = [&](const std::vector<std::vector<TokenId>>& steps) {
    const SequenceHandle sequence = *model.open_sequence(of_64);
    std::vector<float> row;
    for (const auto& tokens : steps) {
      StepBatch batch;
      batch.sequences.push_back({sequence, tokens, 1});
      const auto output = model.run(batch, [] {});
      EXPECT_TRUE(output.ok());
      row.assign(output->logits.row(0).begin(), output->logits.row(0).end());
    }
    model.close_sequence(sequence);
    return row;
  };
  const auto whole = logits_of({{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}});
  EXPECT_EQ(whole, logits_of({{1, 2, 3}, {4}, {5, 6, 7, 8, 9}, {10}}));
  EXPECT_NE(whole, logits_of({{2, 1, 3, 4, 5, 6, 7, 8, 9, 10}}));
  EXPECT_NE(whole, logits_of({{1, 2, 3, 4, 5, 6, 7, 8, 9, 11}}));
  EXPECT_EQ(model.pages_in_use(), 0u);
  EXPECT_TRUE(model.audit().ok());
  const SequenceHandle open = *model.open_sequence(of_64);
  EXPECT_GT(model.pages_in_use(), 0u);
  EXPECT_TRUE(model.audit().ok());
  model.close_sequence(open);
  EXPECT_DEATH(model.close_sequence(open), "check failed");
}

}  // namespace
}  // namespace spin::engine
